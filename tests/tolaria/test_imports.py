"""Importing the packages is cheap: torch comes with the first name that needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["esper.tolaria", "esper.simic", "esper.simic.training"])
def test_importing_a_package_loads_no_torch(package: str) -> None:
    code = f"import sys, {package}; assert 'torch' not in sys.modules, 'torch was loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("package", "name"),
    [("esper.tolaria", "EnginePool"), ("esper.tolaria", "CUDATimer"), ("esper.simic", "ParallelEnvState")],
)
def test_public_names_are_there_on_demand(package: str, name: str) -> None:
    module = __import__(package, fromlist=[name])
    assert getattr(module, name).__name__ == name
    assert name in module.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
