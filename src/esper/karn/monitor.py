"""A run as screens show it: its log followed in steps, with what only screens need beside the history.

One monitor serves any number of screens. It runs in the process of the screens, opens files for reading only, and keeps
a bounded amount, so a run of any length can be watched.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from esper.karn.diagnosis import Diagnosis, diagnose
from esper.karn.history import RunHistory, SeedTimeline
from esper.karn.process import Heartbeat, UnreadableStatus, read_heartbeat
from esper.karn.replay import RECENT_BYTES, BadLine, Follower, LogItem, PassedOver, find_run, log_bytes
from esper.karn.view import Cited, RunView, known
from esper.leyline import ActionTaken, ChoiceStats, CoalitionMeasured, EpochCompleted, GateEvaluated, LoggedEvent

STEP_BYTES = 500_000
"""Read between two looks at the clock."""
NUM_ACTIONS = 12
"""Newest decisions that are kept for every host."""
NUM_EVENTS, NUM_STEP_EVENTS = 400, 200
"""Newest events that are kept: those about seeds, rounds and safety, and those about single steps."""
NUM_SEEDS, NUM_WARNINGS = 4_000, 2_000
"""Newest seeds and warnings that are kept."""


@dataclass(slots=True, kw_only=True)
class HostRecord:
    """What one host has done in the episode it is in."""

    episode: int
    epochs: list[Cited[EpochCompleted]] = field(default_factory=list)
    actions: deque[Cited[ActionTaken]] = field(default_factory=lambda: deque(maxlen=NUM_ACTIONS))
    coalition: Cited[CoalitionMeasured] | None = None
    """What its seeds were worth when that was measured last; None if it never was in this episode."""
    gates: dict[str, Cited[GateEvaluated]] = field(default_factory=dict)
    """By slot: the last answer of a gate."""


class RunMonitor:
    """One run, as far as its log was read.

    Args:
        run_dir: The run directory; it may still be empty.
        recent_bytes: As in `Follower`.
    """

    def __init__(self, run_dir: Path, recent_bytes: int = RECENT_BYTES) -> None:
        self.run_dir = find_run(run_dir)
        self._follower = Follower(run_dir, recent_bytes)
        self.heartbeat: Heartbeat | UnreadableStatus | None = None
        self.behind = True
        """True while there is more to read than one look reads."""
        self.version = 0
        """Grows whenever events came in."""
        self.round_version = 0
        """Grows whenever a round was completed, or the past changed."""
        self._forget()

    def _forget(self) -> None:
        self.history = RunHistory()
        self.hosts: dict[int, HostRecord] = {}
        self.choices: dict[str, ChoiceStats] = {}
        """What each head of the controller did in the newest round."""
        self.events: deque[LoggedEvent] = deque(maxlen=NUM_EVENTS)
        self.step_events: deque[LoggedEvent] = deque(maxlen=NUM_STEP_EVENTS)

    @property
    def view(self) -> RunView:
        return self.history.view

    @property
    def bytes_read(self) -> int:
        return self._follower.bytes_read

    def poll(self, budget_s: float = 0.05) -> bool:
        """Reads further, for about so long, and looks for the process; True if the log had anything new.

        Raises:
            ValueError: The folder is no longer a run, or the log is of another version.
        """
        stop, news = time.monotonic() + budget_s, False
        while True:
            news |= self._step()
            if not self.behind or time.monotonic() >= stop:
                break
        self.heartbeat = read_heartbeat(self.run_dir, time.time())
        self.version += news
        return news

    def _step(self) -> bool:
        batch = self._follower.poll(STEP_BYTES)
        self.behind = batch.behind
        num_rounds = len(self.history.rounds)
        if batch.restarted:
            self._forget()
        for item in batch.items:
            self._add(item)
        self._trim()
        self.round_version += batch.restarted or len(self.history.rounds) != num_rounds
        return batch.restarted or bool(batch.items)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """The verdict as of now, and what else was found."""
        return diagnose(self.view, self.heartbeat, time.time(), run_dir=self.run_dir)

    def reading(self) -> str | None:
        """How far a long log was read, in words; None if all of it was."""
        if not self.behind:
            return None
        return f"reading the log: {self.bytes_read / 1e6:,.0f} of {log_bytes(self.run_dir) / 1e6:,.0f} MB"

    def passed_over(self) -> str | None:
        """What was left out of a long log, in words; None if nothing was."""
        if not self.view.num_passed_over:
            return None
        return (
            f"{self.view.num_passed_over:,} events about single steps of the past were counted, not read; "
            "esper query and esper verify read all of them"
        )

    def seeds_of(self, env: int) -> list[SeedTimeline]:
        """The seeds of the episode that a host is in."""
        host = self.hosts.get(env)
        if host is None:
            return []
        return [seed for seed in self.history.seeds if seed.env == env and seed.episode == host.episode]

    def _add(self, item: LogItem | PassedOver) -> None:
        self.history.add(item)
        if isinstance(item, BadLine | PassedOver):
            return
        match item.data:
            case EpochCompleted() as data:
                self._host(item).epochs.append(Cited(item, data))
            case ActionTaken() as data:
                self._host(item).actions.append(Cited(item, data))
            case CoalitionMeasured() as data if data.rows:
                self._host(item).coalition = Cited(item, data)
            case GateEvaluated() as data:
                self._host(item).gates[data.slot_id] = Cited(item, data)
            case ChoiceStats() as data:
                self.choices[data.head] = data
        step = isinstance(item.data, EpochCompleted | ActionTaken | CoalitionMeasured | GateEvaluated)
        (self.step_events if step else self.events).append(item)

    def _host(self, event: LoggedEvent) -> HostRecord:
        env, episode = known(event.env), known(event.episode)
        host = self.hosts.get(env)
        if host is None or host.episode != episode:
            host = self.hosts[env] = HostRecord(episode=episode)
        return host

    def _trim(self) -> None:
        """Forgets the oldest of what a long run has much of; a screen shows the newest."""
        for kept, limit in ((self.history.seeds, NUM_SEEDS), (self.history.warnings, NUM_WARNINGS)):
            if len(kept) > 2 * limit:
                del kept[:-limit]
