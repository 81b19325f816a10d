"""The site builds, what is broken in it fails the build, and no page is left out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("zensical", reason="the site needs the extra `docs`")

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "mkdocs.yml"


def build(config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def copy_config(folder: Path, **changes: Any) -> Path:
    """The configuration of the site, elsewhere."""
    config = {**yaml.safe_load(CONFIG.read_text(encoding="utf-8")), **changes}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "mkdocs.yml"


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    done = build(copy_config(tmp_path))
    assert done.returncode == 0, done.stderr
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= set(pages)
    for name, text in pages.items():
        assert 'src="http' not in text, name
        assert "fonts.googleapis" not in text, name


@pytest.mark.parametrize("line", ["[gone](gone.md)", "[no such part](index.md#no-such-part)"])
def test_a_broken_link_fails_the_build(line: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{line}\n")
    assert build(copy_config(tmp_path, nav=[{"Start": "index.md"}])).returncode != 0


def test_every_page_is_listed_once() -> None:
    def names(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [name for part in (entry.values() if isinstance(entry, dict) else entry) for name in names(part)]

    listed = names(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
