"""`esper train`: train a controller, or run a fixed one, over many hosts side by side."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from esper.scripts.train_flags import (
    Machine,
    MachineFlags,
    Policy,
    PolicyFlags,
    RecordFlags,
    Records,
    Reward,
    RewardFlags,
    Run,
    RunFlags,
    given,
    resolve,
)

if TYPE_CHECKING:
    from esper.simic.training.config import TrainingConfig
    from esper.simic.training.session import Start


def train_command(
    controller: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(help="ppo learns; wait_only, random, periodic, plateau, fragrow and heuristic follow a rule."),
    ] = "ppo",
    preset: Annotated[str, tyro.conf.arg(help="Named starting point: default, smoke, digits_blind, ...")] = "default",
    config_json: Annotated[
        Path | None, tyro.conf.arg(help="File with fields of the configuration; flags go before it.")
    ] = None,
    resume: Annotated[
        Path | None, tyro.conf.arg(help="Run directory to go on with, from its newest valid checkpoint.")
    ] = None,
    dual_ab: Annotated[
        tuple[str, str] | None,
        tyro.conf.arg(help="Compare two configurations round by round: reward modes, presets or JSON files."),
    ] = None,
    telemetry_dir: Annotated[
        Path, tyro.conf.arg(help="Folder that gets one directory per run.", aliases=("--runs",))
    ] = Path("runs"),
    run_id: Annotated[str | None, tyro.conf.arg(help="Name of the run; default: date, time and chance.")] = None,
    data_dir: Annotated[Path | None, tyro.conf.arg(help="Where the data lies, if not in a usual place.")] = None,
    run: Run = RunFlags(),  # noqa: B008 (frozen)
    machine: Machine = MachineFlags(),  # noqa: B008 (frozen)
    reward: Reward = RewardFlags(),  # noqa: B008 (frozen)
    policy: Policy = PolicyFlags(),  # noqa: B008 (frozen)
    records: Records = RecordFlags(),  # noqa: B008 (frozen)
) -> None:
    """Train a controller over many hosts side by side.

    A round trains one fresh host in every env for an episode, one decision of the controller per epoch; then the
    policy learns from all of them. Every run gets a directory with its configuration, its event log and its
    checkpoints. Ctrl-C stops after the round and saves; a second one stops at once; --resume goes on to the same bits
    either way.

    Accuracies shown are on the validation split, of a policy that explores. `esper evaluate` judges the frozen policy
    on the test split.
    """
    from esper.simic.training.session import start_again, start_new

    changes = given(run, machine, reward, policy, records)
    if dual_ab is not None:
        _compare([_side(word, controller, preset, config_json, changes) for word in dual_ab], telemetry_dir, data_dir)
        return
    if resume is not None:
        start = start_again(resume, changes)
    else:
        config = resolve(controller, preset, config_json, changes)
        _check_before_writing(config, data_dir)
        start = start_new(config, telemetry_dir, run_id)
    run_and_show(start, data_dir)


def _check_before_writing(config: TrainingConfig, data_dir: Path | None) -> None:
    """Finds what is wrong with task, data, controller and devices before a run directory exists."""
    from esper.runtime.tasks import load_task_data
    from esper.simic.training.vectorized import check_controller, training_task
    from esper.tolaria.runtime import parse_devices

    check_controller(config.controller)
    parse_devices(config.device)
    load_task_data(training_task(config), data_dir)


def run_and_show(start: Start, data_dir: Path | None) -> None:
    """Trains from where the run stands, with progress and a table at the end.

    Raises:
        SystemExit: The run was stopped, or its log has gaps.
    """
    from esper.scripts.train_display import TrainingDisplay, outcome_table, progress_bars
    from esper.simic.training.session import run_session
    from esper.simic.training.stop_signals import StopSignals
    from esper.simic.training.vectorized import training_task

    config, console = start.config, Console()
    task = training_task(config)
    console.print(f"[bold]{task.name}[/bold]: {task.description}", soft_wrap=True)
    console.print(
        f"{config.controller}, {config.rounds} rounds of {config.envs} hosts x {task.horizon} epochs, "
        f"run {start.run.path}" + (f", resumed after round {start.rounds_done}" if start.checkpoint else ""),
        soft_wrap=True,
    )
    with StopSignals() as stop, progress_bars(console) as progress:
        display = TrainingDisplay(
            progress, label=config.controller, rounds=config.rounds, horizon=task.horizon, done=start.rounds_done
        )
        finish = run_session(start, stop, display, data_dir=data_dir)
    if finish.history:
        console.print(outcome_table(finish.history, config.envs))
    if not finish.history:
        console.print("Stopped before the first round; there is nothing to go on from.", soft_wrap=True)
    elif len(finish.history) < config.rounds:
        console.print(f"Stopped. Go on with: esper train --resume {start.run.path}", soft_wrap=True)
    else:
        console.print(f"Done. Everything is in {start.run.path}", soft_wrap=True)
    if finish.exit_code:
        raise SystemExit(int(finish.exit_code))


def _side(
    word: str, controller: str, base: str, config_json: Path | None, changes: dict[str, Any]
) -> tuple[str, TrainingConfig]:
    """One side of a comparison: a reward mode, a preset, or a JSON file with the fields that differ."""
    from esper.simic.rewards import MODES
    from esper.simic.training.config import PRESETS, read_config

    common = resolve(controller, base, config_json, changes)
    if word in MODES:
        return word, resolve(controller, base, config_json, {**changes, "reward_mode": word})
    if word in PRESETS:
        return word, resolve(controller, word, config_json, changes)
    if Path(word).is_file():
        return Path(word).stem, read_config(Path(word), common)
    raise ValueError(
        f"--dual-ab {word!r} is neither a reward mode ({', '.join(MODES)}), nor a preset ({', '.join(PRESETS)}), "
        "nor a JSON file"
    )


def _compare(sides: list[tuple[str, TrainingConfig]], runs: Path, data_dir: Path | None) -> None:
    from esper.scripts.train_display import TrainingDisplay, comparison_table, progress_bars
    from esper.simic.training.dual_ab import check_comparable, compare
    from esper.simic.training.session import sitting, start_new
    from esper.simic.training.stop_signals import StopSignals
    from esper.simic.training.vectorized import training_task

    console, (a, b) = Console(), (config for _, config in sides)
    check_comparable(a, b)
    for config in (a, b):
        _check_before_writing(config, data_dir)
    horizon = training_task(a).horizon
    starts = [start_new(config, runs) for config in (a, b)]
    for (name, _), start in zip(sides, starts, strict=True):
        console.print(f"{name}: run {start.run.path}", soft_wrap=True)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        progress = stack.enter_context(progress_bars(console))
        displays = [
            TrainingDisplay(progress, label=name, rounds=a.rounds, horizon=horizon, done=0) for name, _ in sides
        ]
        seats = [
            stack.enter_context(sitting(start, stop, display, data_dir=data_dir))
            for start, display in zip(starts, displays, strict=True)
        ]
        found = compare(seats[0].trainer, seats[1].trainer)
    console.print(comparison_table([name for name, _ in sides], found))


def main() -> None:
    """`python -m esper.scripts.train ...` is `esper train ...`."""
    from esper.scripts.cli import main as cli

    cli(["train", *sys.argv[1:]])


if __name__ == "__main__":
    main()
