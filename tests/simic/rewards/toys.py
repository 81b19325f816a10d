"""The toy host of the incentive tables and the scripted lives that are compared on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from esper.leyline import ActionSpec, LifecycleOp
from esper.tamiyo.simulation import HostCurve, SimulatedBlueprint, SimulationSpec, Synergy
from tests.fakes import ANYTHING_GOES, Step, act_on, germinate, play, script_chooser

HORIZON = 60
SPAN = 15.0
RAMP = 5
HOLD = 6
"""Epochs in HOLDING before a seed is kept: credit needs three, the rest is patience."""
Plan = list[tuple[int, ActionSpec]]


def toy(
    *,
    good_pp: float = 10.0,
    harm_pp: float = 6.0,
    dependence_pp: float = 8.0,
    parasite_pp: float = 15.0,
    params: int = 500,
    host_epochs: float = 9.5,
    noise_pp: float = 0.0,
    rollback_epoch: int | None = None,
) -> SimulationSpec:
    """One blueprint per kind of seed a policy can meet."""

    def blueprint(name: str, gain: float, dependence: float, size: int = params) -> SimulatedBlueprint:
        return SimulatedBlueprint(
            name=name, gain_pp=(gain,) * 3, params=size, dependence_pp=dependence, maturing_epochs=6.0
        )

    return SimulationSpec(
        horizon=HORIZON,
        host=HostCurve(start_pct=20.0, final_pct=80.0, epochs=host_epochs),
        lifecycle=ANYTHING_GOES,
        noise_pp=noise_pp,
        rollback_epoch=rollback_epoch,
        blueprints=(
            blueprint("good", good_pp, dependence_pp),
            blueprint("bad", -harm_pp, 0.25 * dependence_pp),
            blueprint("inert", 0.0, 0.0),
            blueprint("parasite", -0.5, parasite_pp),
            blueprint("left", 0.3, 0.0, size=300),
            blueprint("right", 0.3, 0.0, size=300),
            blueprint("oversized", 0.03 * SPAN, 0.0, size=15_000),
        ),
        synergies=(Synergy(first="left", second="right", gain_pp=14.0),),
    )


def life(
    blueprint: str, start: int, end: LifecycleOp | None, slot: str = "r0c0", *, train: int = 2, hold: int = HOLD
) -> Plan:
    """A seed's whole life: planted, trained, blended, held, and then `end`ed, or held for ever."""
    advance = start + train
    plan = [(start, germinate(slot, blueprint, "linear")), (advance, act_on(LifecycleOp.ADVANCE, slot))]
    return plan if end is None else [*plan, (advance + RAMP + hold, act_on(end, slot))]


KEEP, PRUNE = LifecycleOp.FOSSILIZE, LifecycleOp.PRUNE


def cycling(times: int = 6) -> Plan:
    plan: Plan = []
    for start in range(0, times * 5, 5):
        plan += [(start, germinate("r0c0", "good", "linear")), (start + 1, act_on(PRUNE, "r0c0"))]
    return plan


def oscillating(times: int = 3) -> Plan:
    """Blend in, tear out, again."""
    plan: Plan = []
    for start in range(1, times * 18, 18):
        plan += life("good", start, PRUNE, hold=4)
    return plan


PLANS: Mapping[str, Plan] = {
    "pair kept": life("left", 5, KEEP, "r0c0") + life("right", 15, KEEP, "r0c1"),
    "good kept early": life("good", 5, KEEP),
    "good kept late": life("good", 28, KEEP),
    "wait": [],
    "last-minute germination": [(HORIZON - 4, germinate("r0c0", "good", "linear"))],
    "bad pruned while blending": life("bad", 5, PRUNE, hold=-2),
    "good pruned from holding": life("good", 5, PRUNE),
    "inert kept": life("inert", 5, KEEP),
    "one of the pair kept": life("left", 5, KEEP, "r0c0") + life("right", 15, PRUNE, "r0c1"),
    "parasite kept": life("parasite", 0, KEEP),
    "parasite pruned": life("parasite", 0, PRUNE),
    "cycling": cycling(),
    "oscillating": oscillating(),
    "oversized kept": life("oversized", 5, KEEP),
    "bad kept": life("bad", 5, KEEP),
    "bad held": life("bad", 5, None),
    "good held": life("good", 5, None),
    "crash": life("good", 5, KEEP),
}
CRASH_EPOCH = 40


def live(spec: SimulationSpec, name: str) -> list[Step]:
    """Plays one of the plans; the crash is the early kept seed with a rollback at its epoch."""
    if name == "crash":
        spec = replace(spec, rollback_epoch=CRASH_EPOCH)
    return play(spec, script_chooser(PLANS[name]))
