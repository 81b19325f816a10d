"""`esper bench telemetry`: what the event log costs a run, by level."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from benchmarks.figures_file import check_out, write_figures
from esper.scripts.terminal import plain_console

if TYPE_CHECKING:
    from esper.simic.training.config import TrainingConfig

LEVELS = ("minimal", "normal", "debug")
BYTES_PER_STEP = {"minimal": 100, "normal": 2_500, "debug": 20_000}
"""Volume that each level may have."""
SHARE = 0.01
"""Share of the time of a step that telling it may cost."""


def bench_telemetry_command(
    task: Annotated[str, tyro.conf.arg(help="Hosts that are trained meanwhile.")] = "digits_mlp",
    rounds: Annotated[int, tyro.conf.arg(help="Rounds per level.")] = 3,
    envs: Annotated[int, tyro.conf.arg(help="Hosts side by side.")] = 8,
    epochs: Annotated[int, tyro.conf.arg(help="Epochs of an episode.")] = 20,
    out: Annotated[Path | None, tyro.conf.arg(help="File for the figures as JSON.")] = None,
) -> None:
    """Measure what the event log costs a training run.

    The same run is trained once per level, in this process, with one thread for the hosts. Counted is the CPU time of
    the training thread inside telemetry and that of the log's own thread, per env step, against the CPU time of a
    step; and the bytes that were written. Exit code 1 says that NORMAL is over one of its budgets.
    """
    from esper.simic.training.config import TrainingConfig

    check_out(out)
    config = TrainingConfig(
        task=task,
        rounds=rounds,
        envs=envs,
        episode_length=epochs,
        minibatches=min(4, envs),
        calibration_runs=0,
        worker_kind="inline",
    )
    console, figures = plain_console(), {}
    for level in LEVELS:
        with console.status(Text(f"{task} at level {level}")):
            figures[level] = measure(config, level)
    console.print(_table(task, figures))
    if out is not None:
        write_figures(out, figures)
        console.print(f"written: {out}", soft_wrap=True)
    if over := over_budget(figures["normal"]):
        console.print(f"NORMAL is over its budget: {', '.join(over)}", highlight=False)
        raise SystemExit(1)


def over_budget(figures: Mapping[str, Any]) -> list[str]:
    """What costs more than it may at level NORMAL, which is what runs use."""
    share, size = figures["share"], figures["bytes_per_step"]
    over = [f"{share:.2%} of a step's time, at most {SHARE:.0%}"] if share > SHARE else []
    limit = BYTES_PER_STEP["normal"]
    return [*over, f"{size:,.0f} bytes per step, at most {limit:,}"] if size > limit else over


def measure(config: TrainingConfig, level: str) -> dict[str, Any]:
    """Trains once at a level; times in microseconds per env step."""
    from esper.leyline import TelemetryLevel
    from esper.nissa import TelemetryHub
    from esper.simic.run.recorder import RunRecorder
    from esper.simic.telemetry.telemetry_config import TelemetryConfig
    from esper.simic.training.vectorized import open_trainer

    with TemporaryDirectory(prefix="esper-") as folder:
        telemetry = TelemetryConfig(level=TelemetryLevel[level.upper()], escalation_epochs=0)
        with TelemetryHub(Path(folder), run_id="bench") as hub:
            with open_trainer(config, partial(RunRecorder, hub, telemetry), sink=hub) as trainer:
                started = time.thread_time()
                trainer.run()
                run_s = time.thread_time() - started
            hub.flush(30.0)
            writer_ms, num_events = hub.health().writer_cpu_ms, hub.next_seq
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl"))
    recorder, steps = trainer.recorder, trainer.num_env_steps
    assert isinstance(recorder, RunRecorder)
    step_us = 1e6 * run_s / steps
    telling_us, writer_us = 1e6 * recorder.cpu_total_s / steps, 1e3 * writer_ms / steps
    return {
        "env_steps": steps,
        "events_per_step": num_events / steps,
        "bytes_per_step": size / steps,
        "step_us": step_us,
        "training_thread_us": telling_us,
        "writer_thread_us": writer_us,
        "share": (telling_us + writer_us) / step_us,
    }


def _table(task: str, figures: dict[str, Any]) -> Table:
    table = Table(title=f"{task}: per env step, against {SHARE:.0%} of its time", title_justify="left")
    for name in ("level", "events", "bytes (budget)", "step", "training thread", "log's thread", "share of the step"):
        table.add_column(name, justify="left" if name == "level" else "right")
    for level, row in figures.items():
        table.add_row(
            level,
            f"{row['events_per_step']:.1f}",
            f"{row['bytes_per_step']:,.0f} ({BYTES_PER_STEP[level]:,})",
            f"{row['step_us'] / 1e3:.1f} ms",
            f"{row['training_thread_us']:.0f} us",
            f"{row['writer_thread_us']:.0f} us",
            f"{row['share']:.2%}",
        )
    return table
