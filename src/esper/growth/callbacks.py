"""What callbacks of training libraries share: a grower whose epochs somebody else turns.

A checkpoint of such a library holds the weights of the model with all its seeds, so it says itself what has grown. When
one is loaded to go on, the library comes first: it builds a bare model and an optimizer for it. Seeds must wait until
both are there, and then come back with the grower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from esper.growth.controllers import Controller
from esper.growth.data import Batches, Data
from esper.growth.grower import Grower
from esper.growth.objective import Loss, Metric
from esper.growth.sites import Forward
from esper.growth.tracing import SLOT, in_slot
from esper.growth.validation import Evaluate, Validation, device_of


def let_seeds_wait(model: nn.Module) -> RemovableHandle:
    """From now on, weights of seeds that the model does not have are left out when a state_dict is loaded into it."""
    handle: RemovableHandle = model.register_load_state_dict_pre_hook(_leave_out)  # type: ignore[no-untyped-call]
    return handle


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in [key for key in state_dict if in_slot(key.removeprefix(prefix))]:
        site = key.removeprefix(prefix).split(f".{SLOT}.")[0]
        if SLOT not in module.get_submodule(site)._modules:
            del state_dict[key]


class GrowingCallback:
    """What `esper.lightning.GrowCallback` and `esper.hf.GrowCallback` do alike.

    Args:
        budget: Most parameters the model and its seeds may have together; None for no limit.
        val: Validation data; by default what the trainer validates on.
        evaluate: (model) -> (metric, loss) in place of `val`.
        loss: As for `esper.grow`.
        metric: As for `esper.grow`.
        higher_is_better: Direction of the metric.
        forward: (model, batch) -> output.
        controller: As for `esper.grow`.
        **options: More arguments of `esper.Grower`, such as sites, seed or lifecycle.
    """

    def __init__(
        self,
        *,
        budget: int | None,
        val: Data = None,
        evaluate: Evaluate | None = None,
        loss: Loss | None = None,
        metric: Metric | None = None,
        higher_is_better: bool = True,
        forward: Forward | None = None,
        controller: Controller = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.grower: Grower | None = None
        """Of the run under way."""
        self.result: Any = None
        """The `GrowthResult`, once training is over."""
        self._budget = budget
        self._val = val
        self._evaluate = evaluate
        self._loss = loss
        self._metric = metric
        self._higher_is_better = higher_is_better
        self._forward = forward
        self._controller = controller
        self._options = options

    def begin(
        self,
        model: nn.Module,
        train: Data,
        val: Data,
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        *,
        epochs: int,
        scaler: torch.amp.GradScaler | None,
        state: Mapping[str, Any] | None,
    ) -> Grower:
        """Makes the grower, and goes on with a saved state if there is one."""
        evaluate: Evaluate | Validation
        if self._evaluate is not None:
            evaluate = self._evaluate
        else:
            evaluate = Validation(
                model,
                val if self._val is None else self._val,
                loss=self._loss,
                metric=self._metric,
                higher_is_better=self._higher_is_better,
                forward=self._forward,
            )
        if isinstance(evaluate, Validation):
            sample = evaluate.batches.first  # not of the training data, whose loader may count what was taken from it
        else:
            sample = Batches(train, 2, shuffle=False, device=device_of(model), what="training").first
        self.grower = Grower(
            model,
            sample,
            optimizers,
            evaluate,
            epochs=epochs,
            budget=self._budget,
            controller=self._controller,
            scheduler=schedulers,
            scaler=scaler,
            forward=self._forward,
            higher_is_better=self._higher_is_better,
            **self._options,
        )
        if state is not None:
            self.grower.load_state_dict(state)
        return self.grower

    def finish(self) -> None:
        """Takes the result once all epochs are over, or lets go of a model whose training ended early."""
        if self.grower is None:
            return
        if self.grower.in_epoch:
            self.grower.abandon()
        else:
            self.result = self.grower.finish()
        self.grower = None

    def abandon(self) -> None:
        """Lets go of the model after a failure."""
        if self.grower is not None:
            self.grower.abandon()
            self.grower = None
