"""`esper bench rounds`: whole rounds of training a controller, with both backends in turns."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.figures_file import check_out, write_figures
from esper.scripts.terminal import plain_console

BACKENDS = ("torch", "native")


def bench_rounds_command(
    *, preset: str = "digits_blind", rounds: int = 3, seed: int = 0, out: Path | None = None
) -> None:
    """Measure what a round of `esper train ppo` costs with each backend, from the first op to the update.

    Both runs have the same seed and go on in this process, round by round in turns, with a log at the usual level.
    The first round of each is not counted: it loads what start-up loads. Figures are CPU time.

    Args:
        preset: What to train.
        rounds: Rounds that count.
        seed: Of both runs.
        out: File to write all figures to, as JSON.
    """
    from esper.simic.training.config import preset as config_of

    check_out(out)
    console = plain_console()
    config = replace(config_of(preset), seed=seed, worker_kind="inline", calibration_runs=0, console="off")
    with console.status(f"{preset}: {rounds} rounds with each backend"):
        figures = measure_rounds(config, rounds)
    table = Table(title=f"{preset}: CPU seconds per round of {config.envs} hosts", title_justify="left")
    for column in ("backend", "median", "quartiles", "committed accuracy of the last round"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for name in BACKENDS:
        cost, accuracy = figures[f"{name}_s"], figures["accuracy_pct"][name][-1]
        table.add_row(name, f"{cost['median']:.3g}", f"{cost['low']:.3g} .. {cost['high']:.3g}", f"{accuracy:.1f} %")
    ratio = figures["torch_over_native"]
    table.add_row("torch / native", f"{ratio['median']:.3g}", f"{ratio['low']:.3g} .. {ratio['high']:.3g}", "")
    console.print(table)
    if out is not None:
        write_figures(out, figures)
        console.print(f"written: {out}", soft_wrap=True)


def measure_rounds(config: Any, rounds: int) -> dict[str, Any]:
    """Rounds of two runs that differ in their backend, in turns."""
    from tempfile import TemporaryDirectory

    from benchmarks.engine_figures import spread
    from esper.simic.run.session import start_new
    from esper.simic.training.vectorized import open_session

    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="esper-bench-")))
        trainers = {
            name: stack.enter_context(open_session(start_new(replace(config, backend=name), folder, name))).trainer
            for name in BACKENDS
        }
        for _ in range(rounds + 1):
            for name, trainer in trainers.items():
                started = time.process_time()
                trainer.run_round()
                seconds[name].append(time.process_time() - started)
        history = {name: [row.committed_accuracy_pct for row in trainer.history] for name, trainer in trainers.items()}
    kept = {name: values[1:] for name, values in seconds.items()}
    return {
        "preset_task": config.task,
        "seed": config.seed,
        **{f"{name}_s": spread(values) for name, values in kept.items()},
        "torch_over_native": spread([a / b for a, b in zip(kept["torch"], kept["native"], strict=True)]),
        "accuracy_pct": history,
    }
