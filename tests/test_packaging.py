"""What is installed: the wheel holds the package and its data, and works where nothing else of the source tree is."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import esper

ROOT = Path(__file__).parents[1]
PAGES = ("index.html", "app.js", "charts.js", "dom.js", "screens.js", "stream-worker.js", "style.css", "theme.js")
DATA = (
    *(f"esper/karn/serve/static/{name}" for name in PAGES),
    "esper/py.typed",
    "esper/evidence/report.md.j2",
    "esper/evidence/report.html.j2",
    "esper/karn/report.html.j2",
    "esper/runtime/data/digits.npz",
    "esper/runtime/data/digits.txt",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_its_own_name_the_whole_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"esper_growth-{esper.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/esper").rglob("*.py")}
    assert modules | set(DATA) <= names
    assert {name.split("/")[0] for name in names} == {"esper", f"esper_growth-{esper.__version__}.dist-info"}


def test_an_installed_wheel_runs_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    (libraries,) = (tmp_path / "env/lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(libraries)
    # What it depends on is the present environment's; an editable install of Esper comes after the wheel.
    (libraries / "dependencies.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "env/bin/python"), "-m", "esper.scripts.cli", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    version = run("--version")
    assert (version.returncode, version.stdout) == (0, f"esper {esper.__version__}\n"), version.stderr
    tasks = run("tasks")
    assert tasks.returncode == 0, tasks.stderr
    assert "digits_blind" in tasks.stdout
    bench = run("bench")
    assert bench.returncode == 2
    assert "clone it" in bench.stderr


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == esper.__version__
