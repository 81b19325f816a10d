"""The active file of the log: whole lines or nothing, closed and renamed when it is full. It knows no events."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from esper.leyline import RunManifest, SegmentEntry, segment_name
from esper.leyline.files import write_all
from esper.leyline.rundir import EVENTS_FILE
from esper.nissa.segments import close_segment, next_part, write_manifest


class _Tally:
    """What the manifest will have to say about the active file."""

    def __init__(self) -> None:
        self.num_bytes = self.num_lines = 0
        self.digest = hashlib.sha256()
        self.first_seq: int | None = None
        self.last_seq: int | None = None

    def add(self, lines: bytes, seqs: Sequence[int]) -> None:
        self.num_bytes += len(lines)
        self.num_lines += len(seqs)
        self.digest.update(lines)
        self.first_seq = seqs[0] if self.first_seq is None else self.first_seq
        self.last_seq = seqs[-1]


class LogFile:
    """Appends chunks of whole lines to the active segment of one attempt.

    A chunk that could not be written completely is cut off again, so the file always ends in a newline unless the
    process dies inside a write. After an error the same chunk can simply be appended once more.
    """

    def __init__(self, run_dir: Path, manifest: RunManifest, *, rotate_bytes: int) -> None:
        self._run_dir = run_dir
        self._manifest = manifest
        self._manifest_current = True
        self._rotate_bytes = rotate_bytes
        self._fd: int | None = None
        self._tally = _Tally()
        self._torn = False
        """True while half a line may stand at the end of the file."""
        self._open()

    @property
    def attempt(self) -> int:
        """The start that this file belongs to."""
        return self._manifest.attempts[-1].attempt

    def append(self, lines: bytes, seqs: Sequence[int]) -> None:
        """Writes whole lines in one go.

        Args:
            lines: Complete lines, newlines included.
            seqs: The sequence number of each line.

        Raises:
            OSError: Nothing of the chunk is in the file.
        """
        if self._tally.num_bytes >= self._rotate_bytes:
            self._rotate()
        fd = self._open()
        if self._torn:
            self._cut_back(fd)
        self._torn = True
        try:
            write_all(fd, lines)
        except OSError:
            self._cut_back(fd)
            raise
        self._torn = False
        self._tally.add(lines, seqs)

    def sync(self) -> None:
        """Makes everything written so far survive a loss of power."""
        os.fsync(self._open())
        if not self._manifest_current:
            self._save_manifest()

    def seal(self) -> None:
        """Enters the file into the manifest as it is now: its last line is written.

        Raises:
            OSError: The manifest cannot be written.
        """
        self._manifest = replace(self._manifest, active=self._entry(EVENTS_FILE))
        self._save_manifest()

    def close(self) -> None:
        """Releases the file. It stays the active segment until a new attempt begins."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            # Appending makes each chunk land at the end even where the position is stale after a cut.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._run_dir / EVENTS_FILE, flags, 0o644)
            if os.fstat(self._fd).st_size:
                self.close()
                raise ValueError(f"{self._run_dir / EVENTS_FILE} is not empty: begin a new attempt before opening it")
        return self._fd

    def _cut_back(self, fd: int) -> None:
        if os.fstat(fd).st_size > self._tally.num_bytes:
            os.ftruncate(fd, self._tally.num_bytes)
        self._torn = False

    def _rotate(self) -> None:
        part = next_part(self._manifest.segments, self.attempt)
        entry = self._entry(segment_name(self.attempt, part))
        fd = self._open()
        self._cut_back(fd)
        os.fsync(fd)
        close_segment(self._run_dir, self.attempt, part)
        self.close()
        self._manifest = replace(self._manifest, segments=(*self._manifest.segments, entry))
        self._manifest_current = False
        self._tally = _Tally()
        self._save_manifest()

    def _entry(self, name: str) -> SegmentEntry:
        """What the manifest has to say about the active file, under a name."""
        return SegmentEntry(
            name=name,
            attempt=self.attempt,
            first_seq=self._tally.first_seq,
            last_seq=self._tally.last_seq,
            num_lines=self._tally.num_lines,
            num_bytes=self._tally.num_bytes,
            sha256=self._tally.digest.hexdigest(),
            torn_tail_bytes=0,
        )

    def _save_manifest(self) -> None:
        write_manifest(self._run_dir, self._manifest)
        self._manifest_current = True
