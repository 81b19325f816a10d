"""A training run's event log, as far as learning gates need it: canonical lines, and whether any are missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.leyline import TelemetryEventType, record
from esper.leyline.rundir import EVENTS_FILE, SEGMENTS_DIR


@record
class TrainingLog:
    """The events of a run, in order. Events of an attempt that a later one took back do not count."""

    events: tuple[dict[str, Any], ...]
    num_missing: int
    """Sequence numbers that no event has."""

    def of(self, kind: TelemetryEventType) -> list[dict[str, Any]]:
        """The payloads of one type, in order."""
        return [event["data"] for event in self.events if event["type"] == kind.value]


def read_training_log(run_dir: Path) -> TrainingLog | str:
    """Reads the log of a run directory; where that is not possible, says why in words."""
    active, folder = run_dir / EVENTS_FILE, run_dir / SEGMENTS_DIR
    closed = sorted(folder.iterdir()) if folder.is_dir() else []
    if packed := [path.name for path in closed if path.suffix != ".jsonl"]:
        return f"{packed[0]} is not a plain segment"
    files = [*closed, *([active] if active.is_file() else [])]
    if not files:
        return "no log"
    events: list[dict[str, Any]] = []
    for file in files:
        content = file.read_bytes()
        # What follows the last line's end was being written when the process died.
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                return f"{file.name} is damaged"
    return _canonical(events)


def _canonical(events: Sequence[dict[str, Any]]) -> TrainingLog:
    starts: dict[int, int] = {}
    for event in events:
        attempt, seq = int(event["attempt"]), int(event["seq"])
        starts[attempt] = min(seq, starts.get(attempt, seq))
    kept: dict[int, dict[str, Any]] = {}
    for event in events:
        later = [start for attempt, start in starts.items() if attempt > event["attempt"]]
        if all(event["seq"] < start for start in later):
            kept[event["seq"]] = event
    ordered = tuple(kept[seq] for seq in sorted(kept))
    expected = max(kept) + 1 if kept else 0
    return TrainingLog(events=ordered, num_missing=expected - len(kept))
