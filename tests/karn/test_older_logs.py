"""Run directories of the first log format: every reader refuses them with one sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.scripts.cli import main


@pytest.fixture(params=["events.jsonl", "segments"])
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text('{"v": 1}')
    if request.param == "segments":
        (run / "segments").mkdir()
    else:
        (run / "events.jsonl").write_text('{"v":1,"run":"old","attempt":0,"seq":0}\n')
    return run


@pytest.mark.parametrize(
    "command",
    [("verify",), ("status",), ("status", "--follow"), ("report",), ("export", "parquet"), ("query", "select 1")],
)
def test_an_old_run_is_refused_in_one_line(
    command: tuple[str, ...], old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    with pytest.raises(SystemExit) as stopped:
        main([name, str(old_run), *rest])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{old_run} holds an event log of format 1" in line
    assert "this Esper reads format 2 (events/). Read or resume it with the Esper that wrote it" in line


def test_an_old_run_among_others_is_not_passed_over_in_silence(
    old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old_run.parent / "new" / "events").mkdir(parents=True)
    with pytest.raises(SystemExit) as stopped:
        main(["query", str(old_run.parent), "select 1"])
    assert stopped.value.code == 2
    assert f"{old_run} holds an event log of format 1" in capsys.readouterr().err
