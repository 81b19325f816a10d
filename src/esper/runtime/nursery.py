"""The nursery: tasks by the thousand, for controllers that are to decide well on hosts and data they never met.

`draw_task` draws a task: data, host, optimizer, horizon, budget, slots and blueprints. Every task belongs to a family;
some families are held out by the hash of their name, others by what they are: Fashion-MNIST, CIFAR-10, deeper hosts,
larger budgets, blueprints that training never offers. Tasks have names that any process can resolve: "nursery:7" is a
draw from the training families, "heldout:7" a row of the fixed list that held-out results are measured on.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from esper.kasmina.hosts import Host, HostSpec, build_host
from esper.kasmina.layers import generator_for
from esper.kasmina.layout import host_layout, slot_specs
from esper.leyline import DEFAULT_LIFECYCLE, OptimSpec, derive_seed, record
from esper.runtime.data.variants import DataVariant, describe_variant
from esper.runtime.tasks import TASKS, TaskSpec, adamw_spec, blank_rows, check_task, count_host_params

NURSERY, HELD_OUT = "nursery", "heldout"
VALIDATION = 1_000_000
"""Training draws have numbers below this; from here on, draws of the same families choose recipes and checkpoints."""
HELD_OUT_FILE = "heldout.json"
MAX_TRIES = 1_000

# Written out, so that a blueprint that is added later changes no draw.
OFFERED: Mapping[str, tuple[str, ...]] = {
    "mlp": ("mlp.norm", "mlp.lora", "mlp.mlp_small", "mlp.mlp", "mlp.mlp_wide"),
    "cnn": (
        "cnn.norm",
        "cnn.se",
        "cnn.pointwise",
        "cnn.depthwise",
        "cnn.bottleneck",
        "cnn.conv",
        "cnn.conv_deep",
        "cnn.conv_down",
    ),
    "transformer": (
        "transformer.norm",
        "transformer.lora",
        "transformer.conv_causal",
        "transformer.attention",
        "transformer.mlp_small",
        "transformer.mlp",
    ),
}
NEVER_OFFERED: Mapping[str, str] = {"mlp": "mlp.glu", "cnn": "cnn.dilated"}
"""Blueprints that only held-out tasks offer."""

PLAIN_SLOTS = ("r0", "r1")
"""Rows of slots whose seeds extend the features they read."""
RESTRAINT_SHARE = 1 / 3
"""Of all draws: tasks on which the right answer is to wait."""
MAX_BUDGET = 8.0
"""Most parameters of a training task, in units of its host."""
MAX_BLOCKS = 4
MIN_HORIZON, MAX_HORIZON = 8, 30
MIN_STEPS = 10
"""Least batches per epoch: with fewer, hosts of a few epochs learn nothing."""


@record
class HeldOut:
    """One row of the fixed list."""

    family: str
    why: str
    """What of it training never sees."""
    sha256: str
    """Of the whole task."""
    task: TaskSpec


def draw_task(rng: random.Random, name: str = "draw") -> TaskSpec:
    """Draws a task. The same state of `rng` gives the same task, on any machine."""
    return finish_task(rng, name, draw_draft(rng))


@lru_cache(maxsize=256)
def nursery_task(number: int) -> TaskSpec:
    """The draw of that number from the training families."""
    name = f"{NURSERY}:{number}"
    rng = random.Random(derive_seed(0, None, number, None, NURSERY))
    for _ in range(MAX_TRIES):
        task = draw_task(rng, name)
        if not is_held_out(family_of(task)):
            return task
    raise AssertionError("a fifth of the families is held out")


@cache
def any_nursery_task() -> TaskSpec:
    """Stands for all draws where a run has to name one task: as long as the longest of them."""
    words = "a task that is drawn anew for every group of hosts and every round"
    return replace(nursery_task(0), name=NURSERY, description=words, horizon=MAX_HORIZON)


def heldout_task(number: int) -> TaskSpec:
    """A row of the fixed list.

    Raises:
        ValueError: The list is shorter.
    """
    rows = heldout_list()
    if number >= len(rows):
        raise ValueError(f"there is no task {HELD_OUT}:{number}; the list has {len(rows)} rows, from 0 on")
    return rows[number].task


@cache
def heldout_list() -> tuple[HeldOut, ...]:
    """The fixed list. Its tasks are stored whole, so that no change of what is drawn can change them."""
    stored = files("esper.runtime").joinpath("data", HELD_OUT_FILE).read_bytes()
    return msgspec.json.decode(stored, type=tuple[HeldOut, ...])


def task_sha256(task: TaskSpec) -> str:
    """Hash of all that a task is made of. What is None is left out, so that a field that comes later changes none."""
    return hashlib.sha256(json.dumps(_without_none(asdict(task)), sort_keys=True).encode()).hexdigest()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return value


# ---- families


def family_of(task: TaskSpec) -> str:
    """What kind of task it is, in one word: data, host, how it sees, how deep it is."""
    teacher = None if task.variant is None else task.variant.teacher
    data = f"{task.data}.{teacher}" if teacher else task.data
    kwargs = task.host.kwargs
    if task.host.kind == "cnn":
        return f"{data}/cnn/{_sight(kwargs['kernel'], len(kwargs['channels']))}/{len(kwargs['channels'])}"
    if task.host.kind == "mlp":
        permuted = task.variant is not None and task.variant.permuted
        return f"{data}/mlp/{'permuted' if permuted else 'plain'}/{len(kwargs['hidden'])}"
    return f"{data}/transformer/{kwargs['layers']}"


def _sight(kernel: int | Sequence[int], blocks: int) -> str:
    sizes = [kernel] * blocks if isinstance(kernel, int) else list(kernel)
    seeing = sum(size > 1 for size in sizes)
    return "blind" if seeing == 0 else "sighted" if seeing == blocks else "mixed"


def is_held_out(family: str) -> bool:
    """True for a fifth of the families, by the hash of their names."""
    return hashlib.sha256(family.encode()).digest()[0] % 5 == 0


# ---- what is drawn


_DRAWN = replace(TASKS["digits_mlp"], val_chunk_rows=500)
"""What draws have in common. A draft is a task whose description says why it is drawn: "grow", or why not: "saturated",
"hopeless" or "harmful". Slots, blueprints and budget are chosen last."""


def draw_draft(rng: random.Random) -> TaskSpec:
    """Draws all but slots, blueprints and budget."""
    if rng.random() < RESTRAINT_SHARE:
        return rng.choice((_saturated, _hopeless, _harmful))(rng)
    luck = rng.random()
    if luck < 0.04:
        return _language(rng)
    if luck < 0.22:
        return _taught(rng)
    return _digits(rng)


def _digits(rng: random.Random) -> TaskSpec:
    """Handwritten digits, made harder in one way or another, for a host that is too small or blind."""
    classes = draw_classes(rng)
    if rng.random() < 0.3:
        host = draw_mlp(rng, len(classes), layers=rng.choice((0, 1, 1, 2, 3)), widths=(3, 16))
        variant = draw_variant(rng, classes, permuted=rng.random() < 0.3)
    else:
        host, variant = (
            draw_cnn(rng, len(classes), rng.randint(1, MAX_BLOCKS), widths=(3, 12)),
            draw_variant(rng, classes),
        )
    return image_draft(rng, "grow", host, variant)


def _taught(rng: random.Random) -> TaskSpec:
    """Patterns whose teacher is known: what helps is a convolution, or hidden units, and nothing else."""
    classes = tuple(range(rng.randint(3, 6)))
    if rng.random() < 0.6:
        sight = rng.choice(("blind", "mixed"))
        host, teacher = draw_cnn(rng, len(classes), rng.randint(1, 3), widths=(3, 12), sight=sight), "conv"
    else:
        host, teacher = draw_mlp(rng, len(classes), layers=rng.choice((0, 1)), widths=(3, 12)), "mlp"
    variant = replace(draw_variant(rng, classes), teacher=teacher, pixel_noise=0.0, train_rows=rng.randint(500, 997))
    return image_draft(rng, "grow", host, variant)


def _language(rng: random.Random) -> TaskSpec:
    """Short windows of Python's own documentation."""
    context = rng.choice((16, 24, 32))
    kwargs = {
        "vocab": 256,
        "dim": rng.choice((8, 12, 16)),
        "heads": rng.choice((2, 4)),
        "layers": rng.randint(1, 2),
        "ff": rng.choice((1, 2)),
        "context": context,
    }
    return replace(
        _DRAWN,
        description="grow",
        data="pydoc",
        host=HostSpec(kind="transformer", kwargs=kwargs),
        optimizer=adamw_spec(log_uniform(rng, 2e-3, 1e-2)),
        horizon=rng.randint(8, 14),
        batch_size=32,
        samples_per_epoch=512,
        val_samples=128,
        val_chunk_rows=64,
        context=context,
        num_classes=256,
        metric="loss",
    )


def _saturated(rng: random.Random) -> TaskSpec:
    """A host that has learned all there is, with room to grow."""
    classes = draw_classes(rng, most=6)
    if rng.random() < 0.6:
        host = draw_mlp(rng, len(classes), layers=rng.choice((1, 2)), widths=(32, 64))
    else:
        host = draw_cnn(rng, len(classes), rng.randint(2, MAX_BLOCKS), widths=(10, 16), sight="sighted")
    variant = replace(draw_variant(rng, classes), label_noise=0.0, pixel_noise=0.0, train_rows=rng.randint(600, 997))
    return replace(
        image_draft(rng, "saturated", host, variant), optimizer=adamw_spec(1e-2), horizon=rng.randint(14, 24)
    )


def _hopeless(rng: random.Random) -> TaskSpec:
    """Nothing to learn: labels without meaning, or steps too small to get anywhere."""
    classes = draw_classes(rng)
    if rng.random() < 0.5:
        host = draw_mlp(rng, len(classes), layers=rng.randint(0, 2), widths=(3, 32))
    else:
        host = draw_cnn(rng, len(classes), rng.randint(1, 3), widths=(3, 12))
    draft = image_draft(rng, "hopeless", host, draw_variant(rng, classes))
    if rng.random() < 0.6:
        assert draft.variant is not None
        return replace(draft, variant=replace(draft.variant, label_noise=1.0))
    return replace(draft, optimizer=adamw_spec(1e-5))


def _harmful(rng: random.Random) -> TaskSpec:
    """Few rows, many wrong labels, large steps: what is added learns the noise by heart."""
    classes = draw_classes(rng, most=6)
    host = draw_mlp(rng, len(classes), layers=rng.choice((0, 1)), widths=(8, 32))
    variant = replace(
        draw_variant(rng, classes), label_noise=rng.uniform(0.3, 0.5), pixel_noise=1.0, train_rows=rng.randint(160, 260)
    )
    draft = image_draft(rng, "harmful", host, variant)
    return replace(draft, optimizer=adamw_spec(rng.uniform(1e-2, 3e-2)), batch_size=16, horizon=rng.randint(16, 30))


def image_draft(rng: random.Random, purpose: str, host: HostSpec, variant: DataVariant) -> TaskSpec:
    """A task on digits: draws optimizer, horizon and batch."""
    batches = [size for size in (16, 32, 64) if variant.train_rows // size >= MIN_STEPS]
    return replace(
        _DRAWN,
        description=purpose,
        host=host,
        variant=variant,
        optimizer=_optimizer(rng),
        horizon=rng.randint(MIN_HORIZON, MAX_HORIZON),
        batch_size=rng.choice(batches),
        num_classes=len(variant.classes),
    )


def draw_classes(rng: random.Random, most: int = 10) -> tuple[int, ...]:
    """Draws 3 to `most` of ten classes."""
    return tuple(sorted(rng.sample(range(10), rng.randint(3, most))))


def draw_variant(rng: random.Random, classes: tuple[int, ...], permuted: bool = False) -> DataVariant:
    """Draws rows and noise."""
    return DataVariant(
        classes=classes,
        train_rows=rng.randint(200, 997),
        label_noise=rng.choice((0.0, 0.0, 0.1, 0.2)),
        pixel_noise=rng.choice((0.0, 0.0, 0.3, 0.6)),
        permuted=permuted,
        teacher=None,
        rng_seed=rng.randrange(2**31),
    )


def draw_mlp(rng: random.Random, classes: int, layers: int, widths: tuple[int, int], inputs: int = 64) -> HostSpec:
    """Draws an MLP of so many hidden layers."""
    hidden = [rng.randint(*widths) for _ in range(layers)]
    kwargs = {"inputs": inputs, "hidden": hidden, "classes": classes, "input_slot": True}
    return HostSpec(kind="mlp", kwargs=kwargs)


def draw_cnn(
    rng: random.Random,
    classes: int,
    blocks: int,
    widths: tuple[int, int],
    sight: str | None = None,
    side: int = 8,
    in_channels: int = 1,
    pools: int | None = None,
) -> HostSpec:
    """Draws widths, kernels and pools of so many blocks; `sight` is "blind", "mixed" or "sighted"."""
    channels = [rng.randint(*widths) for _ in range(blocks)]
    sight = rng.choice(("blind", "mixed", "mixed", "sighted")) if sight is None else sight
    kernels = {"blind": [1] * blocks, "sighted": [3] * blocks}.get(sight, [rng.choice((1, 3)) for _ in range(blocks)])
    most = min(blocks, round(math.log2(side)) - 1)
    pooled = rng.sample(range(blocks), rng.randint(0, most) if pools is None else min(pools, most))
    kwargs = {
        "in_channels": in_channels,
        "channels": channels,
        "kernel": kernels,
        "pool": [block in pooled for block in range(blocks)],
        "classes": classes,
    }
    return HostSpec(kind="cnn", kwargs=kwargs)


def _optimizer(rng: random.Random) -> OptimSpec:
    if rng.random() < 0.2:
        lr, schedule = log_uniform(rng, 0.02, 0.2), rng.choice(("cosine", "constant"))
        return OptimSpec(kind="sgd", lr=lr, weight_decay=5e-4, momentum=0.9, schedule=schedule)
    return replace(adamw_spec(log_uniform(rng, 3e-3, 3e-2)), schedule=rng.choice(("cosine", "constant")))


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Draws a number, every doubling equally likely."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def finish_task(
    rng: random.Random,
    name: str,
    draft: TaskSpec,
    *,
    budget: tuple[float, float] | None = None,
    must_offer: str | None = None,
) -> TaskSpec:
    """Chooses slots, blueprints and budget, and checks the whole.

    Args:
        rng: For the draws.
        name: Of the task.
        draft: All the rest.
        budget: Least and most parameters, in units of the host; None: as in training.
        must_offer: A blueprint that is among those offered.
    """
    host = build_host(draft.host, generator_for(0))
    params = sum(weight.numel() for weight in host.parameters())
    low, high = budget or (1.1, 3.0 if draft.host.kind == "transformer" else MAX_BUDGET)
    for _ in range(MAX_TRIES):
        slots, blueprints = _choices(rng, host, must_offer)
        least = 1.0 + _smallest_seed(host, draft, slots, blueprints) / params
        if least <= high:
            break
    else:
        raise AssertionError(f"no seed fits into {high} times the host of {name}")
    task = replace(
        draft,
        name=name,
        description=f"{draft.description}: {_words(draft)}",
        slots=slots,
        blueprints=blueprints,
        lifecycle=replace(DEFAULT_LIFECYCLE, param_budget=math.ceil(params * log_uniform(rng, max(low, least), high))),
    )
    check_task(task)
    return task


def _choices(rng: random.Random, host: Host, must_offer: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Some of the slots and some of the blueprints, in their order: no name can be relied on."""
    slots, keys = [slot for slot in host.slots if slot.startswith(PLAIN_SLOTS)], OFFERED[host.spec.kind]
    chosen = set(rng.sample(slots, rng.randint(1, len(slots))))
    offered = set(rng.sample(keys, rng.randint(2, len(keys)))) | {must_offer}
    return tuple(s for s in slots if s in chosen), tuple(k for k in (*keys, must_offer) if k and k in offered)


def _smallest_seed(host: Host, draft: TaskSpec, slots: Sequence[str], blueprints: Sequence[str]) -> float:
    """Parameters of the smallest seed that fits; a budget below it would leave nothing to decide."""
    sample = blank_rows(draft)
    layout = host_layout(host, sample, slot_specs(host, sample, slots), blueprints)
    return min((card.added_params("add") for cards in layout.cards for card in cards if card.fits), default=math.inf)


def _words(draft: TaskSpec) -> str:
    kwargs = draft.host.kwargs
    if draft.host.kind == "cnn":
        host = f"cnn {kwargs['channels']}, kernels {kwargs['kernel']}"
    elif draft.host.kind == "mlp":
        host = f"mlp {kwargs['hidden']}"
    else:
        host = f"transformer of {kwargs['layers']} x {kwargs['dim']}"
    return host if draft.variant is None else f"{describe_variant(draft.variant)}; {host}"


def facts(task: TaskSpec) -> dict[str, Any]:
    """A draw in plain words, for lists."""
    budget = task.lifecycle.param_budget
    assert budget is not None
    params = count_host_params(task)
    return {
        "task": task.name,
        "family": family_of(task),
        "held_out": is_held_out(family_of(task)),
        "host_params": params,
        "budget_ratio": budget / params,
        "epochs": task.horizon,
        "slots": list(task.slots),
        "blueprints": list(task.blueprint_keys),
        "description": task.description,
        "sha256": task_sha256(task),
    }
