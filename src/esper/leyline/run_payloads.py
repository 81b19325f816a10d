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
    cuda_version: str | None = None
    """That torch was built for; None for a build without CUDA."""
    git_commit: str | None = None
    """Of the source this runs from; None if that is not known."""
    git_dirty: bool | None = None
    """True if tracked files differ from that commit."""
    config_hash: str
    """sha256 of the canonical JSON of the configuration."""
    argv: tuple[str, ...]
    """The command as it was given."""
    run_seed: int
    """Everything random in the run follows from it."""
    task: str
    data_sha256: str | None = None
    """Of the data set; None if it has none."""
    split_sizes: Mapping[str, int]
    """Rows by split: train, val, test."""
    num_rounds: int
    num_envs: int
    epochs_per_episode: int
    slot_ids: tuple[str, ...]
    host_params: int
    """Parameters of the host alone."""
    param_budget: int | None = None
    """Most parameters a host and its seeds may have together; None for no limit."""
    controller: str
    """ppo, or the name of a fixed one."""
    reward_mode: str | None = None
    """None where nothing is priced."""
    worker_kind: str
    """inline: hosts run in this process; process: in workers."""
    num_workers: int
    backend: str | None = None
    """What trains hosts, with its version: torch, native 1, ...; None in logs from before there was a choice."""
    devices: tuple[str, ...]
    amp_dtype: str | None = None
    """Mixed precision of the hosts; None for none."""
    level: str
    """The telemetry level, by its lower-case name."""
    resumed_from: str | None = None
    """The checkpoint this attempt continues, by its name; None for a fresh start."""
    resume_differences: tuple[str, ...]
    """What differs from the build that wrote the checkpoint; bitwise equality is not promised across these."""


@record
class RunEnded:
    """The end marker. A log without one whose process is gone is that of a run that died."""

    status: Literal["completed", "failed", "interrupted"]
    """interrupted: stopped in good order before the last round; it can be resumed."""
    error_type: str | None = None
    """Name of the exception; None if there was none."""
    error_message: str | None = None
    traceback_tail: str | None = None
    """Its last 2000 characters."""
    num_rounds_total: int
    """Rounds completed, those of earlier attempts included."""
    num_env_steps_total: int
    """Host epochs trained over all envs, those of earlier attempts included."""
    best_accuracy_pct: float | None = None
    """The best final accuracy of a single host in any round."""
    final_accuracy_pct: float | None = None
    """`accuracy_mean_pct` of the last round."""
    wall_s: float
    """Of this attempt, what comes before its first round included: data, calibration, workers."""
    num_dropped_total: int
    """Events lost in this attempt."""


@record
class BatchSummary:
    """One round: an episode in every env, then one policy update."""

    accuracy_mean_pct: float
    """Validation accuracy at the end of the episodes, all blended seeds included: mean over envs."""
    accuracy_best_pct: float
    """The best env."""
    accuracy_worst_pct: float
    """The worst env."""
    rolling_accuracy_pct: float
    """Mean of `accuracy_mean_pct` over the last ten rounds."""
    committed_accuracy_pct: float | None = None
    """The same of the networks that would be delivered, hosts with their fossils only; None if none was measured."""
    return_mean: float
    """Mean over envs of the raw rewards summed over an episode."""
    return_std: float
    """Deviation of these sums over envs."""
    params_ratio_mean: float
    """All parameters over the host's own, mean over envs."""
    num_ops: Mapping[str, int]
    """How often each op was carried out, by its name; a new seed that fails its probe leaves without an op."""
    num_rollbacks: int
    """Episodes that ended in a rollback."""
    num_episodes_total: int
    num_env_steps_total: int
    """Host epochs trained over all envs since the run began."""
    update_performed: bool
    """False where the policy did not learn: a fixed controller, or a skipped update."""
    duration_s: float
    """Wall time since the end of the round before."""


@record
class TrendDetected:
    """The rolling accuracy moved, or did not, over a window of rounds."""

    kind: Literal["plateau", "improvement", "degradation"]
    delta_pp: float
    """`rolling_pct` minus `previous_pct`."""
    rolling_pct: float
    """The rolling accuracy now."""
    previous_pct: float
    """The rolling accuracy `window_rounds` ago."""
    window_rounds: int


@record
class PhaseTime:
    """What one phase of a round cost. CPU time is that of the parent process."""

    wall_ms: float
    cpu_ms: float | None = None
    """None where it was not measured."""


@record
class CudaMemory:
    """What one device holds."""

    allocated_bytes: int
    """In use by tensors of this process."""
    reserved_bytes: int
    """Held by torch's allocator, that in use included."""
    total_bytes: int
    """Of the device."""
    num_retries: int
    """How often the allocator had to free its cache and try again."""


PHASES: tuple[str, ...] = ("other", "act", "execute", "reward", "update")
"""Where the time of a round goes: logging and saving the round before, choosing, training and validating hosts,
pricing and noting steps, learning."""


@record
class ProfileMeasured:
    """Where time and memory went in a round. The phases sum to its wall time, from the end of the round before."""

    env_steps_per_s: float
    """Host epochs of all envs over the wall time of the round."""
    host_samples_per_s: float | None = None
    """Training rows that hosts learned from, over the same time."""
    phases: Mapping[str, PhaseTime]
    """By name: other (logging and saving the round before), act, execute (hosts train and are validated), reward,
    update."""
    controller_ms_per_env_step: float | None = None
    """Phase act over env steps: what choosing costs."""
    telemetry_cpu_ms: float | None = None
    """CPU time of logging, in the training thread and in the log's own."""
    wait_share: float | None = None
    """Share of the wall time the parent waited for workers; None where there are none. The alarm `wait_share` is
    another thing: how often the policy chose WAIT although it could act."""
    rss_bytes: int | None = None
    """Largest resident memory of the parent process so far."""
    cuda: Mapping[str, CudaMemory] | None = None
    """By device, of the parent process; None without CUDA."""
    disk_free_bytes: int | None = None
    """Where the run directory lies."""
    queue_high_water: int
    """Most events that were waiting for the log's writer at once, so far."""


@record
class ChoiceCount:
    """How often one choice was legal, taken and carried out."""

    num_legal: int
    """Decisions in which it could have been chosen."""
    num_chosen: int
    """Of these, the ones in which it was."""
    num_ok: int
    """Of these, the ones that were carried out."""


@record
class ChoiceStats:
    """What one head of the controller did in a round."""

    head: str
    """op, slot, blueprint or blend."""
    choices: Mapping[str, ChoiceCount]
    """By name; what was never legal is absent."""
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
    round: int | None = None
    """Rounds completed in it; None where that could not be read."""
    next_seq: int | None = None
    """Events from this number on are written again when the run is resumed from it."""
    size_bytes: int | None = None
    save_ms: float | None = None
    manifest_sha256: str | None = None
    """Of the checkpoint's own manifest, which lists its files and their hashes."""
    error: str | None = None
    """Why it could not be saved or used; None if nothing was wrong."""


@record
class WorkerStateChanged:
    """A worker was lost, came back by replay, or was given up for the round."""

    worker_id: int
    kind: str
    state: str
    """"lost", "recovered" or "abandoned"."""
    env_ids: tuple[int, ...]
    """Envs that lived there."""
    exit_code: int | None = None
    """Negative for a signal; None if the process did not end."""
    error: str
    num_epochs_replayed: int
    """Epochs trained again to bring its envs back to where they were; 0 unless it came back."""
    downtime_ms: float
    """How long it was away; 0 unless it came back."""


@record
class EventsDropped:
    """Explains a gap: the sequence numbers missing in first..last are exactly as many as were counted."""

    counts: Mapping[str, int]
    """Lost events by type."""
    first_seq: int
    """The first number that is missing."""
    last_seq: int
    """The last number that is missing."""
    reason: Literal["queue_full", "invalid", "write_failed"]
    """queue_full: too many waited; invalid: not as the catalogue wants it; write_failed: the log could not be
    written."""
