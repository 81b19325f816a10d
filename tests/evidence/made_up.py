"""Evaluations that never ran: rows with known effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from esper.evidence.arms import ARMS, line_up
from esper.evidence.host_runs import PlantedSeed
from esper.evidence.manifest import EVALUATION_FORMAT, CheckResult, EvaluationManifest, EvaluationSession
from esper.evidence.results import CURVE_COLUMNS, OK, ResultStore, RunResult, Topology
from esper.evidence.runs import Evaluation
from esper.evidence.static_networks import SeedChoice
from esper.evidence.summary import Summary, policy_ids, summarise
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import network_shape
from esper.simic.run.run_state import LoadedPolicy
from esper.simic.training.config import TrainingConfig

HOST = {"kind": "cnn", "kwargs": {"channels": [8, 8]}}
PASSED = CheckResult(name="planted", passed=True, found="good", limit="good")
POLICY = {"policy_id": "abc", "task": "digits_blind", "host epochs": 80}


def manifest(
    arms: Sequence[str], *, num_seeds: int = 20, subject: str = "ppo_greedy", **changes: object
) -> EvaluationManifest:
    """Of an evaluation in which everything was checked and was well."""
    plain = EvaluationManifest(
        schema_version=EVALUATION_FORMAT,
        setup="setup",
        code="code",
        task="digits_blind",
        description="made up",
        metric="accuracy",
        horizon=4,
        num_classes=10,
        budget=200,
        host_params=100,
        data="numbers",
        data_sha256="0" * 64,
        test_sha256="1" * 64,
        num_test=451,
        run_seeds=tuple(range(20_000, 20_000 + num_seeds)),
        arms=tuple(name for name in dict.fromkeys([*ARMS, *arms]) if name in arms),
        subject=subject,
        settings={},
        tuning=None,
        policies=(POLICY,) if subject == "ppo_greedy" else (),
        learning_checks=(PASSED,),
        controls=(PASSED,),
        notes=(),
        versions={"python": "3"},
        machine={"cores": 2},
        sessions=(EvaluationSession(argv=("esper", "evaluate"), started="then", ended="later", opened_test=True),),
        test_openings=1,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


MEANS = {"wait_only": 40.0, "schedule": 84.0, "static_final": 84.0, "static_200": 82.0}
FOUND = manifest(tuple(MEANS), subject="schedule", learning_checks=(), policies=())
"""Without a policy: what a schedule brings beside plain networks."""


def row(arm: str, run_seed: int, accuracy: float, policy_id: str = "", **changes: object) -> RunResult:
    plain = RunResult(
        setup="setup",
        arm=arm,
        policy_id=policy_id,
        run_seed=run_seed,
        status=OK,
        test_accuracy_pct=accuracy,
        test_loss=(100 - accuracy) / 40,
        val_accuracy_pct=accuracy,
        val_loss=(100 - accuracy) / 40,
        host_params=100,
        params=200 if arm.startswith(("ppo", "static")) else 100,
        peak_params=200,
        param_epochs=900 if arm.startswith("static") else 700,
        training_macs=9_000_000 if arm.startswith("static") else 7_000_000,
        host_epochs=4,
        num_wait=1,
        num_germinate=1,
        num_advance=1,
        num_prune=0,
        num_fossilize=1,
        num_kept=1,
        num_rollbacks=0,
        topology_sha="t",
        run_s=1.0,
        controller_s=0.1,
        wall_s=1.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def rows(
    found: EvaluationManifest, means: Mapping[str, float], *, noise: float = 0.4, seed: int = 0
) -> list[RunResult]:
    """Runs whose arms have these means; what a run seed does to all arms alike does not show in pairs."""
    rng = random.Random(seed)
    luck = {run_seed: rng.gauss(0, 2) for run_seed in found.run_seeds}
    return [
        row(arm, run_seed, means[arm] + luck[run_seed] + rng.gauss(0, noise), policy_id)
        for arm in found.arms
        for policy_id in policy_ids(found, arm)
        for run_seed in found.run_seeds
    ]


def untrained(
    name: str, blueprints: Sequence[str] = ("a", "b"), *, run_seed: int = 0, folder: Path = Path(), **config: Any
) -> LoadedPolicy:
    """A policy that nobody trained, of a run without a log."""
    return LoadedPolicy(
        agent=PPOAgent(network_shape(tuple(blueprints)), PPOConfig(), run_seed=run_seed),
        config=TrainingConfig(seed=run_seed, **config),
        checkpoint=folder / "checkpoints" / "none",
        run_id=name,
        rounds=0,
        host_epochs=0,
        training_s=0.0,
        policy_sha256=name,
    )


def summary(found: EvaluationManifest, made: Sequence[RunResult]) -> Summary:
    return summarise(found, pd.DataFrame([asdict(result) for result in made]))


def evaluation(task: TaskSpec, data: Dataset, folder: Path, settings: Mapping[str, Mapping[str, object]]) -> Evaluation:
    """One of fixed arms that nobody prepared."""
    return Evaluation(
        task=task,
        data=data,
        lineup=line_up(["all"], has_policy=False, subject="schedule", can_widen=False),
        policies={},
        store=ResultStore(folder),
        manifest=manifest(list(ARMS), subject="schedule", settings=settings),
    )


def write(
    folder: Path,
    found: EvaluationManifest,
    made: Sequence[RunResult],
    order: Callable[[list[RunResult]], None] = lambda r: None,
) -> None:
    """The files of an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder)
    store = ResultStore(folder)
    shuffled = list(made)
    order(shuffled)
    for result in shuffled:
        life = PlantedSeed(slot="r0c0", blueprint="cnn.conv", blend="linear", params=100, planted=0, blended=1, kept=2)
        grown = result.num_kept > 0
        topology = Topology(
            arm=result.arm,
            policy_id=result.policy_id,
            run_seed=result.run_seed,
            host=HOST,
            kept=(SeedChoice(slot="r0c0", blueprint="cnn.conv", blend="linear"),) if grown else (),
            lives=(life,) if grown else (),
        )
        curve = [
            (*result.key, epoch, result.val_accuracy_pct * epoch / found.horizon, result.val_loss, result.params)
            for epoch in range(1, found.horizon + 1)
        ]
        store.add(result, topology, pd.DataFrame(curve, columns=list(CURVE_COLUMNS)))
