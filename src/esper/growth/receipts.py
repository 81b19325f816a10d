"""Receipts: what a kept seed really brought, measured on a twin that never had it.

A seed that is missed when it is switched off need not have helped: the model has learned to lean on it. A twin goes
back to the moment before the seed was planted and trains on the same batches with the same draws and everything else
that grew, only without that seed. The difference is what it brought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from esper.growth.history import SeedLife, seed_lives
from esper.leyline import ActionSpec, LifecycleOp, record
from esper.leyline.scale import MetricScale
from esper.tamiyo.controller import Setting
from esper.tamiyo.schedule import ScheduleController, ScheduleEntry

if TYPE_CHECKING:
    from esper.growth.training import GrowthRun


@record
class Receipt:
    """What one kept seed brought by the end of its comparison, in the user's metric."""

    seed_id: str
    site: str
    blueprint: str
    params: int
    epochs: int
    """From its planting on, that the twin was trained without it."""
    with_seed: float
    without_seed: float
    gain: float
    """Positive if the seed helped."""


def planned_twins(run: GrowthRun, limit: int | None) -> list[tuple[SeedLife, int]]:
    """(kept seed, epochs to train without it), given the most epochs that a twin may take."""
    end = run.settings.epochs
    kept = [life for life in seed_lives(run.grower.moves) if life.kept is not None and life.pruned is None]
    return [(life, min(end - life.planted, end if limit is None else limit)) for life in kept]


def make_receipts(
    run: GrowthRun,
    snapshots: dict[int, dict[str, Any]],
    twins: Sequence[tuple[SeedLife, int]],
    on_twin: Callable[[str], None] = lambda words: None,
) -> tuple[Receipt, ...]:
    """Trains a twin for every kept seed. The run is afterwards as it was.

    Args:
        run: After its last epoch, not finished.
        snapshots: States of its grower before the epochs in which seeds were planted.
        twins: Of `planned_twins`.
        on_twin: Called with what is being done.
    """
    grower = run.grower
    now, history, specs = grower.state_dict(), list(grower.history), grower.decisions
    cost = run.training_macs, run.seconds
    receipts = []
    try:
        for life, epochs in twins:
            on_twin(f"receipt of {life.blueprint} at {life.site}: {epochs} epochs without it")
            with grower.decided_by(_without(run, specs, life)):
                grower.turn_to(snapshots[life.planted])
                for _ in range(epochs):
                    run.step()
                without = grower.history[-1].metric
            receipts.append(_receipt(life, epochs, history[life.planted + epochs - 1].metric, without, grower.scale))
    finally:
        grower.turn_to(now)
        run.training_macs, run.seconds = cost
    return tuple(receipts)


def _receipt(life: SeedLife, epochs: int, with_seed: float, without_seed: float, scale: MetricScale) -> Receipt:
    sign = 1.0 if scale.higher_is_better else -1.0
    return Receipt(
        seed_id=life.seed_id,
        site=life.site,
        blueprint=life.blueprint,
        params=life.params,
        epochs=epochs,
        with_seed=with_seed,
        without_seed=without_seed,
        gain=sign * (with_seed - without_seed),
    )


def _without(run: GrowthRun, specs: Sequence[ActionSpec], life: SeedLife) -> ScheduleController:
    """All decisions of a run but those about one seed. What is not allowed without it is tried again later."""
    network = run.grower.network
    entries = [
        ScheduleEntry(epoch=epoch, op=spec.op, slot=spec.slot, blueprint=spec.blueprint, blend=spec.blend)
        for epoch, spec in enumerate(specs)
        if spec.op is not LifecycleOp.WAIT
        and spec.slot is not None
        and not (spec.slot == life.slot and epoch >= life.planted)
    ]
    setting = Setting(layout=network.layout, lifecycle=network.lifecycle, run_seed=run.settings.seed)
    return ScheduleController(setting, entries)
