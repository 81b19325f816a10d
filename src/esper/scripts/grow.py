"""`esper grow`: grow one host, beside the same host left alone, and show what it brought."""

from __future__ import annotations

import csv
from dataclasses import dataclass
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
from esper.scripts.own_model import OwnModel, Place, TrainingFlags, show_sites
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowFlags:
    """The flags of `esper grow`; what is written below each is its help."""

    task: str | None = None
    """A bundled task, as `esper tasks` lists them; default: digits_blind."""
    model: Place = None
    """Your own model: a function that returns it."""
    controller: Annotated[
        str | None,
        tyro.conf.arg(
            help="Who decides: a rule (schedule, largest, periodic, plateau, fragrow, heuristic, random), pretrained, "
            "or the folder of a trained run; default: schedule."
        ),
    ] = None
    blueprint: str | None = None
    """What rules plant, such as cnn.depthwise; default: one that suits."""
    list_sites: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show where your model can grow, and stop."""
    receipts: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train your own model again without each kept seed, to see what it really brought."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the unfinished run of your model in --out."""
    backend: str = "auto"
    """What trains a bundled task: native (compiled), torch, or auto; own models: torch."""
    data_dir: Path | None = None
    """Where the data of a task lies, if not in a usual place."""
    out: Path | None = None
    """Folder for everything that is written; default: runs/grow-NAME."""

    def folder(self, name: str) -> Path:
        """Where results go."""
        return Path("runs") / f"grow-{name}" if self.out is None else self.out


def grow_command(
    flags: Annotated[GrowFlags, tyro.conf.arg(name="")], how: Annotated[TrainingFlags, tyro.conf.arg(name="")]
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
    if flags.model is None:
        if how.data is not None or how.sites or flags.list_sites or flags.receipts or flags.resume:
            raise ValueError(
                "--data, --sites, --list-sites, --receipts and --resume are for your own model; give --model"
            )
        _grow_task(flags, how)
        return
    if flags.task is not None or flags.data_dir is not None:
        raise ValueError("--task and --data-dir are for bundled tasks; leave them out with --model")
    if how.data is None:
        raise ValueError("--model needs --data FILE.py:FUNCTION, a function that returns (train, validation)")
    own = OwnModel(model=flags.model, data=how.data, seed=how.seed)
    if flags.list_sites:
        show_sites(own, how)
    else:
        _grow_own_model(own, flags, how)


def _grow_own_model(own: OwnModel, flags: GrowFlags, how: TrainingFlags) -> None:
    from esper.growth import grow

    model, (train, val, test) = own.make_model(), own.make_data()
    result = grow(
        model,
        train,
        val,
        test=test,
        controller=flags.controller,
        controller_params=None if flags.blueprint is None else {"blueprint": flags.blueprint},
        out=flags.folder(own.name),
        resume=flags.resume,
        receipts=flags.receipts,
        **how.arguments(),
    )
    plain_console(soft_wrap=True, highlight=False).print(result.table())


def _grow_task(flags: GrowFlags, how: TrainingFlags) -> None:
    from esper.evidence.host_runs import HostRunner, task_with
    from esper.runtime.tasks import load_task_data
    from esper.simic.training.backend import choose_backend
    from esper.tolaria.executor.available import backend_version

    spec = task_with(flags.task or DEFAULT_TASK, epochs=how.epochs, budget=how.budget)
    data = load_task_data(spec, flags.data_dir)
    seeds = [EpisodeSeed(env_id=0, episode=0, run_seed=how.seed)]
    console = plain_console()
    chosen = choose_backend(flags.backend, spec, data)
    with HostRunner(spec, data, backend=chosen.name) as runner:
        deciding = _deciding(runner, spec, flags.controller or DEFAULT_RULE, flags.blueprint, how.seed)
        flags.folder(spec.name).mkdir(parents=True, exist_ok=True)
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
    console.print(_save(flags.folder(spec.name), spec, alone, grown), soft_wrap=True)


def _save(folder: Path, spec: TaskSpec, alone: HostRun, grown: HostRun) -> str:
    """Writes the grown network, the history and a plot; says what there is."""
    from esper.evidence.growth_plot import plot_growth
    from esper.kasmina import export_model, save_model

    save_model(grown.model, folder / "model.safetensors", extra={"task": spec.name})
    export_model(grown.model, folder / "network.pt2")
    _write_history(folder / "history.csv", alone, grown)
    plotted = plot_growth(folder / "growth.png", spec, alone, grown)
    return (
        f"Saved in {folder}: network.pt2 (loads with torch alone), model.safetensors (can go on growing), history.csv"
        + (", growth.png" if plotted else "; no plot: pip install 'esper-growth[plots]'")
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
