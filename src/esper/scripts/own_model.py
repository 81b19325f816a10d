"""What `esper grow` and `esper compare` do with a model and data of the user's own, given as functions in a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from esper.leyline import record
from esper.leyline.references import load_function
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from torch import nn

DEFAULT_EPOCHS = 20

Place = Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")]
"""Where a function of the user's own is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags:
    """The flags that `esper grow` and `esper compare` share; what is written below each is its help."""

    data: Place = None
    """Your own data: a function that returns (train, validation), or these and test data."""
    sites: tuple[str, ...] = ()
    """Submodules after which something may grow, such as layer1.0 or 'layer*.0'; default: three."""
    seed: int = 0
    """Decides initial weights and the order of data; of several runs, the first seed."""
    epochs: int | None = None
    """Epochs to train; default: the task's own horizon, 20 for your own model."""
    budget: int | None = None
    """Most parameters the model and its seeds may have together; default: no limit."""
    batch_size: int = 64
    """Rows of a batch of your own data, if it is not cut yet."""
    lr: float = 1e-3
    """Learning rate for your own model; it falls along a cosine."""

    def arguments(self) -> dict[str, Any]:
        """How a model of the user's own is trained: arguments of `grow` and `compare`."""
        import torch

        from esper.growth.training import cosine

        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        return {
            "budget": self.budget,
            "epochs": epochs,
            "optimizer": partial(torch.optim.AdamW, lr=self.lr),
            "scheduler": partial(cosine, epochs=epochs),
            "sites": list(self.sites) or "auto",
            "batch_size": self.batch_size,
            "seed": self.seed,
        }


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


def show_sites(own: OwnModel, how: TrainingFlags) -> None:
    """Prints where a model can grow."""
    from esper.growth.data import Batches
    from esper.growth.objective import Objective
    from esper.growth.sites import find_sites
    from esper.growth.validation import device_of

    model, (train, *_) = own.make_model(), own.make_data()
    sample = Batches(train, how.batch_size, shuffle=False, device=device_of(model), what="training").first
    forward = Objective(model, sample).forward
    found = find_sites(model, sample, names=list(how.sites) or None, forward=forward)
    plain_console(soft_wrap=True, highlight=False).print(str(found))


def width_maker(own: OwnModel, wider: str | None) -> Callable[[float], nn.Module] | None:
    """Makes models of any width: by a function of its own, or by the model's if it takes `width`."""
    where = own.model if wider is None else wider
    function = load_function(where)
    if wider is not None:
        return lambda factor: checked_model(function(factor), where)
    if "width" in signature(function).parameters:
        return lambda factor: checked_model(function(width=factor), where)
    return None
