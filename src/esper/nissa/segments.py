"""The log of a run as files: which start wrote which, and how a new start begins. It writes no events.

The active file is renamed into the segments folder when it is full or when a new attempt begins, and is never edited
afterwards, not even to remove a torn last line. The manifest lists the closed files; it can be made again from them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from esper.leyline import SCHEMA_VERSION, AttemptEntry, RunManifest, SegmentEntry, segment_name, segment_position
from esper.leyline.files import sync_directory, write_atomic
from esper.leyline.rundir import DEFAULT_GROUP, EVENTS_FILE, MANIFEST_FILE, SEGMENTS_DIR


class _Stamp(msgspec.Struct):
    """What a scan needs of a line."""

    run: str
    attempt: int
    seq: int
    wall: float
    group: str


_stamp = msgspec.json.Decoder(_Stamp)


def new_run_id() -> str:
    """A fresh name for a run: the time in UTC and six random digits, never drawn from a training generator."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def read_manifest(run_dir: Path) -> RunManifest | None:
    """The manifest of a run directory; None if there is none.

    Raises:
        ValueError: It is not readable as one, or a newer build wrote it.
    """
    path = run_dir / MANIFEST_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        manifest = msgspec.json.decode(content, type=RunManifest)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is damaged: {error}. Move it away; the log can rebuild it") from error
    if manifest.v > SCHEMA_VERSION:
        raise ValueError(f"{path} has version {manifest.v}; this build reads up to {SCHEMA_VERSION}. Update Esper")
    return manifest


def write_manifest(run_dir: Path, manifest: RunManifest) -> None:
    """Replaces the manifest durably, after the segments it speaks of."""
    sync_directory(run_dir / SEGMENTS_DIR)
    write_atomic(run_dir / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest)), durable=True)


def begin_attempt(
    run_dir: Path, *, run_id: str | None = None, first_seq: int = 0, group: str = DEFAULT_GROUP
) -> RunManifest:
    """Makes a run directory ready for a new start: closes what an earlier one left open and enters the new one.

    Args:
        run_dir: Created if missing.
        run_id: Name of the run; None for that of an existing directory, or a new one.
        first_seq: Sequence number the new start begins with: 0, or the checkpoint's `next_seq`.
        group: Cohort of the run.

    Raises:
        ValueError: The directory belongs to another run or group.
        OSError: The directory cannot be written.
    """
    (run_dir / SEGMENTS_DIR).mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(run_dir) or rebuild_manifest(run_dir)
    if manifest is None:
        manifest = RunManifest(v=SCHEMA_VERSION, run=run_id or new_run_id(), group=group, attempts=(), segments=())
    if manifest.run != (run_id or manifest.run) or manifest.group != group:
        raise ValueError(
            f"{run_dir} holds run {manifest.run} of group {manifest.group}, not {run_id} of group {group}. "
            "Use another directory: one holds exactly one run"
        )
    segments = (*manifest.segments, *_unlisted(run_dir, manifest))
    if (run_dir / EVENTS_FILE).exists():
        left = manifest.attempts[-1].attempt if manifest.attempts else 0
        segments = (*segments, _close_left_over(run_dir, left, segments, manifest.active))
    attempt = manifest.attempts[-1].attempt + 1 if manifest.attempts else 0
    begun = AttemptEntry(attempt=attempt, first_seq=first_seq, started_wall=time.time())
    attempts = (*manifest.attempts, begun)
    made = replace(manifest, v=SCHEMA_VERSION, attempts=attempts, segments=segments, active=None)
    write_manifest(run_dir, made)
    return made


def withdraw_attempt(run_dir: Path, begun: RunManifest) -> None:
    """Takes back a start that came to nothing, before its first event: the last words of the one before count again.

    Args:
        run_dir: Where it was entered.
        begun: What `begin_attempt` returned.
    """
    write_manifest(run_dir, replace(begun, attempts=begun.attempts[:-1]))


def rebuild_manifest(run_dir: Path) -> RunManifest | None:
    """The manifest as the files themselves tell it; None if there is no line to tell anything."""
    closed = [scan_segment(path) for path in _segment_files(run_dir)]
    stamps = [stamp for path in [*_segment_files(run_dir), run_dir / EVENTS_FILE] for stamp in _first_stamps(path)]
    if not stamps:
        return None
    begins: dict[int, AttemptEntry] = {}
    for stamp in stamps:
        known = begins.get(stamp.attempt)
        if known is None or stamp.seq < known.first_seq:
            begins[stamp.attempt] = AttemptEntry(attempt=stamp.attempt, first_seq=stamp.seq, started_wall=stamp.wall)
    return RunManifest(
        v=SCHEMA_VERSION,
        run=stamps[0].run,
        group=stamps[0].group,
        attempts=tuple(begins[attempt] for attempt in sorted(begins)),
        segments=tuple(closed),
    )


def scan_segment(path: Path) -> SegmentEntry:
    """What the manifest has to say about a file, read from the file."""
    position = segment_position(path.name)
    digest, tail = hashlib.sha256(), b""
    num_lines = num_bytes = 0
    first: bytes | None = None
    last: bytes | None = None
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            num_bytes += len(line)
            if not line.endswith(b"\n"):
                tail = line
                continue
            num_lines += 1
            first, last = first or line, line
    return SegmentEntry(
        name=path.name,
        attempt=position[0] if position else -1,
        first_seq=_seq_of(first),
        last_seq=_seq_of(last),
        num_lines=num_lines,
        num_bytes=num_bytes,
        sha256=digest.hexdigest(),
        torn_tail_bytes=len(tail),
    )


def next_part(segments: tuple[SegmentEntry, ...], attempt: int) -> int:
    """The number of the next segment that this attempt closes."""
    parts = [position[1] for s in segments if (position := segment_position(s.name)) and position[0] == attempt]
    return max(parts, default=-1) + 1


def close_segment(run_dir: Path, attempt: int, part: int) -> Path:
    """Moves the active file among the closed ones and returns where it is. Writing the manifest makes it durable."""
    target = run_dir / SEGMENTS_DIR / segment_name(attempt, part)
    assert not target.exists(), f"{target} would be overwritten"
    (run_dir / EVENTS_FILE).rename(target)
    return target


def _close_left_over(
    run_dir: Path, attempt: int, segments: tuple[SegmentEntry, ...], known: SegmentEntry | None
) -> SegmentEntry:
    """Closes the active file of an earlier start. What its own process said about it stays what it is held against."""
    fd = os.open(run_dir / EVENTS_FILE, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    path = close_segment(run_dir, attempt, next_part(segments, attempt))
    return scan_segment(path) if known is None else replace(known, name=path.name)


def _unlisted(run_dir: Path, manifest: RunManifest) -> list[SegmentEntry]:
    """Segments whose process died between closing them and writing the manifest."""
    listed = {Path(segment.name).stem for segment in manifest.segments}
    return [scan_segment(path) for path in _segment_files(run_dir) if path.stem not in listed]


def _segment_files(run_dir: Path) -> list[Path]:
    found = (run_dir / SEGMENTS_DIR).glob("*.jsonl")
    return sorted((path for path in found if segment_position(path.name)), key=lambda p: segment_position(p.name) or ())


def _first_stamps(path: Path) -> list[_Stamp]:
    """The stamp of a file's first whole line: a file holds one attempt, in ascending order."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        line = file.readline()
    stamp = _read_stamp(line) if line.endswith(b"\n") else None
    return [] if stamp is None else [stamp]


def _seq_of(line: bytes | None) -> int | None:
    stamp = None if line is None else _read_stamp(line)
    return None if stamp is None else stamp.seq


def _read_stamp(line: bytes) -> _Stamp | None:
    """None for a damaged line: that is for a verification to tell, and no reason to refuse a new start."""
    try:
        return _stamp.decode(line)
    except msgspec.DecodeError:
        return None
