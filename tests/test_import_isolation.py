"""Light imports stay light: words and package roots load no torch, and leyline nothing beyond the standard library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import esper.leyline


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "package",
    [
        "esper",
        "esper.leyline",
        "esper.tolaria",
        "esper.simic",
        "esper.simic.agent",
        "esper.nissa",
        "esper.simic.training",
    ],
)
def test_importing_a_light_package_loads_no_torch(package: str) -> None:
    loaded = modules_after(f"import {package}")
    assert package in loaded
    assert not {name for name in loaded if name.split(".")[0] in ("torch", "numpy")}


def test_the_check_sees_what_a_statement_loads() -> None:
    assert "numpy" in modules_after("import esper.leyline, numpy")


def test_leyline_imports_the_standard_library_only() -> None:
    folder = Path(esper.leyline.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}: relative import"
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                assert root in sys.stdlib_module_names or name.startswith("esper.leyline"), f"{file.name}: {name}"
