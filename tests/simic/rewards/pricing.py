"""Prices whole episodes with the two functions every caller uses: advance the ledger, compute the components."""

from __future__ import annotations

import math
from collections.abc import Sequence

from esper.simic.rewards import (
    Calibration,
    Ledger,
    RewardComponentsTelemetry,
    RewardConfig,
    RewardInputs,
    RewardWeights,
    advance_ledger,
    compute_components,
    open_ledger,
)
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import Step, play, script_chooser


def waiting_curve(spec: SimulationSpec) -> tuple[float, ...]:
    """Points of a host that only waits, after 0, 1, ... T epochs."""
    return tuple(spec.host.accuracy_pct(epochs) for epochs in range(spec.horizon + 1))


def make_config(
    spec: SimulationSpec,
    *,
    family: str = "contribution",
    gamma: float = 0.995,
    span: float = 15.0,
    reference: bool = True,
    weights: RewardWeights | None = None,
) -> RewardConfig:
    """A calibrated configuration.

    The loss of a simulated world is a straight line in its accuracy, so loss points are accuracy points.
    """
    curve = waiting_curve(spec)
    return RewardConfig(
        horizon=spec.horizon,
        gamma=gamma,
        calibration=Calibration(
            family=family,
            floor=curve[-1],
            ceiling=curve[-1] + span,
            reference=curve if reference else None,
        ),
        lifecycle=spec.lifecycle,
        loss_ref=math.log(spec.num_classes),
        weights=weights or RewardWeights(),
    )


def ledgers(steps: Sequence[Step], config: RewardConfig) -> list[Ledger]:
    """The ledger of every state, reset included."""
    found = [open_ledger(steps[0].before, config)]
    for step in steps:
        found.append(advance_ledger(found[-1], step.outcome, step.after, config))
    return found


def inputs(steps: Sequence[Step], spec: SimulationSpec, config: RewardConfig) -> list[RewardInputs]:
    memory = ledgers(steps, config)
    return [
        RewardInputs(
            before=step.before,
            outcome=step.outcome,
            after=step.after,
            ledger=memory[t],
            ledger_after=memory[t + 1],
            config=config,
        )
        for t, step in enumerate(steps)
    ]


def price(
    mode: str, steps: Sequence[Step], spec: SimulationSpec, config: RewardConfig
) -> list[RewardComponentsTelemetry]:
    return [compute_components(mode, transition) for transition in inputs(steps, spec, config)]


def discounted(amounts: Sequence[float], gamma: float) -> float:
    return math.fsum(gamma**t * amount for t, amount in enumerate(amounts))


def discounted_return(mode: str, steps: Sequence[Step], spec: SimulationSpec, config: RewardConfig) -> float:
    return discounted([components.total for components in price(mode, steps, spec, config)], config.gamma)


def wait_steps(spec: SimulationSpec) -> list[Step]:
    return play(spec, script_chooser([]))
