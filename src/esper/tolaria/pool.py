"""Many workers behind the calls of one: splits envs, merges answers, and survives the death of a worker.

Everything random is keyed, so a worker is rebuilt by replay: a new process that gets the episode's start and its specs
again arrives at the same bits. The pool does not know what a worker computes.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Any

from esper.leyline import (
    PROTOCOL_VERSION,
    ActionOutcome,
    ActionSpec,
    EnvSnapshot,
    EpisodeSeed,
    EpochReport,
    EventSink,
    FeatureContext,
    Severity,
    StepResult,
    TelemetryEventType,
    WorkerStateChanged,
    make_event,
)
from esper.tolaria.engine import not_applied
from esper.tolaria.handles import Handle
from esper.tolaria.kinds import find_worker_kind
from esper.tolaria.runtime import machine_facts
from esper.tolaria.worker import BuildWorker, Hello, PoolFailure, Progress, Request, StepCancelled, WorkerLost

_REPLAYED = ("reset", "restore", "step")
MAX_RESTARTS = 5
"""Workers that a run may lose; where there are more of them, as many as there are, since a machine takes all of its."""
MAX_LOST_SHARE = 0.10
"""Share of a round's envs that may be given up before the run stops."""


@dataclass(slots=True)
class _Member:
    """One worker, its envs, and what it takes to bring another worker to the same point."""

    handle: Handle
    env_ids: tuple[int, ...] = ()
    history: list[Request] = field(default_factory=list)
    """Reset or restore, then every step since."""
    reports: Mapping[int, EpochReport] = field(default_factory=dict)
    contexts: Mapping[int, FeatureContext] = field(default_factory=dict)
    abandoned: bool = False

    @property
    def working(self) -> bool:
        return bool(self.env_ids) and not self.abandoned


class EnginePool:
    """Workers of one kind. Use it in a `with` block, or call `close`.

    Args:
        build: Makes a worker from `spec`; importable by name.
        spec: Plain data.
        kind: A name in the table of worker kinds.
        workers: Their number; None leaves it to the kind. At most one per env is used.
        wanted: Events that steps are to report.
        sink: Gets an event when a worker is lost, comes back or is given up.
        options: What the kind wants to know besides, such as an address.

    Raises:
        PoolFailure: A worker did not come up.
        ValueError: The kind is unknown, or cannot have so many workers or these options.
    """

    def __init__(
        self,
        build: BuildWorker,
        spec: Any,
        *,
        kind: str = "inline",
        workers: int | None = None,
        wanted: frozenset[TelemetryEventType] = frozenset(),
        sink: EventSink | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        row, options = find_worker_kind(kind), {} if options is None else options
        if workers is not None and (workers < 1 or (workers > 1 and not row.several)):
            raise ValueError(f"workers must be {'at least ' if row.several else ''}1 for kind {kind!r}, got {workers}")
        if unknown := sorted(set(options) - set(row.options)):
            raise ValueError(
                f"worker kind {kind!r} has no options {', '.join(unknown)}. Known: {', '.join(row.options) or 'none'}"
            )
        self.kind = kind
        self.wanted = wanted
        self.gradient_detail_envs: frozenset[int] = frozenset()
        """Envs whose gradients steps are to describe tensor by tensor."""
        self.num_restarts = 0
        self.num_abandoned = 0
        """Envs given up."""
        self._odd_machines: set[str] = set()
        self._sink = sink
        self._interrupted = False
        self._cancelled = False
        self._next_id = 0
        self._resources = ExitStack()
        handles = self._resources.enter_context(row.opener()(build, spec, workers, **options))
        self._members = [_Member(handle) for handle in handles]
        self.hellos = self._start_all()
        self.tasks = self.hellos[0].contexts
        """What the workers were made for, by the names of the tasks."""

    def _start_all(self) -> tuple[Hello, ...]:
        handles = [member.handle for member in self._members]
        try:
            for handle in handles:
                handle.launch()
            hellos = tuple(handle.greet() for handle in handles)
        except WorkerLost as lost:
            self.close()
            killed = lost.exit_code is not None and lost.exit_code < 0
            remedy = (
                "something ended it, often for lack of memory; use fewer workers"
                if killed
                else "call training under `if __name__ == '__main__':` or use inline workers"
            )
            raise PoolFailure(f"{lost} before its first message; {remedy}") from None
        except BaseException:
            self.close()
            raise
        cores, processes = set().union(*(hello.cores for hello in hellos)), {hello.pid for hello in hellos}
        # Elsewhere nothing follows from equal numbers: the first core of every machine is 0.
        if find_worker_kind(self.kind).shares_files and cores and len(cores) < len(processes):
            sys.stderr.write(f"esper: {len(processes)} workers share {len(cores)} cores; check the CPU affinity\n")
        for hello in hellos:
            self._compare_machine(hello)
        return hellos

    @property
    def context(self) -> FeatureContext:
        """What all hosts look like to a controller.

        Raises:
            ValueError: There are several tasks, so every env has its own.
        """
        if len(self.tasks) != 1:
            raise ValueError(f"this pool has several tasks ({', '.join(self.tasks)}); ask the state of each env")
        return next(iter(self.tasks.values()))

    def _compare_machine(self, hello: Hello) -> None:
        """Warns, once, of each way in which a worker's machine computes otherwise than this one."""
        here = machine_facts()
        there = {key: hello.machine.get(key, "unknown") for key in here}  # another version may say less
        odd = "; ".join(f"{key} {there[key]}, here {here[key]}" for key in here if there[key] != here[key])
        if odd and odd not in self._odd_machines:
            self._odd_machines.add(odd)
            sys.stderr.write(f"esper: workers run on machines of another kind ({odd}): other machines, other bits\n")

    @property
    def bitwise(self) -> bool:
        """Whether all that this pool has returned is, to the bit, what any other would have returned."""
        return not self.num_abandoned and not self._odd_machines

    # ---- the calls of a worker

    @property
    def protocol_version(self) -> int:
        """Version of the records that the calls carry."""
        return PROTOCOL_VERSION

    def reset(self, seeds: Sequence[EpisodeSeed]) -> StepResult:
        """Starts one episode per seed, split over the workers in contiguous ranges."""
        seeds = sorted(seeds, key=lambda seed: seed.env_id)
        if len({seed.env_id for seed in seeds}) != len(seeds):
            raise ValueError(f"an env is listed twice: {[seed.env_id for seed in seeds]}")
        self._revive()
        for member, part in zip(self._members, split_evenly(seeds, len(self._members)), strict=True):
            member.env_ids = tuple(seed.env_id for seed in part)
            member.history, member.reports, member.contexts = [], {}, {}
        busy = sum(bool(member.env_ids) for member in self._members)
        if busy > 1 and len(seeds) % busy:
            warnings.warn(
                f"{len(seeds)} envs on {busy} workers: steps wait for the fullest worker; use a multiple of {busy}",
                stacklevel=2,
            )
        chosen = {seed.env_id: seed for seed in seeds}
        return self._everywhere("reset", lambda member: (tuple(chosen[i] for i in member.env_ids),))

    def step(self, specs: Sequence[ActionSpec], wanted: frozenset[TelemetryEventType] | None = None) -> StepResult:
        """One op and one epoch in every env. Envs that were given up stay as they were last seen.

        Args:
            specs: One per env.
            wanted: Events to report in this step; those of the pool if None.
        """
        by_env = {spec.env_id: spec for spec in specs}
        if len(by_env) != len(specs) or set(by_env) != set(self.env_ids):
            raise ValueError(f"expected one spec for each of the envs {self.env_ids}, got specs for {list(by_env)}")
        events = self.wanted if wanted is None else wanted
        detailed = self.gradient_detail_envs
        result = self._everywhere("step", lambda member: (tuple(by_env[i] for i in member.env_ids), events, detailed))
        return self._with_lost(result, by_env)

    def snapshot(self) -> Mapping[int, EnvSnapshot]:
        """Whole envs by env id, those of lost workers excepted."""
        answers = self._ask("snapshot", lambda member: ())
        return {env_id: packed for answer in answers.values() for env_id, packed in sorted(answer.items())}

    def restore(self, snapshots: Mapping[int, EnvSnapshot]) -> None:
        """Continues from snapshots, split over the workers anew."""
        self._revive()
        for member, part in zip(self._members, split_evenly(sorted(snapshots), len(self._members)), strict=True):
            member.env_ids, member.history, member.reports, member.contexts = tuple(part), [], {}, {}
        found = self._ask("restore", lambda member: ({env_id: snapshots[env_id] for env_id in member.env_ids},))
        for index, contexts in found.items():
            self._members[index].contexts = contexts

    def ask_all(self, call: str, *arguments: Any) -> tuple[Any, ...]:
        """Asks every worker that has envs for something beyond the four calls; for measuring and diagnosis.

        It is no part of an episode: a worker that is rebuilt does not hear of it again.
        """
        return tuple(self._ask(call, lambda member: arguments).values())

    # ---- the life of the pool

    @property
    def env_ids(self) -> tuple[int, ...]:
        """All envs of the round, lost ones included."""
        return tuple(env_id for member in self._members for env_id in member.env_ids)

    @property
    def lost_envs(self) -> frozenset[int]:
        """Envs whose episode of this round was given up with their worker."""
        return frozenset(env_id for member in self._members if member.abandoned for env_id in member.env_ids)

    def progress(self) -> tuple[Progress, ...]:
        """Where the workers are; may be asked while another thread steps."""
        return tuple(member.handle.progress(member.env_ids) for member in self._members if member.working)

    def cancel(self) -> None:
        """Makes the running step, or the next one, stop and raise StepCancelled. Safe in a signal handler."""
        self._cancelled = True
        for member in self._members:
            member.handle.cancel()

    def close(self) -> None:
        """Ends all workers, in the middle of a step if need be."""
        self.cancel()
        for member in self._members:
            member.handle.close()
        self._resources.close()
        self._interrupted = True

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- asking all workers

    def _everywhere(self, call: str, arguments: Callable[[_Member], tuple[Any, ...]]) -> StepResult:
        outcomes: dict[int, ActionOutcome] = {}
        reports: dict[int, EpochReport] = {}
        for index, answer in self._ask(call, arguments).items():
            member = self._members[index]
            member.reports, member.contexts = answer.reports, answer.contexts or member.contexts
            outcomes.update(answer.outcomes)
            reports.update(answer.reports)
        return self._result(outcomes, reports)

    def _result(self, outcomes: Mapping[int, ActionOutcome], reports: Mapping[int, EpochReport]) -> StepResult:
        contexts = {env_id: context for member in self._members for env_id, context in member.contexts.items()}
        return StepResult(protocol_version=PROTOCOL_VERSION, outcomes=outcomes, reports=reports, contexts=contexts)

    def _ask(self, call: str, arguments: Callable[[_Member], tuple[Any, ...]]) -> dict[int, Any]:
        """Sends one call to every working member, then collects; answers by member, in env order."""
        if self._interrupted:
            raise RuntimeError("this pool was closed or interrupted in the middle of a step; make a new one")
        if self._cancelled and call in _REPLAYED:
            raise StepCancelled("the run is stopping")
        self._next_id += 1
        self._interrupted = True  # until every answer is in, the pipes hold something nobody asked for
        asked = []
        for index, member in enumerate(self._members):
            if member.working:
                request = Request(request_id=self._next_id, call=call, arguments=arguments(member))
                lost = None
                try:
                    member.handle.send(request)
                except WorkerLost as error:
                    lost = error
                asked.append((index, member, request, lost))
        answers = {}
        for index, member, request, lost in asked:
            answer = self._collect(member, request, lost)
            if not member.abandoned:
                answers[index] = answer
                if call in _REPLAYED:
                    member.history.append(request)
        self._interrupted = False
        return answers

    def _collect(self, member: _Member, request: Request, lost: WorkerLost | None) -> Any:
        """The answer of a member; a lost worker is replaced once, then given up."""
        if lost is None:
            try:
                return member.handle.receive(request)
            except WorkerLost as error:
                lost = error
        if self._cancelled:
            # What stops the run may have reached the worker too: a terminal or a scheduler signals the whole group.
            raise StepCancelled("the run is stopping")
        started = time.monotonic()
        self._emit(member, "lost", lost, 0, 0.0)
        self.num_restarts += 1
        if self.num_restarts > (limit := max(MAX_RESTARTS, len(self._members))):
            raise PoolFailure(
                f"{lost}. Workers were lost {self.num_restarts} times in this run, the limit is {limit}; "
                "look for memory limits or a crashing library"
            )
        try:
            self._compare_machine(member.handle.start())
            for past in member.history:
                member.handle.send(past)
                member.handle.receive(past)
            member.handle.send(request)
            answer = member.handle.receive(request)
        except WorkerLost as again:
            self._abandon(member, again)
            return None
        epochs = sum(past.call == "step" for past in member.history)
        self._emit(member, "recovered", lost, epochs, (time.monotonic() - started) * 1e3)
        return answer

    # ---- losing workers

    def _abandon(self, member: _Member, lost: WorkerLost) -> None:
        member.abandoned = True
        self.num_abandoned += len(member.env_ids)
        self._emit(member, "abandoned", lost, 0, 0.0)
        share = len(self.lost_envs) / len(self.env_ids)
        if not member.reports or share > MAX_LOST_SHARE:
            raise PoolFailure(
                f"{lost}, twice at the same step. {share:.0%} of the envs of this round are lost, "
                f"the limit is {MAX_LOST_SHARE:.0%}; look for memory limits or a crashing library"
            )

    def _revive(self) -> None:
        """Gives members that were given up a fresh worker for the next round."""
        for member in self._members:
            if member.abandoned:
                try:
                    self._compare_machine(member.handle.start())
                except WorkerLost as lost:
                    raise PoolFailure(f"{lost} when it was started again") from None
                member.abandoned = False

    def _with_lost(self, result: StepResult, specs: Mapping[int, ActionSpec]) -> StepResult:
        """Adds envs that were given up: nothing applied, their last report, over."""
        if not self.lost_envs:
            return result
        outcomes, reports = dict(result.outcomes), dict(result.reports)
        for member in self._members:
            if member.abandoned:
                for env_id in member.env_ids:
                    outcomes[env_id] = not_applied(specs[env_id])
                    reports[env_id] = replace(member.reports[env_id], terminal=True, events=())
        return self._result(outcomes, dict(sorted(reports.items())))

    def _emit(self, member: _Member, state: str, lost: WorkerLost, epochs: int, downtime_ms: float) -> None:
        if self._sink is None:
            return
        payload = WorkerStateChanged(
            worker_id=member.handle.worker_id,
            kind=self.kind,
            state=state,
            env_ids=member.env_ids,
            exit_code=lost.exit_code,
            error=str(lost),
            num_epochs_replayed=epochs,
            downtime_ms=downtime_ms,
        )
        severity = Severity.ERROR if state == "abandoned" else Severity.WARNING
        self._sink.emit(make_event(TelemetryEventType.WORKER_STATE_CHANGED, payload, severity))


def split_evenly(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Contiguous ranges whose lengths differ by at most one, longer ones first."""
    size, extra = divmod(len(items), parts)
    bounds = [0]
    for index in range(parts):
        bounds.append(bounds[-1] + size + (index < extra))
    return [items[a:b] for a, b in pairwise(bounds)]
