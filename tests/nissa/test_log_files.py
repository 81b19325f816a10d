"""The log on disk: whole lines, one file per attempt with a true checksum, attempts that continue."""

from __future__ import annotations

import json
import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.rundir import EVENTS_DIR, event_files
from esper.nissa import log_file
from esper.nissa.log_file import LogFile
from tests.nissa.events import log_path, open_hub, read_lines, trend


def line(seq: int, attempt: int = 0, filler: str = "") -> bytes:
    stamp = {"run": "r", "attempt": attempt, "seq": seq, "wall": 1.0, "group": "main", "filler": filler}
    return json.dumps(stamp).encode() + b"\n"


def killed(run_dir: Path, content: bytes, first_seq: int = 0) -> Path:
    """An attempt whose process left this content and no checksum."""
    log = LogFile(run_dir, run_id="r", first_seq=first_seq)
    log.close()
    log.file.path.write_bytes(content)
    return log.file.path


def assert_sealed(run_dir: Path, num_files: int) -> None:
    """Checked by a tool that knows nothing of Esper."""
    names = sorted(path.name for path in (run_dir / EVENTS_DIR).glob("*.sha256"))
    assert len(names) == num_files
    if names:
        subprocess.run(["sha256sum", "--strict", "-c", *names], cwd=run_dir / EVENTS_DIR, check=True)


def test_a_new_attempt_writes_a_file_of_its_own(tmp_path: Path) -> None:
    with open_hub(tmp_path) as first:
        first.emit(trend())
        first.emit(trend())
    before = log_path(tmp_path).read_bytes()
    with open_hub(tmp_path, first_seq=1) as second:
        second.emit(trend())
    assert (first.run_id, first.attempt + 1) == (second.run_id, second.attempt)
    old, new = event_files(tmp_path)
    assert [(old.name, new.name)] == [("events/a000-s0.jsonl", "events/a001-s1.jsonl")]
    assert old.path.read_bytes() == before
    assert [(each["attempt"], each["seq"]) for each in read_lines(new.path)] == [(1, 1)]
    assert_sealed(tmp_path, 2)


@given(tail=st.binary(max_size=40).filter(lambda tail: b"\n" not in tail), num_lines=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_what_a_killed_process_left_is_kept_as_it_is_and_gets_a_checksum(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, num_lines: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    content = b"".join(line(seq) for seq in range(num_lines)) + tail
    path = killed(run_dir, content)
    assert_sealed(run_dir, 0)
    LogFile(run_dir, first_seq=num_lines).close()
    assert path.read_bytes() == content
    assert_sealed(run_dir, 1)


def test_a_checksum_that_is_there_is_never_made_again(tmp_path: Path) -> None:
    """Else a resume would vouch for what was changed after the run had ended."""
    with open_hub(tmp_path) as hub:
        hub.emit(trend())
    (file,) = event_files(tmp_path)
    sealed = file.checksum_path.read_bytes()
    file.path.write_bytes(b"changed\n")
    LogFile(tmp_path, first_seq=1).close()
    assert file.checksum_path.read_bytes() == sealed


NESTED = b'{"x": ' + b"[" * 4_000 + b"]" * 4_000 + b"}\n"


@pytest.mark.parametrize("damage", [b"\x00\x00garbage\n", b"\xff\n", b"{}\n", NESTED])
def test_a_damaged_line_does_not_keep_a_run_from_resuming(tmp_path: Path, damage: bytes) -> None:
    killed(tmp_path, damage + line(0))
    log = LogFile(tmp_path, first_seq=1)
    log.close()
    assert (log.run_id, log.group, log.file.attempt) == ("r", "main", 1)


def test_a_line_without_an_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = killed(tmp_path, b"")
    with path.open("wb") as file:
        file.truncate(1 << 28)  # a quarter of a gigabyte that takes no room on the disk
        file.seek(0, 2)
        file.write(b"\n" + line(0))
    tracemalloc.start()
    log = LogFile(tmp_path, first_seq=1)
    log.close()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (log.run_id, log.file.attempt) == ("r", 1)
    assert most < 1 << 26


def test_a_directory_holds_one_run(tmp_path: Path) -> None:
    killed(tmp_path, line(0))
    with pytest.raises(ValueError, match="holds run r of group main, not s of group main"):
        LogFile(tmp_path, run_id="s")
    with pytest.raises(ValueError, match="not r of group other"):
        LogFile(tmp_path, group="other")
    assert len(event_files(tmp_path)) == 1


def test_a_directory_of_the_first_format_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(line(0))
    with pytest.raises(ValueError, match=r"event log of format 1 .* reads format 2"):
        LogFile(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_an_attempt_whose_listener_does_not_start_leaves_no_trace(tmp_path: Path) -> None:
    class Broken:
        name = "broken"

        def start(self) -> None:
            raise ValueError("no such server")

    with open_hub(tmp_path) as hub:
        hub.emit(trend())
    before = sorted(path.name for path in (tmp_path / EVENTS_DIR).iterdir())
    with pytest.raises(ValueError, match="no such server"):
        open_hub(tmp_path, backends=(Broken(),))  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / EVENTS_DIR).iterdir()) == before


@pytest.mark.parametrize("written", [0, 1, 20])
def test_a_chunk_that_failed_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    log = LogFile(tmp_path, run_id="r")
    log.append(line(0))

    def half(fd: int, content: bytes) -> None:
        os.write(fd, content[:written])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_file, "write_all", half)
        with pytest.raises(OSError, match="No space"):
            log.append(line(1) + line(2))
    assert log.file.path.read_bytes() == line(0)
    log.append(line(1) + line(2))
    log.sync()
    log.seal()
    log.close()
    assert log.file.path.read_bytes() == line(0) + line(1) + line(2)
    assert_sealed(tmp_path, 1)


def test_half_a_line_that_could_not_be_cut_off_at_once_is_cut_off_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path, run_id="r")
    log.append(line(0))

    def half(fd: int, content: bytes) -> None:
        os.write(fd, content[:7])
        raise OSError(5, "Input/output error")

    def refuse(fd: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(log_file, "write_all", half)
        patch.setattr(os, "ftruncate", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                log.append(line(1))
    log.append(line(1))
    log.close()
    assert log.file.path.read_bytes() == line(0) + line(1)


# ---- what survives a loss of power


def calls_of(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> list[str]:
    """What is made durable or renamed from now on, by its name in the run directory."""
    calls: list[str] = []
    fsync, replace_path = os.fsync, os.replace

    def inside(path: str | Path) -> str:
        name = str(Path(path).relative_to(run_dir))
        return "temporary" if ".tmp-" in name else name

    monkeypatch.setattr(
        os, "fsync", lambda fd: calls.append(f"fsync {inside(os.readlink(f'/proc/self/fd/{fd}'))}") or fsync(fd)
    )
    monkeypatch.setattr(
        os, "replace", lambda old, new: calls.append(f"replace {inside(new)}") or replace_path(old, new)
    )
    return calls


SEALING = [
    "fsync events/a000-s0.jsonl",
    "fsync temporary",
    "replace events/a000-s0.jsonl.sha256",
    "fsync events",
]


def test_the_checksum_is_written_after_the_log_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = open_hub(tmp_path)
    calls = calls_of(monkeypatch, tmp_path)
    hub.emit(trend())
    hub.close()
    assert [call for call in calls if "status" not in call] == SEALING


def test_what_an_earlier_attempt_left_is_durable_before_its_checksum_and_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, line(0))
    calls = calls_of(monkeypatch, tmp_path)
    LogFile(tmp_path, first_seq=1).close()
    assert calls == [*SEALING, "fsync events", "fsync ."]


def test_a_log_that_could_not_be_made_durable_gets_no_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = open_hub(tmp_path)
    hub.emit(trend())

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hub._writer._log, "sync", refuse)
    assert not hub.close().complete
    assert_sealed(tmp_path, 0)
