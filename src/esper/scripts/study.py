"""`esper study`: train policies, tune fixed controllers, judge all on test data."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from esper.evidence.arms import EvaluationRequest
from esper.evidence.studies import STUDIES, log_problem, policy_config, start_policy
from esper.leyline import ExitCode
from esper.scripts.evaluate import evaluate_command
from esper.scripts.terminal import plain_console
from esper.scripts.train import run_and_show


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
    from esper.evidence.statistics import require_libraries
    from esper.simic.training.config import with_overrides
    from esper.tolaria.runtime import usable_cores

    require_libraries()
    study, console = STUDIES[name], plain_console()
    count = usable_cores() if workers is None else workers
    num_policies = 1 if quick else study.policies if policies is None else policies
    if num_policies < 1:
        raise ValueError(f"--policies must be at least 1, got {policies}")
    folder = out / (f"{name}-quick" if quick else name if policies is None else f"{name}-{num_policies}")
    console.print(Text.assemble((name, "bold"), f": {study.description}"), soft_wrap=True)
    config = policy_config(study, count)
    runs = [folder / f"policy-{seed}" for seed in range(num_policies)]
    for seed, path in enumerate(runs):
        if (start := start_policy(with_overrides(config, {"seed": seed}), path)) is not None:
            run_and_show(start, None)
            _require_whole_log(path)
    request = EvaluationRequest(
        task=config.task, epochs=config.episode_length, budget=config.param_budget, out=folder / "evaluation"
    )
    tuned = request.folder / "tuned.json"
    episodes = 16 if quick else study.tune_episodes
    if episodes and not tuned.is_file():
        evaluate_command(request, workers=count, tune=True, tune_episodes=episodes)
    request = replace(
        request,
        arms=("all",),
        policy=tuple(map(str, runs)),
        seeds=5 if quick else study.seeds,
        tuned=tuned if episodes else None,
    )
    evaluate_command(request, workers=count)


def _require_whole_log(path: Path) -> None:
    """Refuses a policy whose log still lacks something after the last round.

    Raises:
        SystemExit: It does.
    """
    if (problem := log_problem(path)) is not None:
        sys.stderr.write(
            f"esper: the event log of {path} is not whole: {problem}. A resume cannot mend that. Move the folder away, "
            "and the study trains this policy again\n"
        )
        raise SystemExit(int(ExitCode.LOG_INCOMPLETE))
