"""What the pages show: code that runs, commands that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. A comment line right above it may say `slow`, or `excerpt: why it cannot run`."""

    page: Path
    line: int
    kind: str
    text: str
    mark: str

    @property
    def slow(self) -> bool:
        return self.mark == "slow"

    @property
    def excerpt(self) -> bool:
        return self.mark.startswith("excerpt: ")


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text"))
        yield Block(page=page, line=line, kind=found["kind"], text=found["text"], mark=found["mark"] or "")
