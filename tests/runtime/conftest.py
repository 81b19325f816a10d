"""Data of this machine is invisible to tests, unless they ask for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from esper.runtime.datasets import SOURCES


@pytest.fixture(autouse=True)
def _only_data_that_tests_make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "real_data" in request.fixturenames:
        return
    for source in list(SOURCES.values()):
        if source.variable is not None:
            monkeypatch.delenv(source.variable, raising=False)
            places = tuple(place for place in source.standard_places if not place.startswith("/"))
            monkeypatch.setitem(SOURCES, source.name, replace(source, standard_places=places))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def real_data() -> None:
    """Lets a test see what this machine has."""
