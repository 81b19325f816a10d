"""A run's directory: its name, its creation, its lock, and what may not lie in it."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from esper.leyline import RunBusy, StorageError, record
from esper.leyline.files import TEMP_PREFIX, free_bytes, open_regular, sync_directory, write_folder, write_new
from esper.leyline.rundir import CHECKPOINTS_DIR, EVENTS_DIR, LOCK_FILE, METRICS_DIR, WANDB_DIR
from esper.nissa import new_run_id

SPARE_CHECKPOINTS = 3
"""Free space for fewer than this many checkpoints is worth a warning."""
CALIBRATIONS_DIR = "calibrations"
"""Beside the runs: scales of scores, measured once for all of them."""
_RUN_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
_PROBE = b"Esper writes here.\n" * 256
_PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle")
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))


@record
class RunDir:
    """One run on disk."""

    path: Path

    @property
    def run_id(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS_DIR

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process, and removes what a dead owner left unfinished.

        The kernel releases the lock when the process ends, however it ends.

        Raises:
            RunBusy: Another process holds it.
            OSError: The lock is a link or no file, or cannot be opened.
        """
        descriptor = open_regular(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 200).decode(errors="replace").strip()
                raise RunBusy(
                    f"run directory {self.path} is in use by {holder or 'another process'}. "
                    "Wait for it, stop it, or start a run of your own"
                ) from None
            os.ftruncate(descriptor, 0)
            now = datetime.now(UTC)
            os.write(descriptor, f"process {os.getpid()} since {now:%Y-%m-%d %H:%M:%S} UTC\n".encode())
            # Only under the lock: the folders of a living writer look the same.
            for place in (*self.checkpoints.iterdir(), *(self.path / EVENTS_DIR).glob("*")):
                if place.name.startswith(TEMP_PREFIX):
                    remove(place)
            yield
        finally:
            # The file stays: were it removed, two processes could hold locks on two files of that name.
            os.close(descriptor)

    def discard(self) -> None:
        """Removes the run with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def create_run(runs_dir: str | Path, run_id: str | None = None) -> RunDir:
    """Makes a new run directory, named by the time in UTC and six random digits, and proves that it can be written to.

    Raises:
        ValueError: The name is not allowed, or there is such a run already.
        StorageError: The directory cannot be made, or a file in it cannot be made durable.
    """
    if run_id is None:
        run_id = new_run_id()
    if not _RUN_ID.fullmatch(run_id):  # it could leave the runs folder, hide, or need quoting
        raise ValueError(
            f"run id {run_id!r} is not allowed. Expected 1 to 64 letters, digits, dots, underscores and hyphens, "
            "and no dot at the start"
        )
    if run_id == CALIBRATIONS_DIR:
        raise ValueError(f"run id {run_id!r} is not allowed: the scales of all runs are kept in a folder of that name")
    run = RunDir(path=Path(runs_dir).absolute() / run_id)
    if run.path.is_dir():
        raise ValueError(f"there is a run {run_id} in {runs_dir} already. Resume it, or choose another name")
    try:
        with write_folder(run.path) as unfinished:  # a process killed in here leaves no half of a run
            os.mkdir(unfinished / CHECKPOINTS_DIR)
            probe = unfinished / "probe"
            write_new(probe, _PROBE)
            os.unlink(probe)
            sync_directory(unfinished)
        sync_directory(run.path.parent)
    except OSError as error:
        free = free_bytes(run.path.parent)
        raise StorageError(str(run.path), error, needed_bytes=None, free_bytes=free) from error
    return run


def open_run(path: str | Path) -> RunDir:
    """Finds an existing run directory.

    Raises:
        ValueError: There is none; the message says what is there instead.
        OSError: A file in its place cannot be read.
    """
    run = RunDir(path=Path(path).absolute())
    if not run.path.exists():
        raise ValueError(f"there is no run directory {path}")
    if not run.path.is_dir():
        raise ValueError(
            pickle_refusal(run.path)
            or f"{path} is no folder. Expected a run directory, the one that holds {CHECKPOINTS_DIR}/"
        )
    if run.path.parent.name == CHECKPOINTS_DIR:
        raise ValueError(f"{path} is inside a run. Expected the run directory itself: {run.path.parent.parent}")
    for folder in (run.path, *(run.path / name for name in (CHECKPOINTS_DIR, EVENTS_DIR, METRICS_DIR, WANDB_DIR))):
        if folder.is_symlink():  # what is written or removed there would be somebody else's
            raise ValueError(f"{folder} is a link. Expected a run directory with folders of its own; name the real one")
    if not run.checkpoints.is_dir():
        raise ValueError(f"{path} is not a run directory: it has no folder {CHECKPOINTS_DIR}")
    return run


def space_warning(run: RunDir, checkpoint_bytes: int) -> str | None:
    """Warns if the disk has no room for a few more checkpoints; None if it has, or the system does not say."""
    free = free_bytes(run.path)
    if free is None or free >= SPARE_CHECKPOINTS * checkpoint_bytes:
        return None
    return (
        f"{run.path}: {free:,} bytes free, and one checkpoint takes {checkpoint_bytes:,}. "
        f"Make room for at least {SPARE_CHECKPOINTS}, or saving will fail"
    )


# ---- files


def make_temp_folder(parent: Path) -> Path:
    """Makes an empty folder that the next `lock` removes. Beside its target, so that a rename is enough."""
    path = parent / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
    os.mkdir(path)
    return path


def remove(path: Path) -> None:
    """Removes a file or a folder with all it holds; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def pickle_refusal(path: Path) -> str | None:
    """Why a file is refused as a pickle, known by its first bytes or its name; None if it is none.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(9)
    # A safetensors file starts with a length, which may look like anything; then comes its header.
    pickled = start.startswith(_PICKLE_STARTS) and start[8:] != b"{"
    if pickled or path.suffix in _PICKLE_SUFFIXES:
        return f"{path.name} is a pickle file; Esper reads safetensors checkpoints only"
    return None
