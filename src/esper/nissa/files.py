"""Small files that are either old or new, never half written."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, *, durable: bool) -> None:
    """Puts `content` in place of a file in one step.

    Args:
        path: The file; a temporary one is made beside it.
        content: All of its bytes.
        durable: True to survive a loss of power, at the price of two syncs.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, content)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
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
