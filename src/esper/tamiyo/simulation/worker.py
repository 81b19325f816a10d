"""Simulated envs behind the four calls of a worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from esper.leyline import (
    PROTOCOL_VERSION,
    ActionOutcome,
    ActionSpec,
    EnvSnapshot,
    EpisodeSeed,
    FeatureContext,
    LifecycleOp,
    StepResult,
    TelemetryEventType,
    check_known,
)
from esper.tamiyo.simulation.env import SimulatedEnv
from esper.tamiyo.simulation.world import SimulationSpec

SNAPSHOT_VERSION = 2
SILENT: frozenset[TelemetryEventType] = frozenset()


class SimulatedWorker:
    """A `Worker` whose hosts are formulas. Equal seeds and specs give equal bits.

    Args:
        worlds: One world, or several of different names.
        beat: Called with every step, which has one batch; may raise to stop it.
    """

    protocol_version = PROTOCOL_VERSION

    def __init__(
        self,
        worlds: SimulationSpec | Sequence[SimulationSpec],
        beat: Callable[[int | None, int], None] = lambda epoch, batch: None,
    ) -> None:
        listed = (worlds,) if isinstance(worlds, SimulationSpec) else worlds
        self._worlds = {world.name: world for world in listed}
        self.contexts = {world.name: world.context for world in listed}
        self._beat = beat
        self._envs: dict[int, SimulatedEnv] = {}
        self._taken: dict[int, list[ActionSpec]] = {}

    def reset(self, seeds: Sequence[EpisodeSeed]) -> StepResult:
        """Starts one episode per seed."""
        self._envs = {seed.env_id: self._start(seed) for seed in seeds}
        self._taken = {seed.env_id: [] for seed in seeds}
        return self._result({})

    def step(
        self,
        specs: Sequence[ActionSpec],
        wanted: frozenset[TelemetryEventType] = SILENT,
        gradient_detail_envs: frozenset[int] = frozenset(),
    ) -> StepResult:
        """One step of every env. Takes exactly one spec per env, in any order. There are no gradients to look at."""
        if sorted(spec.env_id for spec in specs) != sorted(self._envs):
            given = sorted(spec.env_id for spec in specs)
            raise ValueError(f"expected one spec for each of the envs {sorted(self._envs)}, got {given}")
        outcomes = {}
        self._beat(max((len(taken) for taken in self._taken.values()), default=None), 0)
        for spec in specs:
            outcomes[spec.env_id] = self._envs[spec.env_id].step(spec, wanted)
            self._taken[spec.env_id].append(spec)
        return self._result(outcomes)

    def snapshot(self) -> Mapping[int, EnvSnapshot]:
        """The seed of each episode and its actions so far: all that is needed to replay it."""
        facts = {
            env_id: {"seed": asdict(env.seed), "taken": [asdict(spec) for spec in self._taken[env_id]]}
            for env_id, env in self._envs.items()
        }
        return {
            env_id: EnvSnapshot(version=SNAPSHOT_VERSION, env_id=env_id, meta_json=json.dumps(meta), tensors=b"")
            for env_id, meta in facts.items()
        }

    def restore(self, snapshots: Mapping[int, EnvSnapshot]) -> Mapping[int, FeatureContext]:
        """Replays the recorded episodes up to where they were saved, in place of those that are here."""
        self._envs, self._taken = {}, {}
        for env_id, snapshot in snapshots.items():
            if snapshot.version != SNAPSHOT_VERSION:
                raise ValueError(f"expected a snapshot of version {SNAPSHOT_VERSION}, got {snapshot.version}")
            meta = json.loads(snapshot.meta_json)
            self._envs[env_id] = env = self._start(EpisodeSeed(**meta["seed"]))
            self._taken[env_id] = [ActionSpec(**{**entry, "op": LifecycleOp(entry["op"])}) for entry in meta["taken"]]
            for spec in self._taken[env_id]:
                env.step(spec, SILENT)
        return self._contexts()

    def _start(self, seed: EpisodeSeed) -> SimulatedEnv:
        name = seed.task_among(self._worlds)
        check_known("simulated task", name, self._worlds)
        return SimulatedEnv(self._worlds[name], self.contexts[name].layout, seed)

    def _contexts(self) -> dict[int, FeatureContext]:
        return {env_id: self.contexts[env.spec.name] for env_id, env in sorted(self._envs.items())}

    def _result(self, outcomes: Mapping[int, ActionOutcome]) -> StepResult:
        reports = {env_id: env.report for env_id, env in sorted(self._envs.items())}
        return StepResult(
            protocol_version=PROTOCOL_VERSION, outcomes=outcomes, reports=reports, contexts=self._contexts()
        )
