"""Lines into events: nothing lost, nothing invented, damage named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.karn.codec import LineError, NewerSchema, decode_line, with_nonfinite_words
from esper.karn.sql_views import without_none
from esper.leyline import EVENTS, SCHEMA_VERSION, TelemetryEventType
from tests.karn.logs import PAYLOADS, RUN_ID, WALL, LogWriter, T, episode_completed, ids_of, ppo_update


@pytest.fixture
def log(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path)


@pytest.mark.parametrize("kind", list(TelemetryEventType))
def test_every_type_comes_back_as_it_was_written(kind: TelemetryEventType, log: LogWriter) -> None:
    payload = PAYLOADS[kind]()
    event = decode_line(log.line(kind, payload, **ids_of(kind)))
    assert event.data == payload
    assert type(event.data) is type(payload)
    assert (event.run, event.attempt, event.seq, event.wall, event.type) == (RUN_ID, 0, 0, WALL, kind)
    wanted = ids_of(kind)
    assert {name: getattr(event, name) for name in ("round", "episode", "env", "epoch")} == {
        name: wanted.get(name) for name in ("round", "episode", "env", "epoch")
    }


FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@given(loss=FLOATS, parts=st.dictionaries(st.text(), FLOATS, max_size=4), accuracy=st.none() | FLOATS)
def test_numbers_that_are_not_finite_come_back_and_none_stays_none(
    loss: float, parts: dict[str, float], accuracy: float | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    payload = episode_completed(final_loss=loss, components_sum=parts, final_accuracy_pct=accuracy)
    log = LogWriter(tmp_path_factory.getbasetemp())
    back = decode_line(log.line(T.EPISODE_COMPLETED, payload, round=0, episode=0, env=0, epoch=0)).data
    assert repr(back) == repr(payload)  # repr, because nan is not equal to itself


def test_nested_and_listed_numbers_are_restored(log: LogWriter) -> None:
    line = log.line(T.PPO_UPDATE_COMPLETED, ppo_update(), round=0)
    entry = json.loads(line)
    entry["data"]["metrics"]["value_loss"] = None
    entry["nonfinite"] = {"/metrics/value_loss": "nan"}
    assert math.isnan(decode_line(json.dumps(entry).encode()).data.metrics["value_loss"])  # type: ignore[attr-defined]


def test_words_for_readers_that_turn_text_to_numbers(log: LogWriter) -> None:
    line = log.line(T.EPISODE_COMPLETED, episode_completed(final_loss=math.inf), round=0, episode=0, env=0, epoch=0)
    assert json.loads(with_nonfinite_words(line))["data"]["final_loss"] == "inf"


def test_fields_of_a_later_build_are_ignored(log: LogWriter) -> None:
    entry = json.loads(log.line(T.RUN_ENDED, PAYLOADS[T.RUN_ENDED]()))
    entry["shoe_size"] = 44
    entry["data"]["shoe_size"] = {"left": 44}
    assert decode_line(json.dumps(entry).encode()).data == PAYLOADS[T.RUN_ENDED]()


def test_a_newer_version_is_refused_with_advice(log: LogWriter) -> None:
    entry = json.loads(log.line(T.RUN_ENDED, PAYLOADS[T.RUN_ENDED]()))
    entry["v"] = SCHEMA_VERSION + 1
    with pytest.raises(NewerSchema, match=f"version {SCHEMA_VERSION + 1}, this Esper reads {SCHEMA_VERSION}"):
        decode_line(json.dumps(entry).encode())
    del entry["run"], entry["type"]  # whatever a newer version made of the rest
    with pytest.raises(NewerSchema):
        decode_line(json.dumps(entry).encode())


def broken(line: bytes, change: str) -> bytes:
    entry = json.loads(line)
    if change == "half":
        return line[: len(line) // 2] + b"\n"
    if change == "zeros":
        return bytes(len(line) - 1) + b"\n"
    if change == "version":
        entry["v"] = 0
    if change == "type":
        entry["type"] = "COFFEE_BREWED"
    if change == "missing":
        del entry["data"]["wall_s"]
    if change == "kind":
        entry["data"]["status"] = "asleep"
    if change == "path":
        entry["nonfinite"] = {"/no/such": "nan"}
    if change == "word":
        entry["nonfinite"] = {"/wall_s": "large"}
    if change == "ids":
        entry["round"] = 3
    if change == "bare":
        return line.replace(b'"wall_s": 61.0', b'"wall_s": NaN')
    if change == "utf":
        return line.replace(b"completed", b"comp\xff\xfeted")
    return json.dumps(entry).encode()


@pytest.mark.parametrize(
    "change", ["half", "zeros", "version", "type", "missing", "kind", "path", "word", "ids", "bare", "utf"]
)
def test_damage_is_a_line_error(change: str, log: LogWriter) -> None:
    line = log.line(T.RUN_ENDED, PAYLOADS[T.RUN_ENDED]())
    with pytest.raises(LineError):
        decode_line(broken(line, change))


# ---- every optional field of every payload

POLICY = "esper.leyline.policy_payloads"
"""Records that the learner fills completely; their fields are all required."""


def optional_paths(record: Any, tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a tree of JSON values has a field that may be null."""
    for name, hint in get_type_hints(record).items():
        if without_none(hint) is not hint:
            yield (*path, name)
        yield from _inside(without_none(hint), tree[name], (*path, name))


def _inside(hint: Any, tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if tree is None:
        return
    if is_dataclass(hint):
        yield from optional_paths(hint, tree, path)
    elif isinstance(tree, list):
        for place, part in enumerate(tree):
            yield from _inside(hint.__args__[0], part, (*path, place))
    elif isinstance(tree, dict):
        for key, part in tree.items():
            yield from _inside(hint.__args__[1], part, (*path, key))


def parent_of(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path[:-1]:
        tree = tree[part]
    return tree


@pytest.mark.parametrize("kind", [kind for kind in TelemetryEventType if EVENTS[kind].payload.__module__ != POLICY])
def test_any_optional_field_may_be_absent_and_no_other(kind: TelemetryEventType, log: LogWriter) -> None:
    payload = PAYLOADS[kind]()
    line = log.line(kind, payload, **ids_of(kind))
    optional = set(optional_paths(type(payload), json.loads(line)["data"]))
    for path in optional:
        null, absent = json.loads(line), json.loads(line)
        parent_of(null["data"], path)[path[-1]] = None
        del parent_of(absent["data"], path)[path[-1]]
        assert decode_line(json.dumps(absent).encode()) == decode_line(json.dumps(null).encode()), path
    for name in get_type_hints(type(payload)):
        if (name,) not in optional:
            entry = json.loads(line)
            del entry["data"][name]
            with pytest.raises(LineError, match=f"missing required field `{name}`"):
                decode_line(json.dumps(entry).encode())
