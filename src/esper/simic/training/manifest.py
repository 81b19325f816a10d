"""A checkpoint's manifest: which files it has, their sizes and hashes, and what it says about itself.

One encoding, so that the manifest can carry a hash over its own rest. No file is written or trusted here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args

from esper.leyline import CheckpointError, record
from esper.leyline.rundir import MANIFEST_FILE

FORMAT_VERSION = 1
MAX_BYTES = 16 * 2**20
"""A larger file is no manifest and is not read."""

Kind = Literal["round", "step"]
"""A boundary between rounds, or a step inside an episode (then the files hold the envs too)."""


@record
class CheckpointFacts:
    """What a checkpoint says about itself. All values are JSON's own: a tuple comes back as a list."""

    run_id: str
    attempt: int
    """How often the run had been resumed when this was written."""
    round: int
    epoch: int | None
    """None at a round boundary."""
    next_seq: int
    """Events below this number were on disk before this checkpoint was."""
    score: float | None
    """Higher is better; None: not measured."""
    config: Mapping[str, Any]
    identity: Mapping[str, str | int | bool]
    """Where it was made: see identity.py."""


@record
class FileEntry:
    """What a file must prove to be."""

    size: int
    sha256: str


@record
class Manifest:
    """A manifest that matches its own hash."""

    name: str
    kind: Kind
    index: int
    facts: CheckpointFacts
    files: Mapping[str, FileEntry]
    sha256: str
    """Over all the rest."""


def encode_manifest(name: str, kind: Kind, index: int, facts: CheckpointFacts, files: Mapping[str, bytes]) -> bytes:
    """The manifest of these files.

    Raises:
        ValueError: A fact is a number that is not finite.
        TypeError: A fact is nothing that JSON knows.
    """
    rest = {
        "format": FORMAT_VERSION,
        "name": name,
        "kind": kind,
        "index": index,
        "facts": {field.name: getattr(facts, field.name) for field in fields(CheckpointFacts)},
        "files": {file: {"size": len(content), "sha256": sha256(content)} for file, content in files.items()},
    }
    # Keys that are numbers become text here, which changes their order: the hash is over what a reader will see.
    rest = json.loads(json.dumps(rest, allow_nan=False))
    return _encode({**rest, "sha256": sha256(_encode(rest))})


def decode_manifest(content: bytes) -> Manifest:
    """Reads a manifest and proves it by its hash.

    Raises:
        CheckpointError: It is damaged, or of another format.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: not JSON ({error})") from error
    version = values.get("format") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"checkpoint format {version}; this release reads format {FORMAT_VERSION} only")
    rest = {key: value for key, value in values.items() if key != "sha256"}
    if _encode(values) != content or values.get("sha256") != sha256(_encode(rest)):
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: its sha256 does not match")
    try:
        return _parse(values)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is whole but not of this release ({error!r})") from error


def _parse(values: Mapping[str, Any]) -> Manifest:
    facts = CheckpointFacts(**values["facts"])
    for number in (values["index"], facts.attempt, facts.round, facts.next_seq):
        if not isinstance(number, int):
            raise TypeError(f"{number!r} should be a whole number")
    if values["kind"] not in get_args(Kind):
        raise TypeError(f"unknown kind {values['kind']!r}")
    return Manifest(
        name=values["name"],
        kind=values["kind"],
        index=values["index"],
        facts=facts,
        files={file: FileEntry(**entry) for file, entry in values["files"].items()},
        sha256=values["sha256"],
    )


def sha256(content: bytes) -> str:
    """The hash used for files and manifests."""
    return hashlib.sha256(content).hexdigest()


def _encode(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False, indent=1, sort_keys=True).encode()
