"""Files of a folder that anybody may have made: written whole or not at all, read without trusting what is there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from esper.leyline.errors import RunBusy

TEMP_PREFIX = ".tmp-"
"""Names of unfinished files and folders begin with this; only a killed process leaves one behind."""
SCRATCH_PREFIX = "esper-scratch-"
"""The same among the system's temporary files."""
_MAY_BE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


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


def append_durable(path: Path, content: bytes) -> None:
    """Adds to the end of a regular file, or makes it; the bytes are on disk when the call returns."""
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        write_all(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)


def cut_torn_line(path: Path, max_bytes: int) -> None:
    """Removes a last line without its end from a regular file: it was being written when its process died."""
    try:
        fd = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return
    with open(fd, "r+b") as file:
        content = _read_all(file, path, max_bytes)
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)  # in one step: a kill here must not cost the lines before it


@contextlib.contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well; otherwise nothing is left.

    Raises:
        OSError: There is something of that name that is not an empty folder, or the place cannot be written.
    """
    temporary = folder.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask for the same folder out of it until the block ends, however it ends.

    The folder is made if it is missing, and removed again if nothing was put into it.

    Raises:
        RunBusy: Another process uses it.
        OSError: It cannot be made.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunBusy(f"another process writes to {folder}. Wait for it, stop it, or name another folder") from None
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty: what is in it stays
            for place in made:
                place.rmdir()
        os.close(fd)


@contextlib.contextmanager
def scratch_folder(base: Path | None = None) -> Iterator[Path]:
    """A folder for large files of this process, in `base` or among the system's temporary ones. It goes with the block.

    What a killed process left goes when the next one asks: its folder is no longer locked.
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    for left in base.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid == os.getuid():
                fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
                finally:
                    os.close(fd)
    # Locked before it gets the name by which others find it.
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=base))
    with sole_user(folder):
        folder = folder.rename(base / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sync_directory(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- reading


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file that is one; the caller closes the descriptor. Neither follows a link nor waits for a pipe.

    Raises:
        FileNotFoundError: There is nothing.
        OSError: It is a link, a pipe, a device or a folder, or it cannot be opened.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except FileNotFoundError:
        raise
    except OSError as error:
        if (path.exists() and not path.is_file()) or path.is_symlink():
            raise OSError(_not_regular(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(_not_regular(path))
    return fd


def _not_regular(path: Path) -> str:
    found = "a link" if path.is_symlink() else "not a regular file"
    return f"{path} is {found}; Esper opens regular files only. Put the file itself there, or name another place"


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a file that `open_regular` opens.

    Raises:
        OSError: It cannot be opened or read, or has more than `max_bytes`.
    """
    with open(open_regular(path), "rb") as file:
        return _read_all(file, path, max_bytes)


def _read_all(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{path} has more than the {max_bytes:,} bytes that such a file may have")
    return content


def loads_json(text: bytes | str) -> Any:
    """Decodes what every JSON reader understands: finite numbers, whole ones of 64 bits, UTF-8, little nesting.

    Raises:
        ValueError: It is anything else.
    """
    decoded = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(decoded, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int64)
        if _MAY_BE_SURROGATE.search(decoded):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no text") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return value


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**63:
        raise ValueError(f"{digits[:40]} needs more than 64 bits")
    return value


def free_bytes(folder: Path) -> int | None:
    """Space left where a folder is; None if the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
