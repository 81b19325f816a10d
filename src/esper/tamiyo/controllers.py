"""The table of fixed controllers: what each is, which parameters it has, how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from esper.leyline import record
from esper.tamiyo.chance import RandomController, RateMatchedController, WaitOnlyController
from esper.tamiyo.controller import Controller
from esper.tamiyo.heuristic import HeuristicController
from esper.tamiyo.rules import FragrowController, PeriodicController, PlateauController
from esper.tamiyo.schedule import ScheduleController, ScheduleEntry
from esper.tamiyo.situation import Setting


@record
class NoParams:
    """Nothing to choose."""


@record
class RateMatchedParams:
    """Parameters of `rate_matched`."""

    rates: Mapping[str, float]
    """Mean ops per episode to match, for GERMINATE, ADVANCE, PRUNE and FOSSILIZE."""


@record
class ScheduleParams:
    """Parameters of `schedule`."""

    entries: tuple[ScheduleEntry, ...]
    """The ops to play, in order of epochs."""


@record
class PeriodicParams:
    """Parameters of `periodic`."""

    every_epochs: int = 6
    """Epochs from the start to the first planting, and from each to the next."""
    blueprint: str | None = None
    """What to plant; None takes the largest that is legal."""
    blend: str = "linear"
    """How it is blended in."""


@record
class PlateauParams:
    """Parameters of `plateau`."""

    min_gain: float = 0.01
    """Fall of the validation loss, in nats, that counts as improvement."""
    patience: int = 4
    """Epochs without improvement before a seed is planted."""
    blueprint: str | None = None
    """What to plant; None takes the largest that is legal."""
    blend: str = "linear"
    """How it is blended in."""


@record
class FragrowParams:
    """Parameters of `fragrow`."""

    max_interval: float = 20.0
    """Epochs between plantings in a host that overfits badly; half of it at a gap of 4 points."""
    blueprint: str | None = None
    """What to plant; None takes the largest that is legal."""
    blend: str = "linear"
    """How it is blended in."""


@record
class HeuristicParams:
    """Parameters of `heuristic`."""

    plateau_epochs: int = 3
    """Epochs without a gain of half a point after which seeds are auditioned."""
    audition_epochs: int = 3
    """Epochs in a row with a forecast of no gain after which an audition ends."""
    blend: str = "linear"
    """How seeds are blended in."""


@record
class ControllerEntry:
    """One fixed controller."""

    name: str
    description: str
    params: type[Any]
    """Record of its parameters, with their defaults."""
    build: Callable[[Setting, Any], Controller]


def _entry(name: str, description: str, params: type[Any], controller: Callable[..., Controller]) -> ControllerEntry:
    """A row whose parameters are the controller's arguments of the same names."""

    def build(setting: Setting, chosen: Any) -> Controller:
        return controller(setting, **{field.name: getattr(chosen, field.name) for field in fields(chosen)})

    return ControllerEntry(name=name, description=description, params=params, build=build)


CONTROLLERS: dict[str, ControllerEntry] = {
    entry.name: entry
    for entry in (
        _entry("wait_only", "does nothing", NoParams, WaitOnlyController),
        _entry("random", "uniform over what is legal", NoParams, RandomController),
        _entry(
            "rate_matched", "random seeds at random times, ops at given rates", RateMatchedParams, RateMatchedController
        ),
        _entry("schedule", "a declared list of ops", ScheduleParams, ScheduleController),
        _entry("periodic", "plants every so many epochs", PeriodicParams, PeriodicController),
        _entry("plateau", "plants when the validation loss stops falling", PlateauParams, PlateauController),
        _entry("fragrow", "plants the less often the more the host overfits", FragrowParams, FragrowController),
        _entry("heuristic", "auditions blueprints behind a settled host", HeuristicParams, HeuristicController),
    )
}


def make_controller(name: str, setting: Setting, **params: Any) -> Controller:
    """Makes a controller by name; parameters not given keep their defaults.

    Raises:
        ValueError: No such controller or parameter, or a value out of its range.
    """
    if name not in CONTROLLERS:
        raise ValueError(f"unknown controller {name!r}. Known: {', '.join(CONTROLLERS)}")
    entry = CONTROLLERS[name]
    known = [field.name for field in fields(entry.params)]
    if unknown := sorted(set(params) - set(known)):
        raise ValueError(f"{name} has no parameters {', '.join(unknown)}. Known: {', '.join(known) or 'none'}")
    try:
        chosen = entry.params(**params)
    except TypeError as missing:
        raise ValueError(f"{name} needs {', '.join(known)}: {missing}") from missing
    return entry.build(setting, chosen)
