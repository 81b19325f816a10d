"""Workers of kind `simulated`: formulas in place of a task's hosts, with its slots, blueprints, sizes and limits.

They rehearse a run or a cluster without training anything, and are the sandboxes' own. What pays where is drawn from
the names, so it says nothing about the task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from esper.leyline import HostLayout, derive_seed
from esper.runtime.tasks import TaskSpec
from esper.simic.training.env_factory import WorkerSpec
from esper.tamiyo.simulation import HostCurve, SimulatedBlueprint, SimulatedWorker, SimulationSpec
from esper.tolaria.engine import Beat
from esper.tolaria.handles import Handle, InlineHandle
from esper.tolaria.worker import BuildWorker

GAINS_PP = (-5.0, 15.0)
"""Points that a seed may bring in the rehearsal of a task."""


def build_simulated_worker(spec: SimulationSpec | Sequence[SimulationSpec], beat: Beat) -> SimulatedWorker:
    """A worker for the pool, in whatever process this is called."""
    return SimulatedWorker(spec, beat)


@contextmanager
def open_simulated(build: BuildWorker, spec: Any, workers: int | None) -> Iterator[Sequence[Handle]]:
    """Any number of simulated workers in this process, also where `build` would have made real ones.

    Raises:
        ValueError: The spec is of workers whose networks are wanted; there are none.
    """
    if isinstance(spec, WorkerSpec):
        build = build_simulated_worker
        spec = tuple(rehearsal(entry.task, entry.context.layout) for entry in spec.tasks.values())
    elif not all(isinstance(world, SimulationSpec) for world in (spec if isinstance(spec, tuple) else (spec,))):
        raise ValueError(
            f"worker kind 'simulated' trains no networks, so there would be nothing to score or keep "
            f"({type(spec).__name__}). Use 'inline' or 'process'"
        )
    yield [InlineHandle(worker_id, build, spec) for worker_id in range(workers or 1)]


def rehearsal(task: TaskSpec, layout: HostLayout) -> SimulationSpec:
    """A world with the places, names, sizes and limits of a task."""
    return SimulationSpec(
        name=task.name,
        blueprints=tuple(_blueprint(task, layout, name) for name in layout.blueprints),
        horizon=task.horizon,
        slot_ids=layout.slot_ids,
        host=HostCurve(start_pct=100.0 / task.num_classes),
        host_params=layout.host_params,
        num_classes=task.num_classes,
        lifecycle=task.lifecycle,
    )


def _blueprint(task: TaskSpec, layout: HostLayout, name: str) -> SimulatedBlueprint:
    rng = random.Random(derive_seed(0, None, None, None, f"rehearsal:{task.name}:{name}"))
    cards = [layout.card(slot_id, name) for slot_id in layout.slot_ids]
    return SimulatedBlueprint(
        name=name,
        gain_pp=tuple(rng.uniform(*GAINS_PP) if card.fits else 0.0 for card in cards),
        params=max(card.params for card in cards),
        mixing=cards[0].mixing,
        nonlinear=cards[0].nonlinear,
        fits=any(card.fits for card in cards),
    )
