"""Training on the user's data, one epoch after the other, with a grower beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from esper.growth.controllers import Controller
from esper.growth.data import Batches, Data, seeded_everywhere
from esper.growth.grower import Grower
from esper.growth.history import GrowthEpoch
from esper.growth.objective import Loss, Metric, Score
from esper.growth.result import GrowthResult
from esper.growth.sites import Forward
from esper.growth.structure import num_rows
from esper.growth.validation import Validation, device_of
from esper.leyline import FINAL_LR_FACTOR, derive_seed, record
from esper.leyline.scale import MetricScale

DEFAULT_LR = 1e-3

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""(parameters) -> optimizer."""
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
"""(optimizer) -> learning-rate scheduler that is stepped once per epoch."""


@record
class GrowthSettings:
    """How a run trains and grows: the arguments of `grow` that decide its bits."""

    budget: int | None
    epochs: int
    loss: Loss | None = None
    metric: Metric | None = None
    higher_is_better: bool = True
    controller: Controller = None
    controller_params: Mapping[str, Any] | None = None
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None
    scheduler: Any | MakeScheduler | None = None
    sites: str | int | Sequence[str] = "auto"
    batch_size: int = 64
    forward: Forward | None = None
    seed: int = 0
    scale: MetricScale | None = None
    test: Data = None


class GrowthRun:
    """A model, its data and its optimizer, one epoch after the other."""

    def __init__(self, model: nn.Module, train: Data, val: Data, settings: GrowthSettings) -> None:
        self.model = model
        self.settings = settings
        size = settings.batch_size
        self.train = Batches(train, size, shuffle=True, device=device_of(model), what="training")
        self.validation = self._judge(val, "validation")
        self.test = None if settings.test is None else self._judge(settings.test, "test")
        self.optimizer = _make_optimizer(model, settings.optimizer)
        self.scheduler = _make_scheduler(self.optimizer, settings)
        self.training_macs = 0
        """Multiply-accumulates of all training so far, forward and backward."""
        self.seconds = 0.0
        """Of training and validation so far."""
        self.grower = Grower(
            model,
            self.train.first,
            self.optimizer,
            self.validation,
            epochs=settings.epochs,
            budget=settings.budget,
            controller=settings.controller,
            controller_params=settings.controller_params,
            sites=settings.sites,
            scheduler=self.scheduler,
            scale=settings.scale,
            seed=settings.seed,
        )

    def _judge(self, data: Data, what: str) -> Validation:
        settings = self.settings
        return Validation(
            self.model,
            data,
            loss=settings.loss,
            metric=settings.metric,
            higher_is_better=settings.higher_is_better,
            forward=settings.forward,
            batch_size=4 * settings.batch_size,
            what=what,
        )

    def finish(self) -> GrowthResult:
        """The grown model, scored on test data too if there is some."""
        result = self.grower.finish()
        if self.test is None:
            return result
        metric, loss = self.test(self.model)
        return replace(result, test=Score(metric=metric, loss=loss))

    def step(self) -> GrowthEpoch:
        """One epoch: a decision, training, validation."""
        self.grower.begin_epoch()
        assert self.grower.epoch is not None
        loss, metric, rows = self._train(self.grower.epoch)
        network = self.grower.network
        seeds = [(slot.spec.slot_id, slot.blueprint) for slot in network.all_slots() if slot.blueprint is not None]
        self.training_macs += network.layout.training_macs(rows, seeds)
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        entry = self.grower.end_epoch(train_loss=loss, train_metric=metric)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(entry.loss)
        self.seconds += entry.train_s + entry.validate_s
        return entry

    def _train(self, epoch: int) -> tuple[float, float | None, int]:
        """(mean loss, metric on training data if it can be added up, rows) of one epoch."""
        objective = self.validation.objective
        tally = objective.tally() if objective.adds_up else None
        total: Tensor | float = 0.0
        weight = num_trained = 0
        with seeded_everywhere(derive_seed(self.settings.seed, None, None, epoch, "train")):
            self.model.train()
            for batch in self.train.epoch(self.settings.seed, epoch):
                self.optimizer.zero_grad()
                output = objective.forward(self.model, batch)
                loss = objective.loss(output, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                rows = objective.weight(batch)
                total = total + loss.detach().double() * rows
                weight += rows
                num_trained += num_rows(batch)
                if tally is not None:
                    tally.add(output, objective.target(batch))
        mean = float(total) / max(1, weight)
        return mean, None if tally is None else tally.result(mean), num_trained


def _make_optimizer(model: nn.Module, wanted: torch.optim.Optimizer | MakeOptimizer | None) -> torch.optim.Optimizer:
    if isinstance(wanted, torch.optim.Optimizer):
        return wanted
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ValueError("every parameter of the model is frozen; unfreeze some, or pass an optimizer of your own")
    if wanted is None:
        return torch.optim.AdamW(params, lr=DEFAULT_LR)
    made = wanted(params) if callable(wanted) else wanted
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer must be one, or a function that makes one of parameters, got {type(made).__name__}"
        )
    return made


def _make_scheduler(optimizer: torch.optim.Optimizer, settings: GrowthSettings) -> Any:
    wanted = settings.scheduler
    if wanted is not None:
        return wanted if hasattr(wanted, "step") else wanted(optimizer)
    return None if settings.optimizer is not None else cosine(optimizer, settings.epochs)


def cosine(optimizer: torch.optim.Optimizer, epochs: int) -> CosineAnnealingLR:
    """A learning rate that falls along a cosine to a share of what it is now."""
    lowest = FINAL_LR_FACTOR * optimizer.param_groups[0]["lr"]
    return CosineAnnealingLR(optimizer, epochs, eta_min=lowest)
