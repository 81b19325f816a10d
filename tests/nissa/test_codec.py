"""What is written can be read back, whatever the payload, and every line is one line."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import EVENTS, LoggedEvent, Severity, TelemetryEvent, TelemetryEventType, make_event
from esper.nissa import encode
from tests.nissa.events import TEXTS, decode, ids_of, trend, values


def logged(event: TelemetryEvent, **stamp: object) -> LoggedEvent:
    known = {"v": 1, "run": "r", "attempt": 0, "seq": 7, "wall": 1.5, "mono": 0.5, "group": "main"} | stamp
    names = ("type", "severity", "round", "episode", "env", "epoch", "data")
    return LoggedEvent(**known, **{name: getattr(event, name) for name in names})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(EVENTS))
@settings(max_examples=25, deadline=None)
@given(data=st.data(), severity=st.sampled_from(Severity), group=TEXTS)
def test_every_payload_comes_back(
    kind: TelemetryEventType, data: st.DataObject, severity: Severity, group: str
) -> None:
    payload = data.draw(values(EVENTS[kind].payload))
    line = logged(make_event(kind, payload, severity, **ids_of(kind)), group=group)
    text = encode(line)
    assert text.count(b"\n") == 1
    assert text.endswith(b"\n")
    assert repr(decode(text)) == repr(line)  # NaN equals nothing, but prints alike


def test_keys_are_in_the_order_of_the_envelope() -> None:
    keys = "type severity round episode env epoch v run attempt seq wall mono group data"
    assert list(json.loads(encode(logged(trend())))) == keys.split()


def test_numbers_that_are_not_finite_are_named_and_only_they() -> None:
    event = trend()
    object.__setattr__(event.data, "delta_pp", -math.inf)
    raw = json.loads(encode(logged(event)))
    assert raw["nonfinite"] == {"/delta_pp": "-inf"}
    assert raw["data"]["delta_pp"] is None
    assert raw["data"]["rolling_pct"] == 50.0


def test_what_is_no_plain_value_is_refused() -> None:
    event = trend()
    object.__setattr__(event.data, "rolling_pct", object())
    with pytest.raises(TypeError):
        encode(logged(event))
