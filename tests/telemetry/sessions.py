"""Tiny runs through the real session, and the scenarios that make every type of event happen in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from esper.karn.replay import replay
from esper.leyline import ActionSpec, LifecycleOp, LoggedEvent, wait
from esper.nissa import HubLimits
from esper.simic.client import SimicClient
from esper.simic.rewards import suspicion
from esper.simic.run.session import RunStart, Session, start_again, start_new
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from tests.nissa.events import make_strict
from tests.simic.training.runs import TINY
from tests.tolaria.worlds import Fault, FaultySpec, build_faulty

BLIND = replace(TINY, task="digits_blind", checkpoint_s=0.0)


def play_session(start: RunStart, limits: HubLimits | None = None) -> Session:
    """Plays a run to its end; events that break the catalogue raise."""
    own = {} if limits is None else {"limits": limits}

    class StrictHub(vectorized.TelemetryHub):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named, **own)
            make_strict(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectorized, "TelemetryHub", StrictHub)
        with vectorized.open_session(start) as session:
            session.trainer.run()
    return session


def events_of(run: Path) -> list[LoggedEvent]:
    """All events that count; a damaged line fails."""
    items = list(replay(run))
    assert all(isinstance(item, LoggedEvent) for item in items)
    return items  # type: ignore[return-value]


def of(events: list[LoggedEvent], kind: str) -> list[LoggedEvent]:
    return [event for event in events if event.type.value == kind]


# ---- controllers


class OneLife:
    """In every env: plants, blends and keeps one seed as soon as each step is legal, then plants another and prunes
    it."""

    PLAN = (
        (LifecycleOp.GERMINATE, "r0c0", "cnn.conv"),
        (LifecycleOp.ADVANCE, "r0c0", None),
        (LifecycleOp.FOSSILIZE, "r0c0", None),
        (LifecycleOp.GERMINATE, "r1c0", "cnn.norm"),
        (LifecycleOp.PRUNE, "r1c0", None),
    )

    def __init__(self, setting) -> None:
        self.layout = setting.layout

    def begin(self, state) -> None:
        self.left = [list(self.PLAN) for _ in state.reports]

    def act(self, state) -> list[ActionSpec]:
        return [
            self._one(report.env_id, masks)
            for report, masks in zip(state.reports, state.post_action_masks, strict=True)
        ]

    def _one(self, env: int, masks) -> ActionSpec:
        if not self.left[env]:
            return wait(env)
        op, slot, blueprint = self.left[env][0]
        if not masks.slot_by_op[op][self.layout.slot_position(slot)]:
            return wait(env)
        self.left[env].pop(0)
        blend = "linear_fast" if blueprint else None
        return ActionSpec(env_id=env, op=op, slot=slot, blueprint=blueprint, blend=blend)

    def store(self, before, after) -> None:
        """Nothing to remember."""


LIFE = replace(BLIND, controller="wait_only", rounds=1, envs=1, minibatches=1, episode_length=16)


def live(config: TrainingConfig, runs: Path) -> Path:
    """A run whose controller is `OneLife`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectorized, "make_controller", lambda name, setting: OneLife(setting))
        start = start_new(config, runs, "life")
        play_session(start)
    return start.run.path


# ---- scenarios


@dataclass(frozen=True, slots=True)
class Played:
    """What a scenario left."""

    run: Path
    events: list[LoggedEvent]
    session: Session


def learned(runs: Path) -> Played:
    """A policy learns for a round, stops, and goes on from its checkpoint."""
    first = start_new(replace(BLIND, rounds=1), runs, "learned")
    play_session(first)
    session = play_session(start_again(first.run.path, {"rounds": 2}))
    return Played(first.run.path, events_of(first.run.path), session)


def suspected(runs: Path) -> Played:
    """A life of a seed under limits at which any claim is too much, two epochs running."""
    row = replace(suspicion.ROWS["attribution_ratio"], warn=1e-6, num_consecutive=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectorized, "make_controller", lambda name, setting: OneLife(setting))
        patch.setitem(suspicion.ROWS, "attribution_ratio", row)  # type: ignore[arg-type]
        start = start_new(LIFE, runs, "suspected")
        session = play_session(start)
    return Played(start.run.path, events_of(start.run.path), session)


def spoiled(runs: Path) -> Played:
    """The host of env 0 loses its weights in epoch 2 of its first episode."""
    with faults(Fault(kind="nan", env_id=0, epoch=2, once=runs / "spoiled-once")):
        start = start_new(replace(BLIND, rounds=1, episode_length=6), runs, "spoiled")
        session = play_session(start)
    return Played(start.run.path, events_of(start.run.path), session)


def killed_worker(runs: Path) -> Played:
    """A worker process gets SIGKILL in its second epoch."""
    with faults(Fault(kind="die", env_id=1, epoch=1, once=runs / "killed-once")):
        config = replace(BLIND, controller="wait_only", rounds=1, worker_kind="process", workers=1)
        start = start_new(config, runs, "killed-worker")
        session = play_session(start)
    return Played(start.run.path, events_of(start.run.path), session)


def skipped_update(runs: Path) -> Played:
    """The rewards of the first round are no numbers, those of the second are."""
    start = start_new(BLIND, runs, "skipped")
    with nonsense_once():
        session = play_session(start)
    return Played(start.run.path, events_of(start.run.path), session)


def long_wait(runs: Path) -> Played:
    """Enough rounds for a trend."""
    config = replace(TINY, controller="wait_only", rounds=12, envs=1, minibatches=1, episode_length=2)
    start = start_new(config, runs, "long-wait")
    session = play_session(start)
    return Played(start.run.path, events_of(start.run.path), session)


def overflowing(runs: Path) -> Played:
    """A queue of one is full most of the time."""
    start = start_new(replace(TINY, controller="wait_only"), runs, "overflowing")
    session = play_session(start, HubLimits(queue_capacity=1))
    return Played(start.run.path, events_of(start.run.path), session)


@contextmanager
def nonsense_once() -> Iterator[None]:
    """While entered, the next update is asked to learn from rewards that are no numbers."""
    learn, nonsense = SimicClient.update, [float("nan")]

    def learn_nonsense_once(self):
        if nonsense:
            self.buffer.storage.rewards_TN.fill_(nonsense.pop())
        return learn(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimicClient, "update", learn_nonsense_once)
        yield


SCENARIOS: tuple[Callable[[Path], Played], ...] = (
    learned,
    suspected,
    spoiled,
    killed_worker,
    skipped_update,
    long_wait,
    overflowing,
)


class faults:  # noqa: N801 (used like a function)
    """While entered, the envs of new runs meet these faults."""

    def __init__(self, *given: Fault) -> None:
        self._given = given
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        make = vectorized.make_worker_spec
        self._patch.setattr(
            vectorized, "make_worker_spec", lambda *a, **k: FaultySpec(spec=make(*a, **k), faults=self._given)
        )
        self._patch.setattr(vectorized, "build_worker", build_faulty)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
