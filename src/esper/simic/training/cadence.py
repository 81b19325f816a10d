"""When to save: after every round, unless that would be too often or cost too much. Pure; the caller has the clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Cadence:
    """Decides at each boundary whether to save, from the times of the saves before.

    Times are seconds on any clock that does not go back.
    """

    started_s: float
    saved_index: int | None
    """What is on disk already: the checkpoint resumed from, later the last one saved."""
    min_interval_s: float = 10.0
    """From the end of one save to the next."""
    max_share: float = 0.01
    """Most of the run's time that saving may take."""
    failures: int = 0
    """Failed saves in a row."""
    _spent_s: float = 0.0
    _last_took_s: float = 0.0
    _last_end_s: float | None = None
    _not_before_s: float = float("-inf")

    def __post_init__(self) -> None:
        if self.min_interval_s < 0:
            raise ValueError(f"min_interval_s must be at least 0, got {self.min_interval_s}")
        if not 0 < self.max_share <= 1:
            raise ValueError(f"max_share must be in (0, 1], got {self.max_share}")

    def due(self, index: int, now_s: float, *, final: bool) -> bool:
        """Whether to save now.

        Args:
            index: Of the boundary just reached.
            now_s: The time.
            final: The run ends or stops here: then what is not on disk yet is saved, whatever it costs.
        """
        if index == self.saved_index:
            return False
        if final:
            return True
        if now_s < self._not_before_s:
            return False
        if self._last_end_s is None:
            return True
        share_s = self.max_share * (now_s - self.started_s)
        return now_s - self._last_end_s >= self.min_interval_s and self._spent_s + self._last_took_s <= share_s

    def saved(self, index: int, now_s: float, took_s: float) -> None:
        """Takes note of a save that has just ended."""
        self.saved_index = index
        self.failures = 0
        self._ended(now_s, took_s)

    def failed(self, now_s: float, took_s: float) -> None:
        """Takes note of a save that has just been given up."""
        self.failures += 1
        self._ended(now_s, took_s)

    def withheld(self, now_s: float, took_s: float) -> None:
        """Takes note of a save that was not tried, because the event log did not allow it.

        It is neither a save nor a cost of one, so the next boundary is tried. Only a log that keeps the run waiting
        is not asked again before as much time has passed as it took, or it could hold up every short round.
        """
        self._not_before_s = now_s + took_s

    def _ended(self, now_s: float, took_s: float) -> None:
        self._spent_s += took_s
        self._last_took_s = took_s
        self._last_end_s = now_s
