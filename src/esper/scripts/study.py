"""`esper study`: from nothing to a published table: train policies, tune their rivals, judge all on test data."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.text import Text

from esper.leyline import ExitCode
from esper.scripts.evaluate import evaluate_command
from esper.scripts.terminal import plain_console
from esper.scripts.train import run_and_show

if TYPE_CHECKING:
    from esper.simic.run.session import RunStart
    from esper.simic.training.config import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is claimed about, and on how much."""

    description: str
    preset: str
    """Recipe of the policies; it names the task."""
    policies: int = 5
    """Policies that are trained independently, with run seeds 0, 1, ..."""
    seeds: int = 20
    """Paired run seeds of the evaluation."""
    tune_episodes: int = 64
    """Episodes that each tunable rival gets."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe that differ."""


STUDIES: dict[str, Study] = {
    "demo": Study(
        description="one short training and five pairs: shows the way, proves nothing",
        preset="demo",
        policies=1,
        seeds=5,
        tune_episodes=0,
    ),
    "digits_blind": Study(description="growth is needed: where and what both matter", preset="digits_blind"),
    "digits_saturated": Study(
        description="growth is not needed: the right answer is to wait", preset="digits_saturated"
    ),
    "digits_conv": Study(description="a small sighted host with some room to grow", preset="digits_conv"),
}


def study_command(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=f"One of {', '.join(STUDIES)}.")],
    out: Annotated[Path, tyro.conf.arg(help="Folder for runs and results.")] = Path("runs/studies"),
    workers: Annotated[int | None, tyro.conf.arg(help="Worker processes; default: one per core.")] = None,
    policies: Annotated[
        int | None, tyro.conf.arg(help="Policies to train; default: the study's own. One speaks for itself only.")
    ] = None,
    quick: Annotated[bool, tyro.conf.arg(help="One policy and five pairs: not evidence, but the whole way.")] = False,
) -> None:
    """Train policies, tune the fixed controllers, and compare all of them on the test split.

    Everything that is finished is kept: a second start goes on where the first one stopped, in the middle of a
    training too. What is claimed, and on how many seeds, is fixed in the code before any result exists. A policy whose
    event log lacks anything is not judged.
    """
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}. Known: {', '.join(STUDIES)}")
    from esper.simic.training.config import preset, with_overrides
    from esper.tolaria.runtime import usable_cores

    study, console = STUDIES[name], plain_console()
    count = usable_cores() if workers is None else workers
    num_policies = 1 if quick else study.policies if policies is None else policies
    if num_policies < 1:
        raise ValueError(f"--policies must be at least 1, got {policies}")
    folder = out / (f"{name}-quick" if quick else name if policies is None else f"{name}-{num_policies}")
    console.print(Text.assemble((name, "bold"), f": {study.description}"), soft_wrap=True)
    config = with_overrides(preset(study.preset), {**study.changes, "workers": min(count, preset(study.preset).envs)})
    runs = []
    for seed in range(num_policies):
        start = _start(with_overrides(config, {"seed": seed}), folder / f"policy-{seed}")
        if start.rounds_done < start.config.rounds or _log_trouble(start.path) is not None:
            run_and_show(start, None)
            _check_log(start.path)
        runs.append(start.path)
    common: dict[str, Any] = {
        "task": config.task,
        "epochs": config.episode_length,
        "budget": config.param_budget,
        "workers": count,
        "out": folder / "evaluation",
    }
    tuned = folder / "evaluation" / "tuned.json"
    episodes = 16 if quick else study.tune_episodes
    if episodes and not tuned.is_file():
        evaluate_command(**common, tune=True, tune_episodes=episodes)
    evaluate_command(
        **common,
        arms=("all",),
        policy=tuple(map(str, runs)),
        seeds=5 if quick else study.seeds,
        tuned=tuned if episodes else None,
    )


def _check_log(path: Path) -> None:
    """Refuses a policy whose log still lacks something after the last round.

    Raises:
        SystemExit: It does.
    """
    if (trouble := _log_trouble(path)) is not None:
        sys.stderr.write(
            f"esper: the event log of {path} is not whole: {trouble}. A resume cannot mend that. Move the folder away, "
            "and the study trains this policy again\n"
        )
        raise SystemExit(int(ExitCode.LOG_INCOMPLETE))


def _log_trouble(path: Path) -> str | None:
    """What the log of a training lacks; None if it is whole. One that lacks its end gets it from a resume."""
    from esper.karn.integrity import check_run

    found = check_run(path)
    lost = (f"{found.num_missing_seq} events are lost",) if found.num_missing_seq else ()
    return next(iter((*found.problems, *lost)), None)


def _start(config: TrainingConfig, path: Path) -> RunStart:
    """The training of one policy: from its newest checkpoint, or from the beginning."""
    from esper.simic.run.checkpoint import checkpoint_folders
    from esper.simic.run.run_dir import open_run, remove
    from esper.simic.run.session import start_again, start_new

    if path.is_dir() and checkpoint_folders(open_run(path)):
        return start_again(path, {"workers": config.workers})
    if path.is_dir():
        remove(path)  # it was stopped before its first checkpoint
    return start_new(replace(config, require_complete=True), path.parent, path.name)
