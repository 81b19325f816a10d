"""Payloads about one env: its epochs, decisions, seeds and safety. None means not measured, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from esper.leyline.gates import Check
from esper.leyline.policy_payloads import LayerGradientStats
from esper.leyline.record import record
from esper.leyline.stages import Cause, Gate


@record
class EpisodeCompleted:
    """The one outcome of an (env, episode). Germinated = fossilized + pruned + alive."""

    end: Literal["completed", "rolled_back", "worker_lost"]
    num_epochs: int
    final_accuracy_pct: float | None
    best_accuracy_pct: float | None
    committed_accuracy_pct: float | None
    """Of the network that would be delivered: the host with its fossils only."""
    final_loss: float
    params_added: int
    params_ratio: float
    """All parameters over the host's own."""
    num_germinated: int
    num_fossilized: int
    num_pruned: int
    num_alive: int
    """Seeds whose story had no end when the episode had, a rollback included."""
    num_contributing_fossils: int | None
    """Fossils with a positive measured contribution; None where it was not measured."""
    return_raw: float
    components_sum: Mapping[str, float]
    """Reward terms summed over the episode; together they are `return_raw`."""
    num_ops: Mapping[str, int]


@record
class SlotState:
    """One slot with a seed, at the end of an epoch."""

    stage: str
    """A SeedStage name."""
    seed_id: str
    blueprint: str
    alpha_share: float
    epochs_in_stage: int
    params: int
    contribution_pp: float | None
    grad_ratio: float | None
    grad_health: float | None


@record
class EpochCompleted:
    """One point of a learning curve, and the state of every seed."""

    train_loss: float | None
    """None after a rollback to the untrained host."""
    train_accuracy_pct: float | None
    val_loss: float
    val_accuracy_pct: float
    committed_accuracy_pct: float | None
    params_total: int
    params_fossil: int
    lr: float | None
    slots: Mapping[str, SlotState]
    """Slots that hold a seed; a slot that is absent is empty."""
    train_ms: float
    val_ms: float
    debug: tuple[LayerGradientStats, ...] | None
    """Gradients of host and seeds in the last batch before clipping, tensor by tensor, at level DEBUG."""


@record
class HeadDecision:
    """How sure one head was of its choice. Heads that the op does not use, or that had one choice, are absent."""

    prob_share: float
    entropy_share: float
    num_legal: int
    probs: Mapping[str, float] | None
    """All probabilities, at level DEBUG."""


@record
class SeenByPolicy:
    """How unusual what the policy saw was, in standard deviations of what it had seen before."""

    outlier_share: float
    """Share of the normalised columns beyond 5 of them."""
    clipped_share: float
    """Share of those beyond 10, where the policy sees the limit instead."""
    num_nonfinite: int
    max_deviation: float | None
    """None if no column was finite."""
    worst_column: str
    """The first column that is not finite, or the one with the largest deviation; a slot's as "r0c0.alpha"."""


@record
class ActionTaken:
    """Why the controller acted and what it earned. The components sum to `reward_raw`."""

    op: str
    """A LifecycleOp name."""
    slot_id: str | None
    blueprint: str | None
    blend: str | None
    ok: bool
    forced: bool
    """True where nothing else was legal."""
    value: float | None
    """The critic's forecast; None for controllers without one."""
    log_prob: float | None
    heads: Mapping[str, HeadDecision]
    """Empty for controllers that do not draw."""
    reward_raw: float | None
    reward_scaled: float | None
    components: Mapping[str, float]
    """Terms that paid or took something; one that is absent did neither."""
    seen: SeenByPolicy | None
    """What the policy decided on, at level DEBUG."""


@record
class SeedGerminated:
    """A seed was planted."""

    seed_id: str
    slot_id: str
    blueprint: str
    blend: str
    params: int
    initiator: Cause


@record
class SeedStageChanged:
    """A seed moved; births, fossils and prunes have events of their own."""

    seed_id: str
    slot_id: str
    from_stage: str
    to_stage: str
    """SeedStage names."""
    alpha_share: float
    epochs_in_stage: int
    """Of the stage that was left."""
    cause: Cause


@record
class SeedEnded:
    """A seed was kept for good or removed: the payload of SEED_FOSSILIZED and SEED_PRUNED."""

    seed_id: str
    slot_id: str
    blueprint: str
    params: int
    from_stage: str
    """The SeedStage name it ended in: a seed pruned in TRAINING never changed an output."""
    epochs_total: int
    contribution_pp: float | None
    initiator: Cause


@record
class GateEvaluated:
    """Why a seed may or may not move on."""

    seed_id: str
    slot_id: str
    gate: Gate
    target_stage: str
    passed: bool
    checks: tuple[Check, ...]
    """Those that failed; at level DEBUG all."""


@record
class CoalitionRow:
    """One measured coalition."""

    mask: str
    """A character per entry of `slot_ids`, in that order: 1 for enabled."""
    accuracy_pct: float | None
    loss: float | None


@record
class CoalitionMeasured:
    """What the seeds are worth together and apart. Only what was measured is present; nothing is estimated."""

    slot_ids: tuple[str, ...]
    rows: tuple[CoalitionRow, ...]
    strategy: Literal["full", "leave_one_out"] | None
    """None where nothing was measured."""
    committed_mask: str | None
    contribution_pp: Mapping[str, float]
    interaction_pp: Mapping[str, float]
    """By pair, as in "r0c0+r0c1"."""
    shapley_pp: Mapping[str, float] | None
    unavailable: str | None
    """Why there are no rows."""


@record
class GovernorStateChanged:
    """The governor changed its mind about a host, or set it back."""

    from_state: str
    to_state: str
    """A GovernorState value."""
    reason: str | None
    """A RollbackReason value; None on the way back to healthy."""
    value: float
    """The validation loss that was judged. After a rollback this event is the only place that has it."""
    limit: float | None
    median: float | None
    spread: float | None
    num_consecutive: int
    first_epoch: int | None
    """Where the trouble began: the first suspect epoch of the streak."""
    op: str | None
    slot_id: str | None
    """What the controller did in this epoch, and where; None for the untrained host."""
    restored_epoch: int | None
    """Epoch whose end the host was set back to; None if it was not set back or went back to the untrained host."""
    rolled_back: bool
    seeds_removed: tuple[str, ...]
    """Seeds that the rollback undid, by seed_id."""


@record
class RewardHackingSuspected:
    """The reward may be paying for damage."""

    pattern: Literal["attribution_ratio", "ransomware"]
    slot_id: str
    contribution_pp: float
    improvement_pp: float
    ratio: float | None
