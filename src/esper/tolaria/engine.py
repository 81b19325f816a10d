"""The engine: trains many hosts side by side in one process. It knows no rewards, no policies and no seeds.

What happens to a host is handed in as `EnvOps`; the engine decides when it happens and on which data. How an epoch is
computed is the business of an `Executor`. One step: ops, one epoch of training, one validation, one read of what was
measured, verdicts, reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from esper.leyline import (
    PROTOCOL_VERSION,
    ActionOutcome,
    ActionSpec,
    EnvSnapshot,
    EpisodeSeed,
    EpochReport,
    FeatureContext,
    GovernorState,
    StepResult,
    TelemetryEventType,
)
from esper.tolaria.batches import Batch, SharedBatchIterator
from esper.tolaria.governor import TolariaGovernor, Verdict
from esper.tolaria.runtime import Placement, join_streams, make_placement, one_thread

Beat = Callable[[int | None, int], None]
"""Called with (epoch, batch) once per batch. May raise to stop the step."""
Batches = Iterator[Mapping[torch.device, Batch]]
"""One pass over the rows. A batch is gathered, on every device, when it is drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskRows:
    """The rows of a task, on every device of a worker. Envs that hold the same object are to see the same batches."""

    train: tuple[SharedBatchIterator, ...]
    val: tuple[SharedBatchIterator, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class EngineEnv(ABC):
    """What the engine asks of an env. `epoch` is None until the first step."""

    seed: EpisodeSeed
    context: FeatureContext
    rows: TaskRows
    placement: Placement
    governor: TolariaGovernor
    epoch: int | None = None
    terminal: bool = False
    gradient_detail: bool = False
    """Whether the gradients of this step are to be described tensor by tensor."""

    @property
    def env_id(self) -> int:
        """Its name among all envs of a round."""
        return self.seed.env_id

    @property
    def episode(self) -> int:
        """Which episode this is."""
        return self.seed.episode

    @abstractmethod
    def begin_training(self) -> None:
        """Before the first batch of an epoch."""

    @abstractmethod
    def begin_validation(self) -> None:
        """Before the first validation batch."""

    @abstractmethod
    def numbers(self) -> Tensor:
        """All that the pass measured, in one row of float64, still on the device: the engine reads it with the others.

        The length may differ from env to env and from step to step.
        """

    @abstractmethod
    def judge(self, values: Sequence[float]) -> Verdict:
        """Takes the numbers back, read, and says what the governor thinks."""

    @abstractmethod
    def keep(self) -> None:
        """Remembers this state."""

    @abstractmethod
    def roll_back(self, verdict: Verdict) -> int | None:
        """Returns to the remembered state and says which epoch that was."""

    @abstractmethod
    def pack(self) -> EnvSnapshot:
        """The whole env as bytes."""

    @abstractmethod
    def unpack(self, snapshot: EnvSnapshot) -> None:
        """Continues a packed env."""


EnvT = TypeVar("EnvT", bound=EngineEnv)
RunT = TypeVar("RunT", bound=EngineEnv, contravariant=True)


class Executor(Protocol[RunT]):
    """One way to compute an epoch. Results are sums, added to the totals of each env; nothing is read from a device.

    The result of an env must not depend on the envs that run beside it.
    """

    def supports(self, env: RunT) -> bool:
        """True if this env, as it is now, can be trained and validated here. Asked before every pass."""

    def train(self, envs: Sequence[RunT], batches: Batches) -> None:
        """One epoch of envs that are all to see these batches. They have begun to train."""

    def validate(self, envs: Sequence[RunT], batches: Batches) -> None:
        """One validation. They have begun to validate, and the batches are the same in every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOps(Generic[EnvT]):
    """What is done to envs, as functions."""

    create: Callable[[EpisodeSeed, Placement], EnvT]
    apply: Callable[[EnvT, ActionSpec, frozenset[TelemetryEventType]], ActionOutcome]
    executors: Sequence[Executor[EnvT]]
    """The ways to run an epoch. The first that supports an env runs it; the last supports every env."""
    report: Callable[[EnvT, Verdict | None, int | None], EpochReport]
    """With the verdict of a finished epoch and where a rollback went; without a verdict, once more as it was."""
    seed_of: Callable[[EnvSnapshot], EpisodeSeed]
    """Which episode a snapshot belongs to."""


class VectorizedEngine(Generic[EnvT]):
    """A worker in this process.

    Args:
        ops: What is done to envs.
        contexts: The tasks it is made for.
        devices: Env i sits on device i modulo their number.
        amp: One of AMP_CHOICES.
        beat: Called once per batch.
    """

    protocol_version = PROTOCOL_VERSION

    def __init__(
        self,
        ops: EnvOps[EnvT],
        contexts: Mapping[str, FeatureContext],
        *,
        devices: Sequence[torch.device] = (torch.device("cpu"),),
        amp: str = "off",
        beat: Beat = lambda epoch, batch: None,
    ) -> None:
        self.contexts = contexts
        self.devices = tuple(devices)
        self.envs: dict[int, EnvT] = {}
        self._ops = ops
        self._amp = amp
        self._beat = beat
        self._placements: dict[int, Placement] = {}

    # ---- the four calls of a worker

    def reset(self, seeds: Sequence[EpisodeSeed]) -> StepResult:
        """Builds fresh hosts, validates them untrained and reports."""
        with one_thread():
            self.envs = {seed.env_id: self._create(seed) for seed in seeds}
            envs = list(self.envs.values())
            self._validate(envs)
            return self._finish(envs, {})

    def step(
        self,
        specs: Sequence[ActionSpec],
        wanted: frozenset[TelemetryEventType] = frozenset(),
        gradient_detail_envs: frozenset[int] = frozenset(),
    ) -> StepResult:
        """One op and one epoch in every env. Envs whose episode is over sit still.

        Raises:
            ValueError: There is not exactly one spec per env.
            IllegalOperation: An op's gate is closed.
        """
        by_env = {spec.env_id: spec for spec in specs}
        if len(by_env) != len(specs) or by_env.keys() != self.envs.keys():
            given = [spec.env_id for spec in specs]
            raise ValueError(f"expected one spec for each of the envs {sorted(self.envs)}, got specs for {given}")
        with one_thread():
            outcomes = {env_id: not_applied(by_env[env_id]) for env_id, env in self.envs.items() if env.terminal}
            envs = [env for env in self.envs.values() if not env.terminal]
            for env in envs:
                env.epoch = 0 if env.epoch is None else env.epoch + 1
                env.gradient_detail = env.env_id in gradient_detail_envs
                with env.placement.running():
                    outcomes[env.env_id] = self._ops.apply(env, by_env[env.env_id], wanted)
            self._train(envs)
            self._validate(envs)
            return self._finish(envs, outcomes)

    def snapshot(self) -> Mapping[int, EnvSnapshot]:
        """Whole envs by env id."""
        return {env_id: env.pack() for env_id, env in self.envs.items()}

    def restore(self, snapshots: Mapping[int, EnvSnapshot]) -> Mapping[int, FeatureContext]:
        """Continues packed envs, in place of those that are here."""
        with one_thread():
            envs = {}
            for env_id, snapshot in sorted(snapshots.items()):
                envs[env_id] = self._create(self._ops.seed_of(snapshot))
                envs[env_id].unpack(snapshot)
            self.envs = envs
            return self._contexts()

    def _contexts(self) -> dict[int, FeatureContext]:
        return {env_id: env.context for env_id, env in self.envs.items()}

    # ---- the phases of a step

    def _create(self, seed: EpisodeSeed) -> EnvT:
        if seed.env_id not in self._placements:
            self._placements[seed.env_id] = make_placement(self.devices[seed.env_id % len(self.devices)], self._amp)
        placement = self._placements[seed.env_id]
        placement.new_episode()
        with placement.running():
            return self._ops.create(seed, placement)

    def _train(self, envs: Sequence[EnvT]) -> None:
        """One epoch, with one pass over the batches for all envs that are to see the same ones."""
        for env in envs:
            with env.placement.running():
                env.begin_training()
        groups: dict[tuple[Executor[EnvT], TaskRows, int, int, int], list[EnvT]] = {}
        for env in envs:
            assert env.epoch is not None
            key = (self._executor(env), env.rows, env.seed.run_seed, env.episode, env.epoch)
            groups.setdefault(key, []).append(env)
        for (executor, rows, run_seed, episode, epoch), group in groups.items():
            streams = [here.keyed(run_seed).epoch(episode, epoch) for here in rows.train]
            executor.train(group, self._batches(streams, epoch))

    def _validate(self, envs: Sequence[EnvT]) -> None:
        for env in envs:
            with env.placement.running():
                env.begin_validation()
        groups: dict[tuple[Executor[EnvT], TaskRows], list[EnvT]] = {}
        for env in envs:
            groups.setdefault((self._executor(env), env.rows), []).append(env)
        for (executor, rows), group in groups.items():
            executor.validate(group, self._batches([here.in_order() for here in rows.val], group[0].epoch))

    def _executor(self, env: EnvT) -> Executor[EnvT]:
        return next(executor for executor in self._ops.executors if executor.supports(env))

    def _batches(self, streams: Sequence[Iterator[Batch]], epoch: int | None) -> Batches:
        """Equal batches of all devices side by side; every one is a sign of life."""
        for batches in zip(*streams, strict=True):
            self._beat(epoch, batches[0].index)
            yield dict(zip(self.devices, batches, strict=True))

    def _finish(self, envs: Sequence[EnvT], outcomes: Mapping[int, ActionOutcome]) -> StepResult:
        """Verdicts, rollbacks and reports, from one read of all numbers."""
        reports = {}
        for env, values in zip(envs, self._read(envs), strict=True):
            with env.placement.running():
                verdict = env.judge(values)
                restored = env.roll_back(verdict) if verdict.state is GovernorState.PANIC else None
                reports[env.env_id] = self._ops.report(env, verdict, restored)
                if env.epoch is None or env.governor.snapshot_due(verdict):
                    env.keep()
        for env_id, env in self.envs.items():
            if env_id not in reports:
                reports[env_id] = self._ops.report(env, None, None)
        return StepResult(
            protocol_version=PROTOCOL_VERSION,
            outcomes=outcomes,
            reports=dict(sorted(reports.items())),
            contexts=self._contexts(),
        )

    def _read(self, envs: Sequence[EnvT]) -> list[list[float]]:
        """What all envs measured, with one transfer per device."""
        rows: dict[torch.device, dict[int, Tensor]] = {device: {} for device in self.devices}
        for env in envs:
            with env.placement.running():
                rows[env.placement.device][env.env_id] = env.numbers()
        join_streams(env.placement for env in envs)
        values: dict[int, list[float]] = {}
        for here in rows.values():
            if here:
                together = iter(torch.cat([*here.values()]).tolist())  # sync: the one read of the step
                values |= {env_id: list(islice(together, len(row))) for env_id, row in here.items()}
        return [values[env.env_id] for env in envs]


def not_applied(spec: ActionSpec) -> ActionOutcome:
    """The outcome of a spec for an env whose episode is over."""
    return ActionOutcome(env_id=spec.env_id, op=spec.op, slot=spec.slot, applied=False)
