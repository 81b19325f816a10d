"""The hub: nothing is lost silently, nothing blocks, and every gap is explained."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import CheckpointRecorded, RunStatus, Severity, TelemetryEvent, TelemetryEventType, make_event
from esper.leyline.rundir import STATUS_FILE
from esper.nissa import Hub, TelemetryHub, get_hub, set_hub
from esper.nissa import hub as hub_module
from esper.nissa.log_file import LogFile
from tests.karn.logs import round_completed
from tests.nissa.events import ended, log_path, open_hub, read_lines, trend, unexplained
from tests.nissa.test_backends import Listener


def stall(hub: TelemetryHub) -> threading.Event:
    """Keeps the writer's thread from taking anything until the returned event is set."""
    gate = threading.Event()
    original = hub._take

    def wait_then_take() -> list:  # type: ignore[type-arg]
        gate.wait(10)
        return original()

    hub._take = wait_then_take  # type: ignore[method-assign]
    return gate


def test_events_reach_the_log_in_order_and_stamped(tmp_path: Path) -> None:
    with open_hub(tmp_path, first_seq=100) as hub:
        for tag in range(50):
            hub.emit(trend(tag))
        assert hub.next_seq == 150
    lines = read_lines(log_path(tmp_path))
    assert [line["seq"] for line in lines] == list(range(100, 150))
    assert [line["data"]["window_rounds"] for line in lines] == list(range(50))
    assert {(line["run"], line["attempt"], line["group"], line["v"]) for line in lines} == {(hub.run_id, 0, "main", 2)}
    assert [line["mono"] for line in lines] == sorted(line["mono"] for line in lines)
    report = hub.close()
    assert (report.complete, hub.next_seq) == (True, 150)


def test_flush_means_in_the_file(tmp_path: Path) -> None:
    with open_hub(tmp_path, flush_interval_s=60.0) as hub:
        hub.emit(trend())
        assert read_lines(log_path(tmp_path)) == []
        assert hub.flush(10, fsync=True)
        assert len(read_lines(log_path(tmp_path))) == 1


def test_an_urgent_event_does_not_wait(tmp_path: Path) -> None:
    with open_hub(tmp_path, flush_interval_s=60.0) as hub:
        hub.emit(ended(severity=Severity.ERROR))
        with hub._changed:
            assert hub._changed.wait_for(lambda: len(read_lines(log_path(tmp_path))) == 1, 10)


def checkpoint(severity: Severity) -> TelemetryEvent:
    data = CheckpointRecorded(
        action="save_failed",
        path="checkpoints/round 1",
        round=1,
        next_seq=0,
        size_bytes=None,
        save_ms=None,
        manifest_sha256=None,
        error="No space left",
    )
    return make_event(TelemetryEventType.CHECKPOINT_RECORDED, data, severity)


def calls_of(log: LogFile, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the log's file is asked for from now on."""
    calls: list[str] = []
    append, sync = log.append, log.sync
    monkeypatch.setattr(log, "append", lambda lines: (calls.append("append"), append(lines)))
    monkeypatch.setattr(log, "sync", lambda: (calls.append("sync"), sync()))
    return calls


@pytest.mark.parametrize(
    ("event", "durable"),
    [
        (make_event(TelemetryEventType.ROUND_COMPLETED, round_completed(num_env_steps_total=1), round=0), True),
        (ended(), True),
        (checkpoint(Severity.ERROR), True),
        (checkpoint(Severity.CRITICAL), True),
        (checkpoint(Severity.WARNING), False),
        (trend(), False),
    ],
    ids=["a round's end", "the run's end", "error", "critical", "warning", "anything else"],
)
def test_what_ends_something_or_is_urgent_is_durable_as_soon_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: TelemetryEvent, durable: bool
) -> None:
    with open_hub(tmp_path, strict=True, flush_interval_s=60.0) as hub:
        calls = calls_of(hub._writer._log, monkeypatch)
        hub.emit(event)
        assert hub.flush(10)
        assert calls == ["append", "sync"][: 1 + durable]


def test_the_fullest_the_queue_has_been_is_remembered(tmp_path: Path) -> None:
    with open_hub(tmp_path, flush_interval_s=60.0) as hub:
        for _ in range(5):
            hub.emit(trend())
        assert hub.flush(10)
        hub.emit(trend())
        assert hub.health().queue_high_water == 5


def test_a_full_queue_loses_only_what_may_be_lost_and_says_so(tmp_path: Path) -> None:
    hub = open_hub(tmp_path, queue_capacity=4, flush_interval_s=0.01)
    gate = stall(hub)
    for tag in range(10):
        hub.emit(trend(tag))
        hub.emit(ended(tag))
    gate.set()
    report = hub.close()
    lines = read_lines(log_path(tmp_path))
    assert [line["data"]["num_rounds_total"] for line in lines if line["type"] == "RUN_ENDED"] == list(range(10))
    assert report.num_dropped == {"TREND_DETECTED": 8}
    assert not report.complete
    assert not unexplained(lines, hub.next_seq)
    assert {line["data"]["reason"] for line in lines if line["type"] == "EVENTS_DROPPED"} == {"queue_full"}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["may", "must", "invalid", "unwritable", "drain"]), max_size=60), st.integers(1, 5))
def test_any_mix_of_losses_is_explained_to_the_number(
    tmp_path_factory: pytest.TempPathFactory, story: list[str], capacity: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    hub = open_hub(run_dir, queue_capacity=capacity, flush_interval_s=60.0)
    idle = stall(hub)
    expected = 0
    for act in story:
        if act == "drain":
            idle.set()
            hub.flush(10)
            idle.clear()
        elif act == "unwritable":
            event = ended()
            object.__setattr__(event.data, "error_type", object())
            hub.emit(event)
        else:
            hub.emit({"may": trend(), "must": ended(1), "invalid": trend(round=None)}[act])
            expected += act == "must"
    idle.set()
    hub.close()
    lines = read_lines(log_path(run_dir))
    assert not unexplained(lines, hub.next_seq)
    assert sum(line["type"] == "RUN_ENDED" for line in lines) == expected
    assert [line["seq"] for line in lines] == sorted(line["seq"] for line in lines)


def test_losses_for_different_reasons_are_explained_apart(tmp_path: Path) -> None:
    hub = open_hub(tmp_path, queue_capacity=1, flush_interval_s=60.0)
    idle = stall(hub)
    for event in (trend(), trend(), trend(round=None), trend(round=None), trend()):
        hub.emit(event)
    idle.set()
    hub.close()
    drops = [line["data"] for line in read_lines(log_path(tmp_path)) if line["type"] == "EVENTS_DROPPED"]
    assert [(drop["reason"], drop["first_seq"], drop["last_seq"]) for drop in drops] == [
        ("queue_full", 1, 1),
        ("invalid", 2, 3),
        ("queue_full", 4, 4),
    ]


def test_an_event_that_breaks_the_catalogue_or_cannot_be_written_is_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unwritable = ended()
    object.__setattr__(unwritable.data, "error_type", object())
    with open_hub(tmp_path) as hub:
        hub.emit(trend(round=None))
        hub.emit(unwritable)
    reported = capsys.readouterr().err
    assert "TREND_DETECTED needs round" in reported
    assert "RUN_ENDED (seq 1) cannot be written as JSON" in reported
    assert [line["data"]["reason"] for line in read_lines(log_path(tmp_path))] == ["invalid", "invalid"]
    assert not hub.close().complete


def test_a_complaint_that_nobody_can_hear_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have been started without standard error."""
    with open_hub(tmp_path) as hub:
        monkeypatch.setattr(sys, "stderr", None)
        hub.emit(trend(round=None))
        hub.emit(trend())
    assert [line["type"] for line in read_lines(log_path(tmp_path))] == ["TREND_DETECTED", "EVENTS_DROPPED"]


def test_a_flush_explains_what_only_the_writer_found_to_be_unusable(tmp_path: Path) -> None:
    """A checkpoint that is taken now must not count an event whose loss nothing on disk explains."""
    unwritable = ended()
    object.__setattr__(unwritable.data, "error_type", object())
    hub = open_hub(tmp_path)
    for event in (trend(), unwritable, trend()):
        hub.emit(event)
    assert hub.flush(10, fsync=True)
    next_seq, lines = hub.next_seq, read_lines(log_path(tmp_path))
    hub.close()
    assert [line["type"] for line in lines] == ["TREND_DETECTED", "TREND_DETECTED", "EVENTS_DROPPED"]
    assert next_seq == 4
    assert not unexplained(lines, next_seq)


def test_close_is_idempotent_and_health_outlives_it(tmp_path: Path) -> None:
    hub = open_hub(tmp_path)
    hub.emit(trend())
    first = hub.close()
    hub.emit(trend())
    again = hub.close()
    assert (first.num_late, again.num_late) == (0, 1)
    assert len(read_lines(log_path(tmp_path))) == 1
    assert hub._queue == []
    assert hub.flush(1)


def test_close_does_not_hang_on_a_stuck_writer(tmp_path: Path) -> None:
    hub = open_hub(tmp_path, flush_interval_s=0.01)
    gate = stall(hub)
    hub.emit(ended())
    report = hub.close(timeout=0.1)
    assert not report.complete
    assert report.num_unwritten == 1
    assert report.log_error is not None
    assert not hub.flush(0.05)
    gate.set()
    assert hub.close().complete


def test_a_defect_in_the_writer_is_loud_and_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = open_hub(tmp_path, flush_interval_s=60.0)

    def fail() -> list:  # type: ignore[type-arg]
        raise KeyError("a defect")

    hub._take = fail  # type: ignore[method-assign]
    assert not hub.flush(10)
    assert hub.health().must_stop
    assert "a defect" in capsys.readouterr().err
    assert not hub.close().complete


def test_a_hub_cannot_be_pickled(tmp_path: Path) -> None:
    with open_hub(tmp_path) as hub, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(hub)


def test_the_heartbeat_tells_where_training_is(tmp_path: Path) -> None:
    with open_hub(tmp_path, heartbeat_s=0.0) as hub:
        for epoch in range(3):
            hub.progress("train", round=2, epoch=epoch)
        hub.emit(trend())
        assert hub.flush(10)
        status = json.loads((tmp_path / STATUS_FILE).read_bytes())
    assert (status["phase"], status["round"], status["epoch"], status["last_seq"]) == ("train", 2, 2, 0)
    assert not status["closed"]
    assert status["median_epoch_s"] >= 0.0
    last = json.loads((tmp_path / STATUS_FILE).read_bytes())
    assert last["closed"]
    assert set(last) == set(RunStatus.__record_fields__)  # type: ignore[attr-defined]


def test_the_heartbeat_tells_what_waits_and_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_hub(tmp_path, heartbeat_s=0.0) as hub:
        monkeypatch.setattr(hub._writer._log, "append", _refuse)
        for event in (ended(), ended(), trend()):
            hub.emit(event)
        assert not hub.flush(10)
        status = json.loads((tmp_path / STATUS_FILE).read_bytes())
        monkeypatch.undo()
    assert (status["num_held"], status["num_dropped"]) == (2, {"TREND_DETECTED": 1})
    assert status["log_error"] == "PermissionError: [Errno 13] no"


def test_leaving_without_close_still_writes(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.nissa.events import ended, open_hub
hub = open_hub(Path(sys.argv[1]), flush_interval_s=60.0)
hub.emit(ended(5))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert [line["data"]["num_rounds_total"] for line in read_lines(log_path(tmp_path))] == [5]


def test_a_comparison_study_stops_at_the_first_loss(tmp_path: Path) -> None:
    with open_hub(tmp_path, require_complete=True) as hub:
        assert not hub.health().must_stop
        hub.emit(trend(round=None))
        assert hub.health().must_stop


def test_without_a_log_only_what_is_urgent_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert not isinstance(get_hub(), TelemetryHub)
    get_hub().emit(ended())
    assert capsys.readouterr().err == ""
    get_hub().emit(ended(severity=Severity.ERROR))
    assert "RUN_ENDED" in capsys.readouterr().err
    assert get_hub().close().complete
    with open_hub(tmp_path) as hub:
        set_hub(hub)
        assert get_hub() is hub
        set_hub(None)
    assert not isinstance(get_hub(), TelemetryHub)


def test_without_a_log_listeners_are_reported_and_words_on_stderr_are_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listener = Listener()
    with Hub(first_seq=7, backends=(listener,)) as hub:
        hub.emit(ended(severity=Severity.ERROR))
        hub.emit(trend())
        assert hub.next_seq == 7, "nothing is written, so no number is used"
    assert listener.heard == [0, 1]
    assert hub.close().backends["listener"].state == "closed"
    assert capsys.readouterr().err == ""


def test_must_events_that_pile_up_before_a_writer_that_never_returns_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.nissa.hub.MAX_HELD", 10)
    hub = open_hub(tmp_path, queue_capacity=2)
    release = stall(hub)
    for _ in range(8):
        hub.emit(ended())
    assert not hub.health().must_stop
    for _ in range(8):
        hub.emit(ended())
    assert hub.health().must_stop
    release.set()
    hub.close()


def test_many_threads_may_emit(tmp_path: Path) -> None:
    with open_hub(tmp_path, flush_interval_s=0.001) as hub:
        threads = [threading.Thread(target=lambda: [hub.emit(trend()) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [line["seq"] for line in read_lines(log_path(tmp_path))] == list(range(2000))


def test_too_many_held_events_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_HELD", 2)
    with open_hub(tmp_path) as hub:
        monkeypatch.setattr(hub._writer._log, "append", _refuse)
        for _ in range(3):
            hub.emit(ended())
        assert not hub.flush(10)
        assert hub.health().num_held == 3
        assert hub.health().must_stop
        monkeypatch.undo()
    assert hub.close().complete


def _refuse(lines: bytes) -> None:
    raise PermissionError(13, "no")
