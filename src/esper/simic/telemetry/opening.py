"""Opens the hub that a telemetry configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.leyline.rundir import DEFAULT_GROUP, METRICS_DIR
from esper.nissa import Backend, Hub, NullHub, TelemetryHub, begin_attempt
from esper.nissa.segments import withdraw_attempt
from esper.simic.telemetry.telemetry_config import Exporter, TelemetryConfig, TelemetryLevel


def open_hub(
    config: TelemetryConfig,
    run_dir: Path,
    *,
    run_id: str | None = None,
    first_seq: int = 0,
    group: str = DEFAULT_GROUP,
    run_config: Mapping[str, Any] | None = None,
    env_steps: int | None = None,
    listeners: Sequence[Backend] = (),
) -> Hub:
    """Begins a new attempt in a run directory and opens its log; at level OFF nothing is touched.

    Args:
        config: What to tell and how.
        run_dir: Created if missing.
        run_id: Name of the run; None for the one the directory holds, or a new one.
        first_seq: The checkpoint's `next_seq` on resume.
        group: Cohort of the run.
        run_config: What exporters show as the configuration of the run.
        env_steps: The checkpoint's total on resume: exported points beyond it are hidden.
        listeners: Told beside the exporters of the configuration, and at level OFF too.
    """
    if config.level is TelemetryLevel.OFF:
        return NullHub(next_seq=first_seq, backends=listeners)
    manifest = begin_attempt(run_dir, run_id=run_id, first_seq=first_seq, group=group)
    exporters = [_exporter(name, run_dir, manifest.run, run_config or {}, env_steps) for name in config.exporters]
    try:
        return TelemetryHub(
            run_dir,
            run_id=manifest.run,
            attempt=manifest.attempts[-1].attempt,
            first_seq=first_seq,
            group=group,
            queue_capacity=config.queue_capacity,
            flush_interval_s=config.flush_interval_s,
            rotate_bytes=config.rotate_bytes,
            heartbeat_s=config.heartbeat_s,
            backends=[*exporters, *listeners],
            strict=config.strict,
            require_complete=config.require_complete,
        )
    except BaseException:  # a listener that does not start; the run itself is as it was
        withdraw_attempt(run_dir, manifest)
        raise


def _exporter(
    name: Exporter, run_dir: Path, run_id: str, run_config: Mapping[str, Any], env_steps: int | None
) -> Backend:
    if name == "tensorboard":
        from esper.nissa.tensorboard import TensorBoardBackend

        return TensorBoardBackend(run_dir / METRICS_DIR, purge_step=env_steps)
    from esper.nissa.wandb import WandbBackend

    return WandbBackend(name, project="esper", run_id=run_id, config=run_config, folder=run_dir)
