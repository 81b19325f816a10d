"""`esper bench grow`: what growing costs a model of one's own, beside the same model in a plain loop.

All variants of a model take the same step in turns, so a busy machine disturbs them alike; times are CPU times of this
process, and figures are medians of ratios within a turn.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from benchmarks.figures_file import check_out, write_figures
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from torch import nn

    from esper.growth.network import AttachedNetwork

WARM_UP = 3
TRAINING, BLENDED = "three training seeds", "three blended seeds"
LIMITS = {"empty slots": 1.03, TRAINING: 1.25, "leave-one-out, shared": 2.7}
"""What is promised: CPU time of a step over that of the plain model, and of leave-one-out over one validation pass."""
MOST_OVER_BLENDED = 1.1
"""Where the same seeds, blended in as layers, cost more than that: training them may cost this many times as much."""
AGAIN = "plain again"
"""The plain model a second time: how far from 1 a ratio is by chance."""


def bench_grow_command(
    repeats: Annotated[int, tyro.conf.arg(help="Timed turns; medians are reported.")] = 60,
    out: Annotated[Path | None, tyro.conf.arg(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Time a training step with slots and seeds beside the plain model, and leave-one-out beside one pass.

    Two ResNets on images and a GPT-2 on tokens (extra `hf`), three sites each, one thread. A step is forward, backward,
    clipping and AdamW. The share of multiply-accumulates says what seeds of that size would cost inside any model: in
    ResNet-8 three convolutions are more than half of what the model itself has. Exit code 1 says that something costs
    more than is promised.
    """
    import torch

    if repeats < 2:
        raise ValueError(f"--repeats must be at least 2, got {repeats}")
    check_out(out)
    torch.set_num_threads(1)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    console = plain_console()
    for name, (build, batch) in _models().items():
        figures[name] = _measure(build(), batch, repeats)
    table = Table(title=f"cost of growing, median of {repeats} turns, one thread", title_justify="left")
    for column in ("model", "what", "cost", "quartiles", "by MACs", "at most"):
        table.add_column(column, justify="left" if column in ("model", "what") else "right")
    for name, rows in figures.items():
        for what, spread in rows.items():
            limit = "" if (most := limit_of(what, rows)) is None else f"{most:.2f}"
            macs = f"{spread['macs']:.2f}" if "macs" in spread else ""
            quartiles = f"{spread['low']:.2f}..{spread['high']:.2f}"
            table.add_row(name, what, f"{spread['median']:.3f}", quartiles, macs, limit)
    console.print(table)
    console.print("Steps in plain steps, leave-one-out in validation passes of the grown model.")
    if out is not None:
        write_figures(out, {"torch": torch.__version__, "repeats": repeats, "figures": figures})
    if over := over_limits(figures):
        console.print(f"more than is promised: {', '.join(over)}", highlight=False)
        raise SystemExit(1)


def over_limits(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """What costs more than is promised."""
    return [
        f"{name}, {what}: {spread['median']:.3f}"
        for name, rows in figures.items()
        for what, spread in rows.items()
        if (most := limit_of(what, rows)) is not None and spread["median"] > most
    ]


def limit_of(what: str, rows: Mapping[str, Mapping[str, float]]) -> float | None:
    """What a model's figure may be at most; None if nothing is promised of it."""
    most = LIMITS.get(what)
    if what == TRAINING and BLENDED in rows and rows[BLENDED]["median"] > LIMITS[TRAINING]:
        most = MOST_OVER_BLENDED * rows[BLENDED]["median"]
    return most


def _models() -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    """Models that users have, with a batch for each."""
    import torch

    from examples.cifar_resnet import ResNet

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 32, 32, generator=generator), torch.randint(10, (64,), generator=generator)
    found: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "ResNet-20": (partial(ResNet, 16, 3), images),
        "ResNet-8": (partial(ResNet, 16, 1), images),
    }
    try:
        from examples.text_gpt2 import CONTEXT, make_model
    except ImportError:
        plain_console().print("GPT-2 is left out: pip install 'esper-growth[hf]'")
    else:
        tokens = torch.randint(256, (32, CONTEXT), generator=generator)
        found["GPT-2"] = make_model, {"input_ids": tokens, "labels": tokens}
    return found


def _measure(model: nn.Module, batch: Any, repeats: int) -> dict[str, dict[str, float]]:
    import torch

    from esper.growth.coalitions import CoalitionPasses
    from esper.growth.sites import call_model

    steps: dict[str, Callable[[], object]] = {}
    for what in ("plain", AGAIN):
        plain = copy.deepcopy(model)
        steps[what] = partial(_step, plain, _optimizer(plain), batch)
    for what in ("empty slots", TRAINING, BLENDED):
        grown = copy.deepcopy(model)
        optimizer = _optimizer(grown)
        network = _attach(grown, optimizer, batch, what)
        steps[what] = partial(_step, grown, optimizer, batch)
    found = {what: spread for what, spread in _ratios(steps, "plain", repeats).items() if what != "plain"}
    layout = network.layout
    seeds = sum(layout.card(slot.spec.slot_id, slot.blueprint or "").macs for slot in network.all_slots())
    for what in (TRAINING, BLENDED):
        found[what]["macs"] = 1.0 + seeds / layout.host_macs

    grown.eval()
    passes, full = CoalitionPasses(network), frozenset(network.layout.slot_ids)
    coalitions = [full, *(full - {slot_id} for slot_id in network.layout.slot_ids)]
    run = partial(call_model, grown, batch)
    looks: dict[str, Callable[[], object]] = {
        "one pass": partial(passes.separate, run, [full]),
        "leave-one-out, shared": partial(passes.outputs, run, coalitions),
        "leave-one-out, separate": partial(passes.separate, run, coalitions),
    }
    with torch.no_grad():
        found |= {what: spread for what, spread in _ratios(looks, "one pass", repeats).items() if what != "one pass"}
    if passes.fell_back is not None:
        raise RuntimeError(f"nothing was shared: {passes.fell_back}")
    return found


def _optimizer(model: nn.Module) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _attach(model: nn.Module, optimizer: Any, batch: Any, what: str) -> AttachedNetwork:
    """Slots at three sites, with seeds in the wanted stage."""
    import torch

    from esper.evidence.host_runs import DEFAULT_BLUEPRINT
    from esper.growth.network import AttachedNetwork
    from esper.growth.optimizers import UserOptimizers
    from esper.growth.sites import call_model, find_sites
    from esper.kasmina import begin_epoch
    from esper.leyline import DEFAULT_LIFECYCLE, SeedStage

    network = AttachedNetwork(model, batch, find_sites(model, batch), call_model, DEFAULT_LIFECYCLE)
    network.bind(UserOptimizers(network, [optimizer]))
    if what == "empty slots":
        return network
    for slot in network.all_slots():
        key = DEFAULT_BLUEPRINT[slot.topology]
        network.germinate(slot.spec.slot_id, key, "linear_fast", rng_seed=1)
    begin_epoch(network)
    if what == BLENDED:
        for slot in network.all_slots():
            slot.stage, slot.alpha = SeedStage.HOLDING, 1.0
            assert slot.seed is not None
            torch.nn.init.normal_(slot.seed.gamma, std=0.1, generator=torch.Generator().manual_seed(1))
    return network


def _step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    import torch.nn.functional as F
    from torch.nn.utils import clip_grad_norm_

    from esper.growth.sites import call_model

    optimizer.zero_grad()
    output = call_model(model, batch)
    loss = output.loss if isinstance(batch, dict) else F.cross_entropy(output, batch[1])
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _ratios(calls: Mapping[str, Callable[[], object]], base: str, repeats: int) -> dict[str, dict[str, float]]:
    """Median and quartiles of each call's time over that of `base` in the same turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + WARM_UP):
        names = list(calls) if turn % 2 else list(calls)[::-1]
        for name in names:
            start = time.process_time()
            calls[name]()
            if turn >= WARM_UP:
                times[name].append(time.process_time() - start)
    spreads = {}
    for name, values in times.items():
        ratios = [value / plain for value, plain in zip(values, times[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        spreads[name] = {"median": middle, "low": low, "high": high}
    return spreads
