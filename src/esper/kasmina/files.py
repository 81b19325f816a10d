"""Writing files so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes to a temporary file beside the target, makes it durable, then renames it into place."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no folder {path.parent}")
    # Opened like any file, so that it gets the permissions its owner's other files have.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
