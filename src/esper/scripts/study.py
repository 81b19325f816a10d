"""`esper study`: train policies, tune fixed controllers, judge all on test data."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.text import Text

from esper.evidence.arms import FRONTIER, SEARCHES, TUNABLE, EvaluationRequest, get_arm
from esper.evidence.studies import (
    QUICK_LIST,
    STUDIES,
    UNIVERSAL,
    HeldOutOptions,
    Study,
    log_problem,
    policy_config,
    start_policy,
)
from esper.leyline import ExitCode, check_known
from esper.scripts.evaluate import KIND_HELP, evaluate_command
from esper.scripts.terminal import plain_console
from esper.scripts.train import run_and_show
from esper.tolaria.kinds import AUTO, RAY_HELP, Workers

if TYPE_CHECKING:
    from esper.simic.training.config import TrainingConfig


def study_command(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=f"One of {', '.join(STUDIES)}.")],
    held_out: Annotated[HeldOutOptions, tyro.conf.arg(name="")],
    out: Annotated[Path, tyro.conf.arg(help="Folder for runs and results.")] = Path("runs/studies"),
    workers: Annotated[int | None, tyro.conf.arg(help="Workers; default: one per core of this machine.")] = None,
    worker_kind: Annotated[str, tyro.conf.arg(help=KIND_HELP)] = AUTO,
    ray_address: Annotated[str | None, tyro.conf.arg(help=RAY_HELP)] = None,
    backend: Annotated[str, tyro.conf.arg(help="What trains hosts: auto, native or torch.")] = "auto",
    policies: Annotated[
        int | None, tyro.conf.arg(help="Policies to train; default: the study's own. One speaks for itself only.")
    ] = None,
    quick: Annotated[bool, tyro.conf.arg(help="One policy and five pairs: not evidence, but the whole way.")] = False,
) -> None:
    """Train policies, tune their rivals, and compare all of them on the test split.

    A study of sizes (frontier-...) trains no policy: at every budget it compares what rules and searches grow with
    the best plain network of that size.

    Everything that is finished is kept: a second start goes on where the first one stopped, in the middle of a
    training too. What is claimed, and on how many seeds, is fixed in the code before any result exists. A policy whose
    event log lacks anything is not judged.
    """
    check_known("study", name, STUDIES)
    from esper.evidence.statistics import require_libraries
    from esper.simic.training.config import with_overrides
    from esper.tolaria.runtime import usable_cores

    require_libraries()
    study, console = STUDIES[name], plain_console()
    place = Workers(count=usable_cores() if workers is None else workers, kind=worker_kind, ray_address=ray_address)
    num_policies = min(1, study.policies) if quick else study.policies if policies is None else policies
    if num_policies < (study.preset is not None):
        raise ValueError(f"--policies must be at least 1, got {policies}")
    folder = out / (f"{name}-quick" if quick else name if policies is None else f"{name}-{num_policies}")
    console.print(Text.assemble((name, "bold"), f": {study.description}"), soft_wrap=True)
    if quick:
        study = replace(study, seeds=5, tune_episodes=16, search_episodes=16)
    if study.preset is None:
        _judge_sizes(study, folder, place, backend)
        return
    config = with_overrides(policy_config(study, place), {"backend": backend})
    runs = _trained(folder / "policy", config, num_policies)
    if name == UNIVERSAL:
        clock_only = _trained(folder / "clock_only", with_overrides(config, {"sees": "clock"}), held_out.clock_only)
        options = replace(QUICK_LIST, data_dir=held_out.data_dir) if quick else held_out
        _judge_universal(folder, runs, clock_only, options, place)
        return
    request = EvaluationRequest(
        task=config.task,
        epochs=config.episode_length,
        budget=config.param_budget,
        out=folder / "evaluation",
        backend=backend,
    )
    _judge(study, replace(request, policy=tuple(map(str, runs))), place)


def _trained(prefix: Path, config: TrainingConfig, count: int) -> list[Path]:
    """Policies of one recipe, each with a run seed of its own; what is trained already is not trained again."""
    runs = [prefix.with_name(f"{prefix.name}-{seed}") for seed in range(count)]
    for seed, path in enumerate(runs):
        if (start := start_policy(replace(config, seed=seed), path)) is not None:
            run_and_show(start, None)
            _require_whole_log(path)
    return runs


def _judge_sizes(study: Study, folder: Path, workers: Workers, backend: str) -> None:
    """One evaluation for each budget, then all of them as one table and picture."""
    from esper.evidence.frontier import publish_frontier

    assert study.task is not None
    folders = [folder / f"at_{budget}" for budget in study.budgets]
    for budget, out in zip(study.budgets, folders, strict=True):
        request = EvaluationRequest(
            task=study.task, epochs=study.epochs, rows=study.rows, budget=budget, out=out, backend=backend
        )
        _judge(study, request, workers)
    publish_frontier(folders, folder)
    plain_console().print(f"Saved in {folder}: frontier.md, frontier.csv, frontier.png", soft_wrap=True)


def _judge(study: Study, request: EvaluationRequest, workers: Workers) -> None:
    """Tunes what can be tuned, then compares on the test split. What is done already is not done again."""
    tuned = request.folder / "tuned.json" if study.tune_episodes else None
    place: Any = {"workers": workers.count, "worker_kind": workers.kind, "ray_address": workers.ray_address}
    if study.tune_episodes:
        sized = () if request.budget is None else (FRONTIER,)  # plain networks of what size, without a budget?
        asked = study.arms if "all" not in study.arms else (*TUNABLE, *SEARCHES, *sized)
        tune = replace(request, arms=tuple(arm for arm in asked if arm == FRONTIER or _tunable(arm)), policy=())
        evaluate_command(
            tune, **place, tune=True, tune_episodes=study.tune_episodes, search_episodes=study.search_episodes
        )
    request = replace(request, arms=study.arms, subject=study.subject, seeds=study.seeds, tuned=tuned)
    evaluate_command(request, **place)


def _tunable(arm: str) -> bool:
    return get_arm(arm).tunable or get_arm(arm).searched


def _judge_universal(
    folder: Path, runs: list[Path], clock_only: list[Path], options: HeldOutOptions, workers: Workers
) -> None:
    from esper.evidence.draws import choose_checkpoint
    from esper.evidence.universal import UniversalPlan, run_universal

    console = plain_console()

    def say(line: str) -> None:
        console.print(line, highlight=False)

    plan = UniversalPlan(
        folder=folder / "held-out",
        policies=tuple(str(choose_checkpoint(run, workers, say)) for run in runs),
        clock_only=tuple(str(choose_checkpoint(run, workers, say)) for run in clock_only),
        options=options,
        workers=workers,
    )
    report = run_universal(plan, say)
    console.print(report.split("## Task by task")[0], soft_wrap=True, highlight=False)
    console.print(f"Saved in {plan.folder}: rows.csv (one row per run), report.md, universal.png", soft_wrap=True)


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
