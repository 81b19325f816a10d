"""Errors that more than one package raises or handles, and the codes a process ends with."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended. Scripts and schedulers rely on these numbers."""

    DONE = 0
    UNEXPECTED = 1
    """A defect: there is a traceback."""
    USAGE = 2
    """Usage, configuration or data."""
    LOG_INCOMPLETE = 3
    """Trained to the end, or stopped at a boundary because of it, with an incomplete event log."""
    CHECKPOINT = 4
    """No checkpoint could be used."""
    NUMERIC = 5
    """Non-finite updates or too many rollbacks."""
    STORAGE = 6
    WORKERS = 7
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class IllegalOperation(RuntimeError):
    """An op reached a model whose gate refuses it. Masks rule this out, so it is a defect, not an outcome."""


class GerminationError(RuntimeError):
    """A seed could not be built or attached. The model, its optimizer and the slot are as they were before."""


class DataNotFound(FileNotFoundError):
    """A data set is not on this machine. The message lists the places searched and how to get it."""


class DataDamaged(ValueError):
    """A data file is there but is not what it claims to be. The message says what was expected and found."""


class ModelFileError(ValueError):
    """A saved model cannot be read or does not match this code. Nothing was loaded."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message says which, and what was expected and found."""


class NumericFailure(RuntimeError):
    """A run cannot go on because its numbers went wrong: hosts that keep diverging, updates that are not finite."""


class WorkersFailed(RuntimeError):
    """A run cannot go on because its workers died or never came up."""


class RunBusy(RuntimeError):
    """Another process holds the run directory. The message says which and since when."""


class StorageError(RuntimeError):
    """Something could not be made durable. What was durable before still is."""

    def __init__(self, what: str, error: OSError, *, needed_bytes: int | None, free_bytes: int | None) -> None:
        self.errno = error.errno
        self.needed_bytes = needed_bytes
        """None: not known."""
        self.free_bytes = free_bytes
        """None: the file system did not say."""
        sizes = [f"{needed_bytes:,} bytes needed"] if needed_bytes is not None else []
        sizes += [f"{free_bytes:,} bytes free"] if free_bytes is not None else []
        note = f" ({', '.join(sizes)})" if sizes else ""
        super().__init__(f"cannot write {what}: {error.strerror or error}{note}")


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Refuses a name that is not among the known ones, and lists those.

    Raises:
        ValueError: It is none of them.
    """
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}. Known: {', '.join(known)}")
