"""`esper evaluate`: the same hosts under different controllers, paired by seed, on the test split.

The only code that opens the test split.
"""

from __future__ import annotations

import csv
import hashlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from esper import __version__
from esper.leyline import record

if TYPE_CHECKING:
    from esper.runtime.datasets import Dataset
    from esper.runtime.tasks import TaskSpec
    from esper.scripts.host_run import PlannedOp

ARMS = ("wait_only", "schedule")
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
    kept: int
    cpu_s: float


def evaluate_command(
    task: Annotated[str, tyro.conf.arg(help="What to evaluate on; `esper tasks` lists them.")] = "digits_blind",
    seeds: Annotated[int, tyro.conf.arg(help="Paired run seeds per arm.")] = 5,
    blueprint: Annotated[
        str | None, tyro.conf.arg(help="Seed that the schedule plants; default: one that suits the host.")
    ] = None,
    data_dir: Annotated[Path | None, tyro.conf.arg(help="Where the data lies, if not in a usual place.")] = None,
    out: Annotated[Path | None, tyro.conf.arg(help="Folder for results; default: runs/evaluate-TASK.")] = None,
) -> None:
    """Compare a host left alone with the same host grown by a fixed schedule, on the test split.

    Both arms of a pair share initial weights, batches, optimizer and number of epochs. What counts is the committed
    network (host and kept seeds) after the last epoch, never the best epoch. Each finished run is written at once; a
    second start with the same --out goes on where the first one stopped.
    """
    import torch

    from esper.runtime.tasks import get_task_spec, load_task_data

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    torch.set_num_threads(1)
    spec = get_task_spec(task)
    data = load_task_data(spec, data_dir)
    folder = Path("runs") / f"evaluate-{spec.name}" if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    setup = _setup(spec, data, blueprint)
    wanted = [(arm, FIRST_SEED + number) for number in range(seeds) for arm in ARMS]
    results = _read(folder / "results.csv", setup)
    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(spec.name, total=len(wanted))
        for arm, run_seed in wanted:
            progress.update(bar, description=f"{arm} {run_seed}")
            if (arm, run_seed) not in results:
                result = _run(spec, data, arm, run_seed, blueprint, setup)
                _append(folder / "results.csv", result)
                results[arm, run_seed] = result
                if not console.is_terminal:
                    console.print(f"{arm} {run_seed}: {result.test_accuracy_pct:.2f} %, loss {result.test_loss:.4f}")
            progress.advance(bar)
    rows = [results[key] for key in wanted]
    console.print(_table(spec, rows))
    report = _report(spec, data, rows, seeds)
    (folder / "report.md").write_text(report, encoding="utf-8")
    console.print(f"Saved in {folder}: results.csv (one row per run), report.md")


def _setup(spec: TaskSpec, data: Dataset, blueprint: str | None) -> str:
    facts = f"{spec} {data.sha256} {blueprint} {__version__}"
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _run(spec: TaskSpec, data: Dataset, arm: str, run_seed: int, blueprint: str | None, setup: str) -> ArmResult:
    from esper.leyline import SeedStage
    from esper.scripts.host_run import build_model, default_schedule, fossils, run_host, validate

    start = time.process_time()
    plan: tuple[PlannedOp, ...] = ()
    if arm == "schedule":
        plan = default_schedule(build_model(spec, data, run_seed).layout, spec.horizon, blueprint)
    run = run_host(spec, data, plan, run_seed)
    committed = fossils(run.model)
    ((loss, accuracy),) = validate(spec, data, run.model, data.open_test(), [committed]).values()
    return ArmResult(
        setup=setup,
        arm=arm,
        run_seed=run_seed,
        test_accuracy_pct=accuracy,
        test_loss=loss,
        params=run.model.param_counts().committed,
        kept=sum(slot.stage is SeedStage.FOSSILIZED for slot in run.model.all_slots()),
        cpu_s=time.process_time() - start,
    )


def _read(path: Path, setup: str) -> dict[tuple[str, int], ArmResult]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    fields: Mapping[str, str] = ArmResult.__annotations__
    convert = {"str": str, "int": int, "float": float}
    found = [ArmResult(**{name: convert[kind](row[name]) for name, kind in fields.items()}) for row in rows]
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


def _differences(rows: Sequence[ArmResult], field: str) -> list[float]:
    """How much the schedule is above waiting, seed by seed."""
    by_arm = {arm: {row.run_seed: float(getattr(row, field)) for row in rows if row.arm == arm} for arm in ARMS}
    return [by_arm["schedule"][seed] - by_arm["wait_only"][seed] for seed in by_arm["wait_only"]]


def _spread(values: Sequence[float], digits: int) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def _cells(rows: Sequence[ArmResult]) -> list[list[str]]:
    lines = []
    for arm in ARMS:
        own = [row for row in rows if row.arm == arm]
        lines.append(
            [
                arm,
                _spread([row.test_accuracy_pct for row in own], 2),
                _spread([row.test_loss for row in own], 4),
                f"{statistics.fmean(row.params for row in own):,.0f}",
                _spread([row.kept for row in own], 1),
                f"{statistics.fmean(row.cpu_s for row in own):.1f}",
            ]
        )
    gains = _differences(rows, "test_accuracy_pct")
    losses = _differences(rows, "test_loss")
    lines.append(["schedule - wait_only", _spread(gains, 2), _spread(losses, 4), "", "", ""])
    return lines


HEADER = ("arm", "test accuracy (%)", "test loss (nats)", "parameters", "seeds kept", "CPU s")


def _table(spec: TaskSpec, rows: Sequence[ArmResult]) -> Table:
    num = len(rows) // len(ARMS)
    table = Table(title=f"{spec.name}, {spec.horizon} epochs, {num} paired seeds, mean ± sd", title_justify="left")
    for name in HEADER:
        table.add_column(name, justify="left" if name == "arm" else "right")
    for line in _cells(rows):
        table.add_row(*line)
    return table


def _report(spec: TaskSpec, data: Dataset, rows: Sequence[ArmResult], seeds: int) -> str:
    lines = [
        f"# {spec.name}: a fixed schedule against leaving the host alone",
        "",
        f"Command: `esper {' '.join(sys.argv[1:])}`. {data.description}, sha256 {data.sha256[:16]}. Test split of "
        f"{data.num_test} rows, committed network after epoch {spec.horizon}, run seeds {FIRST_SEED} to "
        f"{FIRST_SEED + seeds - 1}, mean ± standard deviation over seeds.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(line) + " |" for line in _cells(rows)),
        "",
        "Paired differences by seed, accuracy in points: "
        + ", ".join(f"{value:+.2f}" for value in _differences(rows, "test_accuracy_pct"))
        + "; loss in nats: "
        + ", ".join(f"{value:+.4f}" for value in _differences(rows, "test_loss"))
        + ".",
        "",
    ]
    return "\n".join(lines)
