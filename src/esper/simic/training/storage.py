"""Durable files and folders: the few calls of the operating system that checkpoints are made of.

Every write of a checkpoint passes through here, so errors, permissions and order have one home. It knows nothing of
what the bytes mean.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from esper.leyline.files import write_all

TEMP_PREFIX = ".tmp-"


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a new file and makes its content durable. Its name is durable after `sync_directory`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_temp_folder(parent: Path) -> Path:
    """Makes an empty folder that `remove_temp` would clear away. Beside its target, so that a rename is enough."""
    counter = 0
    while True:
        path = parent / f"{TEMP_PREFIX}{os.getpid()}-{counter}"
        try:
            os.mkdir(path)
        except FileExistsError:
            counter += 1
        else:
            return path


def remove_temp(parent: Path) -> tuple[str, ...]:
    """Removes what unfinished writers left. Only for who holds the run's lock: a living writer looks the same."""
    stale = tuple(sorted(entry.name for entry in os.scandir(parent) if entry.name.startswith(TEMP_PREFIX)))
    for name in stale:
        remove(parent / name)
    return stale


def remove(path: Path) -> None:
    """Removes a file or a folder with all it holds; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)
