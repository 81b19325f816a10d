"""The words all of Esper shares: enums, tables, frozen records, protocols, seed keys. Standard library only."""

# fmt: off
from esper.leyline.actions import (
    BLENDS, CURVES, HEAD_NAMES, HEADS, OPERATORS, OPS, SAMPLING_ORDER, BlendSpec, HeadName, LifecycleOp, get_blend,
    heads_used_by
)
from esper.leyline.coalitions import (
    attribute, attribution, coalition_mask, coalitions_to_measure, contribution, full_coalition, interaction,
    interaction_sum, shapley, solo
)
from esper.leyline.env_payloads import (
    ActionTaken, CoalitionMeasured, CoalitionRow, EpisodeCompleted, EpochCompleted, EpochScores, GateEvaluated,
    GovernorStateChanged, HeadDecision, LossCheck, RewardHackingSuspected, SeedEnded, SeedGerminated, SeedMoved,
    SeedStageChanged, SeenByPolicy, SlotState, SlotTally
)
from esper.leyline.errors import (
    CheckpointError, DataDamaged, DataNotFound, ExitCode, GerminationError, IllegalOperation, ModelFileError,
    NumericFailure, RunBusy, StorageError, WorkersFailed, check_known,
)
from esper.leyline.gates import (
    DEFAULT_LIFECYCLE, Check, GateResult, LifecycleConfig, gate_blend, gate_fossilize, gate_germinate, gate_hold,
    gate_prune, gate_train
)
from esper.leyline.optim import AUGMENTATIONS, FINAL_LR_FACTOR, SCHEDULES, OptimSpec, lr_factor
from esper.leyline.policy_payloads import (
    AnomalyDebug, AnomalyDetected, GradientStats, GradState, HeadEntropies, HeadUpdate, LayerGradientStats,
    LayerHealth, LSTMHealth, NumericalStability, ObservationHealth, PPOUpdateCompleted, PPOUpdateMetrics
)
from esper.leyline.protocols import EventSink, PolicyProtocol, RewardProtocol, Worker
from esper.leyline.record import as_keywords, record
from esper.leyline.records import (
    PROTOCOL_VERSION, Action, ActionExecutionResult, ActionMasks, ActionOutcome, ActionSpec, CoalitionTable,
    EnvSnapshot, EpisodeSeed, EpochReport, FeatureContext, GovernorState, GradientEvidence, RollbackReason, StepResult,
    TrainingSignals, wait
)
from esper.leyline.rng import derive_seed
from esper.leyline.run_payloads import (
    BatchSummary, CheckpointRecorded, ChoiceCount, ChoiceStats, CudaMemory, EventsDropped, PhaseTime, ProfileMeasured,
    RunEnded, RunStarted, TrendDetected, WorkerStateChanged
)
from esper.leyline.rundir import RunStatus, process_started_s
from esper.leyline.slots import (
    MIXING, PASSES_PER_STEP, Attribution, BlueprintCard, HostLayout, SlotConfig, SlotMeasurement, SlotReport, SlotSpec,
    SpanSource, check_slot_id
)
from esper.leyline.stages import TRANSITIONS, Cause, Gate, SeedStage, SlotTransition
from esper.leyline.telemetry import (
    EVENTS, SCHEMA_VERSION, TIMING_SUFFIXES, EventSpec, LoggedEvent, Scope, Severity, TelemetryEvent,
    TelemetryEventType, TelemetryLevel, check_event, fill_ids, join_path, make_event, split_path, transition_event
)
from esper.leyline.thresholds import THRESHOLDS, Threshold
