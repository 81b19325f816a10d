"""Checkpoints: committed whole or not at all, proved by hashes when they are read. What the files hold is the caller's.

A checkpoint is a folder `checkpoints/ckpt-<index>` with its files and a manifest of their sizes and hashes. It is
written under a temporary name and renamed when everything in it is durable. There is no pointer to the latest: the
newest folder that proves valid is the truth. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path, PurePosixPath

from esper.leyline import CheckpointError, ModelFileError, StorageError, record
from esper.leyline.files import free_bytes, sync_directory
from esper.leyline.rundir import MANIFEST_FILE
from esper.simic.training import storage
from esper.simic.training.foreign import refusal
from esper.simic.training.manifest import (
    MAX_BYTES,
    CheckpointFacts,
    FileEntry,
    Kind,
    Manifest,
    decode_manifest,
    encode_manifest,
    sha256,
)
from esper.simic.training.run_dir import RunDir

BACK_OFF_S = (0.2, 1.0)
"""Pauses after failed tries; the try after the last pause is the last."""
_NAME = re.compile(r"ckpt-(\d{8,})")
_ASIDE_PREFIX = "rejected-"


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
    kind: Kind
    index: int
    facts: CheckpointFacts
    files: Mapping[str, bytes]


@record
class Rejection:
    """A folder or file that cannot be used as a checkpoint."""

    name: str
    reason: str


def checkpoint_name(index: int) -> str:
    """The folder's name for a round or step."""
    assert index >= 0, f"index {index} is negative"
    return f"ckpt-{index:08d}"


# ---- saving


def save_checkpoint(
    run: RunDir,
    *,
    kind: Kind,
    index: int,
    files: Mapping[str, bytes],
    facts: CheckpointFacts,
    sleep: Callable[[float], None] = time.sleep,
) -> SavedCheckpoint:
    """Commits a checkpoint. It returns after the last fsync, so what it reports as saved survives a power loss.

    The caller holds the run's lock and has made the event log durable up to `facts.next_seq`.

    Args:
        run: Where to.
        kind: What `index` counts.
        index: Round or step; orders checkpoints and names the folder.
        files: Content by name; a name may have one folder, as in `envs/000.safetensors`.
        facts: What goes into the manifest beside sizes and hashes.
        sleep: Waits between tries.

    Raises:
        StorageError: Every try failed. Nothing is left of them, and earlier checkpoints are as they were.
        CheckpointError: There is a valid checkpoint of this index already.
    """
    started = time.perf_counter()
    target = run.checkpoints / checkpoint_name(index)
    if target.exists() and rejection(target) is None:
        raise CheckpointError(f"{target.name} is saved already and valid; it will not be replaced")
    _check_names(files)
    manifest = encode_manifest(target.name, kind, index, facts, files)
    size_bytes = len(manifest) + sum(map(len, files.values()))
    for pause_s in (*BACK_OFF_S, None):
        try:
            _commit(target, files, manifest)
            break
        except OSError as error:
            if pause_s is None:
                free = free_bytes(run.checkpoints)
                raise StorageError(str(target), error, needed_bytes=size_bytes, free_bytes=free) from error
            sleep(pause_s)
    return SavedCheckpoint(
        path=target,
        manifest_sha256=decode_manifest(manifest).sha256,
        size_bytes=size_bytes,
        save_ms=(time.perf_counter() - started) * 1e3,
    )


def _check_names(files: Mapping[str, bytes]) -> None:
    for file in files:
        parts = PurePosixPath(file).parts
        assert len(parts) in (1, 2), f"{file!r} is not a file name"
        assert not any(part.startswith((".", "/")) for part in parts), f"{file!r} is not a file name"
        assert file != MANIFEST_FILE, "the manifest is ours to write"


def _commit(target: Path, files: Mapping[str, bytes], manifest: bytes) -> None:
    """Writes under a temporary name, proves what was written, then renames. On an error nothing is left behind."""
    placed = storage.make_temp_folder(target.parent)
    try:
        folders = sorted({(placed / file).parent for file in files} - {placed})
        for folder in folders:
            os.mkdir(folder)
        for file, content in files.items():
            _write_proved(placed / file, content)
        for folder in folders:
            sync_directory(folder)
        _write_proved(placed / MANIFEST_FILE, manifest)
        sync_directory(placed)
        _set_aside(target)
        os.rename(placed, target)
        placed = target
        sync_directory(target.parent)
    except BaseException:
        # After the rename too: a folder that may not survive a power loss must not count as saved.
        _withdraw(placed)
        raise


def _write_proved(path: Path, content: bytes) -> None:
    storage.write_bytes(path, content)
    if path.read_bytes() != content:
        raise OSError(errno.EIO, "the bytes read back differ from the bytes written", str(path))


def _set_aside(target: Path) -> None:
    """Keeps what stands in a checkpoint's place but is none: damaged, or of another release."""
    if target.exists():
        asides = (target.with_name(f"{_ASIDE_PREFIX}{target.name}-{number}") for number in count())
        os.rename(target, next(aside for aside in asides if not aside.exists()))


def _withdraw(placed: Path) -> None:
    # The error that led here is the one to tell. A temporary folder is cleared away at the next start.
    with suppress(OSError):
        remove_checkpoint(placed)


def remove_checkpoint(path: Path) -> None:
    """Removes the manifest first: without it the rest is no checkpoint, whatever happens next."""
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    storage.remove(path)


# ---- loading


def newest_valid(
    run: RunDir, check: Callable[[LoadedCheckpoint], object] | None = None
) -> tuple[LoadedCheckpoint, tuple[Rejection, ...]]:
    """Reads the newest checkpoint that proves valid, and says which newer ones did not.

    Args:
        run: Where from.
        check: Raises ModelFileError if it cannot use the contents; then the next older one is tried.

    Raises:
        CheckpointError: There is no checkpoint, or none is valid. Nothing was changed.
    """
    rejections: list[Rejection] = []
    for name in _candidates(run):
        try:
            loaded = load_checkpoint(run.checkpoints / name)
            if check is not None:
                check(loaded)
            return loaded, tuple(rejections)
        except (CheckpointError, ModelFileError) as error:
            rejections.append(Rejection(name=name, reason=str(error)))
    if not rejections:
        raise CheckpointError(f"{run.path}: there is no checkpoint yet, so there is nothing to go on from")
    reasons = "; ".join(f"{rejected.name}: {rejected.reason}" for rejected in rejections)
    raise CheckpointError(f"{run.path}: none of {len(rejections)} checkpoints is valid ({reasons})")


def checkpoint_folders(run: RunDir) -> dict[int, Path]:
    """The folders named like checkpoints, by index, oldest first. Whether they are valid is not checked."""
    matches = (_NAME.fullmatch(entry.name) for entry in os.scandir(run.checkpoints) if entry.is_dir())
    return dict(sorted((int(match[1]), run.checkpoints / match[0]) for match in matches if match))


def _candidates(run: RunDir) -> list[str]:
    """Everything that may be meant as a checkpoint, newest first; what is named otherwise comes last."""

    def age(name: str) -> tuple[int, str]:
        match = _NAME.fullmatch(name)
        return (int(match[1]) if match else -1, name)

    names = (entry.name for entry in os.scandir(run.checkpoints))
    return sorted((name for name in names if not name.startswith((".", _ASIDE_PREFIX))), key=age, reverse=True)


def rejection(path: Path) -> str | None:
    """Why a folder is no valid checkpoint; None if it is one."""
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return None


def load_checkpoint(path: Path) -> LoadedCheckpoint:
    """Reads one checkpoint and checks names, sizes and hashes of everything in it.

    Raises:
        CheckpointError: It is not valid; the message is the reason.
    """
    try:
        if not path.is_dir():
            raise CheckpointError(refusal(path) or "not a folder")
        found = _listing(path)
        for reason in (refusal(file) for file in found.values()):
            if reason is not None:
                raise CheckpointError(reason)
        manifest = read_manifest(path)
        _compare_names(manifest, found)
        files = {file: _read_proved(found[file], entry) for file, entry in manifest.files.items()}
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error}") from error
    return LoadedCheckpoint(path=path, kind=manifest.kind, index=manifest.index, facts=manifest.facts, files=files)


def _listing(folder: Path) -> dict[str, Path]:
    """All files below a folder, by name relative to it. Links and other oddities are refused, not followed."""
    found = {}
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *names)):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise CheckpointError(f"{name} is neither a file nor a folder")
            if path.is_file():
                found[name] = path
    return found


def read_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest; the files it speaks of are not looked at.

    Raises:
        CheckpointError: It is missing, damaged, of another format or of another checkpoint.
        OSError: It cannot be read.
    """
    file = path / MANIFEST_FILE
    if not file.is_file():
        raise CheckpointError(f"{MANIFEST_FILE} is missing: never completed, or about to be removed")
    if file.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{MANIFEST_FILE} has {file.stat().st_size:,} bytes, expected a small file")
    manifest = decode_manifest(file.read_bytes())
    if manifest.name != path.name:
        raise CheckpointError(f"{MANIFEST_FILE} belongs to {manifest.name}")
    return manifest


def _compare_names(manifest: Manifest, found: Mapping[str, Path]) -> None:
    missing, extra = manifest.files.keys() - found.keys(), found.keys() - manifest.files.keys() - {MANIFEST_FILE}
    if missing:
        raise CheckpointError(f"{min(missing)} is missing")
    if extra:
        raise CheckpointError(f"{min(extra)} does not belong to it")


def _read_proved(path: Path, entry: FileEntry) -> bytes:
    found = path.stat().st_size
    if found != entry.size:
        raise CheckpointError(f"{path.name} has {found:,} bytes, expected {entry.size:,}")
    content = path.read_bytes()
    if sha256(content) != entry.sha256:
        raise CheckpointError(f"{path.name} sha256 mismatch (bit damage?)")
    return content
