"""`esper train`: train a controller, or run a fixed one, over many hosts side by side."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from esper.leyline import BatchSummary, ExitCode
from esper.leyline.rundir import DEFAULT_GROUP
from esper.scripts.train_flags import NO_FLAGS, ConfigFlags, given, resolve
from esper.simic.training.config import PRESETS

if TYPE_CHECKING:
    from rich.console import Console

    from esper.karn.live import LiveConsole, RunProgress
    from esper.simic.run.session import RunStart, SessionEnd
    from esper.simic.run.stop_signals import StopSignals
    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.dual_ab import PairedRounds


RUNS_DIR = Path("runs")


def _unset(words: str, metavar: str, **more: Any) -> Any:
    """How a flag that says nothing unless it is given shows in the help."""
    return tyro.conf.arg(help=words, metavar=metavar, help_behavior_hint="", **more)


_CONTROLLERS = "ppo (the default) learns; wait_only, random, periodic, plateau, fragrow and heuristic follow a rule."
_PRESETS = f"Named starting point: {', '.join(PRESETS)}."


def train_command(
    controller: Annotated[str | None, tyro.conf.Positional, _unset(_CONTROLLERS, "[CONTROLLER]")] = None,
    preset: Annotated[str | None, _unset(_PRESETS, "NAME")] = None,
    config_json: Annotated[
        Path | None, _unset("File with fields of the configuration; flags override it.", "FILE")
    ] = None,
    resume: Annotated[
        Path | None, _unset("Run directory to go on with, from its newest valid checkpoint.", "RUN")
    ] = None,
    dual_ab: Annotated[
        tuple[str, str] | None,
        _unset("Compare two configurations round by round: reward modes, presets or JSON files.", "A B"),
    ] = None,
    telemetry_dir: Annotated[
        Path | None,
        _unset(f"Folder that gets one directory per run; default: {RUNS_DIR}.", "FOLDER", aliases=("--runs",)),
    ] = None,
    run_id: Annotated[str | None, _unset("Name of the run; default: date, time and random digits.", "NAME")] = None,
    group: Annotated[
        str | None,
        _unset(f"Cohort of a new run: `esper query` compares by it; default: {DEFAULT_GROUP}.", "NAME"),
    ] = None,
    data_dir: Annotated[Path | None, _unset("Where the data lies, if not in a usual place.", "FOLDER")] = None,
    config: ConfigFlags = NO_FLAGS,
) -> None:
    """Train a controller over many hosts side by side.

    A round trains one fresh host in every env for an episode, one decision of the controller per epoch; then the
    policy learns from all of them. Every run gets a directory with its configuration, its event log and its
    checkpoints. Ctrl-C stops after the round and saves; a second one stops at once; --resume goes on to the same bits
    either way.

    Accuracies shown are on the validation split, of a policy that explores. `esper evaluate` judges the frozen policy
    on the test split.
    """
    from esper.simic.run.session import start_again, start_new

    changes = given(config) | ({} if controller is None else {"controller": controller})
    runs = RUNS_DIR if telemetry_dir is None else telemetry_dir
    if dual_ab is not None:
        why = "it starts two new runs, each with a name of its own and in the group of its side"
        _refuse("--dual-ab", why, resume=resume, run_id=run_id, group=group)
        _compare([_side(word, preset, config_json, changes) for word in dual_ab], runs, data_dir)
        return
    if resume is not None:
        _refuse("--resume", "a run keeps the name and the group it began with", run_id=run_id, group=group)
        _refuse("--resume", "a run keeps its configuration", preset=preset, config_json=config_json)
        _refuse("--resume", "it names the run directory itself", telemetry_dir=telemetry_dir)
        start = start_again(resume, changes)
    else:
        chosen = resolve(preset, config_json, changes)
        _check_before_writing(chosen, data_dir)
        start = start_new(chosen, runs, run_id, group=group)
    run_and_show(start, data_dir)


def _refuse(mode: str, why: str, **flags: object) -> None:
    """Names the first flag that was given although it says nothing in this mode.

    Raises:
        ValueError: There is one.
    """
    for name, value in flags.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not go with {mode}: {why}. Leave it out")


def _check_before_writing(config: TrainingConfig, data_dir: Path | None) -> None:
    """Finds what is wrong with task, data, controller and devices before a run directory exists."""
    from esper.runtime.tasks import load_task_data
    from esper.simic.run.run_state import load_policy
    from esper.simic.training.vectorized import check_controller, training_task
    from esper.tolaria.runtime import parse_devices

    check_controller(config.controller)
    parse_devices(config.device)
    load_task_data(training_task(config), data_dir)
    if config.warm_start is not None:
        load_policy(config.warm_start)


def run_and_show(start: RunStart, data_dir: Path | None) -> None:
    """Trains from where the run stands, with progress and a table at the end.

    Raises:
        SystemExit: The run was stopped, or its log has gaps.
    """
    from esper.karn.live import run_console
    from esper.simic.training.helpers import run_session
    from esper.simic.training.vectorized import training_task

    config, task, console = start.config, training_task(start.config), run_console(start.config.console)
    progress, stop = _progress_and_stop(console)
    resumed = f", resumed after round {start.rounds_done}" if start.checkpoint else ""
    plan = f"{config.rounds} rounds of {config.envs} hosts x {task.horizon} epochs"
    opening = (f"{task.name}: {task.description}", f"{config.controller}, {plan}, run {start.path}{resumed}")
    with stop:
        end = run_session(start, stop, (_screen(progress, start, config.controller, opening),), data_dir=data_dir)
    if end.history:
        console.print(_outcome_table(end.history, config.envs))
    console.print(_last_words(start, end), soft_wrap=True, markup=False, highlight=False)
    if end.exit_code:
        raise SystemExit(int(end.exit_code))


def _progress_and_stop(console: Console) -> tuple[RunProgress, StopSignals]:
    """Bars, and signals whose answer stands below them as long as they are drawn."""
    from esper.karn.live import RunProgress
    from esper.simic.run.stop_signals import StopSignals

    stop = StopSignals()
    progress = RunProgress(console, notice=lambda: stop.notice)
    stop.on_screen = progress.is_drawing
    return progress, stop


def _screen(progress: RunProgress, start: RunStart, label: str, opening: Iterable[str]) -> LiveConsole:
    from esper.karn.live import LiveConsole
    from esper.simic.training.vectorized import training_task

    return LiveConsole(
        progress,
        label=label,
        rounds=start.config.rounds,
        horizon=training_task(start.config).horizon,
        done=start.rounds_done,
        quiet=start.config.console == "off",
        opening=opening,
    )


def _last_words(start: RunStart, end: SessionEnd) -> str:
    path, done, config = start.path, len(end.history), start.config
    # What runs code, here or on other machines, a run folder cannot ask for by itself.
    named = {"--task": config.task if ":" in config.task else None, "--ray-address": config.ray_address}
    resume = f"esper train --resume {path}" + "".join(f" {flag} {given}" for flag, given in named.items() if given)
    if end.saved_index is None:
        what = "No round is saved" if done else "Stopped before the first round"
        return f"{what}; there is nothing to go on from in {path}"
    if end.saved_index < done:
        what = f"Rounds after the first {end.saved_index} are not" if end.saved_index else "No round is"
        return f"{what} saved. Mend what kept them from it, then repeat them with: {resume}"
    if done < config.rounds:
        when = "" if done else " before the first round"
        return f"Stopped{when}. Go on with: {resume}"
    kept = "All but a part of the event log" if end.exit_code is ExitCode.LOG_INCOMPLETE else "Everything"
    return f"Done. {kept} is in {path}"


def _side(word: str, base: str | None, config_json: Path | None, changes: dict[str, Any]) -> tuple[str, TrainingConfig]:
    """One side of a comparison: a reward mode, a preset, or a JSON file with the fields that differ."""
    from esper.simic.rewards import MODES
    from esper.simic.training.config import read_config

    common = resolve(base, config_json, changes)
    if word in MODES:
        return word, resolve(base, config_json, {**changes, "reward_mode": word})
    if word in PRESETS:
        return word, resolve(word, config_json, changes)
    if Path(word).is_file():
        return Path(word).stem, read_config(Path(word), common)
    raise ValueError(
        f"--dual-ab {word!r} is neither a reward mode ({', '.join(MODES)}), nor a preset ({', '.join(PRESETS)}), "
        "nor a JSON file"
    )


def _compare(sides: list[tuple[str, TrainingConfig]], runs: Path, data_dir: Path | None) -> None:
    from esper.karn.live import run_console
    from esper.simic.run.session import start_new
    from esper.simic.training.dual_ab import check_pairable, differing_fields, run_comparison

    configs = [replace(config, require_complete=True) for _, config in sides]
    check_pairable(*configs)
    for config in configs:
        _check_before_writing(config, data_dir)
    names = [name for name, _ in sides]  # also the groups of the runs; two files of the same name are told apart
    if names[0] == names[1]:
        names = [f"{name}-{side}" for name, side in zip(names, "ab", strict=True)]
    first, second = (start_new(config, runs, group=name) for name, config in zip(names, configs, strict=True))
    console = run_console(configs[0].console)
    progress, stop = _progress_and_stop(console)
    differences = f"the sides differ in {', '.join(differing_fields(*configs))}"
    screens = (
        _screen(progress, first, names[0], (differences, f"{names[0]}: run {first.path}")),
        _screen(progress, second, names[1], (f"{names[1]}: run {second.path}",)),
    )
    with stop:
        end = run_comparison((first, second), stop, screens, data_dir=data_dir)
    if end.found.pairs:
        console.print(_comparison_table(names, end.found))
    else:
        console.print("No episode was completed on both sides; there is nothing to compare.", soft_wrap=True)
    for name, start, side in zip(names, (first, second), end.sides, strict=True):
        console.print(f"{name}: {_last_words(start, side)}", soft_wrap=True, markup=False, highlight=False)
    if end.exit_code:
        raise SystemExit(int(end.exit_code))


# ---- tables at the end


def _outcome_table(history: Sequence[BatchSummary], envs: int) -> Table:
    """The first and the last rounds of a run side by side; seeds are counted per episode."""
    tenth = max(1, len(history) // 10)
    table = _table("First and last rounds", "rounds", "accuracy", "return", "params", "planted", "kept", "removed")
    for label, part in ((f"first {tenth}", history[:tenth]), (f"last {tenth}", history[-tenth:])):
        counts = [sum(row.num_ops[op] for row in part) for op in ("GERMINATE", "FOSSILIZE", "PRUNE")]
        table.add_row(label, *_means(part), *(f"{count / (len(part) * envs):.1f}" for count in counts))
    return table


def _comparison_table(names: Sequence[str], found: PairedRounds) -> Table:
    """Both sides, and the paired difference over the last tenth of the rounds."""
    last = max(1, len(found.pairs) // 10)
    table = _table(f"Last {last} rounds, same hosts on both sides", "side", "accuracy", "return", "params")
    for name, history in zip(names, found.histories, strict=True):
        table.add_row(name, *_means(history[-last:]))
    differences = found.differences_pp(last)
    shown = f"{statistics.fmean(differences):+.2f}" if differences else "not measured"
    spread = f" ± {statistics.stdev(differences):.2f}" if len(differences) > 1 else ""
    table.add_section()
    table.add_row(f"{names[1]} - {names[0]}", f"{shown}{spread}", f"{len(differences)} pairs", "")
    return table


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=f"{title} (validation, exploring)", title_justify="left")
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _means(rounds: Sequence[BatchSummary]) -> tuple[str, str, str]:
    """Committed accuracy, return and growth over some rounds."""
    committed = [row.committed_accuracy_pct for row in rounds if row.committed_accuracy_pct is not None]
    return (
        f"{statistics.fmean(committed):.1f} %" if committed else "not measured",
        f"{statistics.fmean(row.return_mean for row in rounds):+.3f}",
        f"{statistics.fmean(row.params_ratio_mean for row in rounds):.2f}x",
    )


if __name__ == "__main__":  # `python -m esper.scripts.train ...` is `esper train ...`
    from esper.scripts.cli import main

    main(["train", *sys.argv[1:]])
