"""Rules and rewards need nothing but Python: no torch, no numpy."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import esper.simic.rewards
import esper.tamiyo

MODULES = [
    found.name
    for package in (esper.tamiyo, esper.simic.rewards)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]

PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
foreign = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"esper"}
print(" ".join(sorted(name for name in foreign if not name.startswith(("_", "sitecustomize", "usercustomize")))))
"""


@pytest.mark.parametrize("package", [esper.tamiyo, esper.simic.rewards], ids=lambda package: package.__name__)
def test_a_package_loads_nothing_but_the_standard_library(package: object) -> None:
    names = [name for name in MODULES if name.startswith(package.__name__)]  # type: ignore[attr-defined]
    assert len(names) >= 5
    found = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
