"""Telling files that Esper never reads: pickles, known by their first bytes or their name."""

from __future__ import annotations

from pathlib import Path

_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle")
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))


def refusal(path: Path) -> str | None:
    """Why a file is not ours; None if nothing speaks against it.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(9)
    # A safetensors file starts with a length, which may look like anything; then comes its header.
    pickled = start.startswith(_PICKLE_STARTS) and start[8:] != b"{"
    if pickled or path.suffix in _SUFFIXES:
        return f"{path.name} is a pickle file; Esper reads safetensors checkpoints only"
    return None
