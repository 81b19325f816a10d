"""The few calls on files that a durable record is made of."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def replace_file(path: Path, content: bytes, *, durable: bool) -> None:
    """Puts `content` in place of a file in one step. If it cannot be written, the old file stays and nothing else does.

    Args:
        path: The file; a temporary one is made beside it.
        content: All of its bytes.
        durable: True to survive a loss of power, at the price of two syncs.
    """
    temporary = os.path.join(path.parent, f".{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, content)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def write_all(fd: int, content: bytes) -> None:
    """Writes every byte: one call may take fewer than it was given."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def sync_directory(folder: Path) -> None:
    """Makes names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int | None:
    """Space left where a folder is; None if the system does not tell."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
