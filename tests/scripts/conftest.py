"""Tests leave no trace in the record of test split openings."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def record_of_openings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder / "esper" / "test_access.jsonl"
