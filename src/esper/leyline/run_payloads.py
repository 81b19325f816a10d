"""Payloads about a whole run or a round of it. Plain numbers; None means not measured, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from esper.leyline.record import record


@record
class RunStarted:
    """What is needed to repeat the run and to compare it with another."""

    esper_version: str
    python_version: str
    torch_version: str
    numpy_version: str
    cuda_version: str | None
    git_commit: str | None
    git_dirty: bool | None
    config_hash: str
    """sha256 of the canonical JSON of the configuration."""
    argv: tuple[str, ...]
    run_seed: int
    task: str
    data_sha256: str | None
    split_sizes: Mapping[str, int]
    """Rows by split: train, val, test."""
    num_rounds: int
    num_envs: int
    epochs_per_episode: int
    slot_ids: tuple[str, ...]
    host_params: int
    param_budget: int | None
    """Most parameters a host and its seeds may have together; None for no limit."""
    controller: str
    reward_mode: str | None
    """None where nothing is priced."""
    worker_kind: str
    num_workers: int
    devices: tuple[str, ...]
    amp_dtype: str | None
    level: str
    """The telemetry level, by its lower-case name."""
    resumed_from: str | None
    """The checkpoint this attempt continues, by its name; None for a fresh start."""
    resume_differences: tuple[str, ...]
    """What differs from the build that wrote the checkpoint; bitwise equality is not promised across these."""


@record
class RunEnded:
    """The end marker. A log without one whose process is gone is that of a run that died."""

    status: Literal["completed", "failed", "interrupted"]
    error_type: str | None
    error_message: str | None
    traceback_tail: str | None
    num_rounds_total: int
    num_env_steps_total: int
    best_accuracy_pct: float | None
    final_accuracy_pct: float | None
    wall_s: float
    num_dropped_total: int


@record
class RoundCompleted:
    """One round is over and counted: an episode in every env, then one policy update."""

    accuracy_mean_pct: float
    accuracy_best_pct: float
    accuracy_worst_pct: float
    rolling_accuracy_pct: float
    """Mean of `accuracy_mean_pct` over the last ten rounds."""
    committed_accuracy_pct: float | None
    return_mean: float
    return_std: float
    """Of the raw rewards, over envs."""
    params_ratio_mean: float
    """All parameters over the host's own."""
    num_germinated: int
    num_fossilized: int
    num_pruned: int
    """These three count ops carried out; a new seed that fails its probe leaves without an op."""
    num_rollbacks: int
    num_episodes_total: int
    num_env_steps_total: int
    update_performed: bool
    duration_s: float


@record
class TrendDetected:
    """The rolling accuracy moved, or did not, over a window of rounds."""

    kind: Literal["plateau", "improvement", "degradation"]
    delta_pp: float
    rolling_pct: float
    previous_pct: float
    window_rounds: int


@record
class PhaseTime:
    """What one phase of a round cost. CPU time is that of the parent process."""

    wall_ms: float
    cpu_ms: float | None


@record
class CudaMemory:
    """What one device holds."""

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    num_retries: int


PHASES: tuple[str, ...] = ("other", "act", "execute", "reward", "update")
"""Where the time of a round goes: telling and saving the round before, choosing, training and validating hosts,
pricing and noting steps, learning."""


@record
class ProfileMeasured:
    """Where time and memory went in a round. The phases sum to its wall time, from the end of the round before."""

    env_steps_per_s: float
    host_samples_per_s: float | None
    phases: Mapping[str, PhaseTime]
    controller_ms_per_env_step: float | None
    telemetry_cpu_ms: float | None
    wait_share: float | None
    """Share of the wall time the parent waited for workers; None where there are none."""
    rss_bytes: int | None
    cuda: Mapping[str, CudaMemory] | None
    disk_free_bytes: int | None
    queue_high_water: int
    """Most events that were waiting for the log's writer at once."""


@record
class ChoiceCount:
    """How often one choice was legal, taken and carried out."""

    num_legal: int
    num_chosen: int
    num_ok: int


@record
class ChoiceStats:
    """What one head of the controller did in a round."""

    head: str
    choices: Mapping[str, ChoiceCount]
    num_decisions: int
    """Steps on which the head mattered."""
    num_forced: int
    """Of these, the ones with a single legal choice."""


@record
class CheckpointRecorded:
    """What can be resumed, and when saving began to fail."""

    action: Literal["saved", "save_failed", "loaded", "rejected"]
    path: str
    """Relative to the run directory."""
    round: int | None
    """Rounds completed in it; None where that could not be read."""
    next_seq: int | None
    size_bytes: int | None
    save_ms: float | None
    manifest_sha256: str | None
    error: str | None


@record
class WorkerStateChanged:
    """A worker was lost, came back by replay, or was given up for the round."""

    worker_id: int
    kind: str
    state: str
    """"lost", "recovered" or "abandoned"."""
    env_ids: tuple[int, ...]
    exit_code: int | None
    error: str
    num_epochs_replayed: int
    downtime_ms: float


@record
class EventsDropped:
    """Explains a gap: the sequence numbers missing in first..last are exactly as many as were counted."""

    counts: Mapping[str, int]
    """Lost events by type."""
    first_seq: int
    last_seq: int
    reason: Literal["queue_full", "invalid", "write_failed"]
