"""Fewer resamples: a test looks at what an interval says, not at its third digit."""

import pytest

from esper.scripts.evidence import statistics


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 120)
    monkeypatch.setattr(statistics, "SIGN_FLIPS", 500)
