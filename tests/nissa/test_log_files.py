"""The log on disk: whole lines, segments with true entries, attempts that continue, a manifest that can be remade."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import SegmentEntry
from esper.leyline.rundir import EVENTS_FILE, MANIFEST_FILE, SEGMENTS_DIR
from esper.nissa import begin_attempt, read_manifest, rebuild_manifest
from esper.nissa import jsonl as jsonl_module
from esper.nissa.jsonl import LogFile
from tests.nissa.events import open_hub, read_lines, trend


def line(seq: int, attempt: int = 0, filler: str = "") -> bytes:
    stamp = {"run": "r", "attempt": attempt, "seq": seq, "wall": 1.0, "group": "main", "filler": filler}
    return json.dumps(stamp).encode() + b"\n"


def assert_true(run_dir: Path, entry: SegmentEntry) -> None:
    content = (run_dir / SEGMENTS_DIR / entry.name).read_bytes()
    assert entry.sha256 == hashlib.sha256(content).hexdigest()
    assert entry.num_bytes == len(content)
    whole = content[: content.rfind(b"\n") + 1].splitlines()
    assert entry.num_lines == len(whole)
    assert entry.torn_tail_bytes == len(content) - content.rfind(b"\n") - 1
    seqs = [json.loads(each)["seq"] for each in whole]
    assert (entry.first_seq, entry.last_seq) == ((seqs[0], seqs[-1]) if seqs else (None, None))


def test_a_full_file_becomes_a_segment_and_nothing_is_lost(tmp_path: Path) -> None:
    with open_hub(tmp_path, rotate_bytes=2000, flush_interval_s=60.0) as hub:
        for tag in range(40):
            hub.emit(trend(tag))
            assert hub.flush(10)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert len(manifest.segments) > 3
    for entry in manifest.segments:
        assert_true(tmp_path, entry)
        assert 2000 <= entry.num_bytes < 3000
    files = [tmp_path / SEGMENTS_DIR / entry.name for entry in manifest.segments]
    lines = [each for file in [*files, tmp_path / EVENTS_FILE] for each in read_lines(file)]
    assert [each["seq"] for each in lines] == list(range(40))


def test_a_new_attempt_closes_the_old_file_and_goes_on(tmp_path: Path) -> None:
    with open_hub(tmp_path) as first:
        first.emit(trend())
        first.emit(trend())
    with open_hub(tmp_path, first_seq=1) as second:
        second.emit(trend())
    assert (first.run_id, first.attempt + 1) == (second.run_id, second.attempt)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [(entry.attempt, entry.first_seq) for entry in manifest.attempts] == [(0, 0), (1, 1)]
    assert [entry.name for entry in manifest.segments] == ["a000-p0000.jsonl"]
    assert_true(tmp_path, manifest.segments[0])
    assert [(each["attempt"], each["seq"]) for each in read_lines(tmp_path / EVENTS_FILE)] == [(1, 1)]


@given(tail=st.binary(max_size=40).filter(lambda tail: b"\n" not in tail), num_lines=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_torn_tail_is_counted_and_kept(tmp_path_factory: pytest.TempPathFactory, tail: bytes, num_lines: int) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    begin_attempt(run_dir, run_id="r")
    content = b"".join(line(seq) for seq in range(num_lines)) + tail
    (run_dir / EVENTS_FILE).write_bytes(content)
    manifest = begin_attempt(run_dir, first_seq=num_lines)
    (entry,) = manifest.segments
    assert entry.torn_tail_bytes == len(tail)
    assert_true(run_dir, entry)
    assert (run_dir / SEGMENTS_DIR / entry.name).read_bytes() == content


def test_the_manifest_can_be_remade_from_the_files(tmp_path: Path) -> None:
    for start in (0, 7):
        with open_hub(tmp_path, first_seq=start, rotate_bytes=1000, flush_interval_s=60.0) as hub:
            for tag in range(10):
                hub.emit(trend(tag))
                hub.flush(10)
    known, remade = read_manifest(tmp_path), rebuild_manifest(tmp_path)
    assert known is not None
    assert remade is not None
    assert (remade.run, remade.group, remade.segments) == (known.run, known.group, known.segments)
    assert [(a.attempt, a.first_seq) for a in remade.attempts] == [(0, 0), (1, 7)]
    (tmp_path / MANIFEST_FILE).unlink()
    assert begin_attempt(tmp_path, first_seq=17).attempts[-1].attempt == 2


def test_a_segment_that_the_manifest_missed_is_entered(tmp_path: Path) -> None:
    begin_attempt(tmp_path, run_id="r")
    (tmp_path / SEGMENTS_DIR / "a000-p0000.jsonl").write_bytes(line(0) + line(1))
    (tmp_path / EVENTS_FILE).write_bytes(line(2))
    manifest = begin_attempt(tmp_path, first_seq=3)
    assert [entry.name for entry in manifest.segments] == ["a000-p0000.jsonl", "a000-p0001.jsonl"]
    for entry in manifest.segments:
        assert_true(tmp_path, entry)


def test_a_damaged_line_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    begin_attempt(tmp_path, run_id="r")
    (tmp_path / EVENTS_FILE).write_bytes(line(0) + b"\x00\x00garbage\n")
    (entry,) = begin_attempt(tmp_path, first_seq=1).segments
    assert (entry.first_seq, entry.last_seq, entry.num_lines) == (0, None, 2)


def test_a_directory_holds_one_run(tmp_path: Path) -> None:
    begin_attempt(tmp_path, run_id="r", group="main")
    with pytest.raises(ValueError, match="holds run r of group main, not s of group main"):
        begin_attempt(tmp_path, run_id="s")
    with pytest.raises(ValueError, match="not None of group other"):
        begin_attempt(tmp_path, group="other")


def test_foreign_and_newer_manifests_are_refused_with_a_remedy(tmp_path: Path) -> None:
    begin_attempt(tmp_path, run_id="r")
    path = tmp_path / MANIFEST_FILE
    newer = json.loads(path.read_bytes()) | {"v": 99}
    path.write_text(json.dumps(newer))
    with pytest.raises(ValueError, match="version 99; this build reads up to 1"):
        begin_attempt(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        begin_attempt(tmp_path)


@pytest.mark.parametrize("written", [0, 1, 20])
def test_a_chunk_that_failed_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    log = LogFile(tmp_path, begin_attempt(tmp_path, run_id="r"), rotate_bytes=10_000)
    log.append(line(0), [0])

    def half(fd: int, content: bytes) -> None:
        os.write(fd, content[:written])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jsonl_module, "write_all", half)
        with pytest.raises(OSError, match="No space"):
            log.append(line(1) + line(2), [1, 2])
    assert (tmp_path / EVENTS_FILE).read_bytes() == line(0)
    log.append(line(1) + line(2), [1, 2])
    log.sync()
    log.close()
    assert (tmp_path / EVENTS_FILE).read_bytes() == line(0) + line(1) + line(2)


def test_half_a_line_that_could_not_be_cut_off_at_once_is_cut_off_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path, begin_attempt(tmp_path, run_id="r"), rotate_bytes=10_000)
    log.append(line(0), [0])

    def half(fd: int, content: bytes) -> None:
        os.write(fd, content[:7])
        raise OSError(5, "Input/output error")

    def refuse(fd: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(jsonl_module, "write_all", half)
        patch.setattr(os, "ftruncate", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                log.append(line(1), [1])
    log.append(line(1), [1])
    log.close()
    assert (tmp_path / EVENTS_FILE).read_bytes() == line(0) + line(1)


def test_parts_are_numbered_anew_in_every_attempt(tmp_path: Path) -> None:
    for attempt in range(2):
        log = LogFile(tmp_path, begin_attempt(tmp_path, run_id="r", first_seq=3 * attempt), rotate_bytes=10)
        for seq in range(3 * attempt, 3 * attempt + 3):
            log.append(line(seq, attempt), [seq])
        log.close()
    closed = begin_attempt(tmp_path, first_seq=6).segments
    assert [entry.name for entry in closed] == [
        f"a00{attempt}-p000{part}.jsonl" for attempt in (0, 1) for part in range(3)
    ]
    for entry in closed:
        assert_true(tmp_path, entry)


# ---- what survives a loss of power


def calls_of(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> list[str]:
    """What is made durable or renamed from now on, by its name in the run directory."""
    calls: list[str] = []
    fsync, rename, replace_path = os.fsync, Path.rename, os.replace

    def inside(path: str | Path) -> str:
        name = str(Path(path).relative_to(run_dir))
        return ".tmp-" if name.startswith(".tmp-") else name

    monkeypatch.setattr(
        os, "fsync", lambda fd: calls.append(f"fsync {inside(os.readlink(f'/proc/self/fd/{fd}'))}") or fsync(fd)
    )
    monkeypatch.setattr(Path, "rename", lambda self, to: calls.append(f"rename {inside(self)}") or rename(self, to))
    monkeypatch.setattr(
        os, "replace", lambda old, new: calls.append(f"replace {inside(new)}") or replace_path(old, new)
    )
    return calls


DURABLE_MANIFEST = ["fsync segments", "fsync .tmp-", "replace manifest.json", "fsync ."]
CLOSING = ["fsync events.jsonl", "rename events.jsonl", *DURABLE_MANIFEST]


def test_a_full_file_is_durable_before_the_manifest_speaks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(tmp_path, begin_attempt(tmp_path, run_id="r"), rotate_bytes=10)
    log.append(line(0), [0])
    calls = calls_of(monkeypatch, tmp_path)
    log.append(line(1), [1])
    log.close()
    assert calls == CLOSING


def test_what_an_earlier_start_left_is_durable_before_the_manifest_speaks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_attempt(tmp_path, run_id="r")
    (tmp_path / EVENTS_FILE).write_bytes(line(0))
    calls = calls_of(monkeypatch, tmp_path)
    begin_attempt(tmp_path, first_seq=1)
    assert calls == CLOSING


def test_the_last_word_on_a_log_is_said_after_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = open_hub(tmp_path)
    calls = calls_of(monkeypatch, tmp_path)
    hub.emit(trend())
    hub.close()
    assert [call for call in calls if "status" not in call] == ["fsync events.jsonl", *DURABLE_MANIFEST]


def test_a_log_that_could_not_be_made_durable_gets_no_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = open_hub(tmp_path)
    hub.emit(trend())

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hub._writer._log, "sync", refuse)
    report = hub.close()
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert (manifest.active, report.complete) == (None, False)


@pytest.mark.parametrize("step", ["close_segment", "write_manifest"])
def test_a_rotation_that_failed_half_way_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    log = LogFile(tmp_path, begin_attempt(tmp_path, run_id="r"), rotate_bytes=10)
    log.append(line(0), [0])

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jsonl_module, step, refuse)
        with pytest.raises(OSError, match="No space"):
            log.append(line(1), [1])
    log.append(line(1), [1])
    log.sync()
    log.close()
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [(entry.name, entry.last_seq) for entry in manifest.segments] == [("a000-p0000.jsonl", 0)]
    assert (tmp_path / EVENTS_FILE).read_bytes() == line(1)


def test_an_open_log_is_not_opened_again(tmp_path: Path) -> None:
    with open_hub(tmp_path) as hub:
        hub.emit(trend())
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    with pytest.raises(ValueError, match="begin a new attempt"):
        LogFile(tmp_path, manifest, rotate_bytes=1000)
