"""The table of fixed controllers, and how one is made by name."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from esper.leyline import ActionSpec, check_known
from esper.tamiyo.controller import Controller, Setting, Situation, StatelessController
from esper.tamiyo.random_controllers import RandomController, RateMatchedController
from esper.tamiyo.rules import (
    FragrowController,
    HeuristicController,
    LargestController,
    PeriodicController,
    PlateauController,
)
from esper.tamiyo.schedule import ScheduleController


class WaitOnlyController(StatelessController):
    """Does nothing: what the host becomes by itself."""

    def decide(self, situation: Situation) -> ActionSpec:
        """Waits."""
        return situation.wait()


CONTROLLERS: dict[str, type[Controller[Any]]] = {
    "wait_only": WaitOnlyController,
    "random": RandomController,
    "rate_matched": RateMatchedController,
    "schedule": ScheduleController,
    "largest": LargestController,
    "periodic": PeriodicController,
    "plateau": PlateauController,
    "fragrow": FragrowController,
    "heuristic": HeuristicController,
}
"""A controller's parameters are the arguments of its constructor besides the setting."""

DEFAULT_RULE = "schedule"
"""Decides where nobody else is named. `largest` is as good within a budget, but without one it has no measure."""


def make_controller(name: str, setting: Setting, **params: Any) -> Controller[Any]:
    """Makes a controller by name; parameters not given keep their defaults.

    Raises:
        ValueError: No such controller or parameter, one that has no default is missing, or a value is out of range.
    """
    check_known("controller", name, CONTROLLERS)
    known = _parameters(name)
    if unknown := sorted(set(params) - set(known)):
        raise ValueError(f"{name} has no parameters {', '.join(unknown)}. Known: {', '.join(known) or 'none'}")
    if missing := [part for part in _required(name) if part not in params]:
        raise ValueError(f"{name} needs {', '.join(missing)}")
    return CONTROLLERS[name](setting, **params)


def runs_by_name(name: str) -> bool:
    """True for a controller whose parameters all have defaults."""
    return not _required(name)


def _parameters(name: str) -> dict[str, Parameter]:
    return {part: parameter for part, parameter in signature(CONTROLLERS[name]).parameters.items() if part != "setting"}


def _required(name: str) -> list[str]:
    return [part for part, parameter in _parameters(name).items() if parameter.default is Parameter.empty]
