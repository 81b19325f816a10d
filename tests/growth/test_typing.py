"""What a type checker sees of the public names: users' code is checked against real signatures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="needs the dev extra")

SNIPPET = """
import torch
from torch import nn
import esper

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x, y = torch.randn(32, 4), torch.randint(2, (32,))
result = esper.grow(model, (x, y), (x, y), budget=20_000, epochs=8, controller="largest", sites=["0"])
grown: nn.Module = result.model
table: str = result.table()
result.plot("growth.png")
names: list[str] = [site.name for site in esper.find_sites(model, x).chosen]

optimizer = torch.optim.AdamW(model.parameters())
grower = esper.Grower(model, x, optimizer, esper.Validation(model, (x, y)), epochs=8, budget=20_000)
for epoch in grower:
    number: int = epoch
    metric: float = grower.end_epoch().metric
net: nn.Module = grower.finish().model
print(esper.compare(lambda: model, (x, y), (x, y), budget=None, epochs=8).verdict().upper())
"""

MISTAKES = {
    "result.tables()": "attr-defined",
    "esper.grow(model, (x, y), (x, y), epochs=8)": "call-arg",
    'esper.grow(model, (x, y), (x, y), budget="20k", epochs=8)': "arg-type",
    'esper.grow("model.pt", (x, y), (x, y), budget=None, epochs=8)': "arg-type",
    'esper.grow(model, (x, y), (x, y), budget=None, epochs=8, controllers="largest")': "call-arg",
    "wrong: int = grower.finish().metric": "assignment",
    'esper.find_sites(model, x, k="three")': "arg-type",
    "esper.shrink(model)": "attr-defined",
}


def test_the_public_names_are_typed_and_mistakes_are_seen(tmp_path: Path) -> None:
    """One run of the checker: the snippet is clean, and every line after it is an error of its kind."""
    file = tmp_path / "user.py"
    file.write_text(SNIPPET + "\n".join(MISTAKES) + "\n")
    root = Path(__file__).parents[2]  # its settings and its cache, which a check of the code has filled
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    errors = {int(number): kind for number, kind in re.findall(r"user\.py:(\d+): error: .*\[([a-z-]+)\]", shown)}
    first = SNIPPET.count("\n") + 1
    assert errors == {first + at: kind for at, kind in enumerate(MISTAKES.values())}, shown
