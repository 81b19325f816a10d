"""The Python code of every page runs as printed, block after block, and every `esper` command on a page is understood.

Mark a block with a comment line above it: `<!-- slow -->` for one that takes long (run by `make test-slow`, with the
whole page), `<!-- excerpt: why -->` for one that shows a part of something larger.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

from esper.scripts import cli
from tests.docs.pages import PAGES, Block, blocks

TESTED_ELSEWHERE = ("README.md",)
"""Pages whose code a test of its own runs and looks at."""
DEADLINE_S = 280


def code_of(page: Path, *, slow: bool) -> list[Block]:
    found = [block for block in blocks(page) if block.kind == "python" and not block.excerpt]
    return found if slow else [block for block in found if not block.slow]


def pages_with_code(*, slow: bool) -> list[Path]:
    """Pages with code that is run; with `slow`, those that have some of that."""
    pages = [page for page in PAGES if page.name not in TESTED_ELSEWHERE and code_of(page, slow=slow)]
    return [page for page in pages if not slow or any(block.slow for block in code_of(page, slow=True))]


def run(code: list[Block], folder: Path) -> None:
    """Runs blocks one after the other, as one file, so that what one block defines the next can use."""
    file = folder / "page.py"
    file.write_text("\n".join(block.text for block in code), encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{code[0].page.name}:\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", pages_with_code(slow=False), ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run(code_of(page, slow=False), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages_with_code(slow=True), ids=lambda page: page.name)
def test_the_slow_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run(code_of(page, slow=True), tmp_path)


def commands() -> Iterator[tuple[str, str]]:
    """Every command in a block without a language, with the page that has it."""
    for page in PAGES:
        for block in blocks(page):
            if block.kind in ("", "sh", "console"):
                for line in block.text.replace("\\\n", " ").splitlines():
                    text = re.sub(r"\s+#.*$", "", line.strip()).removeprefix("$ ").removeprefix(".venv/bin/")
                    if text.startswith("esper ") and not block.excerpt:
                        yield page.name, text


@pytest.mark.parametrize(("page", "text"), sorted(set(commands())))
def test_commands_on_the_pages_are_understood(page: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(text)[1:]
    if words[-1] in ("--help", "--version") or words[0] == "bench":
        return
    try:
        made = tyro.cli(cli._commands(listed=False), prog="esper", args=words)
    except SystemExit:
        pytest.fail(f"{page}: {text}\n{capsys.readouterr().err}")
    assert callable(made)


def test_there_is_something_to_test() -> None:
    assert len(pages_with_code(slow=False)) >= 2
    assert len(pages_with_code(slow=True)) >= 2
    assert len(set(commands())) > 15
