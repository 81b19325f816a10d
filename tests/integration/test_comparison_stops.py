"""`--dual-ab` stops like any other run, on both sides, and its two runs are two groups."""

import errno
import json
import os
import signal

import pytest

from esper.karn.integrity import check_run
from esper.leyline.rundir import CHECKPOINTS_DIR, CONFIG_FILE
from esper.nissa import HubLimits, TelemetryHub
from esper.nissa.log_file import LogFile
from esper.scripts.cli import main
from esper.simic.run.recorder import RunRecorder
from esper.simic.training import vectorized
from tests.integration.kills import lines
from tests.integration.losses import lose_one

ENVS, EPOCHS = 2, 5
DUAL = ["train", "--preset", "smoke", "--task", "digits_mlp", "--workers", "1", "--checkpoint-s", "1000",
        "--dual-ab", "shaped", "sparse"]  # fmt: skip


def compare(runs, *arguments):
    """The exit code; 0 if there is none."""
    try:
        main([*DUAL, "--runs", str(runs), *map(str, arguments)])
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.fixture
def at_step(monkeypatch):
    """Sends this process a signal when a side has finished a step: steps count over both sides, which take turns."""

    def send(number, signum):
        steps = 0
        note = RunRecorder.stored

        def stored(self, before, specs, after):
            nonlocal steps
            steps += 1
            note(self, before, specs, after)
            if steps == number:
                os.kill(os.getpid(), signum)

        monkeypatch.setattr(RunRecorder, "stored", stored)

    return send


def sides(runs):
    """Both runs by the group in their logs."""
    found = {lines(path)[0]["group"]: path for path in runs.iterdir() if (path / CONFIG_FILE).is_file()}
    return found["shaped"], found["sparse"]


def saved(run):
    return sorted(int(path.name.removeprefix("ckpt-")) for path in (run / CHECKPOINTS_DIR).glob("ckpt-*"))


def end(run):
    last = lines(run)[-1]
    assert last["type"] == "RUN_ENDED"
    assert check_run(run).problems == ()
    return last["data"]["status"], last["data"]["num_rounds_total"]


def test_an_interrupt_finishes_the_round_on_both_sides_and_saves_both(tmp_path, at_step, capfd):
    at_step(2 * EPOCHS + 2, signal.SIGINT)  # in the second round of the first side
    assert compare(tmp_path, "--rounds", 50) == 130
    reported = capfd.readouterr()
    assert "stopping after this round" in reported.err
    assert "sparse - shaped" in reported.out
    for side in sides(tmp_path):
        assert end(side) == ("interrupted", 2)
        assert saved(side) == [1, 2]
        assert f"esper train --resume {side}" in reported.out


def test_a_termination_request_saves_the_boundary_that_each_side_has(tmp_path, at_step, capfd):
    at_step(5 * EPOCHS + 2, signal.SIGTERM)  # in the third round of the second side
    assert compare(tmp_path, "--rounds", 50) == 143
    reported = capfd.readouterr()
    assert "stopping now" in reported.err
    assert "Traceback" not in reported.err
    shaped, sparse = sides(tmp_path)
    assert (end(shaped), end(sparse)) == (("interrupted", 3), ("interrupted", 2))
    assert (saved(shaped), saved(sparse)) == ([1, 3], [1, 2])


def test_a_stop_before_the_first_round_has_nothing_to_compare(tmp_path, at_step, capsys):
    at_step(2, signal.SIGTERM)
    assert compare(tmp_path, "--rounds", 3) == 143
    assert "there is nothing to compare" in capsys.readouterr().out
    assert [end(side) for side in sides(tmp_path)] == [("interrupted", 0)] * 2


def test_a_stop_while_the_second_side_measures_its_scale_is_no_crash(tmp_path, monkeypatch, capsys):
    measure, asked = vectorized.load_or_calibrate, []

    def measure_and_stop(pool, task, data, runs, folder, backend):
        asked.append(folder)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(pool, task, data, runs, None, backend)  # without the file of the first side

    monkeypatch.setattr(vectorized, "load_or_calibrate", measure_and_stop)
    assert compare(tmp_path, "--rounds", 3, "--calibration-runs", 5) == 143
    assert "there is nothing to compare" in capsys.readouterr().out
    assert [end(side) for side in sides(tmp_path)] == [("interrupted", 0)] * 2


def test_a_side_can_go_on_alone_in_its_group(tmp_path, at_step, capsys):
    at_step(EPOCHS + 1, signal.SIGINT)
    assert compare(tmp_path, "--rounds", 2) == 130
    _, sparse = sides(tmp_path)
    main(["train", "--resume", str(sparse)])
    assert end(sparse) == ("completed", 2)
    assert {event["group"] for event in lines(sparse)} == {"sparse"}


def test_both_sides_are_groups_of_a_query(tmp_path, capsys):
    pytest.importorskip("duckdb", reason="queries need the extra `runs`")
    assert compare(tmp_path, "--rounds", 1) == 0
    capsys.readouterr()
    question = 'select "group", reward_mode, count(*) as episodes from runs join episodes using (run, "group")'
    main(["query", str(tmp_path), f"{question} group by all order by all", "--format", "json"])
    assert json.loads(capsys.readouterr().out) == [
        {"group": mode, "reward_mode": mode, "episodes": ENVS} for mode in ("shaped", "sparse")
    ]


def test_sides_of_the_same_name_are_told_apart(tmp_path, capsys):
    for folder, mode in (("one", "shaped"), ("two", "sparse")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "side.json").write_text(json.dumps({"reward_mode": mode}))
    words = [str(tmp_path / folder / "side.json") for folder in ("one", "two")]
    main([*DUAL[:-2], *words, "--runs", str(tmp_path / "runs"), "--rounds", "1"])
    groups = {lines(path)[0]["group"] for path in (tmp_path / "runs").iterdir() if (path / CONFIG_FILE).is_file()}
    assert groups == {"side-a", "side-b"}


def test_a_loss_on_either_side_stops_the_comparison(tmp_path, monkeypatch, capsys):
    class Lossy(TelemetryHub):
        def __init__(self, *given, group, **named):
            limits = HubLimits(queue_capacity=1 if group == "sparse" else 8192)
            super().__init__(*given, group=group, **named, limits=limits)

    monkeypatch.setattr(vectorized, "TelemetryHub", Lossy)
    assert compare(tmp_path, "--rounds", 5) == 3
    reported = capsys.readouterr()
    assert "stopping after this round: the event log is not complete" in reported.err
    shaped, sparse = sides(tmp_path)
    assert (end(shaped), end(sparse)) == (("interrupted", 1), ("interrupted", 1))
    assert lines(sparse)[-1]["data"]["error_type"] == "LogIncomplete"
    assert (saved(shaped), saved(sparse)) == ([1], [])
    assert f"shaped: Stopped. Go on with: esper train --resume {shaped}" in reported.out
    assert f"sparse: No round is saved; there is nothing to go on from in {sparse}" in reported.out


def test_a_loss_in_the_last_round_says_what_is_done_and_what_is_not(tmp_path, monkeypatch, capsys):
    lose_one(monkeypatch, round_idx=1, group="sparse")
    assert compare(tmp_path, "--rounds", 2) == 3
    reported = capsys.readouterr().out
    shaped, sparse = sides(tmp_path)
    assert (saved(shaped), saved(sparse)) == ([1, 2], [1])
    assert "sparse - shaped" in reported
    assert f"shaped: Done. Everything is in {shaped}" in reported
    assert "sparse: Rounds after the first 1 are not saved." in reported
    main(["train", "--resume", str(sparse)])
    assert check_run(sparse).num_missing_seq == 0
    assert end(sparse) == ("completed", 2)


def test_no_way_is_shown_where_there_is_none(tmp_path, monkeypatch, capsys):
    def append(self, text, seqs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LogFile, "append", append)
    assert compare(tmp_path, "--rounds", 5) == 3
    reported = capsys.readouterr().out
    assert "sparse - shaped" in reported
    assert reported.count("No round is saved; there is nothing to go on from in") == 2
    assert "--resume" not in reported


def test_a_side_that_has_a_round_can_go_on_even_if_there_is_no_pair(tmp_path, at_step, capsys):
    at_step(EPOCHS + 2, signal.SIGTERM)  # in the first round of the second side
    assert compare(tmp_path, "--rounds", 2) == 143
    reported = capsys.readouterr().out
    shaped, sparse = sides(tmp_path)
    assert "there is nothing to compare" in reported
    assert (saved(shaped), saved(sparse)) == ([1], [0])
    assert f"shaped: Stopped. Go on with: esper train --resume {shaped}" in reported
    assert f"sparse: Stopped before the first round. Go on with: esper train --resume {sparse}" in reported
    for side in (shaped, sparse):
        main(["train", "--resume", str(side)])
        assert end(side) == ("completed", 2)
