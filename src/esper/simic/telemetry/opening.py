"""Opens the hub that a telemetry configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.leyline.rundir import METRICS_DIR
from esper.nissa import Backend, Hub, TelemetryHub
from esper.nissa.exporters import TensorBoardBackend, WandbBackend
from esper.simic.telemetry.telemetry_config import Exporter, TelemetryConfig, TelemetryLevel


def open_hub(
    config: TelemetryConfig,
    run_dir: Path,
    *,
    run_id: str,
    first_seq: int = 0,
    group: str | None = None,
    run_config: Mapping[str, Any] | None = None,
    env_steps: int | None = None,
    listeners: Sequence[Backend] = (),
) -> Hub:
    """Begins a new attempt in a run directory and opens its log; at level OFF nothing is touched.

    Args:
        config: What to log and where.
        run_dir: Created if missing.
        run_id: Name of the run.
        first_seq: The checkpoint's `next_seq` on resume.
        group: Cohort of the run; None for the one the directory holds, or the default.
        run_config: What exporters show as the configuration of the run.
        env_steps: The checkpoint's total on resume: exported points beyond it are hidden.
        listeners: Receive events beside the exporters of the configuration, and at level OFF too.
    """
    if config.level is TelemetryLevel.OFF:
        return Hub(first_seq=first_seq, backends=listeners)
    exporters = [_exporter(name, run_dir, run_id, run_config or {}, env_steps) for name in config.exporters]
    return TelemetryHub(
        run_dir,
        run_id=run_id,
        group=group,
        first_seq=first_seq,
        backends=[*exporters, *listeners],
        require_complete=config.require_complete,
    )


def _exporter(
    name: Exporter, run_dir: Path, run_id: str, run_config: Mapping[str, Any], env_steps: int | None
) -> Backend:
    if name == "tensorboard":
        return TensorBoardBackend(run_dir / METRICS_DIR, purge_step=env_steps)
    return WandbBackend(name, project="esper", run_id=run_id, config=run_config, folder=run_dir)
