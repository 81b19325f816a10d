"""Fewer resamples than in earnest, a record of test split openings of their own, and an evaluation that is shared."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.evidence import statistics
from esper.evidence.publication import publish
from tests.evidence.made_up import FOUND, MEANS, rows, write


@pytest.fixture(autouse=True, scope="package")
def few_resamples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", 120)
        patch.setattr(statistics, "SIGN_FLIPS", 500)
        yield


@pytest.fixture(autouse=True)
def record_of_openings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder / "esper" / "test_access.jsonl"


@pytest.fixture(scope="package")
def published(few_resamples: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation with its report and figures, to be read only."""
    folder = tmp_path_factory.mktemp("published")
    write(folder, FOUND, rows(FOUND, MEANS))
    publish(folder, folder)
    return folder
