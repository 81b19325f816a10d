"""Events for tests: small ones by hand, arbitrary ones from the payloads' own annotations, and a reader of lines.

The reader is written independently of any in the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
from hypothesis import strategies as st

from esper.leyline import (
    EVENTS,
    EventsDropped,
    LoggedEvent,
    RunEnded,
    Scope,
    Severity,
    TelemetryEvent,
    TelemetryEventType,
    TrendDetected,
    check_event,
    make_event,
)
from esper.leyline.rundir import event_files
from esper.nissa import Backend, HubLimits, TelemetryHub, encode

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTS = st.integers(-(2**53), 2**53)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Arbitrary values of an annotated type, numbers that are not finite included."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if arguments:
        return st.one_of([values(argument) for argument in arguments])
    if isinstance(hint, type) and is_dataclass(hint):
        return st.fixed_dictionaries({k: values(v) for k, v in get_type_hints(hint).items()}).map(
            lambda fields: hint(**fields)
        )
    if is_typeddict(hint):
        return st.fixed_dictionaries({k: values(v) for k, v in get_type_hints(hint).items()})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        NoneType: st.none(),
        bool: st.booleans(),
        int: INTS,
        float: st.floats(),
        str: TEXTS,
    }
    return plain[hint]


def ids_of(kind: TelemetryEventType) -> dict[str, int]:
    names = {Scope.RUN: (), Scope.ROUND: ("round",)}.get(EVENTS[kind].scope, ("round", "episode", "env", "epoch"))
    return dict.fromkeys(names, 1)


def trend(tag: int = 0, round: int | None = 0) -> TelemetryEvent:
    """An event that may be dropped; `window_rounds` carries the tag."""
    data = TrendDetected(kind="plateau", delta_pp=0.1, rolling_pct=50.0, previous_pct=49.9, window_rounds=tag)
    return make_event(TelemetryEventType.TREND_DETECTED, data, round=round)


def ended(tag: int = 0, severity: Severity = Severity.INFO) -> TelemetryEvent:
    """An event that must not be lost; `num_rounds_total` carries the tag."""
    data = RunEnded(
        status="completed",
        error_type=None,
        error_message=None,
        traceback_tail=None,
        num_rounds_total=tag,
        num_env_steps_total=0,
        best_accuracy_pct=None,
        final_accuracy_pct=None,
        wall_s=0.0,
        num_dropped_total=0,
    )
    return make_event(TelemetryEventType.RUN_ENDED, data, severity)


def open_hub(
    run_dir: Path,
    *,
    run_id: str | None = None,
    first_seq: int = 0,
    backends: tuple[Backend, ...] = (),
    strict: bool = False,
    require_complete: bool = False,
    **limits: Any,
) -> TelemetryHub:
    hub = TelemetryHub(
        run_dir,
        run_id=run_id,
        first_seq=first_seq,
        backends=backends,
        require_complete=require_complete,
        limits=HubLimits(**limits),
    )
    return make_strict(hub) if strict else hub


def make_strict(hub: TelemetryHub) -> TelemetryHub:
    """From now on the hub raises on events that break the catalogue or cannot be written, instead of counting them."""
    emit = hub.emit

    def emit_checked(event: TelemetryEvent) -> None:
        check_event(event)
        encode(hub._stamp(0, 0.0, 0.0, event))
        emit(event)

    hub.emit = emit_checked  # type: ignore[method-assign]
    return hub


def log_path(run_dir: Path) -> Path:
    """The log of the newest attempt."""
    return event_files(run_dir)[-1].path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a file; a line without its newline is an error here."""
    text = path.read_bytes()
    assert text == b"" or text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def decode(line: bytes) -> LoggedEvent:
    raw = json.loads(line)
    for path, what in raw.pop("nonfinite", {}).items():
        *parents, last = [p.replace("~1", "/").replace("~0", "~") for p in path.split("/")[1:]]
        place = raw["data"]
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        place[int(last) if isinstance(place, list) else last] = float(what)
    kind = TelemetryEventType(raw.pop("type"))
    data = msgspec.convert(raw.pop("data"), EVENTS[kind].payload)
    return LoggedEvent(**raw | {"type": kind, "severity": Severity(raw["severity"]), "data": data})


def unexplained(lines: list[dict[str, Any]], next_seq: int) -> set[int]:
    """Sequence numbers that are missing although no EVENTS_DROPPED accounts for them. Checks each account."""
    missing = set(range(next_seq)) - {line["seq"] for line in lines}
    explained: set[int] = set()
    for line in lines:
        if line["type"] == "EVENTS_DROPPED":
            gap = msgspec.convert(line["data"], EventsDropped)
            inside = {seq for seq in missing if gap.first_seq <= seq <= gap.last_seq}
            assert len(inside) == sum(gap.counts.values()), gap
            explained |= inside
    return missing - explained
