"""Words for times and payloads, as every view prints them."""

import pytest

from esper.karn.console import describe_payload, duration
from esper.leyline import PhaseTime, ProfileMeasured


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (3599.0, "59 min"),
        (3600.0, "1 h 0 min"),
        (93_660.0, "26 h 1 min"),
    ],
)
def test_a_duration_names_no_unit_that_is_zero_at_its_front(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_phases_are_named_with_their_times() -> None:
    fields = dict.fromkeys(ProfileMeasured.__dataclass_fields__)
    fields |= {"phases": {"act": PhaseTime(wall_ms=12.3456), "update": PhaseTime(wall_ms=7.0, cpu_ms=6.0)}}
    assert describe_payload(ProfileMeasured(**fields)) == "phases act 12.35 ms update 7 ms"  # type: ignore[arg-type]
