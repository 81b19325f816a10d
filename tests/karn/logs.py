"""Synthetic run directories: a small writer of log lines, and payloads whose fields a test can replace."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from esper.karn.replay import LogItem
from esper.karn.view import RunView
from esper.leyline import (
    EVENTS,
    SCHEMA_VERSION,
    ActionTaken,
    AnomalyDetected,
    BatchSummary,
    Cause,
    Check,
    CheckpointRecorded,
    ChoiceCount,
    ChoiceStats,
    CoalitionMeasured,
    CoalitionRow,
    EpisodeCompleted,
    EpochCompleted,
    EventsDropped,
    Gate,
    GateEvaluated,
    GovernorStateChanged,
    GradientStats,
    HeadDecision,
    HeadEntropies,
    HeadUpdate,
    LayerGradientStats,
    LSTMHealth,
    ObservationHealth,
    PhaseTime,
    PPOUpdateCompleted,
    PPOUpdateMetrics,
    ProfileMeasured,
    RewardHackingSuspected,
    RunEnded,
    RunStarted,
    SeedEnded,
    SeedGerminated,
    SeedStageChanged,
    SeenByPolicy,
    Severity,
    SlotState,
    SlotTally,
    TelemetryEventType,
    TrendDetected,
    WorkerStateChanged,
    join_path,
)
from esper.leyline.rundir import event_file

T = TelemetryEventType
RUN_ID = "20260101-000000-abc123"
WALL = 1_767_225_600.0
"""The wall clock of a log's first line; a second later for each further one."""
R = TypeVar("R")


class LogWriter:
    """Writes one attempt of a run: sequence numbers, times and the envelope; the test says the rest."""

    def __init__(self, folder: Path, *, run: str = RUN_ID, attempt: int = 0, first_seq: int = 0) -> None:
        self.folder, self.run, self.attempt, self.seq = folder, run, attempt, first_seq
        self.group = "main"
        self.path = event_file(folder, attempt, first_seq).path
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def line(
        self,
        kind: TelemetryEventType,
        data: object,
        severity: Severity = Severity.INFO,
        *,
        round: int | None = None,
        episode: int | None = None,
        env: int | None = None,
        epoch: int | None = None,
    ) -> bytes:
        assert type(data) is EVENTS[kind].payload
        nonfinite: dict[str, str] = {}
        entry = {
            "v": SCHEMA_VERSION,
            "run": self.run,
            "attempt": self.attempt,
            "seq": self.seq,
            "wall": WALL + self.seq,
            "mono": float(self.seq),
            "type": kind.value,
            "severity": severity.value,
            "round": round,
            "episode": episode,
            "env": env,
            "epoch": epoch,
            "group": self.group,
            "data": plain(data, (), nonfinite),
        }
        if nonfinite:
            entry["nonfinite"] = nonfinite
        self.seq += 1
        return json.dumps(entry, allow_nan=False).encode() + b"\n"

    def emit(self, kind: TelemetryEventType, data: object, severity: Severity = Severity.INFO, **ids: int) -> int:
        """Appends one event; returns its sequence number."""
        seq = self.seq
        self.write(self.line(kind, data, severity, **ids))
        return seq

    def write(self, line: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(line)


def seal(folder: Path) -> None:
    """Writes the checksums as the writer of real logs leaves them."""
    for path in (folder / "events").glob("*.jsonl"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")


def plain(value: object, path: tuple[str | int, ...], nonfinite: dict[str, str]) -> Any:
    """A payload as JSON types; what is not finite becomes null and is noted by its path."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name), (*path, name), nonfinite) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(entry, (*path, str(key)), nonfinite) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [plain(entry, (*path, index), nonfinite) for index, entry in enumerate(value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[join_path(path)] = str(value)
        return None
    return value


started = partial(
    RunStarted,
    esper_version="0.1.0",
    python_version="3.11.7",
    torch_version="2.13.0",
    numpy_version="2.4.6",
    git_commit="0123456789abcdef",
    git_dirty=False,
    config_hash="c0ffee",
    argv=("esper", "train"),
    run_seed=7,
    task="digits_mlp",
    data_sha256="d161",
    split_sizes={"train": 1000, "val": 300, "test": 300},
    num_rounds=20,
    num_envs=2,
    epochs_per_episode=3,
    slot_ids=("r0c0", "r0c1"),
    host_params=1000,
    param_budget=3000,
    controller="ppo",
    reward_mode="shaped",
    worker_kind="inline",
    num_workers=1,
    devices=("cpu",),
    level="normal",
    resume_differences=(),
)

ended = partial(
    RunEnded,
    status="completed",
    num_rounds_total=20,
    num_env_steps_total=120,
    best_accuracy_pct=91.5,
    final_accuracy_pct=90.0,
    wall_s=61.0,
    num_dropped_total=0,
)

round_completed = partial(
    BatchSummary,
    accuracy_mean_pct=80.0,
    accuracy_best_pct=85.0,
    accuracy_worst_pct=75.0,
    rolling_accuracy_pct=79.0,
    committed_accuracy_pct=78.0,
    return_mean=1.5,
    return_std=0.25,
    params_ratio_mean=1.2,
    num_ops={"WAIT": 4, "GERMINATE": 1, "FOSSILIZE": 1, "PRUNE": 0},
    num_rollbacks=0,
    num_episodes_total=2,
    num_env_steps_total=6,
    update_performed=True,
    duration_s=3.0,
)

slot = partial(
    SlotState,
    stage="TRAINING",
    seed_id="0.0.r0c0.0",
    blueprint="mlp.lora",
    alpha_share=0.25,
    epochs_in_stage=1,
    params=200,
    contribution_pp=0.5,
    grad_ratio=1.0,
    grad_health=0.9,
)


def unmeasured_slot() -> SlotState:
    return slot(seed_id="0.0.r0c1.0", contribution_pp=None, grad_ratio=None, grad_health=None)


def layer_stats() -> LayerGradientStats:
    return LayerGradientStats(
        name="head.weight",
        num_elements=20,
        norm=0.5,
        mean=0.0,
        std=0.1,
        max_abs=0.3,
        zero_share=0.25,
        large_share=0.0,
        num_nan=0,
        num_inf=0,
    )


epoch_completed = partial(
    EpochCompleted,
    train_loss=0.5,
    train_accuracy_pct=82.0,
    val_loss=0.6,
    val_accuracy_pct=80.0,
    committed_accuracy_pct=79.0,
    params_total=1200,
    params_fossil=0,
    lr=0.01,
    slots={"r0c0": slot(), "r0c1": unmeasured_slot()},
    train_ms=5.0,
    val_ms=2.0,
    debug=(layer_stats(),),
)

action_taken = partial(
    ActionTaken,
    op="GERMINATE",
    slot_id="r0c0",
    blueprint="mlp.lora",
    blend="linear",
    ok=True,
    forced=False,
    value=0.4,
    log_prob=-1.2,
    heads={
        "op": HeadDecision(prob_share=0.5, entropy_share=0.8, num_legal=2, probs=None),
        "slot": HeadDecision(prob_share=0.4, entropy_share=0.9, num_legal=2, probs={"r0c0": 0.4, "r0c1": 0.6}),
    },
    reward_raw=0.5,
    reward_scaled=0.25,
    components={"gain": 0.75, "rent": -0.25},
    seen=SeenByPolicy(
        outlier_share=0.02, clipped_share=0.0, num_nonfinite=0, max_deviation=5.5, worst_column="r0c0.alpha"
    ),
)

episode_completed = partial(
    EpisodeCompleted,
    end="completed",
    num_epochs=3,
    final_accuracy_pct=82.0,
    best_accuracy_pct=83.0,
    committed_accuracy_pct=81.0,
    final_loss=0.4,
    params_added=200,
    params_ratio=1.2,
    num_germinated=1,
    num_fossilized=1,
    num_pruned=0,
    num_alive=0,
    num_contributing_fossils=1,
    return_raw=1.5,
    components_sum={"gain": 2.0, "rent": -0.5},
    num_ops={"WAIT": 2, "GERMINATE": 1},
    slots={"r0c0": SlotTally(num_germinated=1, num_fossilized=1, contribution_gain_pp=2.5)},
)

germinated = partial(
    SeedGerminated,
    seed_id="0.0.r0c0.0",
    slot_id="r0c0",
    blueprint="mlp.lora",
    blend="linear",
    params=200,
    cause=Cause.POLICY,
)

stage_changed = partial(
    SeedStageChanged,
    seed_id="0.0.r0c0.0",
    slot_id="r0c0",
    from_stage="GERMINATED",
    to_stage="TRAINING",
    alpha_share=0.0,
    epochs_in_stage=0,
    cause=Cause.AUTO,
)

seed_ended = partial(
    SeedEnded,
    seed_id="0.0.r0c0.0",
    slot_id="r0c0",
    blueprint="mlp.lora",
    params=200,
    from_stage="HOLDING",
    epochs_total=2,
    contribution_pp=1.25,
    cause=Cause.POLICY,
)

governor_changed = partial(
    GovernorStateChanged,
    from_state="panic",
    to_state="healthy",
    reason="divergence",
    value=9.5,
    limit=3.0,
    median=0.5,
    spread=0.1,
    num_consecutive=2,
    first_epoch=1,
    op="GERMINATE",
    slot_id="r0c0",
    restored_epoch=0,
    rolled_back=True,
    seeds_removed=("0.0.r0c0.0",),
)

head_update = partial(HeadUpdate, kl=0.01, clip_fraction=0.1, grad_norm=0.5, num_usable=40, grad_state="ok")


def ppo_update(**fields: object) -> PPOUpdateCompleted:
    metrics = PPOUpdateMetrics(
        performed=True,
        skip_reason=None,
        num_optimizer_steps=8,
        env_steps=6,
        kl_stopped=False,
        policy_loss=-0.01,
        value_loss=0.3,
        entropy_loss=0.9,
        total_loss=0.2,
        approx_kl=0.012,
        clip_fraction=0.1,
        ratio_mean=1.0,
        ratio_min=0.8,
        ratio_max=1.3,
        explained_variance=0.4,
        value_nrmse=0.7,
        return_corr=0.6,
        return_mean=1.5,
        return_std=0.3,
        advantage_mean=0.0,
        advantage_std=1.0,
        gradient_stats=GradientStats(grad_norm=0.4, max_grad=0.9, min_grad=0.1, clip_norm=0.5, num_nonfinite=0),
        head_entropies=HeadEntropies(slot=None, blueprint=0.7, blend=0.7, op=0.7),
        heads={"op": head_update(), "slot": head_update(num_usable=0)},
        lstm=LSTMHealth(h_rms=0.3, c_rms=0.5, saturated_share=0.0, dead_share=0.0, num_nonfinite=0),
        observations=ObservationHealth(outlier_share=0.0, clipped_share=0.0, drift=0.1, num_nonfinite=0),
        decision_share=0.8,
        num_rewards_clipped=0,
        learning_rate=3e-4,
        entropy_coef=0.01,
        clip_ratio=0.2,
        target_kl=0.02,
    )
    assert set(fields) <= set(metrics)
    return PPOUpdateCompleted(metrics=cast(PPOUpdateMetrics, {**metrics, **fields}), layers=None)


anomaly = partial(
    AnomalyDetected,
    kind="clip_fraction",
    state="entered",
    metric="clip_fraction",
    value=0.4,
    limit=0.3,
    num_consecutive=1,
    detail="",
)

suspected = partial(
    RewardHackingSuspected, pattern="ransomware", slot_id="r0c0", contribution_pp=2.5, improvement_pp=-0.75, ratio=None
)

trend = partial(TrendDetected, kind="improvement", delta_pp=3.0, rolling_pct=83.0, previous_pct=80.0, window_rounds=10)

profile = partial(
    ProfileMeasured,
    env_steps_per_s=40.0,
    host_samples_per_s=5000.0,
    phases={"train": PhaseTime(wall_ms=2000.0, cpu_ms=1900.0), "other": PhaseTime(wall_ms=10.0, cpu_ms=None)},
    controller_ms_per_env_step=0.5,
    telemetry_cpu_ms=2.0,
    wait_share=0.0,
    rss_bytes=500_000_000,
    disk_free_bytes=50_000_000_000,
    queue_high_water=12,
)

choices = partial(
    ChoiceStats,
    head="op",
    choices={
        "WAIT": ChoiceCount(num_legal=6, num_chosen=4, num_ok=4),
        "GERMINATE": ChoiceCount(num_legal=6, num_chosen=2, num_ok=2),
    },
    num_decisions=6,
    num_forced=0,
)

checkpoint = partial(
    CheckpointRecorded,
    action="saved",
    path="checkpoints/ckpt-00000001",
    round=1,
    next_seq=10,
    size_bytes=4096,
    save_ms=3.0,
    manifest_sha256="abcd",
)

worker_changed = partial(
    WorkerStateChanged,
    worker_id=1,
    kind="process",
    state="lost",
    env_ids=(0, 1),
    exit_code=-9,
    error="worker 1 ended",
    num_epochs_replayed=0,
    downtime_ms=12.0,
)

events_dropped = partial(EventsDropped, counts={"EPOCH_COMPLETED": 2}, first_seq=3, last_seq=4, reason="queue_full")

gate_evaluated = partial(
    GateEvaluated,
    seed_id="0.0.r0c0.0",
    slot_id="r0c0",
    gate=Gate.BLEND,
    target_stage="BLENDING",
    passed=False,
    checks=(
        Check(name="epochs", value=1.0, limit=2.0, passed=False),
        Check(name="gradient", value=None, limit=0.1, passed=False),
    ),
)

coalition = partial(
    CoalitionMeasured,
    slot_ids=("r0c0", "r0c1"),
    rows=(
        CoalitionRow(mask="00", accuracy_pct=78.0, loss=0.7),
        CoalitionRow(mask="10", accuracy_pct=80.0, loss=0.6),
    ),
    strategy="full",
    committed_mask="00",
    contribution_pp={"r0c0": 2.0},
    interaction_pp={},
    shapley_pp={"r0c0": 2.0},
)

PAYLOADS: dict[TelemetryEventType, Callable[..., object]] = {
    T.RUN_STARTED: started,
    T.RUN_ENDED: ended,
    T.ROUND_COMPLETED: round_completed,
    T.EPISODE_COMPLETED: episode_completed,
    T.EPOCH_COMPLETED: epoch_completed,
    T.ACTION_TAKEN: action_taken,
    T.SEED_GERMINATED: germinated,
    T.SEED_STAGE_CHANGED: stage_changed,
    T.GATE_EVALUATED: gate_evaluated,
    T.SEED_FOSSILIZED: seed_ended,
    T.SEED_PRUNED: seed_ended,
    T.COALITION_MEASURED: coalition,
    T.GOVERNOR_STATE_CHANGED: governor_changed,
    T.PPO_UPDATE_COMPLETED: ppo_update,
    T.ANOMALY_DETECTED: anomaly,
    T.REWARD_HACKING_SUSPECTED: suspected,
    T.TREND_DETECTED: trend,
    T.PROFILE_MEASURED: profile,
    T.CHOICE_STATS: choices,
    T.CHECKPOINT_RECORDED: checkpoint,
    T.WORKER_STATE_CHANGED: worker_changed,
    T.EVENTS_DROPPED: events_dropped,
}


def write_round(log: LogWriter, number: int, *, envs: int = 2, epochs: int = 3) -> None:
    """One uneventful round of a PPO run: every env grows one seed and keeps it."""
    for epoch in range(epochs):
        for env in range(envs):
            where = {"round": number, "episode": number, "env": env, "epoch": epoch}
            seed_id = f"{env}.{number}.r0c0.0"
            if epoch == 0:
                log.emit(T.SEED_GERMINATED, germinated(seed_id=seed_id), **where)
                log.emit(T.SEED_STAGE_CHANGED, stage_changed(seed_id=seed_id), **where)
            accuracy = 70.0 + number + epoch + env
            log.emit(T.EPOCH_COMPLETED, epoch_completed(val_accuracy_pct=accuracy), **where)
            log.emit(T.ACTION_TAKEN, action_taken(), **where)
            if epoch == epochs - 1:
                log.emit(T.SEED_FOSSILIZED, seed_ended(seed_id=seed_id), **where)
                log.emit(
                    T.EPISODE_COMPLETED,
                    episode_completed(final_accuracy_pct=accuracy, return_raw=1.0 + number / 10 + env / 100),
                    **where,
                )
    log.emit(T.PPO_UPDATE_COMPLETED, ppo_update(), round=number)
    log.emit(T.CHOICE_STATS, choices(), round=number)
    log.emit(T.PROFILE_MEASURED, profile(), round=number)
    totals = {"num_episodes_total": envs * (number + 1), "num_env_steps_total": envs * epochs * (number + 1)}
    log.emit(T.ROUND_COMPLETED, round_completed(accuracy_mean_pct=72.0 + number, **totals), round=number)


def write_run(folder: Path, *, rounds: int = 3, run: str = RUN_ID, finish: bool = True) -> LogWriter:
    """A healthy run from its first line to its last."""
    log = LogWriter(folder, run=run)
    log.emit(T.RUN_STARTED, started())
    for number in range(rounds):
        write_round(log, number)
    if finish:
        log.emit(T.RUN_ENDED, ended(num_rounds_total=rounds))
    return log


def every_type(folder: Path) -> LogWriter:
    """One event of every type, with the ids its scope asks for."""
    log = LogWriter(folder)
    for kind in TelemetryEventType:
        log.emit(kind, PAYLOADS[kind](), **ids_of(kind))
    return log


def ids_of(kind: TelemetryEventType) -> dict[str, int]:
    scope = EVENTS[kind].scope.value
    if scope == "run":
        return {}
    return {"round": 0} if scope == "round" else {"round": 0, "episode": 0, "env": 0, "epoch": 1}


def read_view(items: Iterable[LogItem]) -> RunView:
    """The view of a run after all of these items."""
    view = RunView()
    for item in items:
        view.add(item)
    return view
