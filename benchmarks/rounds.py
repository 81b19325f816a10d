"""`esper bench rounds`: whole rounds of training a controller, with both backends in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.figures_file import check_out, write_figures
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from esper.simic.training.config import TrainingConfig

BACKENDS = ("torch", "native")
LAST = 5
"""Rounds at the end of a curve whose mean says what was learned."""


def bench_rounds_command(
    *,
    preset: str = "digits_blind",
    rounds: int = 3,
    seeds: int = 1,
    envs: int | None = None,
    episode_length: int | None = None,
    plot: Path | None = None,
    out: Path | None = None,
) -> None:
    """Measure what a round of `esper train ppo` costs with each backend, from the first op to the update.

    Both runs of a seed go on in this process, round by round in turns, with a log at the usual level. The first round
    of each is not timed: it loads what start-up loads. Times are CPU time. Figures are written after every seed.

    Args:
        preset: What to train.
        rounds: Rounds that are timed.
        seeds: Pairs of runs, with seeds 0, 1, ...
        envs: Hosts side by side; the preset's number if not given.
        episode_length: Epochs of an episode; the preset's number if not given.
        plot: File for a picture of the learning curves.
        out: File to write all figures to, as JSON.
    """
    from esper.simic.training.config import preset as config_of
    from esper.simic.training.config import with_overrides

    check_out(out)
    console = plain_console()
    changes = {"envs": envs, "episode_length": episode_length}
    config = with_overrides(config_of(preset), {name: value for name, value in changes.items() if value is not None})
    config = replace(config, rounds=rounds + 1, worker_kind="inline", calibration_runs=0, console="off")
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        runs.append(measure_rounds(replace(config, seed=seed), console.print))
        figures = summarise(config, runs)
        if out is not None:
            write_figures(out, figures)
    table = Table(title=f"{preset}: CPU seconds per round of {config.envs} hosts", title_justify="left")
    for column in ("backend", "median", "quartiles", "committed accuracy of the last round"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for name in BACKENDS:
        cost, accuracy = figures[f"{name}_s"], [curve[-1] for curve in figures["accuracy_pct"][name]]
        reached = ", ".join(f"{value:.1f} %" for value in accuracy)
        table.add_row(name, f"{cost['median']:.3g}", f"{cost['low']:.3g} .. {cost['high']:.3g}", reached)
    ratio = figures["torch_over_native"]
    table.add_row("torch / native", f"{ratio['median']:.3g}", f"{ratio['low']:.3g} .. {ratio['high']:.3g}", "")
    console.print(table)
    if (apart := figures["native_minus_torch_pp"]) is not None:
        console.print(
            f"native minus torch, last {LAST} rounds: {apart['mean']:+.2f} points, 95 % interval {apart['low']:+.2f} "
            f"to {apart['high']:+.2f}, {seeds} pairs"
        )
    if plot is not None:
        draw_curves(figures["accuracy_pct"], plot)
        console.print(f"drawn: {plot}", soft_wrap=True)
    if out is not None:
        console.print(f"written: {out}", soft_wrap=True)


def measure_rounds(config: TrainingConfig, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """(seconds, accuracies) by backend: rounds of two runs that differ in nothing else, in turns."""
    from esper.simic.run.session import start_new
    from esper.simic.training.vectorized import open_session

    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="esper-bench-")))
        trainers = {
            name: stack.enter_context(open_session(start_new(replace(config, backend=name), folder, name))).trainer
            for name in BACKENDS
        }
        for index in range(config.rounds):
            for name, trainer in trainers.items():
                started = time.process_time()
                trainer.run_round()
                seconds[name].append(time.process_time() - started)
                reached = trainer.history[-1].committed_accuracy_pct
                cost = f"{seconds[name][-1]:.1f} CPU s, committed {reached:.1f} %"
                say(f"seed {config.seed} round {index + 1}/{config.rounds} {name}: {cost}")
        curves = {name: [row.committed_accuracy_pct for row in trainer.history] for name, trainer in trainers.items()}
    return {"seconds": {name: values[1:] for name, values in seconds.items()}, "accuracy_pct": curves}


def summarise(config: TrainingConfig, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all seeds say together."""
    from benchmarks.engine_figures import spread

    seconds = {name: [s for run in runs for s in run["seconds"][name]] for name in BACKENDS}
    return {
        "task": config.task,
        "envs": config.envs,
        "episode_length": config.episode_length,
        "seeds": len(runs),
        **{f"{name}_s": spread(values) for name, values in seconds.items()},
        "torch_over_native": spread([a / b for a, b in zip(seconds["torch"], seconds["native"], strict=True)]),
        "accuracy_pct": {name: [run["accuracy_pct"][name] for run in runs] for name in BACKENDS},
        "native_minus_torch_pp": difference([_end(run, "native") - _end(run, "torch") for run in runs]),
    }


def _end(run: Mapping[str, Any], name: str) -> float:
    return statistics.fmean(run["accuracy_pct"][name][-LAST:])


def difference(pairs: Sequence[float]) -> dict[str, float] | None:
    """Mean of paired differences with Student's interval; None for a single pair."""
    if len(pairs) < 2:
        return None
    from scipy.stats import t

    mean, half = statistics.fmean(pairs), t.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def draw_curves(curves: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """One line per run, one colour per backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for colour, (name, lines) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        for index, line in enumerate(lines):
            axes.plot(range(1, len(line) + 1), line, color=colour, alpha=0.8, label=name if index == 0 else None)
    axes.set(xlabel="round", ylabel="committed accuracy (%)", title="The same training with both backends")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
