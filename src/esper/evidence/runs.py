"""Plays arms: which controller and which starting network a run gets, and what came of it.

All arms go through the same workers, step loop, masks and epochs. The test split is handed in.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from esper.evidence import limits
from esper.evidence.arms import BASELINE, GREEDY, SAMPLED, Arm, Lineup, get_arm
from esper.evidence.host_runs import HostRun, HostRunner, PlantedSeed, all_rows, score_committed, score_network
from esper.evidence.manifest import EvaluationManifest
from esper.evidence.outside import grow_with_gromo
from esper.evidence.results import CURVE_COLUMNS, OK, ResultStore, RunResult, Topology
from esper.evidence.static_networks import StaticNetwork, read_host, static_family, widened
from esper.leyline import EpisodeSeed, LifecycleOp, PolicyProtocol, record
from esper.runtime.data.splits import Dataset, Split
from esper.runtime.tasks import TaskSpec, count_host_params
from esper.simic.client import FrozenPolicy
from esper.simic.run.run_state import LoadedPolicy
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.random_controllers import RATED_OPS
from esper.tamiyo.schedule import ScheduleEntry, read_schedule
from esper.tamiyo.side_by_side import SideBySide
from esper.tolaria.kinds import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation, ready to run."""

    task: TaskSpec
    data: Dataset
    lineup: Lineup
    policies: Mapping[str, LoadedPolicy]
    """By id."""
    store: ResultStore
    """Where finished runs are; arms that depend on others look there."""
    manifest: EvaluationManifest
    """As it is at the start."""

    @property
    def backend(self) -> str:
        """What trains the hosts of all arms: native or torch."""
        return self.manifest.backend.partition(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """One run, with everything that is stored of it."""

    result: RunResult
    topology: Topology
    curve: pd.DataFrame


@record
class Job:
    """Runs of one arm under one policy, or none."""

    arm: Arm
    policy_id: str
    seeds: tuple[EpisodeSeed, ...]


class Arena(ExitStack):
    """Plays the jobs of an evaluation, used in a `with` block."""

    def __init__(self, evaluation: Evaluation, *, workers: Workers | int) -> None:
        super().__init__()
        self._evaluation = evaluation
        self._task = evaluation.task
        self._workers = workers
        self._runner: HostRunner | None = None
        self._static_for: tuple[str, str] | None = None
        """Arm and policy whose static networks the workers hold; None: bare hosts."""

    def check(self, arms: Sequence[Arm]) -> None:
        """Makes every fixed controller once, so that a wrong parameter shows before anything runs.

        Raises:
            ValueError: A parameter is unknown or out of range.
        """
        for arm in arms:
            if arm.budget is not None:
                self._plain_network(arm)
            elif not (arm.learned or arm.rebuilds or arm.needs_sampled or arm.replays or arm.outside):
                self._fixed(self._open(None), arm, 0)

    def play(self, job: Job, test: Split) -> Iterator[FinishedRun]:
        """Plays a job and scores its networks. What fails fails alone."""
        start = time.perf_counter()
        if job.arm.outside:
            yield from (self._outside(job, seed, test) for seed in job.seeds)
            return
        try:
            runs = self._play(job)
        except Exception as error:  # a run may fail in any way, and its pair must still be counted
            self.close()  # the next job gets fresh workers
            self._runner = None
            if len(job.seeds) > 1:
                for seed in job.seeds:
                    yield from self.play(replace(job, seeds=(seed,)), test)
                return
            yield self._lost(job, f"failed: {type(error).__name__}: {error}", time.perf_counter() - start)
            return
        wall_s = (time.perf_counter() - start) / len(runs)
        for run in runs:
            yield self._finish(job, run, test, wall_s)

    # ---- who plays

    def _play(self, job: Job) -> tuple[HostRun, ...]:
        runner = self._open((job.arm.name, job.policy_id) if job.arm.static else None)
        if job.arm.static:
            return runner.run(runner.controller(BASELINE), job.seeds)
        controllers = {seed.env_id: self._controller(runner, job, seed.run_seed) for seed in job.seeds}
        return runner.run(SideBySide(controllers), job.seeds)

    def _open(self, static_for: tuple[str, str] | None) -> HostRunner:
        """Workers for the jobs of one arm; those with bare hosts serve all arms that grow."""
        if self._runner is None or self._static_for != static_for:
            self.close()
            networks = None if static_for is None else self._networks(*static_for)
            runner = HostRunner(
                self._task,
                self._evaluation.data,
                workers=self._workers,
                networks=networks,
                backend=self._evaluation.backend,
            )
            self._runner, self._static_for = self.enter_context(runner), static_for
        return self._runner

    def _controller(self, runner: HostRunner, job: Job, run_seed: int) -> PolicyProtocol:
        if job.arm.learned:
            agent = self._evaluation.policies[job.policy_id].agent
            return FrozenPolicy(agent, run_seed=run_seed, greedy=job.arm.name == GREEDY)
        if job.arm.needs_sampled and job.policy_id:
            rates = realised_rates(self._evaluation.store, job.policy_id)
            return make_controller("rate_matched", runner.setting(run_seed), rates=rates)
        if job.arm.replays:
            entries = modal_schedule(self._evaluation.store, job.policy_id)
            return runner.controller("schedule", run_seed, entries=entries)
        return self._fixed(runner, job.arm, run_seed)

    def _fixed(self, runner: HostRunner, arm: Arm, run_seed: int) -> PolicyProtocol:
        params = self._evaluation.manifest.settings.get(arm.name, {})
        if arm.searched:
            return runner.controller("schedule", run_seed, entries=read_schedule(params["entries"]))
        return runner.controller(arm.name, run_seed, **params)

    def _plain_network(self, arm: Arm) -> StaticNetwork:
        """What was chosen on validation data; untuned, the host's own proportions."""
        assert arm.budget is not None
        chosen = self._evaluation.manifest.settings.get(arm.name)
        host = static_family(self._task, arm.budget)[0] if chosen is None else read_host(chosen["host"])
        return StaticNetwork(host=host, kept=())

    def _networks(self, arm: str, policy_id: str) -> dict[int, StaticNetwork]:
        """The starting network of every run seed; of those on which the subject has grown one if made after it."""
        store, subject = self._evaluation.store, self._evaluation.manifest.subject
        if get_arm(arm).budget is not None:
            return dict.fromkeys(self._evaluation.manifest.run_seeds, self._plain_network(get_arm(arm)))
        return {
            result.run_seed: StaticNetwork(host=widened(self._task, result.params), kept=())
            if arm == "static_wide"
            else StaticNetwork(host=self._task.host, kept=store.topologies[key].kept)
            for key, result in store.results.items()
            if (result.arm, result.policy_id) == (subject, policy_id)
        }

    # ---- what came of it

    def _finish(self, job: Job, run: HostRun, test: Split, wall_s: float) -> FinishedRun:
        loss, accuracy = score_committed(self._task, self._evaluation.data, run.model, test)
        val_loss, val_accuracy = run.committed_scores
        num_rollbacks = sum(report.rollback_reason is not None for report in run.reports)
        status = OK
        if not math.isfinite(loss) or not math.isfinite(val_loss):
            status = "failed: the network's output is not finite"
            loss, accuracy = val_loss, val_accuracy = self._guessing()
        elif num_rollbacks > limits.MAX_ROLLBACKS:
            status = f"failed: {num_rollbacks} rollbacks"
        sizes = [report.total_params for report in run.reports]
        return self._finished(
            _topology(job, run),
            _curve(job, run),
            status=status,
            test_accuracy_pct=accuracy,
            test_loss=loss,
            val_accuracy_pct=val_accuracy,
            val_loss=val_loss,
            host_params=run.reports[-1].host_params,
            params=run.reports[-1].committed_params,
            peak_params=max(sizes),
            param_epochs=sum(sizes),
            training_macs=run.training_macs,
            host_epochs=len(sizes),
            num_ops=run.num_ops,
            num_rollbacks=num_rollbacks,
            run_s=run.seconds,
            controller_s=run.controller_s,
            wall_s=wall_s,
        )

    def _outside(self, job: Job, seed: EpisodeSeed, test: Split) -> FinishedRun:
        """A run of another library, in this process."""
        start = time.perf_counter()
        task, data = self._task, self._evaluation.data
        try:
            run = grow_with_gromo(task, data, seed.run_seed)
        except Exception as error:  # as for other arms: its pair must still be counted
            status = f"failed: {type(error).__name__}: {error}"
            return self._lost(replace(job, seeds=(seed,)), status, time.perf_counter() - start)
        run_s = time.perf_counter() - start
        loss, accuracy = score_network(run.network, all_rows(task, data, test))
        key = (job.arm.name, job.policy_id, seed.run_seed)
        curve = [
            (*key, epoch, own_accuracy, own_loss, size)
            for epoch, ((own_loss, own_accuracy), size) in enumerate(zip(run.scores, run.params, strict=True), start=1)
        ]
        host = {"kind": "gromo mlp", "kwargs": {"hidden": [run.hidden]}}
        return self._finished(
            Topology(arm=key[0], policy_id=key[1], run_seed=key[2], host=host, kept=(), lives=()),
            pd.DataFrame(curve, columns=list(CURVE_COLUMNS)),
            status=OK,
            test_accuracy_pct=accuracy,
            test_loss=loss,
            val_accuracy_pct=run.scores[-1][1],
            val_loss=run.scores[-1][0],
            host_params=run.params[0],
            params=run.params[-1],
            peak_params=max(run.params),
            param_epochs=sum(run.params),
            training_macs=run.training_macs,
            host_epochs=len(run.params),
            num_ops=dict.fromkeys(LifecycleOp, 0),
            num_rollbacks=0,
            run_s=run_s,
            controller_s=0.0,
            wall_s=run_s,
        )

    def _lost(self, job: Job, status: str, wall_s: float) -> FinishedRun:
        """The row of a run that left no network: the scores of guessing, with the bare host."""
        (seed,) = job.seeds
        params = count_host_params(self._task)
        loss, accuracy = self._guessing()
        topology = Topology(
            arm=job.arm.name,
            policy_id=job.policy_id,
            run_seed=seed.run_seed,
            host=asdict(self._task.host),
            kept=(),
            lives=(),
        )
        return self._finished(
            topology,
            pd.DataFrame(columns=list(CURVE_COLUMNS)),
            status=" ".join(status.split()),
            test_accuracy_pct=accuracy,
            test_loss=loss,
            val_accuracy_pct=accuracy,
            val_loss=loss,
            host_params=params,
            params=params,
            peak_params=params,
            param_epochs=0,
            training_macs=0,
            host_epochs=0,
            num_ops=dict.fromkeys(LifecycleOp, 0),
            num_rollbacks=0,
            run_s=0.0,
            controller_s=0.0,
            wall_s=wall_s,
        )

    def _guessing(self) -> tuple[float, float]:
        """(loss, accuracy in percent) of guessing."""
        return self._task.chance_loss, 100.0 / self._task.num_classes

    def _finished(
        self, topology: Topology, curve: pd.DataFrame, *, num_ops: Mapping[LifecycleOp, int], **figures: Any
    ) -> FinishedRun:
        ops: dict[str, Any] = {f"num_{op.name.lower()}": num_ops[op] for op in LifecycleOp}
        result = RunResult(
            setup=self._evaluation.manifest.setup,
            arm=topology.arm,
            policy_id=topology.policy_id,
            run_seed=topology.run_seed,
            **ops,
            num_kept=len(topology.kept),
            topology_sha=topology.sha,
            **figures,
        )
        return FinishedRun(result=result, topology=topology, curve=curve)


def realised_rates(store: ResultStore, policy_id: str) -> dict[str, float]:
    """Mean ops per episode of the sampled policy, in the form `rate_matched` takes."""
    rows = [row for row in store.results.values() if row.arm == SAMPLED and row.policy_id == policy_id]
    assert rows, "the sampled policy runs before the arms that are matched to it"
    rates = {name: statistics.fmean(getattr(row, f"num_{name.lower()}") for row in rows) for name in RATED_OPS}
    # A rollback brings a seed back, which may then be advanced or end a second time.
    rates["ADVANCE"] = min(rates["ADVANCE"], rates["GERMINATE"])
    rates["FOSSILIZE"] = min(rates["FOSSILIZE"], rates["ADVANCE"])
    rates["PRUNE"] = min(rates["PRUNE"], rates["GERMINATE"] - rates["FOSSILIZE"])
    return rates


def modal_schedule(store: ResultStore, policy_id: str) -> tuple[ScheduleEntry, ...]:
    """The ops that the greedy policy took on most run seeds; among equals, where the validation score was best."""
    rows = [row for row in store.results.values() if row.arm == GREEDY and row.policy_id == policy_id]
    assert rows, "the greedy policy runs before its replay"
    taken = {row.key: ops_of(store.topologies[row.key].lives) for row in rows}
    count = Counter(taken.values())
    best = max(rows, key=lambda row: (count[taken[row.key]], row.val_accuracy_pct, -row.val_loss))
    return taken[best.key]


def ops_of(lives: Sequence[PlantedSeed]) -> tuple[ScheduleEntry, ...]:
    """The lives of seeds as a schedule that leads to them again."""
    entries = []
    for life in lives:
        moves = (
            (life.planted, LifecycleOp.GERMINATE),
            (life.blended, LifecycleOp.ADVANCE),
            (life.kept, LifecycleOp.FOSSILIZE),
            (life.pruned, LifecycleOp.PRUNE),
        )
        for epoch, op in moves:
            if epoch is not None:
                seed = (life.blueprint, life.blend) if op is LifecycleOp.GERMINATE else (None, None)
                entries.append(ScheduleEntry(epoch=epoch, op=op, slot=life.slot, blueprint=seed[0], blend=seed[1]))
    return tuple(sorted(entries, key=lambda entry: entry.epoch))


def _curve(job: Job, run: HostRun) -> pd.DataFrame:
    rows = [
        (job.arm.name, job.policy_id, run.run_seed, epoch, r.committed_accuracy_pct, r.committed_loss, r.total_params)
        for epoch, r in enumerate(run.reports, start=1)
        if r.committed_accuracy_pct is not None and r.committed_loss is not None
    ]
    return pd.DataFrame(rows, columns=list(CURVE_COLUMNS))


def _topology(job: Job, run: HostRun) -> Topology:
    return Topology(
        arm=job.arm.name,
        policy_id=job.policy_id,
        run_seed=run.run_seed,
        host=asdict(run.model.host.spec),
        kept=run.kept,
        lives=run.grown_seeds,
    )
