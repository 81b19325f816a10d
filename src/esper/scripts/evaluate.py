"""`esper evaluate`: the same hosts under different controllers, paired by seed, on the test split.

The only code that opens the test split.
"""

from __future__ import annotations

import csv
import hashlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from esper import __version__
from esper.leyline import EpisodeSeed, SeedStage, record

if TYPE_CHECKING:
    from esper.runtime.datasets import Dataset, Split
    from esper.runtime.tasks import TaskSpec
    from esper.scripts.host_runs import HostRun, HostRunner

BASELINE = "wait_only"
# Run seeds of evaluations start here; training and tuning of controllers use lower ones.
FIRST_SEED = 20_000


@record
class ArmResult:
    """One run of one arm: the committed network after the last epoch, on the test split."""

    setup: str
    """Short hash of task, data, schedule and version: rows of different setups are never mixed."""
    arm: str
    run_seed: int
    test_accuracy_pct: float
    test_loss: float
    params: int
    planted: int
    kept: int
    rollbacks: int
    wall_s: float
    """Wall-clock of the run; hosts trained side by side in one worker share it."""


def evaluate_command(
    task: Annotated[str, tyro.conf.arg(help="What to evaluate on; `esper tasks` lists them.")] = "digits_blind",
    arms: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="Controllers to compare with wait_only: schedule, periodic, plateau, fragrow, heuristic, random."
        ),
    ] = ("schedule",),
    seeds: Annotated[int, tyro.conf.arg(help="Paired run seeds per arm.")] = 5,
    blueprint: Annotated[
        str | None, tyro.conf.arg(help="Seed that the schedule plants; default: one that suits the host.")
    ] = None,
    budget: Annotated[
        int | None, tyro.conf.arg(help="Most parameters a host and its seeds may have together, in every arm.")
    ] = None,
    workers: Annotated[int, tyro.conf.arg(help="Processes; the results do not depend on it.")] = 1,
    data_dir: Annotated[Path | None, tyro.conf.arg(help="Where the data lies, if not in a usual place.")] = None,
    out: Annotated[Path | None, tyro.conf.arg(help="Folder for results; default: runs/evaluate-TASK.")] = None,
) -> None:
    """Compare controllers on the same hosts, on the test split.

    All arms of a pair share initial weights, batches, optimizer, number of epochs and parameter budget; `wait_only`,
    which leaves the host alone, is always among them. What counts is the committed network (host and kept seeds)
    after the last epoch, never the best epoch. Finished runs are written at once; a second start with the same --out
    goes on where the first one stopped.
    """
    from esper.runtime.tasks import get_task_spec, load_task_data
    from esper.scripts.host_runs import HostRunner, with_overrides

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    names = (BASELINE, *(arm for arm in dict.fromkeys(arms) if arm != BASELINE))
    spec = with_overrides(get_task_spec(task), epochs=None, budget=budget)
    data = load_task_data(spec, data_dir)
    folder = Path("runs") / f"evaluate-{spec.name}" if out is None else out
    setup = _setup(spec, data, blueprint)
    results = _read(folder / "results.csv", setup)
    console = Console()
    with HostRunner(spec, data, workers=workers) as runner:
        for name in names:
            runner.controller(name, blueprint)  # a wrong name or blueprint shows before anything runs
        folder.mkdir(parents=True, exist_ok=True)
        test = data.open_test()
        with _progress(console) as progress:
            bar = progress.add_task(spec.name, total=len(names) * seeds)
            for arm in names:
                for chunk in _chunks(seeds, 2 * workers):
                    progress.update(bar, description=arm)
                    missing = [seed for seed in chunk if (arm, seed.run_seed) not in results]
                    for result in _run(runner, spec, data, test, arm, missing, blueprint, setup):
                        _append(folder / "results.csv", result)
                        results[arm, result.run_seed] = result
                        if not console.is_terminal:
                            console.print(_line(result), highlight=False)
                    progress.advance(bar, len(chunk))
    rows = [results[arm, FIRST_SEED + number] for arm in names for number in range(seeds)]
    console.print(_table(spec, names, rows))
    (folder / "report.md").write_text(_report(spec, data, names, rows), encoding="utf-8")
    console.print(f"Saved in {folder}: results.csv (one row per run), report.md", soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _chunks(seeds: int, size: int) -> Iterator[list[EpisodeSeed]]:
    """Seeds in groups that run side by side. A seed keeps its env id, so that its host is the same in every arm."""
    every = [EpisodeSeed(env_id=n, episode=0, run_seed=FIRST_SEED + n) for n in range(seeds)]
    for start in range(0, seeds, size):
        yield every[start : start + size]


def _setup(spec: TaskSpec, data: Dataset, blueprint: str | None) -> str:
    facts = f"{spec} {data.sha256} {blueprint} {__version__}"
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _run(
    runner: HostRunner,
    spec: TaskSpec,
    data: Dataset,
    test: Split,
    arm: str,
    seeds: Sequence[EpisodeSeed],
    blueprint: str | None,
    setup: str,
) -> Iterator[ArmResult]:
    from esper.scripts.host_runs import score_committed

    if not seeds:
        return
    start = time.perf_counter()
    runs = runner.run(runner.controller(arm, blueprint), seeds)
    wall_s = time.perf_counter() - start
    for run in runs:
        loss, accuracy = score_committed(spec, data, run.model, test)
        yield ArmResult(
            setup=setup,
            arm=arm,
            run_seed=run.run_seed,
            test_accuracy_pct=accuracy,
            test_loss=loss,
            params=run.reports[-1].committed_params,
            planted=_planted(run),
            kept=sum(slot.stage is SeedStage.FOSSILIZED for slot in run.reports[-1].slots),
            rollbacks=sum(report.rollback_reason is not None for report in run.reports),
            wall_s=wall_s,
        )


def _planted(run: HostRun) -> int:
    from esper.leyline import TelemetryEventType

    return sum(event.type is TelemetryEventType.SEED_GERMINATED for event in run.events)


def _read(path: Path, setup: str) -> dict[tuple[str, int], ArmResult]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    fields: Mapping[str, str] = ArmResult.__annotations__
    convert = {"str": str, "int": int, "float": float}
    try:
        found = [ArmResult(**{name: convert[kind](row[name]) for name, kind in fields.items()}) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a results file of this version ({error}); choose another --out") from error
    if any(result.setup != setup for result in found):
        raise ValueError(f"{path} holds results of another task, schedule or version; choose another --out")
    return {(result.arm, result.run_seed): result for result in found}


def _append(path: Path, result: ArmResult) -> None:
    names = list(ArmResult.__annotations__)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(names)
        writer.writerow([getattr(result, name) for name in names])


def _line(result: ArmResult) -> str:
    return (
        f"{result.arm} {result.run_seed}: {result.test_accuracy_pct:.2f} %, loss {result.test_loss:.4f}, "
        f"{result.params:,} parameters"
    )


# ---- tables

HEADER = ("arm", "accuracy (%)", "loss (nats)", "parameters", "planted", "kept", "accuracy - wait", "loss - wait")


def _spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.{digits}f}{deviation}"


def differences(rows: Sequence[ArmResult], arm: str, field: str) -> list[float]:
    """How much an arm is above waiting, seed by seed."""
    values = {(row.arm, row.run_seed): float(getattr(row, field)) for row in rows}
    return [values[arm, seed] - value for (name, seed), value in values.items() if name == BASELINE]


def _cells(names: Sequence[str], rows: Sequence[ArmResult]) -> Iterator[list[str]]:
    for arm in names:
        own = [row for row in rows if row.arm == arm]
        gain, drop = (
            ("", "")
            if arm == BASELINE
            else (
                _spread(differences(rows, arm, "test_accuracy_pct"), 2, "+"),
                _spread(differences(rows, arm, "test_loss"), 3, "+"),
            )
        )
        yield [
            arm,
            _spread([row.test_accuracy_pct for row in own], 2),
            _spread([row.test_loss for row in own], 3),
            f"{statistics.fmean(row.params for row in own):,.0f}",
            f"{statistics.fmean(row.planted for row in own):.1f}",
            f"{statistics.fmean(row.kept for row in own):.1f}",
            gain,
            drop,
        ]


def _table(spec: TaskSpec, names: Sequence[str], rows: Sequence[ArmResult]) -> Table:
    num = len(rows) // len(names)
    title = f"{spec.name}: test split, {spec.horizon} epochs, {num} paired seeds, mean ± sd"
    table = Table(title=title, title_justify="left")
    shown = [position for position, name in enumerate(HEADER) if name not in ("planted", "loss - wait")]
    for position in shown:
        table.add_column(HEADER[position], justify="left" if position == 0 else "right")
    for line in _cells(names, rows):
        table.add_row(*(line[position] for position in shown))
    return table


def _report(spec: TaskSpec, data: Dataset, names: Sequence[str], rows: Sequence[ArmResult]) -> str:
    seeds = [row.run_seed for row in rows if row.arm == BASELINE]
    lines = [
        f"# {spec.name}",
        "",
        f"Command: `esper {' '.join(sys.argv[1:])}`",
        "",
        f"{data.description}, sha256 {data.sha256[:16]}. Test split of {data.num_test} rows; committed network after "
        f"epoch {spec.horizon}; run seeds {seeds[0]} to {seeds[-1]}; mean ± standard deviation over seeds.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" + "|---:" * (len(HEADER) - 1) + "|",
        *("| " + " | ".join(line) + " |" for line in _cells(names, rows)),
        "",
    ]
    for arm in names[1:]:
        gains = ", ".join(f"{value:+.2f}" for value in differences(rows, arm, "test_accuracy_pct"))
        drops = ", ".join(f"{value:+.4f}" for value in differences(rows, arm, "test_loss"))
        lines.append(f"{arm} - {BASELINE} by seed: accuracy in points {gains}; loss in nats {drops}.")
    failed = sum(row.rollbacks for row in rows)
    lines += ["", f"Rollbacks in all runs: {failed}.", ""]
    return "\n".join(lines)
