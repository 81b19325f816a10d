"""What an evaluation is to be, before anything runs: task, arms, run seeds, policies, settings, folder."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from esper.evidence.arms import ALIASES, ARMS, DEFAULT_ARMS, FRONTIER, GREEDY, EvaluationRequest, Lineup, line_up
from esper.evidence.host_runs import task_with
from esper.evidence.learning_checks import check_training
from esper.evidence.manifest import (
    EVALUATION_FORMAT,
    MANIFEST,
    CheckResult,
    EvaluationManifest,
    EvaluationSession,
    code_version,
    machine,
    now,
    package_versions,
)
from esper.evidence.outside import why_not_gromo
from esper.evidence.results import ResultStore
from esper.evidence.runs import Evaluation
from esper.evidence.static_networks import can_widen
from esper.evidence.tuning import read_tuned
from esper.leyline.rng import FIRST_EVALUATION_SEED
from esper.leyline.rundir import EVENTS_DIR
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec, count_host_params, get_task_spec, load_task_data
from esper.simic.run.run_state import LoadedPolicy, load_policy
from esper.simic.training.backend import choose_backend
from esper.tolaria.executor.available import backend_version


def prepare(request: EvaluationRequest) -> Evaluation:
    """Checks a request and gathers what it needs. Nothing is written and no test row is read.

    Raises:
        ValueError: The request makes no sense, or the folder holds results of another one.
    """
    names, places = names_and_places(request.arms, request.policy)
    get_task_spec(request.task)  # one of the user's own is named here, and not by a policy that was trained on it
    policies = load_policies(places)
    task, notes = _task(request, policies)
    data = load_task_data(task, request.data_dir)
    backend = choose_backend(request.backend, task, data)
    store = ResultStore(request.folder)
    default = (*DEFAULT_ARMS, GREEDY, "random") if policies else DEFAULT_ARMS
    started = list(dict.fromkeys(row.arm for row in store.results.values()))  # they stay
    settings, tuning = ({}, None) if request.tuned is None else read_tuned(request.tuned, task)
    if request.blueprint is not None:
        settings["schedule"] = {**settings.get("schedule", {}), "blueprint": request.blueprint}
    lineup = line_up(
        [*(names or default), *started],
        has_policy=bool(policies),
        subject=request.subject,
        can_widen=can_widen(task.host),
        budgets=frontier_budgets(request),
        found=settings.keys(),
        no_gromo=why_not_gromo(task),
    )
    notes += [
        f"{arm.name} has the proportions of the host: no network was chosen for it with --tune."
        for arm in lineup.arms
        if arm.budget is not None and arm.name not in settings
    ]
    if backend.note is not None:
        notes.append(f"Hosts are trained by {backend.name}: {backend.note}.")
    lineup = replace(lineup, notes=(*lineup.notes, *notes))
    manifest = _manifest(request, task, data, lineup, policies, settings, tuning, backend_version(backend.name))
    store.require(manifest.setup, set(manifest.policy_ids))
    if store.results and (request.folder / MANIFEST).is_file():
        manifest = _continued(manifest, EvaluationManifest.load(request.folder))
    check_unseen(policies, manifest.run_seeds)
    return Evaluation(
        task=task,
        data=data,
        lineup=lineup,
        policies={policy_id(policy): policy for policy in policies},
        store=store,
        manifest=manifest,
    )


def _manifest(
    request: EvaluationRequest,
    task: TaskSpec,
    data: Dataset,
    lineup: Lineup,
    policies: Sequence[LoadedPolicy],
    settings: Mapping[str, Any],
    tuning: Mapping[str, Any] | None,
    backend: str,
) -> EvaluationManifest:
    """The manifest of a first start."""
    code = code_version()
    facts = f"{task} {data.sha256} {sorted(settings.items())} {lineup.subject} {code} {backend}"
    return EvaluationManifest(
        schema_version=EVALUATION_FORMAT,
        setup=hashlib.sha256(facts.encode()).hexdigest()[:12],
        code=code,
        task=task.name,
        description=task.description,
        metric=task.metric,
        horizon=task.horizon,
        num_classes=task.num_classes,
        budget=task.lifecycle.param_budget,
        host_params=count_host_params(task),
        data=data.description,
        data_sha256=data.sha256,
        test_sha256=data.test_sha256,
        num_test=data.num_test,
        run_seeds=tuple(range(FIRST_EVALUATION_SEED, FIRST_EVALUATION_SEED + request.seeds)),
        arms=lineup.names,
        subject=lineup.subject,
        backend=backend,
        settings=settings,
        tuning=tuning,
        policies=tuple(map(policy_facts, policies)),
        learning_checks=tuple(
            replace(check, name=f"{policy_id(policy)}: {check.name}")
            for policy in policies
            for check in _training_checks(policy.checkpoint.parent.parent)
        ),
        controls=(),
        notes=lineup.notes,
        versions=package_versions(),
        machine=machine(),
        sessions=(EvaluationSession(argv=("esper", *sys.argv[1:]), started=now(), ended=None, opened_test=False),),
        test_openings=None,
    )


def _continued(manifest: EvaluationManifest, before: EvaluationManifest) -> EvaluationManifest:
    """The manifest of a further start: what was promised stays promised."""
    return replace(
        manifest,
        run_seeds=max(manifest.run_seeds, before.run_seeds, key=len),
        controls=before.controls,
        sessions=(*before.sessions, *manifest.sessions),
        test_openings=before.test_openings,
    )


def request_task(request: EvaluationRequest) -> TaskSpec:
    """The task under the conditions that a request names."""
    return task_with(request.task, epochs=request.epochs, budget=request.budget, rows=request.rows)


def frontier_budgets(request: EvaluationRequest) -> tuple[int, ...]:
    """Sizes of the static frontier: those asked for, or the budget of the evaluation."""
    return request.budgets or (() if request.budget is None else (request.budget,))


def names_and_places(asked: Sequence[str], sources: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Arms by name, and folders with policies; a folder among the arms is a policy to be played greedily."""
    names: list[str] = []
    places = [Path(place) for entry in sources for place in entry.split(",") if place]
    for word in (word for entry in asked for word in entry.split(",") if word):
        if word in ARMS or word in ALIASES or word in ("all", FRONTIER) or not Path(word).is_dir():
            names.append(word)
        else:
            places.append(Path(word))
            names.append(GREEDY)
    return names, places


def _task(request: EvaluationRequest, policies: Sequence[LoadedPolicy]) -> tuple[TaskSpec, list[str]]:
    """The task under the conditions asked for, or those that the policies were trained under; and notes about them.

    Raises:
        ValueError: Nothing was said and the policies were trained under different conditions.
    """
    epochs, budget = request.epochs, request.budget
    native = [policy for policy in policies if policy.config.task == request.task]
    if native and epochs is None:
        epochs = _agreed("epochs", [policy.config.episode_length for policy in native])
    if native and budget is None:
        budget = _agreed("budget", [policy.config.param_budget for policy in native])
    task = request_task(replace(request, epochs=epochs, budget=budget))
    notes = []
    for policy in native:
        config = policy.config
        trained = task_with(request.task, epochs=config.episode_length, budget=config.param_budget)
        if (trained.horizon, trained.lifecycle) != (task.horizon, task.lifecycle):
            notes.append(
                f"Policy {policy_id(policy)} was trained with {trained.horizon} epochs and a budget of "
                f"{trained.lifecycle.param_budget}, not with those of this evaluation."
            )
    return task, notes


def _agreed(name: str, values: Sequence[int | None]) -> int | None:
    if len(set(values)) > 1:
        raise ValueError(f"the policies were trained with different {name} ({values}); say which with --{name}")
    return values[0]


def _training_checks(run_dir: Path) -> tuple[CheckResult, ...]:
    """The checks over the log of a training. A study asks on every task: a log is read once, unless it grows."""
    files = sorted((run_dir / EVENTS_DIR).glob("*"))
    return _checks_of_log(run_dir, tuple(file.stat().st_mtime_ns for file in files))


@cache
def _checks_of_log(run_dir: Path, _: tuple[int, ...]) -> tuple[CheckResult, ...]:
    return tuple(check_training(run_dir))


# ---- policies


def policy_id(policy: LoadedPolicy) -> str:
    """The start of its sha256."""
    return policy.policy_sha256[:12]


def load_policies(sources: Sequence[Path]) -> tuple[LoadedPolicy, ...]:
    """Reads trained policies from run directories or checkpoints.

    Raises:
        ValueError: The same policy was named twice.
        CheckpointError: A place holds no policy.
    """
    policies = tuple(load_policy(source) for source in sources)
    if len({policy_id(policy) for policy in policies}) != len(policies):
        raise ValueError("--policy names the same policy twice; independent policies come from different run seeds")
    return policies


def policy_facts(policy: LoadedPolicy) -> dict[str, Any]:
    """For manifest and report: where it comes from and what its training cost."""
    return {
        "policy_id": policy_id(policy),
        "run": policy.run_id,
        "checkpoint": policy.checkpoint.name,
        "sha256": policy.policy_sha256,
        "task": policy.config.task,
        "seed": policy.config.seed,
        "rounds": policy.rounds,
        "host epochs": policy.host_epochs,
        "training hours": policy.training_s / 3600,
    }


def check_unseen(policies: Sequence[LoadedPolicy], run_seeds: Sequence[int]) -> None:
    """Refuses run seeds that a policy has trained on.

    Raises:
        ValueError: There are such seeds.
    """
    for policy in policies:
        shared = sorted(policy.trained_run_seeds & set(run_seeds))
        if shared:
            raise ValueError(
                f"policy {policy_id(policy)} has trained on run seeds {shared[:5]}, which are to judge it; "
                "train with seeds below 10,000"
            )
