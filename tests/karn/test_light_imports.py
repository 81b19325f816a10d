"""Reading runs needs no torch, and what only queries and reports need is loaded when they run."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import esper.karn

MODULES = [found.name for found in pkgutil.iter_modules(esper.karn.__path__, "esper.karn.")]
HEAVY = {"torch", "numpy", "duckdb", "matplotlib", "jinja2", "scipy", "tensorboardX"}


def loaded_by(names: list[str]) -> set[str]:
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split() if not name.startswith("esper.")} | {
        ".".join(name.split(".")[:2]) for name in done.stdout.split() if name.startswith("esper.")
    }


def test_all_of_karn_loads_without_anything_heavy_and_knows_leyline_only() -> None:
    assert len(MODULES) > 10
    loaded = loaded_by(MODULES)
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("esper.")} == {"esper.karn", "esper.leyline"}


def test_that_check_sees_what_is_loaded() -> None:
    assert {"numpy", "esper.leyline"} <= loaded_by(["numpy", "esper.leyline"])
