"""Telling needs no torch: the words, the hub and the emitters load without it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "esper.nissa",
        "esper.nissa.exporters",
        "esper.simic.telemetry",
        "esper.simic.telemetry.emitters",
        "esper.simic.telemetry.report_events",
        "esper.simic.telemetry.aggregation",
    ],
)
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
