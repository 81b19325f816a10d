"""What an evaluation is to be, before anything runs: task, arms, run seeds, policies, settings, folder."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from esper.evidence.arms import ALIASES, ARMS, DEFAULT_ARMS, GREEDY, Lineup, line_up
from esper.evidence.gates import learning_gates
from esper.evidence.host_runs import with_overrides
from esper.evidence.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    Session,
    code_version,
    machine,
    now,
    read_manifest,
    versions,
)
from esper.evidence.policies import Policy, check_apart, load_policies
from esper.evidence.results import ResultStore
from esper.evidence.runs import Job
from esper.evidence.starts import can_widen
from esper.evidence.statistics import MIN_PAIRS, require_libraries
from esper.evidence.summary import policy_ids
from esper.evidence.tuning import Tuned, read_tuned
from esper.leyline import EpisodeSeed
from esper.runtime.datasets import Dataset
from esper.runtime.tasks import TaskSpec, count_host_params, get_task_spec, load_task_data

FIRST_SEED = 20_000
"""Run seeds of evaluations start here; training and tuning of controllers use lower ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for."""

    task: str
    arms: Sequence[str]
    num_seeds: int
    policies: Sequence[str]
    subject: str | None
    blueprint: str | None
    epochs: int | None
    budget: int | None
    tuned: Path | None
    data_dir: Path | None
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation, ready to run."""

    task: TaskSpec
    data: Dataset
    lineup: Lineup
    policies: Mapping[str, Policy]
    folder: Path
    store: ResultStore
    manifest: Manifest
    """As it is at the start."""


def prepare(request: Request) -> Evaluation:
    """Checks a request and gathers what it needs. Nothing is written and no test row is read.

    Raises:
        ValueError: The request makes no sense, or the folder holds results of another one.
    """
    names, places = names_and_places(request.arms, request.policies)
    policies = load_policies(places)
    task, notes = _task(request, policies)
    data = load_task_data(task, request.data_dir)
    store = ResultStore(request.folder)
    lineup = _line_up(request, names, policies, task, store)
    tuned = None if request.tuned is None else read_tuned(request.tuned, task)
    manifest = _manifest(
        task,
        data,
        replace(lineup, notes=(*lineup.notes, *notes)),
        policies,
        settings=_settings(request, tuned),
        tuning=None if tuned is None else tuned.facts,
        num_seeds=request.num_seeds,
    )
    store.require(manifest.setup, set(manifest.policy_ids))
    if store.results and (request.folder / MANIFEST).is_file():
        manifest = _continued(manifest, read_manifest(request.folder))
    check_apart(policies, manifest.run_seeds)
    if len(manifest.run_seeds) >= MIN_PAIRS:
        require_libraries()
    return Evaluation(
        task=task,
        data=data,
        lineup=lineup,
        policies={policy.policy_id: policy for policy in policies},
        folder=request.folder,
        store=store,
        manifest=manifest,
    )


def _line_up(
    request: Request, names: Sequence[str], policies: Sequence[Policy], task: TaskSpec, store: ResultStore
) -> Lineup:
    # Whatever was started stays in the table.
    started = [name for name in ARMS if any(row.arm == name for row in store.results.values())]
    default = (*DEFAULT_ARMS, GREEDY, "random") if policies else DEFAULT_ARMS
    asked = [*(names or default), *started]
    return line_up(asked, has_policy=bool(policies), subject=request.subject, can_widen=can_widen(task.host))


def _settings(request: Request, tuned: Tuned | None) -> dict[str, dict[str, Any]]:
    settings = {} if tuned is None else {name: dict(found) for name, found in tuned.settings.items()}
    if request.blueprint is not None:
        settings["schedule"] = {**settings.get("schedule", {}), "blueprint": request.blueprint}
    return settings


def _manifest(
    task: TaskSpec,
    data: Dataset,
    lineup: Lineup,
    policies: Sequence[Policy],
    *,
    settings: Mapping[str, Mapping[str, Any]],
    tuning: Mapping[str, Any] | None,
    num_seeds: int,
) -> Manifest:
    """The manifest of a first start."""
    code = code_version()
    facts = f"{task} {data.sha256} {sorted(settings.items())} {lineup.subject} {code}"
    return Manifest(
        schema_version=SCHEMA_VERSION,
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
        run_seeds=tuple(range(FIRST_SEED, FIRST_SEED + num_seeds)),
        arms=lineup.names,
        subject=lineup.subject,
        settings=settings,
        tuning=tuning,
        policies=tuple({"policy_id": policy.policy_id, **policy.facts} for policy in policies),
        gates=tuple(check for policy in policies for check in learning_gates(policy)),
        controls=(),
        notes=lineup.notes,
        versions=versions(),
        machine=machine(),
        sessions=(_session(),),
        test_openings=None,
    )


def _continued(manifest: Manifest, before: Manifest) -> Manifest:
    """The manifest of a further start: what was promised stays promised."""
    return replace(
        manifest,
        run_seeds=max(manifest.run_seeds, before.run_seeds, key=len),
        controls=before.controls,
        sessions=(*before.sessions, *manifest.sessions),
        test_openings=before.test_openings,
    )


def _session() -> Session:
    return Session(argv=("esper", *sys.argv[1:]), started=now(), ended=None, opened_test=False)


def names_and_places(asked: Sequence[str], sources: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Arms by name, and folders with policies; a folder among the arms is a policy to be played greedily."""
    names: list[str] = []
    places = [Path(place) for entry in sources for place in entry.split(",") if place]
    for word in (word for entry in asked for word in entry.split(",") if word):
        if word in ARMS or word in ALIASES or word == "all" or not Path(word).is_dir():
            names.append(word)
        else:
            places.append(Path(word))
            names.append(GREEDY)
    return names, places


def _task(request: Request, policies: Sequence[Policy]) -> tuple[TaskSpec, list[str]]:
    """The task under the conditions asked for; where nothing was said, those that the policies were trained under.

    Raises:
        ValueError: Nothing was said and the policies were trained under different conditions.
    """
    task = get_task_spec(request.task)
    epochs, budget, notes = request.epochs, request.budget, []
    native = [policy for policy in policies if policy.task == task.name]
    if native and epochs is None:
        epochs = _agreed("epochs", [policy.episode_length for policy in native])
    if native and budget is None:
        budget = _agreed("budget", [policy.param_budget for policy in native])
    for policy in native:
        trained = with_overrides(task, epochs=policy.episode_length, budget=policy.param_budget)
        asked = with_overrides(task, epochs=epochs, budget=budget)
        if (trained.horizon, trained.lifecycle.param_budget) != (asked.horizon, asked.lifecycle.param_budget):
            notes.append(
                f"Policy {policy.policy_id} was trained with {trained.horizon} epochs and a budget of "
                f"{trained.lifecycle.param_budget}, not with those of this evaluation."
            )
    return with_overrides(task, epochs=epochs, budget=budget), notes


def _agreed(name: str, values: Sequence[int | None]) -> int | None:
    if len(set(values)) > 1:
        raise ValueError(f"the policies were trained with different {name} ({values}); say which with --{name}")
    return values[0]


def jobs(evaluation: Evaluation, size: int) -> Iterator[Job]:
    """What is still to be run, arm by arm, in groups that run side by side."""
    for arm in evaluation.lineup.arms:
        for policy_id in policy_ids(evaluation.manifest, arm.name):
            # A run seed keeps its env id, so that its host is the same in every arm.
            missing = [
                EpisodeSeed(env_id=number, episode=0, run_seed=run_seed)
                for number, run_seed in enumerate(evaluation.manifest.run_seeds)
                if (arm.name, policy_id, run_seed) not in evaluation.store.results
            ]
            for start in range(0, len(missing), size):
                yield Job(arm=arm, policy_id=policy_id, seeds=tuple(missing[start : start + size]))


def ended(manifest: Manifest) -> Manifest:
    """The manifest of a session that came to its end."""
    return replace(manifest, sessions=(*manifest.sessions[:-1], replace(manifest.sessions[-1], ended=now())))


def opened(manifest: Manifest, openings: int | None) -> Manifest:
    """The manifest of a session that has opened the test split."""
    last = replace(manifest.sessions[-1], opened_test=True)
    return replace(manifest, test_openings=openings, sessions=(*manifest.sessions[:-1], last))
