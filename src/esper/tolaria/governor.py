"""Watches the health of one host and says when to keep its state and when to go back. Numbers in, verdicts out.

All thresholds are relative: to the host's own recent losses and to what guessing from the label frequencies would
score. It does not know what a snapshot contains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from statistics import median
from typing import TypedDict

from esper.leyline import GovernorState, LossCheck, NumericFailure, RollbackReason, record

HISTORY = 20
"""Accepted losses that are remembered."""
MIN_HISTORY = 5
"""Accepted losses below which there is no median worth comparing with."""
PATIENCE = 3
"""Suspect epochs in a row that make a panic."""
SNAPSHOT_EVERY = 5
"""Epochs after which a healthy host is kept again."""
RECOVERY_EPOCHS = 3
"""Epochs without ops after a rollback, where the episode goes on."""
SPREAD_PER_MAD = 1.4826
MIN_SPREAD_SHARE = 0.02
SPIKE_SPREADS = 6.0
SPIKE_RATIO = 1.5
SPIKE_SHARE = 0.05
"""Share of the guessing loss that a spike must exceed, so that losses near zero may double."""
START_FACTOR = 4.0
LEARNED_SHARE = 0.6
"""A host whose median loss is below this share of the guessing loss has learned something it can lose."""
GUESSING_SHARE = 0.935


@record
class LabelFacts:
    """What can be known of the labels without a model."""

    entropy: float
    """Loss in nats of guessing by label frequency."""
    top_share: float
    """Accuracy of always guessing the most frequent label."""
    rows: int
    """Labels in one validation: rows, or tokens of a language model."""

    @property
    def guessing_accuracy(self) -> float:
        """Accuracy that guessing hardly ever exceeds, by chance."""
        return self.top_share + 3.0 * math.sqrt(self.top_share * (1.0 - self.top_share) / self.rows)


@record
class Verdict(LossCheck):
    """What the governor thinks after one epoch."""

    state: GovernorState
    reason: RollbackReason | None
    """Why the host is suspect or in panic; None while it is healthy."""


class GovernorMemory(TypedDict):
    """What a governor must remember; plain JSON."""

    reset_loss: float
    losses: list[float]
    streak: int
    first_suspect: int | None
    epochs_since_snapshot: int
    fossil_pending: bool


class TolariaGovernor:
    """The health of one host over one episode."""

    def __init__(self, labels: LabelFacts) -> None:
        self.labels = labels
        self.num_rollbacks = 0
        self.recovery_left = 0
        self._memory = _fresh(math.inf)

    def begin(self, val_loss: float) -> Verdict:
        """Starts an episode with the loss of the untrained host, which is healthy.

        Raises:
            ValueError: The loss is not finite: no training has happened, so the task itself is broken.
        """
        if not math.isfinite(val_loss):
            raise ValueError(
                f"the untrained host has validation loss {val_loss}; a finite number was expected. "
                "Check the task's data and the host's initial weights"
            )
        self.num_rollbacks = 0
        self.recovery_left = 0
        self._memory = _fresh(val_loss)
        return self._verdict(GovernorState.HEALTHY, None, val_loss, None, None)

    def check(
        self, *, epoch: int, train_loss: float, val_loss: float, val_accuracy_share: float, param_norm: float
    ) -> Verdict:
        """Judges one epoch. Only a healthy loss is remembered.

        Args:
            epoch: 0-based epoch of the episode.
            train_loss: Mean over the epoch's batches.
            val_loss: Of the network with all its seeds.
            val_accuracy_share: 0 to 1, of the same.
            param_norm: Any norm over all parameters; only its finiteness counts.
        """
        memory = self._memory
        memory["epochs_since_snapshot"] += 1
        self.recovery_left = max(0, self.recovery_left - 1)
        center, spread = _middle(memory["losses"])
        if not all(map(math.isfinite, (train_loss, val_loss, param_norm))):
            return self._panic(RollbackReason.NONFINITE, epoch, val_loss, None)
        if self._collapsed(center, val_loss, val_accuracy_share):
            return self._panic(RollbackReason.COLLAPSE, epoch, val_loss, GUESSING_SHARE * self.labels.entropy)
        limit = self._limit(center, spread)
        if val_loss > limit:
            return self._suspect(epoch, val_loss, limit)
        memory["losses"] = [*memory["losses"], val_loss][-HISTORY:]
        memory["streak"], memory["first_suspect"] = 0, None
        return self._verdict(GovernorState.HEALTHY, None, val_loss, limit, None)

    def _limit(self, center: float | None, spread: float | None) -> float:
        """The loss above which a host is suspect."""
        if center is None or spread is None:
            return START_FACTOR * max(self.labels.entropy, self._memory["reset_loss"])
        return max(center + SPIKE_SPREADS * spread, SPIKE_RATIO * center, center + SPIKE_SHARE * self.labels.entropy)

    def _collapsed(self, center: float | None, val_loss: float, accuracy: float) -> bool:
        # One-sided on purpose: worse than guessing is no better than guessing.
        learned = center is not None and center <= LEARNED_SHARE * self.labels.entropy
        guesses = val_loss >= GUESSING_SHARE * self.labels.entropy and accuracy <= self.labels.guessing_accuracy
        return learned and guesses

    def _suspect(self, epoch: int, val_loss: float, limit: float) -> Verdict:
        memory = self._memory
        memory["streak"] += 1
        if memory["first_suspect"] is None:
            memory["first_suspect"] = epoch
        if memory["streak"] >= PATIENCE:
            return self._panic(RollbackReason.DIVERGENCE, epoch, val_loss, limit)
        return self._verdict(GovernorState.SUSPECT, RollbackReason.DIVERGENCE, val_loss, limit, memory["first_suspect"])

    def _panic(self, reason: RollbackReason, epoch: int, val_loss: float, limit: float | None) -> Verdict:
        first = self._memory["first_suspect"]
        return self._verdict(GovernorState.PANIC, reason, val_loss, limit, epoch if first is None else first)

    def _verdict(
        self, state: GovernorState, reason: RollbackReason | None, value: float, limit: float | None, first: int | None
    ) -> Verdict:
        center, spread = _middle(self._memory["losses"])
        return Verdict(
            state=state,
            reason=reason,
            value=value,
            limit=limit,
            median=center,
            spread=spread,
            num_consecutive=self._memory["streak"],
            first_epoch=first,
        )

    # ---- snapshots

    def note_fossilization(self) -> None:
        """A seed was kept for good: the next healthy state is worth keeping too."""
        self._memory["fossil_pending"] = True

    def snapshot_due(self, verdict: Verdict) -> bool:
        """True if the state that earned this verdict should be kept. Never while anything is suspect."""
        if verdict.state is not GovernorState.HEALTHY:
            return False
        return self._memory["fossil_pending"] or self._memory["epochs_since_snapshot"] >= SNAPSHOT_EVERY

    def note_snapshot(self) -> None:
        """The state is about to be kept, this memory with it."""
        self._memory["epochs_since_snapshot"] = 0
        self._memory["fossil_pending"] = False

    def note_rollback(self) -> None:
        """The host is back in its last kept state. Call after the memory was restored: the count survives."""
        self.num_rollbacks += 1
        self.recovery_left = RECOVERY_EPOCHS

    def memory(self) -> GovernorMemory:
        """What a kept state must contain, independent of the governor's later life."""
        return copy.deepcopy(self._memory)

    def restore_memory(self, memory: GovernorMemory) -> None:
        """Returns to a kept memory. Counts of rollbacks are of the episode and stay."""
        self._memory = copy.deepcopy(memory)


def _fresh(reset_loss: float) -> GovernorMemory:
    return GovernorMemory(
        reset_loss=reset_loss,
        losses=[],
        streak=0,
        first_suspect=None,
        epochs_since_snapshot=0,
        fossil_pending=False,
    )


def _middle(losses: Sequence[float]) -> tuple[float | None, float | None]:
    """Median and robust spread, or nothing while there are too few losses."""
    if len(losses) < MIN_HISTORY:
        return None, None
    center = median(losses)
    deviation = median(abs(loss - center) for loss in losses)
    return center, max(SPREAD_PER_MAD * deviation, MIN_SPREAD_SHARE * center)


# ---- limits of a run


class RollbackLimitReached(NumericFailure):
    """So many episodes were rolled back that the run is not worth continuing."""


class RollbackBudget:
    """How many rollbacks a run may have before it stops: a fifth of its episodes, at least 8."""

    def __init__(self, planned_episodes: int) -> None:
        self.cap = max(8, math.ceil(0.2 * planned_episodes))
        self.num_total = 0
        self.bad_rounds = 0

    def note_round(self, num_rollbacks: int, num_episodes: int) -> None:
        """Takes note of a finished round.

        Raises:
            RollbackLimitReached: The cap is exceeded, or more than half of the episodes of two rounds in a row were
                rolled back.
        """
        self.num_total += num_rollbacks
        self.bad_rounds = self.bad_rounds + 1 if 2 * num_rollbacks > num_episodes else 0
        if self.num_total > self.cap:
            raise RollbackLimitReached(
                f"{self.num_total} rollbacks, the limit is {self.cap}. Hosts keep diverging: lower the learning rate "
                "of the task, or look at the first rollback event of the run"
            )
        if self.bad_rounds >= 2:
            raise RollbackLimitReached(
                f"more than half of the episodes were rolled back in two rounds in a row (last: {num_rollbacks} of "
                f"{num_episodes}). Hosts keep diverging: lower the learning rate of the task"
            )

    def state_dict(self) -> dict[str, int]:
        """The counts, for checkpoints."""
        return {"num_total": self.num_total, "bad_rounds": self.bad_rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from saved counts."""
        self.num_total, self.bad_rounds = state["num_total"], state["bad_rounds"]
