"""`esper grow`: grow one host, beside the same host left alone, and show what it brought."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from esper.leyline import (
    ActionExecutionResult,
    EpisodeSeed,
    SeedEnded,
    SeedGerminated,
    SeedStage,
    SeedStageChanged,
    TelemetryEvent,
    TelemetryEventType,
)
from esper.leyline.files import write_atomic
from esper.scripts.terminal import plain_console, progress_bar
from esper.simic.training.config import PRETRAINED
from esper.tamiyo.controllers import DEFAULT_RULE

if TYPE_CHECKING:
    from esper.evidence.host_runs import HostRun, HostRunner, OnEpoch
    from esper.leyline import PolicyProtocol
    from esper.runtime.tasks import TaskSpec

DEFAULT_TASK = "digits_blind"
HISTORY_COLUMNS = (
    "epoch",
    "train_loss",
    "train_accuracy_pct",
    "val_loss",
    "val_accuracy_pct",
    "committed_loss",
    "committed_accuracy_pct",
    "total_params",
    "committed_params",
)


def grow_command(
    task: Annotated[
        str | None, tyro.conf.arg(help="A bundled task, as `esper tasks` lists them; default: digits_blind.")
    ] = None,
    model: Annotated[
        str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION", help="Your own model: a function that returns it.")
    ] = None,
    data: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FILE.py:FUNCTION",
            help="Your own data: a function that returns (train, validation), or these and test data.",
        ),
    ] = None,
    controller: Annotated[
        str | None,
        tyro.conf.arg(
            help="Who decides: a rule (schedule, largest, periodic, plateau, fragrow, heuristic, random), pretrained, "
            "or the folder of a trained run; default: schedule."
        ),
    ] = None,
    blueprint: Annotated[
        str | None, tyro.conf.arg(help="What rules plant, such as cnn.depthwise; default: one that suits.")
    ] = None,
    sites: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="Submodules after which something may grow, such as layer1.0 or 'layer*.0'; default: three."
        ),
    ] = (),
    list_sites: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="Show where your model can grow, and stop.")
    ] = False,
    seed: Annotated[int, tyro.conf.arg(help="Decides initial weights and the order of data.")] = 0,
    epochs: Annotated[
        int | None, tyro.conf.arg(help="Epochs to train; default: the task's own horizon, 20 for your own model.")
    ] = None,
    budget: Annotated[
        int | None, tyro.conf.arg(help="Most parameters the model and its seeds may have together; default: no limit.")
    ] = None,
    batch_size: Annotated[int, tyro.conf.arg(help="Rows of a batch of your own data, if it is not cut yet.")] = 64,
    lr: Annotated[float, tyro.conf.arg(help="Learning rate for your own model; it falls along a cosine.")] = 1e-3,
    receipts: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Train your own model again without each kept seed, to see what it really brought."),
    ] = False,
    resume: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="Go on with the unfinished run of your model in --out.")
    ] = False,
    backend: Annotated[
        str, tyro.conf.arg(help="What trains a bundled task: native (compiled), torch, or auto; own models: torch.")
    ] = "auto",
    data_dir: Annotated[
        Path | None, tyro.conf.arg(help="Where the data of a task lies, if not in a usual place.")
    ] = None,
    out: Annotated[
        Path | None, tyro.conf.arg(help="Folder for everything that is written; default: runs/grow-NAME.")
    ] = None,
) -> None:
    """Grow a network: a bundled one, or your own model on your own data.

    With --model and --data, your model is trained and grown: `esper grow --model mine.py:make_model --data
    mine.py:make_data --budget 20000`. The first function returns a torch.nn.Module, the second (train, validation),
    each as tensors (inputs, target), a Dataset or a DataLoader. Written are the grown network as a file that runs
    without Esper (network.pt2), its weights (model.safetensors), the history, a plot and an HTML report. `esper
    compare` says whether growing pays.

    With --task, a bundled network is grown beside the same network left alone. Both start from the same weights and
    see the same batches in the same order. By default one seed after the other is planted, trained behind the host,
    blended in over three epochs and kept if it helps. Accuracies are on the validation split; `esper evaluate` opens
    the test split.
    """
    if model is None:
        if data is not None or sites or list_sites or receipts or resume:
            raise ValueError(
                "--data, --sites, --list-sites, --receipts and --resume are for your own model; give --model"
            )
        _grow_task(
            task or DEFAULT_TASK, controller or DEFAULT_RULE, blueprint, seed, epochs, budget, backend, data_dir, out
        )
        return
    if task is not None or data_dir is not None:
        raise ValueError("--task and --data-dir are for bundled tasks; leave them out with --model")
    if data is None:
        raise ValueError("--model needs --data FILE.py:FUNCTION, a function that returns (train, validation)")
    from esper.scripts.own_model import OwnModel, grow_own_model, show_sites

    own = OwnModel(model=model, data=data, seed=seed)
    if list_sites:
        show_sites(own, sites, batch_size)
        return
    grow_own_model(
        own,
        controller=controller,
        blueprint=blueprint,
        sites=sites,
        epochs=epochs,
        budget=budget,
        batch_size=batch_size,
        lr=lr,
        receipts=receipts,
        resume=resume,
        out=out,
    )


def _grow_task(
    task: str,
    controller: str,
    blueprint: str | None,
    seed: int,
    epochs: int | None,
    budget: int | None,
    backend: str,
    data_dir: Path | None,
    out: Path | None,
) -> None:
    from esper.evidence.growth_plot import plot_growth
    from esper.evidence.host_runs import HostRunner, task_with
    from esper.kasmina import export_model, save_model
    from esper.runtime.tasks import load_task_data
    from esper.simic.training.backend import choose_backend
    from esper.tolaria.executor.available import backend_version

    spec = task_with(task, epochs=epochs, budget=budget)
    folder = Path("runs") / f"grow-{spec.name}" if out is None else out
    data = load_task_data(spec, data_dir)
    seeds = [EpisodeSeed(env_id=0, episode=0, run_seed=seed)]
    console = plain_console()
    chosen = choose_backend(backend, spec, data)
    with HostRunner(spec, data, backend=chosen.name) as runner:
        deciding = _deciding(runner, spec, controller, blueprint, seed)
        folder.mkdir(parents=True, exist_ok=True)
        console.print(Text.assemble((spec.name, "bold"), f": {spec.description}"), soft_wrap=True)
        console.print(
            f"{data.description}; {len(data.train):,} rows to train on, {len(data.val):,} to validate on",
            soft_wrap=True,
        )
        why = "" if chosen.note is None else f" ({chosen.note})"
        console.print(f"trained by {backend_version(chosen.name)}{why}", soft_wrap=True)
        with progress_bar(console, width=10, facts=True) as progress:
            watch = _reporter(progress, console, "left alone", spec)
            (alone,) = runner.run(runner.controller("wait_only"), seeds, watch)
            watch = _reporter(progress, console, "growing", spec)
            (grown,) = runner.run(deciding, seeds, watch)

    console.print(_seed_table(grown))
    console.print(_result_table(spec, alone, grown))
    save_model(grown.model, folder / "model.safetensors", extra={"task": spec.name})
    export_model(grown.model, folder / "network.pt2")
    _write_history(folder / "history.csv", alone, grown)
    plotted = plot_growth(folder / "growth.png", spec, alone, grown)
    console.print(
        f"Saved in {folder}: network.pt2 (loads with torch alone), model.safetensors (can go on growing), history.csv"
        + (", growth.png" if plotted else "; no plot: pip install 'esper-growth[plots]'"),
        soft_wrap=True,
    )


def _deciding(runner: HostRunner, spec: TaskSpec, controller: str, blueprint: str | None, seed: int) -> PolicyProtocol:
    """A rule by its name, the policy of a trained run by its folder, or the one that comes with Esper."""
    params: dict[str, Any] = {} if blueprint is None else {"blueprint": blueprint}
    if controller == PRETRAINED or Path(controller).is_dir():
        from esper.growth.controllers import choose_controller

        setting, classes = runner.setting(seed), spec.num_classes
        chosen = choose_controller(
            controller,
            setting.layout,
            setting.lifecycle,
            epochs=spec.horizon,
            seed=seed,
            num_classes=classes,
            params=params,
        )
        return chosen.policy
    return runner.controller(controller, **params)


def _reporter(progress: Progress, console: Console, label: str, spec: TaskSpec) -> OnEpoch:
    from esper.evidence import limits

    bar = progress.add_task(label, total=spec.horizon, facts="")
    rollbacks: list[int] = []

    def report(state: ActionExecutionResult) -> None:
        (now,) = state.reports
        metric = f"{now.val_accuracy_pct:5.1f} %" if spec.metric == "accuracy" else f"loss {now.val_loss:.3f}"
        facts = f"val {metric}  {now.total_params:,} params"
        progress.update(bar, advance=1, facts=facts)
        for event in now.events:
            console.print(f"  epoch {now.epochs_done:3}  {_story(event)}", highlight=False)
        if now.rollback_reason is not None:
            console.print(f"  epoch {now.epochs_done:3}  rolled back: {now.rollback_reason.value}", style="yellow")
            rollbacks.append(now.epochs_done)
            if len(rollbacks) > limits.MAX_ROLLBACKS:
                raise ValueError(
                    f"{spec.name}: the host diverged again and again (epochs {rollbacks}); at most "
                    f"{limits.MAX_ROLLBACKS} rollbacks are allowed. Lower the learning rate of the task, or plant "
                    "something smaller"
                )
        if not console.is_terminal and now.epochs_done % max(1, spec.horizon // 8) == 0:
            console.print(f"{label}: epoch {now.epochs_done}/{spec.horizon}  {facts}", highlight=False)

    return report


def _story(event: TelemetryEvent) -> str:
    data = event.data
    if isinstance(data, SeedGerminated):
        return f"{data.slot_id}  planted {data.blueprint} ({data.params:,} parameters, {data.blend})"
    if isinstance(data, SeedEnded):
        kept = event.type is TelemetryEventType.SEED_FOSSILIZED
        worth = "" if data.contribution_pp is None else f", worth {data.contribution_pp:+.1f} points"
        return f"{data.slot_id}  {'kept' if kept else 'removed'} {data.blueprint}{worth}"
    assert isinstance(data, SeedStageChanged)
    words = {
        SeedStage.TRAINING: "trains behind the host",
        SeedStage.BLENDING: "starts to blend in",
        SeedStage.HOLDING: "is fully blended",
        SeedStage.EMBARGOED: "rests",
        SeedStage.DORMANT: "is free again",
    }
    return f"{data.slot_id}  {words[SeedStage[data.to_stage]]}"


def _seed_table(run: HostRun) -> Table:
    table = Table(title="What grew", title_justify="left")
    for name in ("slot", "seed", "parameters", "planted", "kept", "worth at the end"):
        table.add_column(name, justify="left" if name in ("slot", "seed") else "right")
    grown = {seed.slot: seed for seed in run.grown_seeds}
    for slot in run.reports[-1].slots:
        if slot.seed_id is None or slot.blueprint is None:
            continue
        worth = "not measured" if slot.contribution_pp is None else f"{slot.contribution_pp:+.1f} points"
        seed = grown[slot.slot_id]
        kept_at = "not kept" if seed.kept is None else f"epoch {seed.kept + 1}"
        table.add_row(slot.slot_id, slot.blueprint, f"{slot.params:,}", f"epoch {seed.planted + 1}", kept_at, worth)
    return table


def _result_table(spec: TaskSpec, alone: HostRun, grown: HostRun) -> Table:
    table = Table(title=f"What it brought after {spec.horizon} epochs (validation)", title_justify="left")
    for name in ("network", "accuracy", "loss", "parameters"):
        table.add_column(name, justify="left" if name == "network" else "right")
    rows = []
    for name, run in (("left alone", alone), ("grown", grown)):
        loss, accuracy = run.committed_scores
        rows.append((accuracy, loss, run.reports[-1].committed_params))
        table.add_row(name, f"{accuracy:.1f} %", f"{loss:.3f}", f"{rows[-1][2]:,}")
    accuracy, loss, params = (after - before for before, after in zip(*rows, strict=True))
    table.add_section()
    table.add_row("difference", f"{accuracy:+.1f}", f"{loss:+.3f}", f"{params:+,}")
    return table


def _write_history(path: Path, alone: HostRun, grown: HostRun) -> None:
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["run", *HISTORY_COLUMNS])
    for label, run in (("alone", alone), ("grown", grown)):
        writer.writerows([label, *(getattr(report, name) for name in HISTORY_COLUMNS)] for report in run.reports)
    write_atomic(path, text.getvalue().encode())
