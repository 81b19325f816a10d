"""`esper bench coalitions`: what measuring every combination of seeds costs, against the formula and no sharing.

A segment runs once per distinct on/off pattern of the seeds before it. With the cost of each part measured alone, the
formula predicts the whole; both are timed in turns within one run, so a busy machine disturbs them alike.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.progress import track
from rich.table import Table

from benchmarks.figures_file import check_out, write_figures
from esper.leyline import record
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from torch import Tensor

    from esper.kasmina import MorphogeneticModel

# Hosts of the three sizes that users meet, with a seed in each of their slots: (name, kind, kwargs, input shape).
HOSTS: tuple[tuple[str, str, dict[str, Any], tuple[int, ...]], ...] = (
    ("mlp 64-16-16-10", "mlp", {"inputs": 64, "hidden": [16, 16], "classes": 10, "input_slot": True}, (360, 64)),
    (
        "cnn 8x8",
        "cnn",
        {"in_channels": 1, "channels": [8, 8], "kernel": 3, "pool": [True, False], "classes": 10},
        (360, 1, 8, 8),
    ),
    (
        "cnn 32x32",
        "cnn",
        {"in_channels": 3, "channels": [8, 16, 32], "kernel": 3, "pool": [True, True, False], "classes": 10},
        (250, 3, 32, 32),
    ),
)
BLUEPRINTS = {"mlp": "mlp.mlp", "cnn": "cnn.conv"}
MAX_SEEDS = 3


@record
class CoalitionCost:
    """Times of one host with so many seeds, in units of one full pass."""

    host: str
    seeds: int
    one_pass_ms: float
    shared_passes: float
    separate_passes: float
    formula_passes: float


def bench_coalitions_command(
    repeats: Annotated[int, tyro.conf.arg(help="Timed rounds; medians are reported.")] = 60,
    out: Annotated[Path | None, tyro.conf.arg(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Time all 2^n combinations of n blended seeds against one plain pass.

    Columns: passes = shared evaluation in units of one full pass; separate = one pass per combination; formula = what
    the cost of the parts predicts for the shared evaluation; off = measured over predicted.
    """
    import torch

    check_out(out)
    torch.set_num_threads(1)
    console = plain_console()
    cases = [(name, kind, kwargs, shape, n) for name, kind, kwargs, shape in HOSTS for n in range(1, MAX_SEEDS + 1)]
    rows = []
    for name, kind, kwargs, shape, num_seeds in track(cases, "timing", console=console, transient=True):
        model, x = _grown(kind, kwargs, shape, num_seeds)
        rows.append(_measure(name, num_seeds, model, x, repeats))
    table = Table(title=f"cost of 2^n coalitions, median of {repeats} rounds, one thread", title_justify="left")
    for column in ("host", "seeds", "one pass ms", "passes", "separate", "formula", "off"):
        table.add_column(column, justify="left" if column == "host" else "right")
    for row in rows:
        table.add_row(
            row.host,
            str(row.seeds),
            f"{row.one_pass_ms:.2f}",
            f"{row.shared_passes:.2f}",
            f"{row.separate_passes:.2f}",
            f"{row.formula_passes:.2f}",
            f"{100 * (row.shared_passes / row.formula_passes - 1):+.0f} %",
        )
    console.print(table)
    if out is not None:
        write_figures(out, {"torch": torch.__version__, "repeats": repeats, "rows": [asdict(row) for row in rows]})


def _grown(kind: str, kwargs: dict[str, Any], shape: tuple[int, ...], seeds: int) -> tuple[MorphogeneticModel, Tensor]:
    """A host with a fully blended seed in each of its first slots."""
    import torch

    from esper.kasmina import HostSpec, MorphogeneticModel, build_host
    from esper.kasmina.layers import generator_for
    from esper.kasmina.network import build_seed
    from esper.leyline import SeedStage, get_blend

    generator = generator_for(0)
    x = torch.randn(shape, generator=generator)
    model = MorphogeneticModel(build_host(HostSpec(kind=kind, kwargs=kwargs), generator), x)
    for slot in model.all_slots()[:seeds]:
        blueprint = BLUEPRINTS[kind]
        seed, gate = build_seed(slot.spec, kind, blueprint, "linear_fast", rng_seed=1, device=x.device, dtype=x.dtype)
        torch.nn.init.normal_(seed.gamma, generator=generator)
        slot.plant(seed, gate, blueprint, get_blend("linear_fast"))
        slot.stage, slot.alpha = SeedStage.HOLDING, 1.0
    return model.eval(), x


def _measure(host: str, num_seeds: int, model: MorphogeneticModel, x: Tensor, repeats: int) -> CoalitionCost:
    seeded = [slot.spec.slot_id for slot in model.all_slots() if slot.stage.is_blended]
    coalitions = [frozenset(c) for size in range(len(seeded) + 1) for c in itertools.combinations(seeded, size)]
    full = frozenset(seeded)
    segments, seeds = _parts(model, x)
    calls: dict[str, Callable[[], object]] = {
        "one": partial(model.forward_coalitions, x, [full]),
        "shared": partial(model.forward_coalitions, x, coalitions),
        "separate": lambda: [model.forward_coalitions(x, [coalition]) for coalition in coalitions],
    }
    calls.update({f"segment {index}": call for index, call in enumerate(segments)})
    calls.update({f"seed {index}": call for index, call in seeds.items()})
    cost = _medians(calls, repeats)
    seen = 0
    predicted = 0.0
    for index in range(len(segments)):
        predicted += 2**seen * cost[f"segment {index}"]
        if index in seeds:
            predicted += 2**seen * cost[f"seed {index}"]
            seen += 1
    return CoalitionCost(
        host=host,
        seeds=num_seeds,
        one_pass_ms=1000 * cost["one"],
        shared_passes=cost["shared"] / cost["one"],
        separate_passes=cost["separate"] / cost["one"],
        formula_passes=predicted / cost["one"],
    )


def _parts(model: MorphogeneticModel, x: Tensor) -> tuple[list[Callable[[], object]], dict[int, Callable[[], object]]]:
    """Each segment and each seed as a call on the features it meets in a full pass."""
    import torch

    at = {slot.spec.segment_idx: slot for slot in model.all_slots() if slot.stage.is_blended}
    segments: list[Callable[[], object]] = []
    seeds: dict[int, Callable[[], object]] = {}
    with torch.inference_mode():
        for index, segment in enumerate(model.host.segments):
            segments.append(partial(segment, x))
            x = segment(x)
            if index in at:
                seeds[index] = partial(at[index].blended, x)
                x = at[index].blended(x)
    return segments, seeds


def _medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    import torch

    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for turn in range(repeats + 3):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn >= 3:  # the first rounds warm caches up
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}
