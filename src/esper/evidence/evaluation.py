"""Runs a prepared evaluation. The only code that opens the test split.

Controls must come out right before anything else is believed. A/A: the same arm on the same run seed gives the same
bits. Frozen: playing leaves the policy as it was. Planted optimum and inert seeds: the agent, trained from scratch in
two small worlds, finds what is there and leaves alone what is not.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from esper.evidence import limits
from esper.evidence.arms import BASELINE, get_arm
from esper.evidence.manifest import CheckResult, EvaluationManifest, note_test_access, now
from esper.evidence.publication import Published, publish
from esper.evidence.results import RunResult
from esper.evidence.runs import Arena, Evaluation, Job
from esper.evidence.sandbox_training import run_sandbox
from esper.evidence.sandboxes import SANDBOXES
from esper.evidence.summary import policy_ids
from esper.leyline import EpisodeSeed
from esper.runtime.data.splits import Split
from esper.simic.agent.ppo import PPOAgent
from esper.simic.run.run_state import LoadedPolicy
from esper.tolaria.kinds import Workers

CONTROL_WORLDS: Mapping[str, str] = {"positive control (planted optimum)": "decoy", "negative control (inert)": "inert"}
TIMES = ("run_s", "controller_s", "wall_s")
OnRun = Callable[[str, int, RunResult | None], None]
"""Called with what is played now, how many runs there are to play, and a run when it has ended."""


def run_evaluation(
    evaluation: Evaluation,
    *,
    workers: Workers | int,
    on_run: OnRun = lambda name, total, result: None,
) -> Published:
    """Plays what is missing, and makes report and figures of all there is.

    Args:
        evaluation: As prepared; its folder may hold results of earlier sessions.
        workers: A number of processes, or workers of a kind.
        on_run: For progress.
    """
    play_missing(evaluation, workers=workers, on_run=on_run)
    folder = evaluation.store.folder
    return publish(folder, folder)


def play_missing(
    evaluation: Evaluation, *, workers: Workers | int, on_run: OnRun = lambda name, total, result: None
) -> None:
    """Plays what is missing and stores it beside the manifest; no report."""
    manifest, folder = evaluation.manifest, evaluation.store.folder
    with Arena(evaluation, workers=workers) as arena:
        arena.check(evaluation.lineup.arms)
        folder.mkdir(parents=True, exist_ok=True)
        manifest.save(folder)
        missing = list(missing_jobs(evaluation, 2 * Workers.of(workers).count))
        if missing or (_needs_controls(manifest) and not manifest.controls):
            manifest = _run(evaluation, arena, missing, on_run)
    _with_session(manifest, ended=now()).save(folder)


def missing_jobs(evaluation: Evaluation, size: int) -> Iterator[Job]:
    """What is still to be run, arm by arm, in groups of at most `size` that run side by side."""
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


def _run(evaluation: Evaluation, arena: Arena, missing: Sequence[Job], on_run: OnRun) -> EvaluationManifest:
    """Opens the test split and plays what is missing."""
    store, manifest = evaluation.store, evaluation.manifest
    digests = {policy_id: agent_digest(policy.agent) for policy_id, policy in evaluation.policies.items()}
    facts = {
        "task": evaluation.task.name,
        "test_sha256": evaluation.data.test_sha256,
        "code": manifest.code,
        "setup": manifest.setup,
        "policies": digests,
        "run_seeds": [manifest.run_seeds[0], manifest.run_seeds[-1]],
    }
    manifest = replace(_with_session(manifest, opened_test=True), test_openings=note_test_access(facts))
    test = evaluation.data.open_test()
    manifest.save(store.folder)
    total = sum(len(job.seeds) for job in missing)
    try:
        for job in missing:
            on_run(job.arm.name, total, None)
            for done in arena.play(job, test):
                store.add(done.result, done.topology, done.curve)
                on_run(job.arm.name, total, done.result)
        if not _needs_controls(manifest):
            return replace(manifest, controls=())
        on_run("controls", total, None)
        checks = [_repeat_one(evaluation, arena, test)]
        if evaluation.policies:
            checks += [still_frozen(digests, evaluation.policies), *world_controls()]
        return replace(manifest, controls=tuple(checks))
    except KeyboardInterrupt:
        count = len(store.results)
        sys.stderr.write(f"esper: {count} finished runs are in {store.folder}; the same command goes on there\n")
        raise


def _needs_controls(manifest: EvaluationManifest) -> bool:
    """True where there are enough runs for a claim."""
    return len(manifest.run_seeds) >= limits.MIN_SEEDS


def _repeat_one(evaluation: Evaluation, arena: Arena, test: Split) -> CheckResult:
    """Plays the subject's first run once more."""
    name = evaluation.lineup.subject if evaluation.lineup.subject in evaluation.lineup.names else BASELINE
    policy_id = policy_ids(evaluation.manifest, name)[0]
    seed = EpisodeSeed(env_id=0, episode=0, run_seed=evaluation.manifest.run_seeds[0])
    (again,) = arena.play(Job(arm=get_arm(name), policy_id=policy_id, seeds=(seed,)), test)
    return same_again(evaluation.store.results[name, policy_id, seed.run_seed], again.result)


def _with_session(manifest: EvaluationManifest, **changes: object) -> EvaluationManifest:
    """The manifest with other facts about the session that runs now."""
    *before, last = manifest.sessions
    return replace(manifest, sessions=(*before, replace(last, **changes)))  # type: ignore[arg-type]


# ---- controls


def agent_digest(agent: PPOAgent) -> str:
    """Sha256 over weights, normalisers and all other state. Playing must not change it."""
    total = hashlib.sha256()
    for name, content in sorted(agent.to_files().items()):
        total.update(name.encode() + hashlib.sha256(content).digest())
    return total.hexdigest()


def same_again(first: RunResult, again: RunResult) -> CheckResult:
    """A/A: every figure of a repeated run is the same, but for times."""
    names = [field.name for field in fields(RunResult) if field.name not in TIMES]
    other = [name for name in names if getattr(first, name) != getattr(again, name)]
    what = f"{first.arm}, run seed {first.run_seed}"
    found = f"{what}: identical" if not other else f"{what}: {', '.join(other)} differ"
    return CheckResult(name="A/A", passed=not other, found=found, limit="every figure identical")


def still_frozen(before: Mapping[str, str], policies: Mapping[str, LoadedPolicy]) -> CheckResult:
    """Weights, normalisers and counters of every policy are what they were."""
    moved = [policy_id for policy_id, policy in policies.items() if agent_digest(policy.agent) != before[policy_id]]
    found = "equal" if not moved else f"changed: {', '.join(moved)}"
    return CheckResult(name="policy frozen", passed=not moved, found=found, limit="equal hashes before and after")


def world_controls() -> list[CheckResult]:
    """Trains the agent in the two worlds. Takes a minute or two."""
    checks = []
    for name, world in CONTROL_WORLDS.items():
        (sandbox,) = (sandbox for sandbox in SANDBOXES if sandbox.name == world)
        result = run_sandbox(sandbox, run_seed=0)
        reached = "not measured" if result.reached is None else f"{result.reached:.3f}"
        limit = f"{'>=' if sandbox.higher_is_better else '<='} {sandbox.limit(result.optimum):.3f}"
        found = f"{sandbox.measured} {reached}"
        checks.append(CheckResult(name=name, passed=result.passed, found=found, limit=limit))
    return checks
