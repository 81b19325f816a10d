"""Runs that end early for reasons of their own: what the log says first, what is saved, which code the command has."""

import errno
import os
import re
import sys
from dataclasses import replace
from itertools import count

import pytest

from esper.evidence.studies import start_policy
from esper.karn.integrity import check_run
from esper.karn.replay import replay
from esper.leyline import TelemetryEventType
from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.nissa import HubLimits, TelemetryHub, hub
from esper.nissa.log_file import LogFile
from esper.nissa.writer import LogWriter
from esper.scripts.cli import main
from esper.scripts.train import run_and_show
from esper.simic.client import SimicClient
from esper.simic.run import session
from esper.simic.run.session import log_trouble
from tests.integration.kills import lines, training_facts
from tests.integration.losses import lose_one
from tests.simic.training.runs import TINY

SMOKE = ["--preset", "smoke", "--task", "digits_mlp", "--workers", "1", "--checkpoint-s", "0"]


def train(runs, *arguments):
    """The exit code of a tiny run called `a`."""
    with pytest.raises(SystemExit) as caught:
        main(["train", "ppo", *SMOKE, "--runs", str(runs), "--run-id", "a", *map(str, arguments)])
    return caught.value.code


def test_the_round_whose_update_ends_the_run_is_reported_first(tmp_path, monkeypatch, capsys):
    learn = SimicClient.update

    def learn_nonsense(self):
        self.buffer.storage.rewards_TN.fill_(float("nan"))
        return learn(self)

    monkeypatch.setattr(SimicClient, "update", learn_nonsense)
    assert train(tmp_path, "--rounds", 9) == 5
    assert "3 updates in a row were skipped" in capsys.readouterr().err
    reported = lines(tmp_path / "a")
    updates = [event["data"]["metrics"] for event in reported if event["type"] == "PPO_UPDATE_COMPLETED"]
    assert [update["performed"] for update in updates] == [False, False, False]
    assert [event["round"] for event in reported if event["type"] == "ROUND_COMPLETED"] == [0, 1, 2]
    assert sum(event["type"] == "EPISODE_COMPLETED" for event in reported) == 3 * 2
    alarms = [event for event in reported if event["type"] == "ANOMALY_DETECTED"]
    skipped = [(alarm["severity"], alarm["round"]) for alarm in alarms if alarm["data"]["metric"] == "skipped_updates"]
    assert skipped == [("warning", 0), ("critical", 2)]
    assert (reported[-1]["type"], reported[-1]["data"]["error_type"]) == ("RUN_ENDED", "UpdatesFailed")
    assert reported[-1]["data"]["num_rounds_total"] == 3


# ---- a log that is no longer good enough


def saved(run):
    return sorted(path.name for path in (run / CHECKPOINTS_DIR).iterdir())


def test_a_run_that_needs_its_whole_log_stops_when_it_loses_an_event(tmp_path, monkeypatch, capsys):
    """A queue of one is full most of the time, so events that may be lost are lost in the first round."""
    monkeypatch.setitem(TelemetryHub.__init__.__kwdefaults__, "limits", HubLimits(queue_capacity=1))
    start = session.start_new(replace(TINY, rounds=4, require_complete=True), tmp_path, "a")
    with pytest.raises(SystemExit) as caught:
        run_and_show(start, None)
    assert caught.value.code == 3
    reported = capsys.readouterr()
    assert "stopping after this round: the event log is not complete; lost: " in reported.err
    assert "checkpoint of round 1 not saved: the event log has lost events, and this run needs them all" in reported.err
    assert f"No round is saved; there is nothing to go on from in {tmp_path / 'a'}" in reported.out
    assert saved(tmp_path / "a") == []
    end = lines(tmp_path / "a")[-1]["data"]
    assert (end["status"], end["error_type"], end["num_rounds_total"]) == ("interrupted", "LogIncomplete", 1)
    assert end["num_dropped_total"] > 0
    assert check_run(tmp_path / "a").complete, "every loss is explained"


@pytest.mark.parametrize("round_idx", [2, 3], ids=["before the last round", "in the last round"])
def test_what_was_lost_is_made_up_for_by_a_resume(round_idx, tmp_path, monkeypatch, capsys):
    config = replace(TINY, rounds=4, checkpoint_s=0.0)
    run_and_show(start_policy(config, tmp_path / "whole"), None)
    lose_one(monkeypatch, round_idx)
    with pytest.raises(SystemExit) as caught:
        run_and_show(start_policy(config, tmp_path / "a"), None)
    assert caught.value.code == 3
    assert f"Rounds after the first {round_idx} are not saved" in capsys.readouterr().out
    assert saved(tmp_path / "a")[-1] == f"ckpt-{round_idx:08d}", "no checkpoint counts what is lost"
    again = start_policy(config, tmp_path / "a")
    assert again.rounds_done == round_idx
    run_and_show(again, None)
    found = check_run(tmp_path / "a")
    assert (found.problems, found.num_missing_seq, found.num_dropped) == ((), 0, 0)
    assert training_facts(tmp_path / "a") == training_facts(tmp_path / "whole")


def fail_syncs(monkeypatch, which):
    """Makes those of the log's fsyncs fail whose number this is true of."""
    sync, numbers = LogFile.sync, count()

    def fail_or_sync(self):
        if which(next(numbers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(self)

    monkeypatch.setattr(LogFile, "sync", fail_or_sync)


@pytest.mark.parametrize(("which", "stops"), [(lambda number: number == 0, False), (lambda number: True, True)])
def test_only_an_error_that_is_not_over_by_the_boundary_stops_a_run_that_lost_nothing(
    which, stops, tmp_path, monkeypatch
):
    fail_syncs(monkeypatch, which)
    with TelemetryHub(tmp_path, run_id="a", require_complete=True) as log:
        assert not log.flush(10, fsync=True)
        assert ("Input/output error" in (log_trouble(log) or "")) == stops
        monkeypatch.undo()
    assert log.close().complete


def test_a_study_whose_log_could_not_be_made_durable_once_is_done(tmp_path, monkeypatch, capsys):
    fail_syncs(monkeypatch, lambda number: number == 0)
    run_and_show(start_policy(replace(TINY, rounds=3, checkpoint_s=0.0), tmp_path / "a"), None)
    reported = capsys.readouterr()
    assert "the event log cannot be made durable (OSError: [Errno 5] Input/output error)" in reported.err
    assert "Done." in reported.out
    assert saved(tmp_path / "a")[-1] == "ckpt-00000003"
    assert lines(tmp_path / "a")[-1]["data"]["error_type"] is None


def test_losses_do_not_stop_a_run_that_may_have_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TelemetryHub.__init__.__kwdefaults__, "limits", HubLimits(queue_capacity=1))
    assert train(tmp_path, "--rounds", 2) == 3
    reported = capsys.readouterr()
    assert "Done. All but a part of the event log is in" in reported.out
    gone = sum(sum(event["data"]["counts"].values()) for event in lines(tmp_path / "a") if "counts" in event["data"])
    counted = re.findall(r"(\d+) [A-Z_]+", reported.err.partition(": the event log is not complete; lost: ")[2])
    assert sum(map(int, counted)) == gone > 0, "a code alone explains nothing"
    assert lines(tmp_path / "a")[-1]["data"]["status"] == "completed"


def test_a_writer_that_fails_ends_the_run_at_the_next_boundary(tmp_path, monkeypatch, capsys):
    original = LogWriter.write

    def write(self, batch):
        if any(event.type is TelemetryEventType.ROUND_COMPLETED and event.round == 1 for event in batch):
            raise RuntimeError("a defect in the writer")
        original(self, batch)

    monkeypatch.setattr(LogWriter, "write", write)
    assert train(tmp_path, "--rounds", 50) == 3
    reported = capsys.readouterr()
    assert "the log's writer failed" in reported.err
    assert (
        "stopping after this round: the event log is not complete; RuntimeError: a defect in the writer" in reported.err
    )
    assert "are not saved" in reported.out
    assert saved(tmp_path / "a") == ["ckpt-00000001"], "nothing is committed that counts events which are lost"
    assert not check_run(tmp_path / "a").has_end


def test_too_many_events_in_memory_end_the_run(tmp_path, monkeypatch, capsys):
    def append(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LogFile, "append", append)
    monkeypatch.setattr(hub, "MAX_HELD", 40)
    assert train(tmp_path, "--rounds", 50) == 3
    reported = capsys.readouterr()
    assert "events are not written" in reported.err
    assert "No space left on device" in reported.err
    assert "No round is saved" in reported.out
    assert saved(tmp_path / "a") == []


def test_studies_need_whole_logs_from_the_first_start_and_on_every_other(tmp_path):
    first = start_policy(replace(TINY, rounds=1), tmp_path / "policy-0")
    assert first.config.require_complete
    run_and_show(first, None)
    assert start_policy(replace(TINY, rounds=1), tmp_path / "policy-0") is None, "it is complete"
    assert session.start_again(tmp_path / "policy-0", {}).config.require_complete


def test_a_session_without_a_log_hides_nothing_of_those_before_it(tmp_path):
    config = replace(TINY, rounds=2, checkpoint_s=0.0)
    run_and_show(session.start_new(config, tmp_path, "a"), None)
    before = [line["seq"] for line in lines(tmp_path / "a")]
    run_and_show(session.start_again(tmp_path / "a", {"rounds": 3, "level": "off"}), None)
    run_and_show(session.start_again(tmp_path / "a", {"rounds": 4, "level": "normal"}), None)
    counted = [event for event in replay(tmp_path / "a") if event.type.value == "ROUND_COMPLETED"]
    assert [event.round for event in counted] == [0, 1, 3], "the round that was not logged is the only one missing"
    assert len(before) > 10
    found = check_run(tmp_path / "a")
    assert found.problems == ()
    assert found.num_superseded <= 3, "what followed the last checkpoint: its record and the end"


def test_a_resume_whose_exporter_does_not_start_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    """The events after the last checkpoint, the end marker among them, still count: nothing came after them."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = tmp_path / "a"
    run_and_show(session.start_new(replace(TINY, rounds=1), tmp_path, "a"), None)
    before = list(replay(run))
    for _ in range(2):
        with pytest.raises(SystemExit) as caught:
            main(["train", "--resume", str(run), "--rounds", "2", "--exporters", "wandb"])
        assert caught.value.code == 2
        assert check_run(run).complete
        assert list(replay(run)) == before
    main(["train", "--resume", str(run), "--rounds", "2"])
    assert check_run(run).complete
    training_facts(run)


def test_a_new_run_whose_exporter_does_not_start_leaves_its_name_free(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train(tmp_path, "--exporters", "wandb") == 2
    assert "wandb is not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_resume_on_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    run_and_show(session.start_new(replace(TINY, rounds=1), tmp_path, "a"), None)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("esper.nissa.log_file.sync_directory", full)
    with pytest.raises(SystemExit) as caught:
        main(["train", "--resume", str(tmp_path / "a"), "--rounds", "2"])
    assert caught.value.code == 6
    reported = capsys.readouterr().err
    assert "No space left on device" in reported
    assert "Traceback" not in reported
