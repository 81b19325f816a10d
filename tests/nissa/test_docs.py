"""The operators' page says what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("telemetry_docs", ROOT / "tools" / "telemetry_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_current() -> None:
    page = (ROOT / "docs" / "telemetry.md").read_text()
    assert tool().with_tables(page) == page, "run: python tools/telemetry_docs.py"
    assert "| RUN_STARTED |" in page
    assert "| `entropy_share` |" in page
    assert "| EPISODE_COMPLETED | `return_raw` |" in page
