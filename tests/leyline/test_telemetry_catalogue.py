"""The catalogue: every type has a spec, ids are enforced, records travel, paths are reversible."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import (
    EVENTS,
    EventsDropped,
    LoggedEvent,
    Scope,
    Severity,
    TelemetryEventType,
    TelemetryLevel,
    TrendDetected,
    check_event,
    fill_ids,
    join_path,
    make_event,
    split_path,
)

IDS = ("round", "episode", "env", "epoch")
ALLOWED = {
    Scope.RUN: [set()],
    Scope.ROUND: [{"round"}],
    Scope.ENV: [set(IDS)],
    Scope.ROUND_OR_ENV: [{"round"}, set(IDS)],
}


def blank(kind: TelemetryEventType) -> object:
    """An instance that looks like the payload; its fields do not matter here."""
    payload = EVENTS[kind].payload
    return payload.__new__(payload)


def test_every_type_has_a_spec_and_no_other() -> None:
    assert list(EVENTS) == list(TelemetryEventType)


def test_what_can_be_urgent_is_never_dropped() -> None:
    urgent = {"RUN_ENDED", "GOVERNOR_STATE_CHANGED", "ANOMALY_DETECTED", "REWARD_HACKING_SUSPECTED"}
    urgent |= {"CHECKPOINT_RECORDED", "WORKER_STATE_CHANGED", "EVENTS_DROPPED", "PPO_UPDATE_COMPLETED"}
    assert all(EVENTS[TelemetryEventType(name)].must for name in urgent)


def test_per_step_types_may_be_dropped_and_need_level_normal() -> None:
    normal = {kind.value for kind, spec in EVENTS.items() if spec.level is TelemetryLevel.NORMAL}
    assert normal == {"EPOCH_COMPLETED", "ACTION_TAKEN", "GATE_EVALUATED", "COALITION_MEASURED"}
    assert not any(EVENTS[TelemetryEventType(name)].must for name in normal)


def test_facts_of_the_machine_are_no_training_facts() -> None:
    machine = {kind.value for kind, spec in EVENTS.items() if not spec.training_fact}
    assert machine == {
        "RUN_STARTED",
        "RUN_ENDED",
        "PROFILE_MEASURED",
        "CHECKPOINT_RECORDED",
        "WORKER_STATE_CHANGED",
        "EVENTS_DROPPED",
    }


@pytest.mark.parametrize("kind", list(EVENTS))
@given(given_ids=st.sets(st.sampled_from(IDS)))
def test_ids_are_exactly_those_of_the_scope(kind: TelemetryEventType, given_ids: set[str]) -> None:
    event = make_event(kind, blank(kind), **dict.fromkeys(given_ids, 3))  # type: ignore[arg-type]
    if given_ids in ALLOWED[EVENTS[kind].scope]:
        check_event(event)
    else:
        with pytest.raises(ValueError, match=kind.value):
            check_event(event)


def test_a_foreign_payload_is_named() -> None:
    dropped = EventsDropped(counts={}, first_seq=0, last_seq=0, reason="queue_full")
    with pytest.raises(ValueError, match="TREND_DETECTED carries a TrendDetected, got a EventsDropped"):
        check_event(make_event(TelemetryEventType.TREND_DETECTED, dropped, round=0))


def test_ids_are_filled_in_and_never_overwritten() -> None:
    trend = TrendDetected(kind="plateau", delta_pp=0.1, rolling_pct=1.0, previous_pct=0.9, window_rounds=10)
    event = make_event(TelemetryEventType.TREND_DETECTED, trend, Severity.WARNING, env=2)
    full = fill_ids(event, round=1, episode=1, env=2, epoch=0)
    assert (full.round, full.episode, full.env, full.epoch, full.severity) == (1, 1, 2, 0, Severity.WARNING)
    with pytest.raises(ValueError, match="already has env 2, which is not 3"):
        fill_ids(event, round=1, episode=1, env=3, epoch=0)


def test_the_envelope_has_its_keys_in_order() -> None:
    names = "type severity round episode env epoch v run attempt seq wall mono group data"
    assert [f.name for f in fields(LoggedEvent)] == names.split()


def nested(hint: object) -> set[type]:
    found: set[type] = set()
    for part in getattr(hint, "__args__", ()):
        found |= nested(part)
    if isinstance(hint, type) and is_dataclass(hint):
        found.add(hint)
        for inner in get_type_hints(hint).values():
            found |= nested(inner)
    return found


@pytest.mark.parametrize("kind", list(EVENTS))
def test_payloads_are_records_all_the_way_down(kind: TelemetryEventType) -> None:
    for cls in nested(EVENTS[kind].payload):
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]
        assert hasattr(cls, "__record_fields__"), cls
        assert "__slots__" in vars(cls), cls


def test_payloads_pickle() -> None:
    dropped = EventsDropped(counts={"ACTION_TAKEN": 2}, first_seq=3, last_seq=9, reason="queue_full")
    assert pickle.loads(pickle.dumps(dropped)) == dropped


@given(st.lists(st.text(), min_size=1).map(tuple))
def test_paths_are_reversible(parts: tuple[str, ...]) -> None:
    assert split_path(join_path(parts)) == parts
