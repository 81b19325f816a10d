"""A run on the screen: what it shows, and that nothing that happens to the screen touches anything else."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from esper.karn.live import LiveConsole, PatientFile, RunProgress, run_console
from esper.leyline import LoggedEvent, Severity, TelemetryEventType, make_event
from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.nissa import Hub
from tests.karn.logs import (
    action_taken,
    anomaly,
    checkpoint,
    ended,
    epoch_completed,
    round_completed,
    started,
    worker_changed,
)

T = TelemetryEventType


def logged(
    kind: TelemetryEventType, data: Any, severity: Severity = Severity.INFO, *, seq: int, **ids: int
) -> LoggedEvent:
    where = {"round": None, "episode": None, "env": None, "epoch": None, **ids}
    head: dict[str, Any] = {"v": 1, "run": "r", "attempt": 0, "seq": seq, "wall": 0.0, "mono": 0.0, "group": "main"}
    return LoggedEvent(**head, type=kind, severity=severity, data=data, **where)


def screen(file: Any, *, terminal: bool = False, **options: Any) -> LiveConsole:
    console = Console(file=file, force_terminal=terminal, width=80, color_system=None, legacy_windows=False)
    settings = {"label": "ppo", "rounds": 4, "horizon": 5, "done": 0, **options}
    return LiveConsole(RunProgress(console), **settings)


def shown(*events: LoggedEvent, **options: Any) -> str:
    file = io.StringIO()
    live = screen(file, **options)
    live.start()
    for event in events:
        live.write(event)
    live.close()
    return file.getvalue()


def test_a_notice_stands_below_the_bars_from_the_next_drawing_on() -> None:
    said: list[str] = []
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    progress = RunProgress(console, notice=lambda: said[-1] if said else None)
    live = LiveConsole(progress, label="ppo", rounds=4, horizon=5, done=0)
    assert not progress.is_drawing()
    live.start()
    assert progress.is_drawing()
    assert "stopping" not in file.getvalue()
    said.append("stopping after this\x1b[2J round")
    progress.refresh()
    live.close()
    assert "stopping after this [2J round" in file.getvalue()
    assert not progress.is_drawing()


def test_without_a_terminal_nothing_is_drawn_over() -> None:
    progress = RunProgress(Console(file=io.StringIO(), force_terminal=False))
    progress.start()
    assert not progress.is_drawing()
    progress.stop()


def test_away_from_a_terminal_every_round_is_a_line() -> None:
    text = shown(
        logged(T.RUN_STARTED, started(), seq=0),
        logged(
            T.ROUND_COMPLETED,
            round_completed(committed_accuracy_pct=61.25, num_rollbacks=2, duration_s=5.0),
            seq=1,
            round=0,
        ),
        logged(T.ROUND_COMPLETED, round_completed(committed_accuracy_pct=None), seq=2, round=1),
        opening=("digits: what it is", "run [a]"),
    )
    opening, where, first, second = text.splitlines()
    assert (opening, where) == ("digits: what it is", "run [a]"), "brackets are no markup"
    assert first.startswith("ppo round 1/4  committed 61.2 %")
    assert "rollbacks 2" in first
    assert "5.0 s  about 15 s left" in first
    assert first.endswith("steady"), "the verdict in a word"
    assert "round 2/4  committed not measured" in second


def rounds_with(*reported: LoggedEvent) -> list[LoggedEvent]:
    """A run of two hosts with a round after each event."""
    events = [logged(T.RUN_STARTED, started(num_envs=4), seq=0)]
    for event in reported:
        events.append(replace(event, seq=len(events)))
        events.append(logged(T.ROUND_COMPLETED, round_completed(), seq=len(events), round=event.round or 0))
    return events


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if ": warning:" in line or ": critical:" in line or ": error:" in line]


def test_an_alarm_about_the_run_is_a_line_that_says_what_to_do_and_is_said_once() -> None:
    alarm = anomaly(kind="clip_fraction", metric="clip_fraction", value=0.6, limit=0.5)
    raised = logged(T.ANOMALY_DETECTED, alarm, Severity.CRITICAL, seq=0, round=1)
    later = logged(T.ANOMALY_DETECTED, replace(alarm, state="worsened"), Severity.CRITICAL, seq=0, round=2)
    (line,) = warnings_in(shown(*rounds_with(raised, later)))
    assert line.startswith("ppo round 2/4: critical: steps too large (clip_fraction 0.6, limit 0.5 (seq 1)).")
    assert line.endswith("lower the learning rate or the passes per update")


def test_an_alarm_that_comes_again_is_said_again() -> None:
    alarm = anomaly(kind="clip_fraction", metric="clip_fraction")
    events = [
        logged(T.ANOMALY_DETECTED, replace(alarm, state=state), Severity.WARNING, seq=0, round=number)
        for number, state in enumerate(("entered", "cleared", "entered"))
    ]
    assert len(warnings_in(shown(*rounds_with(*events)))) == 2


@pytest.mark.parametrize(("hosts", "lines"), [(1, 0), (2, 1), (4, 1)])
def test_what_few_hosts_do_stays_in_the_log(hosts: int, lines: int) -> None:
    ids: dict[str, int] = {"round": 0, "episode": 0, "epoch": 3}
    dormant = anomaly(kind="seed_grad_ratio", metric="seed_grad_ratio:r0c0")
    reported = [
        logged(T.ANOMALY_DETECTED, dormant, Severity.WARNING, seq=env + 1, env=env, **ids) for env in range(hosts)
    ]
    events = [logged(T.RUN_STARTED, started(num_envs=4), seq=0), *reported]
    text = shown(*events, logged(T.ROUND_COMPLETED, round_completed(), seq=len(events), round=0))
    assert len(warnings_in(text)) == lines


def test_a_lost_worker_is_said_at_once() -> None:
    lost = logged(T.WORKER_STATE_CHANGED, worker_changed(), Severity.WARNING, seq=0, round=None)
    (line,) = shown(lost).splitlines()
    assert line.startswith("ppo round -: warning: WORKER_STATE_CHANGED: worker_id ")


def test_what_the_command_itself_says_is_not_said_twice() -> None:
    events = (
        logged(T.CHECKPOINT_RECORDED, checkpoint(action="save_failed", error="no room"), Severity.ERROR, seq=0),
        logged(T.RUN_ENDED, ended(status="failed"), Severity.ERROR, seq=1),
    )
    assert shown(*events) == ""


def test_a_quiet_screen_says_how_the_run_began_and_nothing_else() -> None:
    text = shown(
        logged(T.ROUND_COMPLETED, round_completed(), seq=0, round=0),
        logged(T.ANOMALY_DETECTED, anomaly(), Severity.CRITICAL, seq=1, round=0),
        opening=("digits",),
        quiet=True,
    )
    assert text == "digits\n"


@pytest.mark.parametrize(("mode", "terminal"), [("rich", True), ("plain", False)])
def test_a_person_may_say_what_standard_output_is(mode: str, terminal: bool) -> None:
    assert run_console(mode).is_terminal is terminal


def test_a_terminal_shows_bar_facts_and_verdict_within_80_columns() -> None:
    file = io.StringIO()
    live = screen(file, terminal=True)
    live.start()
    live.write(logged(T.RUN_STARTED, started(), seq=0))
    ids: dict[str, int] = {"round": 0, "episode": 0, "epoch": 1}
    live.write(logged(T.EPOCH_COMPLETED, epoch_completed(val_accuracy_pct=40.0), seq=1, env=0, **ids))
    live.write(logged(T.EPOCH_COMPLETED, epoch_completed(val_accuracy_pct=50.0), seq=2, env=1, **ids))
    live.write(logged(T.ROUND_COMPLETED, round_completed(), seq=3, round=0))
    live.tick(1, 2)
    live._progress.refresh()
    live.close()
    drawn = Text.from_ansi(file.getvalue().replace("\r", "\n")).plain
    last = [line.rstrip() for line in drawn.splitlines() if line.strip()][-3:]
    assert last[0].startswith("ppo 2/4")
    assert " 35 %" in last[0]
    assert "ETA" in last[0]
    assert last[1].startswith("  now 45.0 %  committed")
    assert last[2] == "  steady"
    assert max(map(len, last)) <= 80


def test_a_resumed_run_does_not_miss_what_came_before_it() -> None:
    live = screen(io.StringIO(), done=2)
    live.start()
    for seq in (500, 501):
        live.write(logged(T.ROUND_COMPLETED, round_completed(), seq=seq, round=seq - 498))
    assert live._view is not None
    assert live._view.num_missing == 0


def test_steps_alone_are_no_use_to_the_screen() -> None:
    live = screen(io.StringIO())
    live.start()
    ids: dict[str, int] = {"round": 0, "episode": 0, "env": 0, "epoch": 0}
    assert not live.write(logged(T.ACTION_TAKEN, action_taken(), seq=0, **ids))
    assert live.write(logged(T.ROUND_COMPLETED, round_completed(), seq=1, round=0))


class Unwritable(io.StringIO):
    """Fails like a full disk, or like a pipe whose reader has gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error
        self.tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "reported"), [(OSError(28, "No space left on device"), 1), (BrokenPipeError(32, "Broken pipe"), 0)]
)
def test_output_that_cannot_be_written_is_given_up_once(
    error: OSError, reported: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Unwritable(error)
    patient = PatientFile(file)
    for _ in range(3):
        assert patient.write("words") == 5
        patient.flush()
    assert file.tries == 1
    assert capsys.readouterr().err.count("The run goes on without it") == reported


def test_a_screen_that_blocks_holds_nobody_up(capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()

    class Blocking(io.StringIO):
        def write(self, text: str) -> int:
            release.wait(60)
            return len(text)

    hub = Hub(backends=(screen(Blocking()),))
    for number in range(4):
        hub.emit(make_event(T.ROUND_COMPLETED, round_completed(), round=number))
        hub.progress("play", round=number, epoch=0)
    assert hub.close(0.2).backends["console"].state == "hung"
    assert "console is switched off" in capsys.readouterr().err
    release.set()


def test_training_survives_a_reader_that_leaves(tmp_path: Path) -> None:
    """As with `esper train | head -1`: the pipe breaks, the run is trained and saved to its end, and the code is 0."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "esper.scripts.train", "wait_only", "--preset", "smoke", "--task", "digits_mlp"]
    command += ["--workers", "1", "--backend", "torch", "--runs", str(tmp_path), "--run-id", "a"]
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert (tmp_path / "a" / CHECKPOINTS_DIR / "ckpt-00000002").is_dir()
