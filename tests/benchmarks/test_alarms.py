"""Planted faults are seen by a person at the console, soon; single hosts that misbehave are not."""

from pathlib import Path

import pytest

from benchmarks.alarms import FAULTS, SOON, Fault, run_fault

EVERY_THIRD = [
    fault if number % 3 == 0 else pytest.param(fault, marks=pytest.mark.slow) for number, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize("fault", EVERY_THIRD, ids=lambda fault: fault.name)
def test_a_planted_fault_is_seen_within_three_rounds(fault: Fault, tmp_path: Path) -> None:
    seen = run_fault(fault, 0, tmp_path)
    after = seen.first(fault.shown, fault.onset)
    assert after is not None, f"only: {seen.lines}"
    assert after <= SOON
    if fault.onset:
        early = [text for at, text in seen.lines if at < fault.onset and any(word in text for word in fault.shown)]
        assert early == [], "it is not seen before it is there"
