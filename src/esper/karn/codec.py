"""Lines of the event log back into events. Knows the wire format, not what events mean.

Numbers that were not finite travel as null plus an entry in `nonfinite`; here they become nan and inf again, so that
None keeps its one meaning: not measured. An optional field that a build did not write is None as well.
"""

from __future__ import annotations

import re
from typing import Any, get_type_hints

import msgspec

from esper.leyline import EVENTS, SCHEMA_VERSION, LoggedEvent, TelemetryEventType, split_path
from esper.leyline.files import loads_json
from esper.leyline.telemetry import SCOPE_IDS

LAST_WALL = 253_402_300_799.0
"""The end of the year 9999: later times have no date."""
_MAY_EXCEED_64_BITS = re.compile(rb"\d{19}")


class LineError(ValueError):
    """A line is not an event of this schema: damaged, or never one."""


class NewerSchema(ValueError):
    """The log was written by a newer Esper, whose fields may mean something else."""


_ENVELOPE = {name: hint for name, hint in get_type_hints(LoggedEvent).items() if name != "data"}
# The payload waits for its type, which may come later in the line.
_LINE: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("Line", [*_ENVELOPE.items(), ("data", msgspec.Raw), ("nonfinite", dict[str, str] | None, None)])
)
_PAYLOADS: dict[TelemetryEventType, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(spec.payload) for kind, spec in EVENTS.items()
}


class _Version(msgspec.Struct):
    v: int


def decode_line(line: bytes) -> LoggedEvent:
    """Reads one line of the log; fields it does not know are ignored.

    Raises:
        NewerSchema: The line's schema version is newer than this code.
        LineError: The line is not an event.
    """
    try:
        wire = _LINE.decode(line)
        _check_version(wire.v)
        if not line.isascii():
            line.decode()  # msgspec does not look into fields that it skips
        if _MAY_EXCEED_64_BITS.search(line):
            loads_json(line)
        if not 0.0 <= wire.wall <= LAST_WALL:
            raise LineError(f"wall must be from 0 to {LAST_WALL:.0f}, got {wire.wall!r}")
        given = (wire.round is not None, wire.episode is not None, wire.env is not None, wire.epoch is not None)
        scope = EVENTS[wire.type].scope
        if given not in SCOPE_IDS[scope]:
            raise LineError(f"{wire.type.value} has not the ids of its scope, {scope.value}")
        payload = _PAYLOADS[wire.type].decode(wire.data) if wire.nonfinite is None else _restore(wire)
    except NewerSchema:
        raise
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        _refuse_newer(line)
        raise LineError(str(error)) from None
    except RecursionError:
        raise LineError("nested too deeply") from None
    return LoggedEvent(data=payload, **{name: getattr(wire, name) for name in _ENVELOPE})


def with_nonfinite_words(line: bytes) -> bytes:
    """The line with "nan", "inf" and "-inf" written where `nonfinite` says: for readers that turn text to numbers."""
    tree = msgspec.json.decode(line)
    for path, word in (tree.get("nonfinite") or {}).items():
        _put(tree["data"], path, word)
    return msgspec.json.encode(tree)


def _restore(wire: Any) -> Any:
    tree = msgspec.json.decode(wire.data)
    for path, word in wire.nonfinite.items():
        try:
            _put(tree, path, float(word))
        except (ValueError, LookupError, TypeError, AssertionError):
            raise LineError(f"nonfinite names {path!r} as {word!r}, which the payload cannot hold") from None
    return msgspec.convert(tree, EVENTS[wire.type].payload, str_keys=True)


def _put(tree: Any, path: str, value: object) -> None:
    *parents, last = split_path(path)
    for part in parents:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    tree[int(last) if isinstance(tree, list) else last] = value


def _refuse_newer(line: bytes) -> None:
    """A line that does not decode may simply be of a newer version; then the advice is another one."""
    try:
        version = msgspec.json.decode(line, type=_Version).v
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if version > SCHEMA_VERSION:
        _check_version(version)


def _check_version(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise NewerSchema(
            f"the log has schema version {version}, this Esper reads {SCHEMA_VERSION}: "
            "read it with the Esper that wrote it, or a newer one"
        )
    if version < SCHEMA_VERSION:
        raise LineError(f"expected schema version {SCHEMA_VERSION}, got {version}")
