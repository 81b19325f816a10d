"""Plays arms: which controller and which starting network a run gets, and what came of it.

All arms go through the same workers, step loop, masks and epochs. The test split is handed in by the command.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from esper.evidence.arms import BASELINE, GREEDY, SAMPLED, Arm
from esper.evidence.host_runs import HostRun, HostRunner, SideBySide, default_schedule, score_committed
from esper.evidence.policies import Policy
from esper.evidence.results import OK, CurvePoint, KeptSeed, ResultStore, RunResult, SeedLife, Topology
from esper.evidence.starts import Start, widened
from esper.leyline import (
    EpisodeSeed,
    LifecycleOp,
    PolicyProtocol,
    SeedEnded,
    SeedGerminated,
    SeedStage,
    SeedStageChanged,
    TelemetryEventType,
    record,
)
from esper.runtime.datasets import Dataset, Split
from esper.runtime.tasks import TaskSpec, count_host_params
from esper.tamiyo.controller import Setting
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.random_controllers import RATED_OPS

MAX_ROLLBACKS = 3
"""A run set back more often than this counts as failed; its network still counts."""

Settings = Mapping[str, Mapping[str, Any]]
"""Arm -> its parameters, where they are not the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One run, with everything that is kept of it."""

    result: RunResult
    topology: Topology
    curve: tuple[CurvePoint, ...]


@record
class Job:
    """Runs of one arm under one policy, or none."""

    arm: Arm
    policy_id: str
    seeds: tuple[EpisodeSeed, ...]


def fixed_controller(name: str, setting: Setting, horizon: int, params: Mapping[str, Any]) -> PolicyProtocol:
    """A controller that is not learned. The parameters of `schedule` are those of `default_schedule`."""
    if name == "schedule":
        return make_controller(name, setting, entries=default_schedule(setting, horizon, **params))
    return make_controller(name, setting, **params)


class Arena:
    """Plays jobs on the hosts of one task, used in a `with` block.

    Args:
        task: Host, optimizer, epochs, budget.
        data: Train and val are read.
        store: Where finished runs are; arms that depend on others look there.
        setup: Written into every row.
        subject: The arm whose networks static arms rebuild.
        policies: By id.
        settings: Parameters of fixed arms.
        workers: Processes.
    """

    def __init__(
        self,
        task: TaskSpec,
        data: Dataset,
        store: ResultStore,
        *,
        setup: str,
        subject: str,
        policies: Mapping[str, Policy],
        settings: Settings,
        workers: int,
    ) -> None:
        self._task = task
        self._data = data
        self._store = store
        self._setup = setup
        self._subject = subject
        self._policies = policies
        self._settings = settings
        self._workers = workers
        self._stack = ExitStack()
        self._runner: HostRunner | None = None
        self._started_for: tuple[str, str] | None = None
        """Arm and policy whose starting networks the workers hold; None: bare hosts."""

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def check(self, arms: Sequence[Arm]) -> None:
        """Makes every fixed controller once, so that a wrong parameter shows before anything runs.

        Raises:
            ValueError: A parameter is unknown or out of range.
        """
        for arm in arms:
            if not (arm.learned or arm.rebuilds or arm.needs_sampled):
                self._fixed(self._open(None), arm.name, 0)

    def play(self, job: Job, test: Split) -> Iterator[Finished]:
        """Plays a job and scores its networks. What fails fails alone."""
        start = time.perf_counter()
        try:
            runs = self._play(job)
        except Exception as error:  # a run may fail in any way, and its pair must still be counted
            self._close()  # the next job gets fresh workers
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
        runner = self._open((job.arm.name, job.policy_id) if job.arm.rebuilds else None)
        if job.arm.rebuilds:
            return runner.run(runner.controller(BASELINE), job.seeds)
        controllers = {seed.env_id: self._controller(runner, job, seed.run_seed) for seed in job.seeds}
        return runner.run(SideBySide(controllers), job.seeds)

    def _open(self, started_for: tuple[str, str] | None) -> HostRunner:
        """Workers for the jobs of one arm; those with bare hosts serve all arms that grow."""
        if self._runner is None or self._started_for != started_for:
            self._close()
            starts = None if started_for is None else self._starts(*started_for)
            runner = HostRunner(self._task, self._data, workers=self._workers, starts=starts)
            self._runner, self._started_for = self._stack.enter_context(runner), started_for
        return self._runner

    def _close(self) -> None:
        self._stack.close()
        self._runner = None

    def _controller(self, runner: HostRunner, job: Job, run_seed: int) -> PolicyProtocol:
        if job.arm.learned:
            policy = self._policies[job.policy_id]
            return policy.controller(
                runner.layout,
                self._task.lifecycle,
                self._task.num_classes,
                run_seed=run_seed,
                greedy=job.arm.name == GREEDY,
            )
        if job.arm.needs_sampled and job.policy_id:
            rates = realised_rates(self._store, job.policy_id)
            return make_controller("rate_matched", runner.setting(run_seed), rates=rates)
        return self._fixed(runner, job.arm.name, run_seed)

    def _fixed(self, runner: HostRunner, name: str, run_seed: int) -> PolicyProtocol:
        return fixed_controller(name, runner.setting(run_seed), self._task.horizon, self._settings.get(name, {}))

    def _starts(self, arm: str, policy_id: str) -> dict[int, Start]:
        """The starting network of every run seed on which the subject has grown one."""
        return {
            run_seed: Start(host=widened(self._task, result.params), kept=())
            if arm == "static_wide"
            else Start(host=self._task.host, kept=self._store.topologies[key].kept)
            for key, result in self._store.results.items()
            for name, policy, run_seed in [key]
            if (name, policy) == (self._subject, policy_id)
        }

    # ---- what came of it

    def _finish(self, job: Job, run: HostRun, test: Split, wall_s: float) -> Finished:
        loss, accuracy = score_committed(self._task, self._data, run.model, test)
        num_rollbacks = sum(report.rollback_reason is not None for report in run.reports)
        status = OK
        if not math.isfinite(loss):
            status = "failed: the network's output is not finite"
            loss, accuracy = self._task.chance_loss, 100.0 / self._task.num_classes
        elif num_rollbacks > MAX_ROLLBACKS:
            status = f"failed: {num_rollbacks} rollbacks"
        topology = _topology(job, run)
        last = run.reports[-1]
        assert last.committed_accuracy_pct is not None
        assert last.committed_loss is not None
        result = RunResult(
            setup=self._setup,
            arm=job.arm.name,
            policy_id=job.policy_id,
            run_seed=run.run_seed,
            status=status,
            test_accuracy_pct=accuracy,
            test_loss=loss,
            val_accuracy_pct=last.committed_accuracy_pct,
            val_loss=last.committed_loss,
            host_params=last.host_params,
            params=last.committed_params,
            peak_params=max(report.total_params for report in run.reports),
            param_epochs=sum(report.total_params for report in run.reports),
            host_epochs=len(run.reports),
            **{f"num_{op.name.lower()}": run.num_ops[op] for op in LifecycleOp},
            num_kept=len(topology.kept),
            num_rollbacks=num_rollbacks,
            topology_sha=topology.sha,
            run_s=sum(report.train_ms + report.val_ms for report in run.reports) / 1_000 + run.controller_s,
            controller_s=run.controller_s,
            wall_s=wall_s,
        )
        return Finished(result=result, topology=topology, curve=_curve(job, run))

    def _lost(self, job: Job, status: str, wall_s: float) -> Finished:
        """The row of a run that left no network: chance, with the bare host."""
        (seed,) = job.seeds
        params = count_host_params(self._task)
        topology = Topology(
            arm=job.arm.name,
            policy_id=job.policy_id,
            run_seed=seed.run_seed,
            host=asdict(self._task.host),
            kept=(),
            lives=(),
        )
        chance_pct = 100.0 / self._task.num_classes
        result = RunResult(
            setup=self._setup,
            arm=job.arm.name,
            policy_id=job.policy_id,
            run_seed=seed.run_seed,
            status=" ".join(status.split()),
            test_accuracy_pct=chance_pct,
            test_loss=self._task.chance_loss,
            val_accuracy_pct=chance_pct,
            val_loss=self._task.chance_loss,
            host_params=params,
            params=params,
            peak_params=params,
            param_epochs=0,
            host_epochs=0,
            **{f"num_{op.name.lower()}": 0 for op in LifecycleOp},
            num_kept=0,
            num_rollbacks=0,
            topology_sha=topology.sha,
            run_s=0.0,
            controller_s=0.0,
            wall_s=wall_s,
        )
        return Finished(result=result, topology=topology, curve=())


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


def _curve(job: Job, run: HostRun) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(
            arm=job.arm.name,
            policy_id=job.policy_id,
            run_seed=run.run_seed,
            epoch=number,
            committed_accuracy_pct=report.committed_accuracy_pct,
            committed_loss=report.committed_loss,
            total_params=report.total_params,
        )
        for number, report in enumerate(run.reports, start=1)
        if report.committed_accuracy_pct is not None and report.committed_loss is not None
    )


def _topology(job: Job, run: HostRun) -> Topology:
    kept = [slot for slot in run.model.all_slots() if slot.stage is SeedStage.FOSSILIZED]
    return Topology(
        arm=job.arm.name,
        policy_id=job.policy_id,
        run_seed=run.run_seed,
        host={"kind": run.model.host.spec.kind, "kwargs": dict(run.model.host.spec.kwargs)},
        kept=tuple(
            KeptSeed(slot=slot.spec.slot_id, blueprint=str(slot.blueprint), blend=slot.blend.name)
            for slot in kept
            if slot.blend is not None
        ),
        lives=_lives(run),
    )


def _lives(run: HostRun) -> tuple[SeedLife, ...]:
    """Every seed of a run, in the order of planting."""
    lives: dict[str, SeedLife] = {}
    for event in run.events:
        told, epoch = event.data, 0 if event.epoch is None else event.epoch + 1
        if isinstance(told, SeedGerminated):
            lives[told.seed_id] = SeedLife(
                slot=told.slot_id,
                blueprint=told.blueprint,
                blend=told.blend,
                params=told.params,
                planted=epoch,
                blended=None,
                kept=None,
                pruned=None,
            )
        elif isinstance(told, SeedEnded):
            kept = event.type is TelemetryEventType.SEED_FOSSILIZED
            life = lives[told.seed_id]
            lives[told.seed_id] = replace(life, kept=epoch) if kept else replace(life, pruned=epoch)
        elif isinstance(told, SeedStageChanged) and told.to_stage == SeedStage.BLENDING.name:
            lives[told.seed_id] = replace(lives[told.seed_id], blended=epoch)
    return tuple(lives.values())
