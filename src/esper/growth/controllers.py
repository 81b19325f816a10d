"""Who decides what grows: a rule by its name, a trained run by its folder, or an object of the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from esper.leyline import HostLayout, LifecycleConfig, PolicyProtocol, record
from esper.simic.training.config import PRETRAINED
from esper.tamiyo.controller import Setting
from esper.tamiyo.controllers import CONTROLLERS, DEFAULT_RULE, make_controller, runs_by_name

Controller = str | Path | PolicyProtocol | None
"""A rule's name, the folder of a trained run, or an object with begin, act and store; None for the default."""


@record
class Chosen:
    """A controller, ready to decide."""

    policy: PolicyProtocol
    name: str
    needs_every_coalition: bool
    """True for policies, which were trained to see what seeds bring alone and together."""


def choose_controller(
    wanted: Controller,
    layout: HostLayout,
    lifecycle: LifecycleConfig,
    *,
    epochs: int,
    seed: int,
    num_classes: int,
    params: Mapping[str, Any],
) -> Chosen:
    """Makes the controller that the user asked for.

    Args:
        wanted: See `Controller`.
        layout: The network's slots and blueprints.
        lifecycle: Limits of growth.
        epochs: Of the run.
        seed: Of the run.
        num_classes: Classes or vocabulary entries.
        params: Parameters of a rule.

    Raises:
        ValueError: There is no such controller, or a parameter is unknown or out of range.
    """
    setting = Setting(layout=layout, lifecycle=lifecycle, run_seed=seed)
    if wanted is None:
        wanted = DEFAULT_RULE
    if isinstance(wanted, str) and wanted in CONTROLLERS:
        return _rule(wanted, setting, epochs, params)
    if params:
        raise ValueError(f"parameters ({', '.join(params)}) are for rules; {wanted} takes none")
    if wanted == PRETRAINED:
        return _pretrained(setting, epochs, num_classes)
    if isinstance(wanted, str | Path):
        return _policy(Path(wanted), setting, epochs)
    if not all(callable(getattr(wanted, verb, None)) for verb in ("begin", "act", "store")):
        raise ValueError(f"a controller needs begin, act and store, got a {type(wanted).__name__}")
    return Chosen(policy=wanted, name=type(wanted).__name__, needs_every_coalition=True)


def _rule(name: str, setting: Setting, epochs: int, params: Mapping[str, Any]) -> Chosen:
    if name == "schedule" and "entries" not in params:
        from esper.evidence.host_runs import default_schedule

        known = [name for name in signature(default_schedule).parameters if name not in ("setting", "horizon")]
        if unknown := sorted(set(params) - set(known)):
            raise ValueError(f"schedule has no parameters {', '.join(unknown)}. Known: entries, {', '.join(known)}")
        params = {"entries": default_schedule(setting, epochs, **params)}
    return Chosen(policy=make_controller(name, setting, **params), name=name, needs_every_coalition=False)


def _pretrained(setting: Setting, epochs: int, num_classes: int) -> Chosen:
    """The policy that comes with Esper, or the default rule where it does not know such hosts."""
    from esper.simic.client import FrozenPolicy
    from esper.simic.run.pretrained import load_pretrained, why_outside

    agent, card = load_pretrained()
    outside = why_outside(card.range, setting.layout, setting.lifecycle, horizon=epochs, num_classes=num_classes)
    if outside is not None:
        warnings.warn(
            f"the pretrained controller is outside what it knows: {outside}. The rule {DEFAULT_RULE!r} decides",
            stacklevel=2,
        )
        return _rule(DEFAULT_RULE, setting, epochs, {})
    policy = FrozenPolicy(agent, run_seed=setting.run_seed, greedy=True)
    return Chosen(policy=policy, name=PRETRAINED, needs_every_coalition=True)


def _policy(path: Path, setting: Setting, epochs: int) -> Chosen:
    if not path.exists():
        rules = ", ".join(name for name in CONTROLLERS if runs_by_name(name) or name == DEFAULT_RULE)
        raise ValueError(f"unknown controller {str(path)!r}: expected {rules}, or the folder of a trained run")
    from esper.kasmina import build_host
    from esper.kasmina.layers import generator_for
    from esper.runtime.tasks import get_task_spec
    from esper.simic.client import FrozenPolicy
    from esper.simic.run.run_state import load_policy
    from esper.simic.training.config import NURSERY

    loaded = load_policy(path)
    learned_on = build_host(get_task_spec(loaded.config.task).host, generator_for(0)).topology
    if loaded.config.task != NURSERY and setting.layout.topology != learned_on:
        warnings.warn(
            f"the policy of {path} has learned on {learned_on} hosts and this model is {setting.layout.topology}: "
            f"it is outside what it knows, so the rule {DEFAULT_RULE!r} decides",
            stacklevel=2,
        )
        return _rule(DEFAULT_RULE, setting, epochs, {})
    policy = FrozenPolicy(loaded.agent, run_seed=setting.run_seed, greedy=True)
    return Chosen(policy=policy, name=str(path), needs_every_coalition=True)
