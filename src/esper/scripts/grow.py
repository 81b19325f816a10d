"""`esper grow`: grow one host by a fixed schedule, beside the same host left alone, and show what it brought."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from esper.leyline import SeedStage, SlotTransition

if TYPE_CHECKING:
    from esper.runtime.tasks import TaskSpec
    from esper.scripts.host_run import EpochRow, HostRun


def grow_command(
    task: Annotated[str, tyro.conf.arg(help="What to train on; `esper tasks` lists them.")] = "digits_blind",
    blueprint: Annotated[
        str | None, tyro.conf.arg(help="Seed to plant, such as cnn.conv; default: one that suits the host.")
    ] = None,
    seed: Annotated[int, tyro.conf.arg(help="Decides initial weights and the order of data.")] = 0,
    epochs: Annotated[int | None, tyro.conf.arg(help="Epochs to train; default: the task's own horizon.")] = None,
    budget: Annotated[
        int | None, tyro.conf.arg(help="Most parameters the host and its seeds may have together.")
    ] = None,
    data_dir: Annotated[Path | None, tyro.conf.arg(help="Where the data lies, if not in a usual place.")] = None,
    out: Annotated[
        Path | None, tyro.conf.arg(help="Folder for the grown network, history and plot; default: runs/grow-TASK.")
    ] = None,
) -> None:
    """Grow a network by a fixed schedule and compare it with the same network left alone.

    Both runs start from the same weights and see the same batches in the same order. One seed after the other is
    planted, trained behind the host, blended in over three epochs and kept if it helps. The result is a table of
    what grew and what it brought, the grown network as a file that loads without Esper (network.pt2), one that can
    go on growing (model.safetensors), the history, and a plot.

    Accuracies are on the validation split; `esper evaluate` opens the test split.
    """
    import torch

    from esper.kasmina import export_model, save_model
    from esper.runtime.tasks import get_task_spec, load_task_data, override
    from esper.scripts.host_run import build_model, default_schedule, run_host
    from esper.scripts.plots import plot_growth

    torch.set_num_threads(1)
    spec = get_task_spec(task)
    if epochs is not None:
        spec = override(spec, horizon=epochs)
    if budget is not None:
        spec = override(spec, lifecycle=replace(spec.lifecycle, param_budget=budget))
    folder = Path("runs") / f"grow-{spec.name}" if out is None else out
    data = load_task_data(spec, data_dir)
    plan = default_schedule(build_model(spec, data, seed).layout, spec.horizon, blueprint)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(f"[bold]{spec.name}[/bold]: {spec.description}")
    console.print(f"{data.description}; {len(data.train):,} to train on, {len(data.val):,} to validate on")

    with _progress(console) as progress:
        alone = run_host(spec, data, (), seed, _reporter(progress, console, "left alone", spec))
        grown = run_host(spec, data, plan, seed, _reporter(progress, console, "growing", spec))

    console.print(_seed_table(grown))
    console.print(_result_table(spec, alone, grown))
    save_model(grown.model, folder / "model.safetensors", optimizer=grown.optimizer, extra={"task": spec.name})
    export_model(grown.model, folder / "network.pt2")
    _write_history(folder / "history.csv", alone, grown)
    plotted = plot_growth(folder / "growth.png", spec, alone, grown)
    for planned in grown.undone:
        op = planned.spec
        console.print(f"[yellow]never became legal:[/yellow] {op.op.name} {op.slot} planned for epoch {planned.epoch}")
    console.print(
        f"Saved in {folder}: network.pt2 (loads with torch alone), model.safetensors (can go on growing), history.csv"
        + (", growth.png" if plotted else "; no plot: pip install 'esper[plots]'")
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _reporter(
    progress: Progress, console: Console, label: str, spec: TaskSpec
) -> Callable[[EpochRow, Sequence[SlotTransition]], None]:
    bar = progress.add_task(label, total=spec.horizon, facts="")

    def report(row: EpochRow, moves: Sequence[SlotTransition]) -> None:
        facts = f"val {_metric(spec, row)}  {row.params:,} params"
        progress.update(bar, advance=1, facts=facts)
        for move in moves:
            console.print(_story(row.epoch, move), highlight=False)
        if not console.is_terminal and (row.epoch + 1) % max(1, spec.horizon // 8) == 0:
            console.print(f"{label}: epoch {row.epoch + 1}/{spec.horizon}  {facts}", highlight=False)

    return report


def _metric(spec: TaskSpec, row: EpochRow) -> str:
    return f"{row.val_accuracy_pct:5.1f} %" if spec.metric == "accuracy" else f"loss {row.val_loss:.3f}"


def _story(epoch: int, move: SlotTransition) -> str:
    worth = "" if move.contribution_pp is None else f", worth {move.contribution_pp:+.1f} points"
    what = {
        SeedStage.GERMINATED: f"planted {move.blueprint} ({move.params:,} parameters)",
        SeedStage.TRAINING: "trains behind the host",
        SeedStage.BLENDING: "starts to blend in",
        SeedStage.HOLDING: f"is fully blended{worth}",
        SeedStage.FOSSILIZED: f"is kept{worth}",
        SeedStage.PRUNED: "was removed",
        SeedStage.EMBARGOED: "rests",
        SeedStage.DORMANT: "is free again",
    }[move.target]
    return f"  epoch {epoch + 1:3}  {move.slot_id}  {what}"


def _seed_table(run: HostRun) -> Table:
    table = Table(title="What grew", title_justify="left")
    for name in ("slot", "seed", "parameters", "planted", "kept", "worth at the end"):
        table.add_column(
            name, justify="right" if name in ("parameters", "planted", "kept", "worth at the end") else "left"
        )
    born = {move.seed_id: epoch for epoch, move in run.moves if move.target is SeedStage.GERMINATED}
    kept = {move.seed_id: epoch for epoch, move in run.moves if move.target is SeedStage.FOSSILIZED}
    for report in run.model.reports():
        if report.seed_id is None or report.blueprint is None:
            continue
        worth = "not measured" if report.contribution_pp is None else f"{report.contribution_pp:+.1f} points"
        kept_at = f"epoch {kept[report.seed_id] + 1}" if report.seed_id in kept else "not kept"
        table.add_row(
            report.slot_id,
            report.blueprint,
            f"{report.params:,}",
            f"epoch {born[report.seed_id] + 1}",
            kept_at,
            worth,
        )
    return table


def _result_table(spec: TaskSpec, alone: HostRun, grown: HostRun) -> Table:
    table = Table(title=f"What it brought after {spec.horizon} epochs (validation)", title_justify="left")
    for name in ("network", "accuracy", "loss", "parameters"):
        table.add_column(name, justify="left" if name == "network" else "right")
    for name, run in (("left alone", alone), ("grown", grown)):
        row, params = run.history[-1], run.model.param_counts().committed
        table.add_row(name, f"{row.committed_accuracy_pct:.1f} %", f"{row.committed_loss:.3f}", f"{params:,}")
    before, after = alone.history[-1], grown.history[-1]
    table.add_section()
    table.add_row(
        "difference",
        f"{after.committed_accuracy_pct - before.committed_accuracy_pct:+.1f}",
        f"{after.committed_loss - before.committed_loss:+.3f}",
        f"{grown.model.param_counts().committed - alone.model.param_counts().committed:+,}",
    )
    return table


def _write_history(path: Path, alone: HostRun, grown: HostRun) -> None:
    from esper.scripts.host_run import EpochRow

    names = list(EpochRow.__dataclass_fields__)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *names])
        for label, run in (("alone", alone), ("grown", grown)):
            writer.writerows([label, *(getattr(row, name) for name in names)] for row in run.history)
