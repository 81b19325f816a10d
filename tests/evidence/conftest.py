"""Fewer resamples than in earnest, and a record of test split openings of their own."""

from pathlib import Path

import pytest

from esper.evidence import statistics


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 120)
    monkeypatch.setattr(statistics, "SIGN_FLIPS", 500)


@pytest.fixture(autouse=True)
def record_of_openings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder / "esper" / "test_access.jsonl"
