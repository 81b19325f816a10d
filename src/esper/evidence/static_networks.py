"""Networks that are fixed from the first epoch: what somebody grew, built at once, or a wider host.

They train in the same workers, on the same batches and for the same epochs as growing hosts, and only wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from esper.kasmina import HostSpec, MorphogeneticModel, build_host
from esper.kasmina.layers import generator_for
from esper.leyline import Cause, EpisodeSeed, SeedStage, derive_seed, record
from esper.runtime.tasks import TaskSpec, count_host_params
from esper.simic.training.env_factory import WorkerSpec, build_worker, create_env_state
from esper.simic.training.parallel_env_state import EnvRecipe, ParallelEnvState
from esper.tolaria.engine import Beat, VectorizedEngine
from esper.tolaria.runtime import Placement


@record
class KeptSeed:
    """A seed of a committed network."""

    slot: str
    blueprint: str
    blend: str


@record
class StaticNetwork:
    """The network that a run starts with."""

    host: HostSpec
    kept: tuple[KeptSeed, ...]
    """Seeds that are in it from the beginning, for good."""


@record
class HostWorkerSpec:
    """A worker whose envs may start with networks of their own."""

    worker: WorkerSpec
    networks: Mapping[int, StaticNetwork] | None
    """By run seed; None starts every env with the task's bare host."""


def build_host_worker(spec: HostWorkerSpec, beat: Beat) -> VectorizedEngine[ParallelEnvState]:
    """Builds the engine of a worker, in whatever process this is called."""
    create = create_env_state if spec.networks is None else partial(_create_env, spec.networks)
    return build_worker(spec.worker, beat, create=create)


def _create_env(
    networks: Mapping[int, StaticNetwork], recipe: EnvRecipe, seed: EpisodeSeed, placement: Placement
) -> ParallelEnvState:
    network = networks[seed.run_seed]
    env = create_env_state(_recipe(recipe, network.host), seed, placement)
    for kept in network.kept:
        _plant_for_good(env.model, kept, seed)
        env.note_move(env.model.slot(kept.slot).transition(SeedStage.FOSSILIZED, Cause.AUTO))
    env.zero_accumulators()  # there are more coalitions to measure now
    env.outbox.clear()  # nothing of this happened during the run
    return env


def _recipe(recipe: EnvRecipe, host: HostSpec) -> EnvRecipe:
    # The budget binds what grows; a wide host may exceed it by part of one width step.
    lifecycle = replace(recipe.task.lifecycle, param_budget=None)
    task = replace(recipe.task, host=host, lifecycle=lifecycle)
    layout = recipe.layout
    if host != recipe.task.host:
        outline = build_host(host, generator_for(0))
        layout = MorphogeneticModel(
            outline, recipe.sample, lifecycle, slots=task.slots, blueprints=task.blueprints
        ).layout
    return replace(recipe, task=task, layout=layout)


def _plant_for_good(model: MorphogeneticModel, kept: KeptSeed, seed: EpisodeSeed) -> None:
    """A seed as part of the network, fully blended in: new weights, no training behind the host."""
    purpose = f"static:{kept.slot}"
    model.germinate(
        kept.slot, kept.blueprint, kept.blend, derive_seed(seed.run_seed, seed.env_id, seed.episode, None, purpose)
    )
    slot = model.slot(kept.slot)
    for stage in (SeedStage.TRAINING, SeedStage.BLENDING):
        slot.transition(stage, Cause.AUTO)
    while not slot.ramp_complete:
        slot.ramp()
    slot.transition(SeedStage.HOLDING, Cause.AUTO)


# ---- widths


def can_widen(host: HostSpec) -> bool:
    """True if the host has a width."""
    return host.kind == "transformer" or bool(_widths(host))


def widened(task: TaskSpec, params: int) -> HostSpec:
    """The narrowest host of the task's kind and proportions that has at least so many parameters.

    Raises:
        ValueError: The host has no width to change.
    """
    host = task.host
    if not can_widen(host):
        raise ValueError(f"the {host.kind} host of {task.name} cannot be widened: it has no hidden layer")
    factor = _factor(host)
    while count_host_params(replace(task, host=_scaled(host, factor))) < params:
        factor += 1
    return _scaled(host, factor)


def _widths(host: HostSpec) -> Sequence[int]:
    widths: Sequence[int] = host.kwargs["hidden" if host.kind == "mlp" else "channels"]
    return widths


def _factor(host: HostSpec) -> int:
    """How many of the smallest steps its widths are: layers keep their proportions."""
    if host.kind == "transformer":
        return int(host.kwargs["dim"]) // int(host.kwargs["heads"])
    return math.gcd(*_widths(host))


def _scaled(host: HostSpec, factor: int) -> HostSpec:
    if host.kind == "transformer":
        change: dict[str, Any] = {"dim": factor * int(host.kwargs["heads"])}
    else:
        name = "hidden" if host.kind == "mlp" else "channels"
        change = {name: [factor * width // _factor(host) for width in _widths(host)]}
    return HostSpec(kind=host.kind, kwargs={**host.kwargs, **change})
