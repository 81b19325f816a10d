"""Networks that are fixed from the first epoch: what somebody grew, built at once, a wider host, or a plain family.

They train in the same workers, on the same batches and for the same epochs as growing hosts, and only wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from esper.kasmina import HostSpec, MorphogeneticModel, build_host
from esper.kasmina.layers import generator_for
from esper.leyline import Cause, EpisodeSeed, SeedStage, record
from esper.runtime.datasets import get_source
from esper.runtime.tasks import TaskSpec, count_host_params
from esper.simic.training.env_factory import WorkerSpec, build_worker, create_env_state
from esper.simic.training.parallel_env_state import EnvRecipe, ParallelEnvState
from esper.tolaria.engine import Beat, VectorizedEngine
from esper.tolaria.runtime import Placement


@record
class SeedChoice:
    """What is planted where, and how it enters."""

    slot: str
    blueprint: str
    blend: str


@record
class StaticNetwork:
    """The network that a run starts with."""

    host: HostSpec
    kept: tuple[SeedChoice, ...]
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
    layout = recipe.context.layout
    if host != recipe.task.host:
        outline = build_host(host, generator_for(0))
        # One of another depth may lack some of them. Nothing grows in it, but a network has a slot.
        held = tuple(slot for slot in task.slots if slot in outline.places) or tuple(outline.places)[:1]
        task = replace(task, slots=held)
        layout = MorphogeneticModel(
            outline, recipe.sample, lifecycle, slots=task.slots, blueprints=task.blueprints
        ).layout
    return replace(recipe, task=task, context=replace(recipe.context, layout=layout, lifecycle=lifecycle))


def _plant_for_good(model: MorphogeneticModel, kept: SeedChoice, seed: EpisodeSeed) -> None:
    """A seed as part of the network, fully blended in: new weights, no training behind the host."""
    model.germinate(kept.slot, kept.blueprint, kept.blend, seed.derive(None, f"static:{kept.slot}"))
    slot = model.slot(kept.slot)
    for stage in (SeedStage.TRAINING, SeedStage.BLENDING):
        slot.transition(stage, Cause.AUTO)
    while not slot.ramp_complete:
        slot.ramp()
    slot.transition(SeedStage.HOLDING, Cause.AUTO)


# ---- widths


def can_widen(host: HostSpec) -> bool:
    """True if the host has a width."""
    return bool(_widths(host))


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


def read_host(saved: Mapping[str, Any]) -> HostSpec:
    """A host from its JSON form.

    Raises:
        ValueError: It is something else.
    """
    try:
        if saved["kind"] == "user":  # building it would run whatever function the file names
            raise ValueError("a host of the user's own is not taken from a file")
        return HostSpec(kind=saved["kind"], kwargs=dict(saved["kwargs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a host: expected kind and kwargs, got {saved}") from error


def describe_host(host: HostSpec) -> str:
    """Kind, widths and depth in a few words."""
    if host.kind == "transformer":
        return f"transformer, width {host.kwargs['dim']}, {host.kwargs['layers']} layers"
    if host.kind == "user":
        return f"{host.topology} of {host.kwargs['make']}"
    widths = "-".join(map(str, _widths(host))) or "linear"
    if host.kind == "mlp":
        return f"mlp {widths}"
    return f"cnn {widths}, kernel {host.kwargs['kernel']}, {sum(host.kwargs['pool'])} pools"


# ---- the static family: what a person would try who does not grow

CNN_SHAPES = ((1, 2), (1, 1, 1), (4, 5, 6), (1, 2, 2), (1, 2, 4), (1, 1, 1, 1), (1, 2, 2, 2), (1, 2, 2, 4))
"""Widths of the blocks, in proportion."""
CNN_POOLS = (1, 2, 3)
MLP_SHAPES = ((1,), (1, 1), (2, 1), (1, 1, 1))
TRANSFORMER_LAYERS = (1, 2, 3, 4)
SMALLEST_IMAGE = 2
"""Pixels a side that must be left after the last pool."""


def static_family(task: TaskSpec, budget: int) -> tuple[HostSpec, ...]:
    """Plain networks of the task's kind, each as wide as the budget allows. The task's own proportions come first.

    Convolutions are 3x3 even where the host's are not: a rival is not built to lose.

    Raises:
        ValueError: Not even the narrowest of them fits.
    """
    fitting = [fit_to_budget(task, shape, budget) for shape in _shapes(task)]
    family = tuple({str(host): host for host in fitting if host is not None}.values())
    if not family:
        raise ValueError(f"no plain {task.host.kind} network for {task.name} has at most {budget:,} parameters")
    return family


def fit_to_budget(task: TaskSpec, shape: HostSpec, budget: int) -> HostSpec | None:
    """A network with the proportions of `shape`, as wide as fits; None if its narrowest form is too large.

    All widths grow together as far as they can, then one after the other by the smallest step, the last one first.
    """

    def fits(widths: Sequence[int]) -> bool:
        return count_host_params(replace(task, host=_with_widths(shape, widths))) <= budget

    unit = int(shape.kwargs["heads"]) if shape.kind == "transformer" else 1
    parts = [width / min(_widths(shape)) for width in _widths(shape)]

    def scaled(factor: int) -> list[int]:
        return [unit * int(factor * part) for part in parts]

    if not fits(scaled(1)):
        return None
    low, high = 1, 2
    while parts and fits(scaled(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(scaled(middle)) else (low, middle)
    widths = scaled(low)
    for position in reversed(range(len(widths))):
        while fits([*widths[:position], widths[position] + unit, *widths[position + 1 :]]):
            widths[position] += unit
    return _with_widths(shape, widths)


def _shapes(task: TaskSpec) -> Iterator[HostSpec]:
    """Every depth and proportion of the family, widths in their smallest form."""
    host = task.host
    if host.kind == "transformer":
        own = int(host.kwargs["layers"])
        for layers in (own, *(number for number in TRANSFORMER_LAYERS if number != own)):
            yield HostSpec(kind=host.kind, kwargs={**host.kwargs, "layers": layers})
    elif host.kind == "mlp":
        own_widths = tuple(_widths(host))
        for parts in dict.fromkeys((own_widths, (), *MLP_SHAPES)):
            yield _with_widths(host, parts)
    else:
        yield from _cnn_shapes(task)


def _cnn_shapes(task: TaskSpec) -> Iterator[HostSpec]:
    shape, side = task.host, _image_side(task)
    yield HostSpec(kind=shape.kind, kwargs={**shape.kwargs, "kernel": 3})
    for parts, pools in product(CNN_SHAPES, CNN_POOLS):
        if pools < len(parts) and side >> pools >= SMALLEST_IMAGE:
            pool = [block < pools for block in range(len(parts))]
            kwargs = {**shape.kwargs, "channels": list(parts), "kernel": 3, "pool": pool}
            yield HostSpec(kind=shape.kind, kwargs=kwargs)


def _image_side(task: TaskSpec) -> int:
    row_shape = get_source(task.data).row_shape
    assert row_shape is not None
    return row_shape[-1]


def _with_widths(shape: HostSpec, widths: Sequence[int]) -> HostSpec:
    change = {"dim": widths[0]} if shape.kind == "transformer" else {_WIDTHS_OF[shape.kind]: list(widths)}
    return HostSpec(kind=shape.kind, kwargs={**shape.kwargs, **change})


# ---- widths of a host

_WIDTHS_OF = {"mlp": "hidden", "cnn": "channels"}


def _widths(host: HostSpec) -> Sequence[int]:
    if host.kind == "transformer":
        return [int(host.kwargs["dim"])]
    widths: Sequence[int] = host.kwargs[_WIDTHS_OF[host.kind]] if host.kind in _WIDTHS_OF else ()
    return widths


def _factor(host: HostSpec) -> int:
    """How many of the smallest steps its widths are: layers keep their proportions."""
    if host.kind == "transformer":
        return int(host.kwargs["dim"]) // int(host.kwargs["heads"])
    return math.gcd(*_widths(host))


def _scaled(host: HostSpec, factor: int) -> HostSpec:
    return _with_widths(host, [factor * width // _factor(host) for width in _widths(host)])
