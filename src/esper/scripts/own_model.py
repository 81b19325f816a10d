"""What `esper grow` and `esper compare` do with a model and data of the user's own, given as functions in a file."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline import record
from esper.leyline.references import load_function
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    import torch
    from torch import nn

    from esper.growth.controllers import Controller

DEFAULT_EPOCHS = 20


@record
class OwnModel:
    """Where a model and its data come from."""

    model: str
    """FILE.py:FUNCTION."""
    data: str
    seed: int

    def make_model(self) -> nn.Module:
        """The model, with weights that follow from the seed."""
        from esper.kasmina.layers import seeded

        with seeded(self.seed):
            found = load_function(self.model)()
        return checked_model(found, self.model)

    def make_data(self) -> tuple[Any, Any, Any]:
        """(training data, validation data, test data or None)."""
        found = load_function(self.data)()
        if not isinstance(found, tuple | list) or len(found) not in (2, 3):
            parts = f" of {len(found)}" if isinstance(found, tuple | list) else ""
            raise ValueError(
                f"{self.data} must return (train, validation) or (train, validation, test), got a "
                f"{type(found).__name__}{parts}"
            )
        return found[0], found[1], found[2] if len(found) == 3 else None

    @property
    def name(self) -> str:
        """For folders."""
        return Path(self.model.partition(":")[0]).stem


def checked_model(found: Any, where: str) -> nn.Module:
    """What a function returned, if it is a module."""
    from torch import nn

    if not isinstance(found, nn.Module):
        raise ValueError(f"{where} must return a torch.nn.Module, got {type(found).__name__}")
    return found


def adamw_maker(lr: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A maker of optimizers."""
    import torch

    return lambda params: torch.optim.AdamW(params, lr=lr)


def cosine(epochs: int) -> Callable[[torch.optim.Optimizer], Any]:
    """A maker of schedules that fall over so many epochs."""
    import torch

    from esper.leyline import FINAL_LR_FACTOR

    def make(optimizer: torch.optim.Optimizer) -> Any:
        lowest = FINAL_LR_FACTOR * optimizer.param_groups[0]["lr"]
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=lowest)

    return make


def show_sites(own: OwnModel, names: tuple[str, ...], batch_size: int) -> None:
    """Prints where a model can grow."""
    from esper.growth.data import Batches
    from esper.growth.objective import Objective
    from esper.growth.sites import find_sites
    from esper.growth.validation import device_of

    model, (train, *_) = own.make_model(), own.make_data()
    sample = Batches(train, batch_size, shuffle=False, device=device_of(model), what="training").first
    forward = Objective(model, sample).forward
    found = find_sites(model, sample, names=list(names) or None, forward=forward)
    plain_console(soft_wrap=True, highlight=False).print(str(found))


def grow_own_model(
    own: OwnModel,
    *,
    controller: Controller,
    blueprint: str | None,
    sites: tuple[str, ...],
    epochs: int | None,
    budget: int | None,
    batch_size: int,
    lr: float,
    receipts: bool,
    resume: bool,
    out: Path | None,
) -> None:
    """Grows a model and says what came of it."""
    from esper.growth import grow

    model, (train, val, test) = own.make_model(), own.make_data()
    length = DEFAULT_EPOCHS if epochs is None else epochs
    folder = Path("runs") / f"grow-{own.name}" if out is None else out
    result = grow(
        model,
        train,
        val,
        test=test,
        budget=budget,
        epochs=length,
        controller=controller,
        controller_params=None if blueprint is None else {"blueprint": blueprint},
        optimizer=adamw_maker(lr),
        scheduler=cosine(length),
        sites=list(sites) or "auto",
        batch_size=batch_size,
        seed=own.seed,
        out=folder,
        resume=resume,
        receipts=receipts,
    )
    plain_console(soft_wrap=True, highlight=False).print(result.table())


def width_maker(own: OwnModel, wider: str | None) -> Callable[[float], nn.Module] | None:
    """Makes models of any width: by a function of its own, or by the model's if it takes `width`."""
    where = own.model if wider is None else wider
    function = load_function(where)
    if wider is not None:
        return lambda factor: checked_model(function(factor), where)
    if "width" in signature(function).parameters:
        return lambda factor: checked_model(function(width=factor), where)
    return None
