"""`esper tasks` tells the truth about every task, to people, pipes and programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_files import fashion_arrays, write_fashion

from esper.runtime.tasks import TASKS, count_host_params
from esper.scripts.tasks import tasks_command


def test_a_pipe_gets_whole_plain_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    deep = tmp_path / ("long-name-" * 12)
    write_fashion(deep, fashion_arrays())
    tasks_command(data_dir=deep)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "…" not in out
    lines = out.splitlines()
    for name, spec in TASKS.items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        for part in (f"{count_host_params(spec):,}", " ".join(spec.slots), str(spec.horizon), spec.metric):
            assert part in line
        assert ("MISSING" in line) == (spec.data in ("cifar10", "text"))
    assert f"fashion: found at {deep}" in lines
    (missing,) = [line for line in lines if line.startswith("cifar10: ")]
    for part in ("not found", str(deep), "https://", "ESPER_CIFAR10"):
        assert part in missing


def test_programs_get_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_fashion(tmp_path, fashion_arrays())
    tasks_command(data_dir=tmp_path, as_json=True)
    rows = {row["task"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(TASKS)
    fashion, cifar = rows["fashion_tiny"], rows["cifar_baseline"]
    assert fashion["data_found"] is True
    assert fashion["data_place"] == str(tmp_path)
    assert fashion["host_params"] == 6_274
    assert cifar["data_found"] is False
    assert cifar["data_place"] is None
    assert str(tmp_path) in cifar["data_searched"]
    assert cifar["data_remedy"]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_every_task_uncut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    tasks_command()
    out = capsys.readouterr().out
    assert "…" not in out
    for name in TASKS:
        assert name in out
