"""The alarm table: each row is quiet just below its limit and speaks just above it."""

from __future__ import annotations

import math

import pytest

from esper.leyline import THRESHOLDS, Severity, Threshold
from esper.leyline.thresholds import CLEAR_HIGH, CLEAR_LOW

rows = pytest.mark.parametrize("row", THRESHOLDS.values(), ids=list(THRESHOLDS))


def step_over(row: Threshold, limit: float) -> tuple[float, float]:
    """The last harmless value and the first harmful one."""
    if row.direction == "at_least":
        return math.nextafter(limit, -math.inf), limit
    return limit, math.nextafter(limit, -math.inf if row.direction == "below" else math.inf)


@rows
def test_each_limit_is_sharp(row: Threshold) -> None:
    order = {None: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
    for limit, severity in ((row.warn, Severity.WARNING), (row.critical, Severity.CRITICAL)):
        if limit is None:
            continue
        harmless, harmful = step_over(row, limit)
        assert order[row.severity_of(harmless)] < order[severity]
        assert row.severity_of(harmful) is severity
        assert row.limit_of(severity) == limit


@rows
def test_what_is_not_a_number_is_as_bad_as_it_gets(row: Threshold) -> None:
    worst = Severity.WARNING if row.critical is None else Severity.CRITICAL
    assert row.severity_of(math.nan) is worst
    assert not row.clears(math.nan)


@rows
def test_an_alarm_clears_only_well_inside_the_good_side(row: Threshold) -> None:
    limit = row.critical if row.warn is None else row.warn
    assert limit is not None
    back = row.clear_at
    if row.direction == "below":
        assert limit < back <= CLEAR_LOW * limit
        assert row.high is None or back < row.high  # an alarm that cannot end says nothing
    else:
        assert back == CLEAR_HIGH * limit
    assert row.clears(back)
    assert row.severity_of(back) is None
    outside = math.nextafter(back, -math.inf if row.direction == "below" else math.inf)
    assert not row.clears(outside)


@rows
def test_rows_are_complete(row: Threshold) -> None:
    assert row.warn is not None or row.critical is not None
    assert row.num_consecutive >= 1
    assert row.warmup >= 0
    assert row.reason
    for limit in (row.warn, row.critical):
        assert limit is None or row.high is None or limit <= row.high
    if row.warn is not None and row.critical is not None:
        assert (row.critical < row.warn) == (row.direction == "below")
