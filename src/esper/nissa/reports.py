"""What a hub says about itself."""

from __future__ import annotations

from collections.abc import Mapping

from esper.leyline import record
from esper.nissa.backends import BackendReport


@record
class HubHealth:
    """How the hub fares right now."""

    num_queued: int
    queue_high_water: int
    """Most events that ever waited for the writer at once."""
    num_held: int
    """Events that wait in memory because the log cannot be written."""
    num_dropped: Mapping[str, int]
    """Lost events by type, since this attempt began."""
    log_error: str | None
    must_stop: bool
    """True if the run should stop at the next round boundary, because its record is no longer good enough."""
    writer_cpu_ms: float
    """CPU time of the writer's thread so far."""
    backends: Mapping[str, BackendReport]


@record
class HubReport:
    """What became of a hub's events."""

    next_seq: int
    num_written: int
    num_unwritten: int
    """Accepted events that did not reach the log before it was closed."""
    num_dropped: Mapping[str, int]
    num_late: int
    """Events offered after the hub was closed."""
    log_error: str | None
    complete: bool
    """True if every event of this attempt is in the log."""
    backends: Mapping[str, BackendReport]
