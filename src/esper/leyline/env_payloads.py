"""Payloads about one env: its epochs, decisions, seeds and safety. None means not measured, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from esper.leyline.gates import Check
from esper.leyline.policy_payloads import LayerGradientStats
from esper.leyline.record import record
from esper.leyline.stages import Cause, Gate


@record
class SlotTally:
    """What one slot saw in an episode."""

    num_germinated: int
    """Seeds planted in it, those that a rollback undid included."""
    num_fossilized: int
    """Of these, the ones kept for good."""
    contribution_gain_pp: float | None = None
    """What its seeds brought: the change of their measured contribution since each was planted, summed over them; None
    if none was measured. What a rollback undid is not in it."""


@record
class EpisodeCompleted:
    """The one outcome of an (env, episode). Germinated = fossilized + pruned + alive."""

    end: Literal["completed", "rolled_back", "worker_lost"]
    """How it ended: after its last epoch, by a rollback, or because its worker was given up."""
    num_epochs: int
    """Epochs that were trained; one that ended in a rollback counts."""
    final_accuracy_pct: float | None = None
    """On the validation split, with all blended seeds, after the last epoch; after a rollback, of what was restored."""
    best_accuracy_pct: float | None = None
    """The best of these over the episode, the untrained host included."""
    committed_accuracy_pct: float | None = None
    """Of the network that would be delivered: the host with its fossils only."""
    final_loss: float
    """Validation loss that belongs to `final_accuracy_pct`."""
    params_added: int
    """Parameters beyond those of the host, in fossils and living seeds."""
    params_ratio: float
    """All parameters over the host's own: 1.0 where nothing was added."""
    num_germinated: int
    """Seeds planted."""
    num_fossilized: int
    """Of these, the ones kept for good."""
    num_pruned: int
    """Of these, the ones removed, also by a failed probe, which needs no op."""
    num_alive: int
    """Seeds whose story had no end when the episode had, a rollback included."""
    num_contributing_fossils: int | None = None
    """Fossils with a positive measured contribution; None where that of one was not measured."""
    return_raw: float
    """Sum of the rewards of the episode as they were paid: not scaled, not discounted."""
    components_sum: Mapping[str, float]
    """Reward terms summed over the episode; together they are `return_raw`. docs/rewards.md explains them."""
    num_ops: Mapping[str, int]
    """How often each op was carried out, by its name."""
    slots: Mapping[str, SlotTally] | None = None
    """The same by slot, empty ones included; None where it was not counted."""


@record
class SlotState:
    """One slot with a seed, at the end of an epoch."""

    stage: str
    """A SeedStage name: GERMINATED, TRAINING, BLENDING, HOLDING or FOSSILIZED."""
    seed_id: str
    blueprint: str
    alpha_share: float
    """How much of the seed reaches the output of its slot: 0 not at all, 1 in full."""
    epochs_in_stage: int
    """Epochs completed in this stage."""
    params: int
    """Parameters of the seed."""
    contribution_pp: float | None = None
    """Points lost when this seed alone is switched off; None unless it is blended in and was measured."""
    grad_ratio: float | None = None
    """Gradient per weight of the seed over that of the host, smoothed over epochs (0.9 old, 0.1 new)."""
    grad_health: float | None = None
    """1 minus half the share of its tensors with a vanishing gradient and 0.8 times that of exploding ones; 0 if one
    is not finite."""


@record
class EpochScores:
    """How well a host does after an epoch. Training fields are None for the untrained host, also after a rollback."""

    train_loss: float | None = None
    """Mean over the epoch; None after a rollback to the untrained host."""
    train_accuracy_pct: float | None = None
    """The same for the accuracy."""
    val_loss: float
    """On the validation split, with all blended seeds, after the epoch."""
    val_accuracy_pct: float
    """The same for the accuracy."""


@record
class EpochCompleted(EpochScores):
    """One point of a learning curve, and the state of every seed."""

    committed_accuracy_pct: float | None = None
    """The same of the host with its fossils only; None where that coalition was not measured."""
    params_total: int
    """Of the host and everything in its slots."""
    params_fossil: int
    """Of the fossils alone."""
    lr: float | None = None
    """The host's learning rate in this epoch."""
    slots: Mapping[str, SlotState]
    """Slots that hold a seed; a slot that is absent is empty."""
    train_ms: float
    """Time of training in this epoch."""
    val_ms: float
    """Time of validation, all coalitions included."""
    debug: tuple[LayerGradientStats, ...] | None = None
    """Gradients of host and seeds in the last batch before clipping, tensor by tensor, at level DEBUG."""


@record
class HeadDecision:
    """How sure one head was of its choice. Heads that the op does not use, or that had one choice, are absent."""

    prob_share: float
    """Probability with which the choice that was taken would be drawn, exploration included."""
    entropy_share: float
    """Entropy over the legal choices, without exploration, as a share of ln(num_legal): 1 undecided, 0 certain."""
    num_legal: int
    """Choices that were legal, given what was chosen before."""
    probs: Mapping[str, float] | None = None
    """All probabilities, at level DEBUG."""


@record
class SeenByPolicy:
    """How unusual what the policy saw was, in standard deviations of what it had seen before."""

    outlier_share: float
    """Share of the normalised columns beyond 5 of them."""
    clipped_share: float
    """Share of those beyond 10, where the policy sees the limit instead."""
    num_nonfinite: int
    """Columns that are not numbers."""
    max_deviation: float | None = None
    """The largest; None if no column was finite."""
    worst_column: str
    """The first column that is not finite, or the one with the largest deviation; a slot's as "r0c0.alpha"."""


@record
class ActionTaken:
    """Why the controller acted and what it earned. The components sum to `reward_raw`."""

    op: str
    """A LifecycleOp name: WAIT, GERMINATE, ADVANCE, FOSSILIZE or PRUNE."""
    slot_id: str | None = None
    """Where; None for an op that has no place."""
    blueprint: str | None = None
    """What was planted; None for other ops."""
    blend: str | None = None
    """How it is to be blended in; None for other ops."""
    ok: bool
    """True if the op was carried out."""
    forced: bool
    """True where no other op was legal."""
    value: float | None = None
    """The critic's forecast of the return from here, in scaled reward units; None for controllers without one."""
    log_prob: float | None = None
    """Of the whole action: the sum over its heads; None for controllers that do not draw."""
    heads: Mapping[str, HeadDecision]
    """Heads that had a choice. Empty for controllers that do not draw."""
    reward_raw: float | None = None
    """What the step was paid, in units of the score; None where nothing is priced."""
    reward_scaled: float | None = None
    """The same as the policy learns from it: over the running scale, at most 10; None before there is a scale."""
    components: Mapping[str, float]
    """Terms of `reward_raw` that paid or took something; one that is absent did neither. docs/rewards.md explains
    them."""
    seen: SeenByPolicy | None = None
    """What the policy decided on, at level DEBUG."""


@record
class SeedMoved:
    """A move in the life of a seed."""

    seed_id: str
    """env.episode.slot.n, unique in the run."""
    slot_id: str
    cause: Cause
    """Who did it: policy, or auto (by itself, when a gate opens or time is up)."""


@record
class SeedGerminated(SeedMoved):
    """A seed was planted."""

    blueprint: str
    blend: str
    params: int
    """Parameters it adds."""


@record
class SeedStageChanged(SeedMoved):
    """A seed moved; births, fossils and prunes have events of their own."""

    from_stage: str
    """The SeedStage name it left."""
    to_stage: str
    """The SeedStage name it is in now; EMBARGOED and DORMANT are stages of the emptied slot."""
    alpha_share: float
    """How much of the seed reached the output of its slot at that moment."""
    epochs_in_stage: int
    """Of the stage that was left."""


@record
class SeedEnded(SeedMoved):
    """A seed was kept for good or removed: the payload of SEED_FOSSILIZED and SEED_PRUNED."""

    blueprint: str
    params: int
    """Parameters that it keeps or frees."""
    from_stage: str
    """The SeedStage name it ended in: a seed pruned in TRAINING never changed an output."""
    epochs_total: int
    """Epochs completed since it was planted."""
    contribution_pp: float | None = None
    """Points lost when it alone was switched off, as measured last; None if it was not."""


@record
class GateEvaluated:
    """Why a seed may or may not move on."""

    seed_id: str
    slot_id: str
    gate: Gate
    """G1 train, G2 blend, G3 hold, G4 fossilize."""
    target_stage: str
    """The SeedStage name behind the gate."""
    passed: bool
    """True if all checks hold."""
    checks: tuple[Check, ...]
    """Those that failed, each with what was measured and its limit; at level DEBUG all."""


@record
class CoalitionRow:
    """One measured coalition."""

    mask: str
    """A character per entry of `slot_ids`, in that order: 1 for enabled."""
    accuracy_pct: float | None = None
    """Validation accuracy with exactly these seeds."""
    loss: float | None = None
    """Validation loss with exactly these seeds."""


@record
class CoalitionMeasured:
    """What the seeds are worth together and apart. Only what was measured is present; nothing is estimated."""

    slot_ids: tuple[str, ...]
    """Slots whose seeds took part: blended ones, fossils included."""
    rows: tuple[CoalitionRow, ...]
    """What was measured, each coalition once."""
    strategy: Literal["full", "leave_one_out"] | None = None
    """full: every coalition; leave_one_out: all seeds, none, the fossils, and all but one. None where nothing was
    measured."""
    committed_mask: str | None = None
    """The row with the fossils alone, the network that would be delivered."""
    contribution_pp: Mapping[str, float]
    """By slot: points lost when its seed alone is switched off."""
    interaction_pp: Mapping[str, float]
    """By pair, as in "r0c0+r0c1": points that two seeds bring together beyond what each brings alone."""
    shapley_pp: Mapping[str, float] | None = None
    """By slot: its share of what all bring together, averaged over every order of joining; None unless all was
    measured."""
    unavailable: str | None = None
    """Why there are no rows."""


@record
class LossCheck:
    """A validation loss as the governor judged it."""

    value: float
    """The validation loss that was judged. After a rollback this event is the only place that has it."""
    limit: float | None = None
    """What the loss had to stay below; None where no limit was involved."""
    median: float | None = None
    """Of the accepted losses, at most the last 20; None with fewer than 5."""
    spread: float | None = None
    """Of the same losses: 1.4826 times the median deviation, at least 2 % of the median."""
    num_consecutive: int
    """Suspect epochs in a row, this one included."""
    first_epoch: int | None = None
    """Where the trouble began: the first suspect epoch of the streak; None while healthy."""


@record
class GovernorStateChanged(LossCheck):
    """The governor changed its mind about a host, or set it back."""

    from_state: str
    """healthy, suspect or panic."""
    to_state: str
    """The same."""
    reason: str | None = None
    """nonfinite, collapse (as bad as guessing after having learned) or divergence; None on the way back to healthy."""
    op: str | None = None
    """What the controller did in this epoch; None for the untrained host."""
    slot_id: str | None = None
    """Where it did it."""
    restored_epoch: int | None = None
    """Epoch whose end the host was set back to; None if it was not set back or went back to the untrained host."""
    rolled_back: bool
    """True if the host was set back to an earlier state."""
    seeds_removed: tuple[str, ...]
    """Seeds that the rollback undid, by seed_id."""


@record
class RewardHackingSuspected:
    """The reward may be paying for damage."""

    pattern: Literal["attribution_ratio", "ransomware"]
    """attribution_ratio: the seeds claim many times what they brought together; ransomware: removal would hurt a
    host that is worse than if it had only waited."""
    slot_id: str
    """The seed it is about; for attribution_ratio the one that claims most."""
    contribution_pp: float
    """What that seed claims: points lost when it alone is switched off."""
    improvement_pp: float
    """ransomware: points above a host that only waited; attribution_ratio: points that all seeds brought together."""
    ratio: float | None = None
    """Sum of the positive claims over what was brought together, at least 1 pp; None for ransomware."""
