"""Writing files so that a reader sees the old content or the new one, never half of it. Knows no formats."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

TEMP_PREFIX = ".tmp-"
"""Names of unfinished files and folders begin with this; only a killed process leaves one behind."""


def write_atomic(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces a file in one step. If it cannot be written, the old file stays and nothing else does.

    Args:
        path: The file; a temporary one is made in the same folder, which must exist.
        content: All of its bytes.
        durable: False to skip the two syncs that make it survive a loss of power.
    """
    temporary = path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")
    try:
        write_new(temporary, content, durable=durable)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def write_new(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Creates a file; its name is durable after `sync_directory`.

    Raises:
        FileExistsError: There is something with that name, a link included.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666)
    try:
        write_all(fd, content)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, content: bytes) -> None:
    """Writes every byte: one call may take fewer than it was given."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def sync_directory(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int | None:
    """Space left where a folder is; None if the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
