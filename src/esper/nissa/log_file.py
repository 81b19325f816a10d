"""The log of one attempt as a file: whole lines or nothing, never edited, a checksum at close. Knows no events."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path

import msgspec

from esper.leyline.files import open_regular, sync_directory, write_all, write_atomic
from esper.leyline.rundir import DEFAULT_GROUP, EVENTS_DIR, EventFile, event_file, event_files

MAX_OWNER_BYTES = 1 << 20
"""Of a line that is looked at for its owner; a longer one is looked at in parts, and damaged."""


def new_run_id() -> str:
    """A fresh name for a run: the time in UTC and six random digits, never drawn from a training generator."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


class LogFile:
    """Begins a new attempt in a run directory and appends chunks of whole lines to its file.

    A chunk that could not be written completely is cut off again, so the file always ends in a newline unless the
    process dies inside a write. After an error the same chunk can simply be appended once more.

    Args:
        run_dir: Created if missing. The caller holds the run: nobody else begins an attempt meanwhile.
        run_id: Name of the run; None for the one the directory holds, or a new one.
        group: Cohort of the run; None for the one the directory holds, or the default.
        first_seq: Sequence number the attempt begins with: 0, or the checkpoint's `next_seq`.

    Raises:
        ValueError: The directory belongs to another run or group, or holds a log of another format.
        OSError: The directory cannot be written.
    """

    def __init__(self, run_dir: Path, *, run_id: str | None = None, group: str | None = None, first_seq: int = 0):
        earlier = event_files(run_dir)
        held = _held(earlier)
        self.run_id = run_id or (held.run if held else new_run_id())
        self.group = group or (held.group if held else DEFAULT_GROUP)
        if held and (self.run_id, self.group) != (held.run, held.group):
            raise ValueError(
                f"{run_dir} holds run {held.run} of group {held.group}, not {self.run_id} of group {self.group}. "
                "Use another directory: one holds exactly one run"
            )
        (run_dir / EVENTS_DIR).mkdir(parents=True, exist_ok=True)
        for file in earlier:
            if not file.checksum_path.exists():  # its process died, or could not write it
                _seal_left_over(file)
        self.file = event_file(run_dir, earlier[-1].attempt + 1 if earlier else 0, first_seq)
        # Appending makes each chunk land at the end even where the position is stale after a cut.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.file.path, flags, 0o666)
        self._num_bytes = 0
        self._digest = hashlib.sha256()
        self._torn = False
        """True while half a line may stand at the end of the file."""
        sync_directory(run_dir / EVENTS_DIR)
        sync_directory(run_dir)

    def append(self, lines: bytes) -> None:
        """Writes whole lines, newlines included, in one go.

        Raises:
            OSError: Nothing of the chunk is in the file.
        """
        if self._torn:
            self._cut_back()
        self._torn = True
        try:
            write_all(self._fd, lines)
        except OSError:
            self._cut_back()
            raise
        self._torn = False
        self._num_bytes += len(lines)
        self._digest.update(lines)

    def sync(self) -> None:
        """Makes everything written so far survive a loss of power."""
        os.fsync(self._fd)

    def seal(self) -> None:
        """Writes the checksum file: the last line is written and durable."""
        write_atomic(self.file.checksum_path, self.file.checksum(self._digest.hexdigest()).encode())

    def close(self) -> None:
        """Releases the file."""
        os.close(self._fd)

    def discard(self) -> None:
        """Takes back an attempt that came to nothing before its first event: what the one before said counts again."""
        assert not self._num_bytes
        self.close()
        self.file.path.unlink()

    def _cut_back(self) -> None:
        if os.fstat(self._fd).st_size > self._num_bytes:
            os.ftruncate(self._fd, self._num_bytes)
        self._torn = False


class _Owner(msgspec.Struct):
    """Whose log a line belongs to."""

    run: str
    group: str


def _held(files: list[EventFile]) -> _Owner | None:
    """Whose log a directory holds, by its first line that can be read: damage is no reason to refuse a new attempt."""
    for file in files:
        with open(open_regular(file.path), "rb") as stream:
            while line := stream.readline(MAX_OWNER_BYTES):
                try:
                    return msgspec.json.decode(line, type=_Owner)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
    return None


def _seal_left_over(file: EventFile) -> None:
    with open(open_regular(file.path), "rb") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256")
    write_atomic(file.checksum_path, file.checksum(digest.hexdigest()).encode())
