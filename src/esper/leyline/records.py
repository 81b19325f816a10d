"""The records that cross package and process boundaries. Plain numbers; None means not measured, never 0.

Units are in the names: `_pct` 0-100, `_pp` a difference of two `_pct`, `_share` 0-1, `_ms` milliseconds; losses in
nats; `params` counts. `epoch` is 0-based inside an episode and None at reset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from esper.leyline.actions import LifecycleOp, heads_used_by
from esper.leyline.env_payloads import EpochScores, SlotTally
from esper.leyline.gates import LifecycleConfig
from esper.leyline.policy_payloads import LayerGradientStats
from esper.leyline.record import record
from esper.leyline.rng import derive_seed
from esper.leyline.slots import HostLayout, SlotReport
from esper.leyline.telemetry import TelemetryEvent

PROTOCOL_VERSION = 4


@record
class EpisodeSeed:
    """Which episode an env is to start. Everything random in it follows from these numbers."""

    env_id: int
    episode: int
    run_seed: int
    task: str | None = None
    """Whose host it trains; None where the workers know one task only."""
    group: int | None = None
    """Envs of one group draw alike: the same initial weights, and the same weights for a seed planted at the same
    epoch in the same slot. With one task and the batches that all envs share, only decisions make a difference between
    them. None: an env draws for itself."""

    def derive(self, epoch: int | None, purpose: str) -> int:
        """The key of one draw of this env, or of all envs of its group."""
        if self.group is None:
            return derive_seed(self.run_seed, self.env_id, self.episode, epoch, purpose)
        return derive_seed(self.run_seed, self.group, self.episode, epoch, f"group:{purpose}")

    def task_among(self, known: Collection[str]) -> str:
        """The task it names, or else the only one that is known.

        Raises:
            ValueError: It names none, and there are several.
        """
        if self.task is not None:
            return self.task
        if len(known) != 1:
            raise ValueError(f"the seed of env {self.env_id} must name a task of {', '.join(known)}")
        return next(iter(known))


@record
class FeatureContext:
    """What stays the same over an env's episode: its host as controllers see it, and what gives numbers their scale."""

    task: str
    layout: HostLayout
    lifecycle: LifecycleConfig
    num_classes: int
    """Classes or vocabulary entries: fixes the accuracy and loss of a uniform guess."""
    train_rows: int | None
    """Rows that an epoch of training sees; None where nobody knows."""
    steps_per_epoch: int | None


@record
class Action:
    """One choice of every head. Heads that the op does not use are None.

    Raises:
        ValueError: A head that the op needs is None, or one that it does not use is given.
    """

    op: LifecycleOp
    slot: str | None = None
    blueprint: str | None = None
    blend: str | None = None

    def __post_init__(self) -> None:
        used = heads_used_by(self.op)
        for head in ("slot", "blueprint", "blend"):
            given = getattr(self, head) is not None
            if given != (head in used):
                need = "needs" if head in used else "takes no"
                raise ValueError(f"{self.op.name} {need} {head}, got {getattr(self, head)!r}")


@record
class ActionSpec(Action):
    """One decision for one env."""

    env_id: int


def wait(env_id: int) -> ActionSpec:
    """The spec that does nothing."""
    return ActionSpec(env_id=env_id, op=LifecycleOp.WAIT)


@record
class ActionOutcome:
    """What became of a spec. `applied` is False only for an env whose episode is already over."""

    env_id: int
    op: LifecycleOp
    slot: str | None
    applied: bool


@record
class GradientEvidence:
    """What the optimizer saw of one parameter group in an epoch. None means that no gradient was measured."""

    finite: bool | None
    """False if any batch of the epoch had a gradient that is not a number; its update was skipped."""
    live_fraction: float | None
    """Share of the tensors whose gradient was not zero in the last batch."""
    norm_per_weight: float | None
    """Gradient norm of the last batch divided by the root of the number of weights."""
    health: float | None
    """1 minus penalties for vanishing and exploding tensors, 0 to 1."""


@record
class CoalitionTable:
    """Validation results by coalition: bit i of a mask enables `slot_ids[i]`. Only measured masks are present."""

    slot_ids: tuple[str, ...]
    accuracy_pct: Mapping[int, float]
    loss: Mapping[int, float]


@record
class TrainingSignals:
    """The host's recent history, as the tracker sees it."""

    horizon: int
    recent_accuracies_pct: tuple[float, ...]
    """Oldest first, up to five."""
    plateau_epochs: int
    stable: bool


class GovernorState(str, Enum):
    """What the governor thinks of a host."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    PANIC = "panic"


class RollbackReason(str, Enum):
    """Why a host was set back to its last healthy snapshot."""

    NONFINITE = "nonfinite"
    COLLAPSE = "collapse"
    DIVERGENCE = "divergence"


@record
class EpochReport(EpochScores):
    """One env after one epoch, or after reset (epoch None, nothing trained)."""

    env_id: int
    episode: int
    epoch: int | None
    committed_accuracy_pct: float | None
    committed_loss: float | None
    coalitions: CoalitionTable
    slots: tuple[SlotReport, ...]
    signals: TrainingSignals
    host_params: int
    total_params: int
    committed_params: int
    governor_state: GovernorState
    rollback_reason: RollbackReason | None
    terminal: bool
    events: tuple[TelemetryEvent, ...]
    train_ms: float
    val_ms: float
    gradients: tuple[LayerGradientStats, ...] | None = None
    """Of host and seeds in the last batch, before clipping; None where nobody asked. No controller may read it."""
    tallies: Mapping[str, SlotTally] | None = None
    """What each slot has seen in this episode; None where it is not counted. No controller may read it."""

    @property
    def epochs_done(self) -> int:
        """Epochs trained so far in this episode."""
        return 0 if self.epoch is None else self.epoch + 1

    @property
    def num_live(self) -> int:
        """Seeds that are neither committed nor gone."""
        return sum(slot.stage.is_live for slot in self.slots)


@record
class ActionMasks:
    """What is legal for one env. A row is all False only where the op itself is masked."""

    op: tuple[bool, ...]
    slot_by_op: tuple[tuple[bool, ...], ...]
    blueprint_by_slot: tuple[tuple[bool, ...], ...]
    blend: tuple[bool, ...]


@record
class StepResult:
    """A worker's answer to reset or step, by env id. `outcomes` is empty after reset."""

    protocol_version: int
    outcomes: Mapping[int, ActionOutcome]
    reports: Mapping[int, EpochReport]
    contexts: Mapping[int, FeatureContext]
    """The same from reset to the end of the episode; a transport may leave them out of steps, the pool knows them."""


@record
class EnvSnapshot:
    """A whole env as bytes: JSON for the facts, safetensors for the tensors."""

    version: int
    env_id: int
    meta_json: str
    tensors: bytes


@record
class ActionExecutionResult:
    """Everything a controller may know after a step. The tuples are in env order; `outcomes` is empty at reset."""

    outcomes: tuple[ActionOutcome, ...]
    reports: tuple[EpochReport, ...]
    contexts: tuple[FeatureContext, ...]
    post_action_masks: tuple[ActionMasks, ...]
    truncated_bootstrap_targets: Mapping[int, float | None]
    """env id -> V(s') for envs whose episode was cut off by a lost worker; empty otherwise. The loop knows no critic
    and puts None: a controller that has one bootstraps with its own value of the last complete state."""

    @property
    def post_action_signals(self) -> tuple[TrainingSignals, ...]:
        """Of every env's tracker."""
        return tuple(report.signals for report in self.reports)

    @property
    def post_action_slot_reports(self) -> tuple[tuple[SlotReport, ...], ...]:
        """`[env][slot]`."""
        return tuple(report.slots for report in self.reports)
