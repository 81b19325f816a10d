"""Checkpoints: committed whole or not at all, proved by hashes when they are read. What the files hold is the caller's.

A checkpoint is a folder `checkpoints/ckpt-<index>` with its files and a manifest of their sizes and hashes. It is
written under a temporary name and renamed when everything in it is durable. There is no pointer to the latest: the
newest folder that proves valid counts. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from esper.leyline import CheckpointError, ModelFileError, StorageError, record
from esper.leyline.files import free_bytes, loads_json, read_regular, sync_directory, write_new
from esper.leyline.rundir import MANIFEST_FILE
from esper.simic.run.run_dir import RunDir, make_temp_folder, pickle_refusal, remove

FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 16 * 2**20
"""A larger file is no manifest and is not read."""
MAX_FILE_BYTES = 2**31
"""The same for each of the other files."""
MAX_SEQ = 2**53
"""No run has more events."""
RETRY_PAUSES_S = (0.2, 1.0)
"""Pauses after failed tries; the try after the last pause is the last."""
_NAME = re.compile(r"ckpt-(\d{8,})")
_REJECTED_PREFIX = "rejected-"
T = TypeVar("T")


@record
class CheckpointFacts:
    """What a checkpoint says about itself."""

    index: int
    """Rounds done; orders checkpoints and names the folder."""
    run_id: str
    attempt: int
    """Attempt whose log the events below `next_seq` end in; a session without a log has that of the one before."""
    next_seq: int
    """Events below this number were on disk before this checkpoint was."""
    score: float | None
    """Higher is better; None: not measured."""
    identity: dict[str, str | int | bool]
    """Where it was made, as `environment.identity` says."""
    bitwise: bool = True
    """False once hosts were trained on unequal machines or given up: elsewhere the run would end with other bits."""


@record
class FileEntry:
    """Size and hash that a file must have."""

    size: int
    sha256: str


@record
class CheckpointManifest:
    """A manifest that matches its own hash."""

    format: int
    facts: CheckpointFacts
    files: dict[str, FileEntry]
    sha256: str
    """Over all the rest."""


@record
class SavedCheckpoint:
    """A checkpoint that is durable."""

    path: Path
    manifest_sha256: str
    size_bytes: int
    save_ms: float
    """With failed tries and their pauses."""


@record
class LoadedCheckpoint:
    """A checkpoint whose every byte has been checked."""

    path: Path
    facts: CheckpointFacts
    files: Mapping[str, bytes]


@record
class Rejection:
    """A folder or file that cannot be used as a checkpoint."""

    name: str
    reason: str


def checkpoint_name(index: int) -> str:
    """The folder's name after this many rounds."""
    return f"ckpt-{index:08d}"


# ---- saving


def save_checkpoint(
    run: RunDir,
    facts: CheckpointFacts,
    files: Mapping[str, bytes],
    *,
    read: Callable[[LoadedCheckpoint], object] = lambda found: None,
    sleep: Callable[[float], None] = time.sleep,
) -> SavedCheckpoint:
    """Commits a checkpoint. It returns after the last fsync, so what it reports as saved survives a power loss.

    The caller holds the run's lock and has made the event log durable up to `facts.next_seq`. `read` is what
    `newest_valid` is given: what it refuses does not stand in the way, and is renamed.

    Raises:
        StorageError: Every try failed. Nothing is left of them, and earlier checkpoints are as they were.
        CheckpointError: There is a valid checkpoint of this index already.
    """
    started = time.perf_counter()
    target = run.checkpoints / checkpoint_name(facts.index)
    if _is_valid(target, facts.run_id, read):
        raise CheckpointError(f"{target.name} is saved already and valid; it will not be replaced")
    assert MANIFEST_FILE not in files
    manifest, manifest_sha256 = _encode_manifest(facts, files)
    size_bytes = len(manifest) + sum(map(len, files.values()))
    for pause_s in (*RETRY_PAUSES_S, None):
        try:
            _commit(target, {**files, MANIFEST_FILE: manifest})
            break
        except OSError as error:
            if pause_s is None:
                free = free_bytes(run.checkpoints)
                raise StorageError(str(target), error, needed_bytes=size_bytes, free_bytes=free) from error
            sleep(pause_s)
    return SavedCheckpoint(
        path=target,
        manifest_sha256=manifest_sha256,
        size_bytes=size_bytes,
        save_ms=(time.perf_counter() - started) * 1e3,
    )


def _is_valid(path: Path, run_id: str, read: Callable[[LoadedCheckpoint], object]) -> bool:
    try:
        found = load_checkpoint(path)
        read(found)
    except (CheckpointError, ModelFileError):
        return False
    return found.facts.run_id == run_id


def _encode_manifest(facts: CheckpointFacts, files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """The manifest and its hash; a fact that is not finite raises ValueError."""
    entries = {name: {"size": len(content), "sha256": _sha256(content)} for name, content in files.items()}
    rest = {"format": FORMAT_VERSION, "facts": asdict(facts), "files": entries}
    own = _sha256(_canonical(rest))
    return _canonical({**rest, "sha256": own}), own


def _commit(target: Path, files: Mapping[str, bytes]) -> None:
    """Writes under a temporary name, reads back, then renames. On an error nothing is left behind."""
    placed = make_temp_folder(target.parent)
    try:
        for name, content in files.items():
            write_new(placed / name, content)
            if (placed / name).read_bytes() != content:
                raise OSError(errno.EIO, "the bytes read back differ from the bytes written", str(placed / name))
        sync_directory(placed)
        _set_aside(target)
        os.rename(placed, target)
        placed = target
        sync_directory(target.parent)
    except BaseException:
        # After the rename too: a folder that may not survive a power loss must not count as saved. The first error is
        # the one to report; a temporary folder is removed at the next start.
        with suppress(OSError):
            remove_checkpoint(placed)
        raise


def _set_aside(target: Path) -> None:
    """Renames what stands in a checkpoint's place but is not valid: damaged, a link, of another run or release."""
    if os.path.lexists(target):
        asides = (target.with_name(f"{_REJECTED_PREFIX}{target.name}-{number}") for number in count())
        os.rename(target, next(aside for aside in asides if not os.path.lexists(aside)))


def remove_checkpoint(path: Path) -> None:
    """Removes the manifest first: without it the rest is no checkpoint, whatever happens next. A link goes alone."""
    if not path.is_symlink():
        (path / MANIFEST_FILE).unlink(missing_ok=True)
    remove(path)


# ---- loading


def newest_valid(
    run: RunDir, read: Callable[[LoadedCheckpoint], T]
) -> tuple[LoadedCheckpoint, T, tuple[Rejection, ...]]:
    """Reads the newest checkpoint that proves valid, and says which newer ones did not.

    Args:
        run: Where from.
        read: Makes something of the contents; if it raises ModelFileError, the next older checkpoint is tried.

    Raises:
        CheckpointError: There is no checkpoint, or none is valid. Nothing was changed.
    """
    rejections: list[Rejection] = []
    for name in _candidates(run):
        try:
            loaded = load_checkpoint(run.checkpoints / name)
            return loaded, read(loaded), tuple(rejections)
        except (CheckpointError, ModelFileError) as error:
            rejections.append(Rejection(name=name, reason=str(error)))
    if not rejections:
        raise CheckpointError(f"{run.path}: there is no checkpoint yet, so there is nothing to go on from")
    reasons = "; ".join(f"{rejected.name}: {rejected.reason}" for rejected in rejections)
    raise CheckpointError(f"{run.path}: none of {len(rejections)} checkpoints is valid ({reasons})")


def checkpoint_folders(run: RunDir) -> dict[int, Path]:
    """The folders named like checkpoints, by index, oldest first; no links. Whether they are valid is not checked."""
    entries = (entry for entry in os.scandir(run.checkpoints) if entry.is_dir(follow_symlinks=False))
    matches = (_NAME.fullmatch(entry.name) for entry in entries)
    return dict(sorted((int(match[1]), run.checkpoints / match[0]) for match in matches if match))


def _candidates(run: RunDir) -> list[str]:
    """Everything that may be meant as a checkpoint, newest first; what is named otherwise comes last."""

    def age(name: str) -> tuple[int, str]:
        match = _NAME.fullmatch(name)
        return (int(match[1]) if match else -1, name)

    names = (entry.name for entry in os.scandir(run.checkpoints))
    return sorted((name for name in names if not name.startswith((".", _REJECTED_PREFIX))), key=age, reverse=True)


def load_checkpoint(path: Path) -> LoadedCheckpoint:
    """Reads one checkpoint and checks names, sizes and hashes of everything in it.

    Raises:
        CheckpointError: It is not valid; the message is the reason.
    """
    try:
        if path.is_symlink():
            raise CheckpointError("a link; a checkpoint is a folder of its run")
        if not path.is_dir():
            raise CheckpointError(pickle_refusal(path) or "not a folder")
        names = set()
        for entry in os.scandir(path):
            if not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{entry.name} is not a file")
            if reason := pickle_refusal(Path(entry.path)):
                raise CheckpointError(reason)
            names.add(entry.name)
        manifest = read_checkpoint_manifest(path)
        if missing := manifest.files.keys() - names:
            raise CheckpointError(f"{min(missing)} is missing")
        if extra := names - manifest.files.keys() - {MANIFEST_FILE}:
            raise CheckpointError(f"{min(extra)} does not belong to it")
        files = {name: _read_proved(path / name, entry) for name, entry in manifest.files.items()}
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error}") from error
    return LoadedCheckpoint(path=path, facts=manifest.facts, files=files)


def read_checkpoint_manifest(path: Path) -> CheckpointManifest:
    """Reads a checkpoint's manifest and proves it by its hash; the files it lists are not looked at.

    Raises:
        CheckpointError: It is missing, damaged, of another format or of another checkpoint.
        OSError: It cannot be read.
    """
    try:
        content = read_regular(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_FILE} is missing: never completed, or about to be removed") from None
    try:
        values = loads_json(content)
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: not JSON ({error})") from error
    version = values.get("format") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"checkpoint format {version}; this release reads format {FORMAT_VERSION} only")
    rest = {key: value for key, value in values.items() if key != "sha256"}
    if _canonical(values) != content or values.get("sha256") != _sha256(_canonical(rest)):
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: its sha256 does not match")
    try:
        manifest = msgspec.convert(values, CheckpointManifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{MANIFEST_FILE} is whole but not of this release ({error})") from error
    facts, sizes = manifest.facts, [entry.size for entry in manifest.files.values()]
    if min(facts.index, facts.attempt, facts.next_seq, *sizes) < 0 or facts.next_seq > MAX_SEQ:
        raise CheckpointError(f"{MANIFEST_FILE} is whole but holds impossible counts")
    if (name := checkpoint_name(facts.index)) != path.name:
        raise CheckpointError(f"{MANIFEST_FILE} belongs to {name}")
    return manifest


def _read_proved(path: Path, entry: FileEntry) -> bytes:
    found = path.stat(follow_symlinks=False).st_size
    if found != entry.size:
        raise CheckpointError(f"{path.name} has {found:,} bytes, expected {entry.size:,}")
    content = read_regular(path, MAX_FILE_BYTES)
    if _sha256(content) != entry.sha256:
        raise CheckpointError(f"{path.name} sha256 mismatch (bit damage?)")
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(values: Mapping[str, Any]) -> bytes:
    """One encoding, so that the manifest can carry a hash over its own rest."""
    return json.dumps(values, allow_nan=False, indent=1, sort_keys=True).encode()
