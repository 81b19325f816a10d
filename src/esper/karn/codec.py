"""Lines of the event log back into events. Knows the wire format, not what events mean.

Numbers that were not finite travel as null plus an entry in `nonfinite`; here they become nan and inf again, so that
None keeps its one meaning: not measured. An optional field that an older build did not know is None as well.
"""

from __future__ import annotations

from typing import Any

import msgspec

from esper.karn.records import RecordDecoder
from esper.leyline import EVENTS, SCHEMA_VERSION, LoggedEvent, Severity, TelemetryEventType, split_path
from esper.leyline.catalogue import SCOPE_IDS


class LineError(ValueError):
    """A line is not an event of this schema: damaged, or never one."""


OLDEST_VERSION = 1
"""There was no Esper before this version; a smaller number is damage."""


class NewerSchema(ValueError):
    """The log was written by a newer Esper, whose fields may mean something else."""


class _Line(msgspec.Struct):
    """The envelope on the wire. The payload waits for its type."""

    v: int
    run: str
    attempt: int
    seq: int
    wall: float
    mono: float
    type: TelemetryEventType
    severity: Severity
    round: int | None
    episode: int | None
    env: int | None
    epoch: int | None
    group: str
    data: msgspec.Raw
    nonfinite: dict[str, str] | None = None


class _Version(msgspec.Struct):
    v: int


_LINE = msgspec.json.Decoder(_Line)
_VERSION = msgspec.json.Decoder(_Version)
_PAYLOADS: dict[TelemetryEventType, RecordDecoder[Any]] = {
    kind: RecordDecoder(spec.payload) for kind, spec in EVENTS.items()
}

_ALLOWED = {kind: SCOPE_IDS[spec.scope] for kind, spec in EVENTS.items()}
"""Which of round, episode, env and epoch an event of a type has."""


def decode_line(line: bytes) -> LoggedEvent:
    """Reads one line of the log; fields it does not know are ignored.

    Raises:
        NewerSchema: The line's schema version is newer than this code.
        LineError: The line is not an event.
    """
    try:
        wire = _LINE.decode(line)
        if not OLDEST_VERSION <= wire.v <= SCHEMA_VERSION:
            raise _refusal(wire.v)
        given = (wire.round is not None, wire.episode is not None, wire.env is not None, wire.epoch is not None)
        if given not in _ALLOWED[wire.type]:
            raise LineError(f"{wire.type.value} has not the ids of its scope, {EVENTS[wire.type].scope.value}")
        payload = _PAYLOADS[wire.type].decode(wire.data) if wire.nonfinite is None else _restore(wire)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_newer(line)
        raise LineError(str(error)) from None
    return LoggedEvent(
        v=wire.v,
        run=wire.run,
        attempt=wire.attempt,
        seq=wire.seq,
        wall=wire.wall,
        mono=wire.mono,
        type=wire.type,
        severity=wire.severity,
        round=wire.round,
        episode=wire.episode,
        env=wire.env,
        epoch=wire.epoch,
        group=wire.group,
        data=payload,
    )


def with_nonfinite_words(line: bytes) -> bytes:
    """The line with "nan", "inf" and "-inf" written where `nonfinite` says: for readers that turn text to numbers."""
    tree = msgspec.json.decode(line)
    for path, word in (tree.get("nonfinite") or {}).items():
        _put(tree["data"], path, word)
    return msgspec.json.encode(tree)


def _restore(wire: _Line) -> Any:
    assert wire.nonfinite is not None
    tree = msgspec.json.decode(wire.data)
    for path, word in wire.nonfinite.items():
        try:
            _put(tree, path, float(word))
        except (ValueError, LookupError, TypeError, AssertionError):
            raise LineError(f"nonfinite names {path!r} as {word!r}, which the payload cannot hold") from None
    return _PAYLOADS[wire.type].convert(tree)


def _put(tree: Any, path: str, value: object) -> None:
    *parents, last = split_path(path)
    for part in parents:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    tree[int(last) if isinstance(tree, list) else last] = value


def _refuse_newer(line: bytes) -> None:
    """A line that does not decode may simply be of a newer version; then the advice is another one."""
    try:
        version = _VERSION.decode(line).v
    except msgspec.DecodeError:
        return
    if version > SCHEMA_VERSION:
        raise _refusal(version) from None


def _refusal(version: int) -> NewerSchema | LineError:
    if version < OLDEST_VERSION:
        return LineError(f"expected a schema version from {OLDEST_VERSION} on, got {version}")
    return NewerSchema(
        f"the log has schema version {version}, this Esper reads up to {SCHEMA_VERSION}: "
        "read it with the Esper that wrote it, or a newer one"
    )
