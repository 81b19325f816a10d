"""Evaluations that never ran: rows with known effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from esper.evidence.arms import ARMS
from esper.evidence.manifest import SCHEMA_VERSION, Check, Manifest, Session, write_manifest
from esper.evidence.results import OK, CurvePoint, KeptSeed, ResultStore, RunResult, SeedLife, Topology
from esper.evidence.summary import policy_ids

HOST = {"kind": "cnn", "kwargs": {"channels": [8, 8]}}
PASSED = Check(name="planted", passed=True, found="good", limit="good")
POLICY = {"policy_id": "abc", "task": "digits_blind"}


def manifest(arms: Sequence[str], *, num_seeds: int = 20, subject: str = "ppo_greedy", **changes: object) -> Manifest:
    """Of an evaluation in which everything was checked and was well."""
    plain = Manifest(
        schema_version=SCHEMA_VERSION,
        setup="setup",
        code="code",
        task="digits_blind",
        description="made up",
        metric="accuracy",
        horizon=4,
        num_classes=10,
        budget=None,
        host_params=100,
        data="numbers",
        data_sha256="0" * 64,
        test_sha256="1" * 64,
        num_test=451,
        run_seeds=tuple(range(20_000, 20_000 + num_seeds)),
        arms=tuple(name for name in ARMS if name in arms),
        subject=subject,
        settings={},
        tuning=None,
        policies=(POLICY,) if subject == "ppo_greedy" else (),
        gates=(PASSED,),
        controls=(PASSED,),
        notes=(),
        versions={"python": "3"},
        machine={"cores": 2},
        sessions=(Session(argv=("esper", "evaluate"), started="then", ended="later", opened_test=True),),
        test_openings=1,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


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


def rows(found: Manifest, means: Mapping[str, float], *, noise: float = 0.4, seed: int = 0) -> list[RunResult]:
    """Runs whose arms have these means; what a run seed does to all arms alike does not show in pairs."""
    chance = random.Random(seed)
    luck = {run_seed: chance.gauss(0, 2) for run_seed in found.run_seeds}
    return [
        row(arm, run_seed, means[arm] + luck[run_seed] + chance.gauss(0, noise), policy_id)
        for arm in found.arms
        for policy_id in policy_ids(found, arm)
        for run_seed in found.run_seeds
    ]


def write(
    folder: Path, found: Manifest, made: Sequence[RunResult], order: Callable[[list[RunResult]], None] = lambda r: None
) -> None:
    """The files of an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, found)
    store = ResultStore(folder)
    shuffled = list(made)
    order(shuffled)
    for result in shuffled:
        life = SeedLife(
            slot="r0c0", blueprint="cnn.conv", blend="linear", params=100, planted=1, blended=2, kept=3, pruned=None
        )
        grown = result.num_kept > 0
        topology = Topology(
            arm=result.arm,
            policy_id=result.policy_id,
            run_seed=result.run_seed,
            host=HOST,
            kept=(KeptSeed(slot="r0c0", blueprint="cnn.conv", blend="linear"),) if grown else (),
            lives=(life,) if grown else (),
        )
        curve = [
            CurvePoint(
                arm=result.arm,
                policy_id=result.policy_id,
                run_seed=result.run_seed,
                epoch=epoch,
                committed_accuracy_pct=result.val_accuracy_pct * epoch / found.horizon,
                committed_loss=result.val_loss,
                total_params=result.params,
            )
            for epoch in range(1, found.horizon + 1)
        ]
        store.add(result, topology, curve)
