"""Where a run happens: what its bits depend on besides the config, and what it takes to repeat it."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import esper
from esper.leyline import HostLayout, RunStarted
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.training.config import TrainingConfig
from esper.tolaria.executor.available import VERSION as NATIVE_VERSION
from esper.tolaria.executor.available import backend_version
from esper.tolaria.runtime import machine_facts

Identity = Mapping[str, str | int | bool]
NOT_PROMISED = "bitwise equality not promised"
"""The words for a resume whose identity differs."""
GIT_TIMEOUT_S = 5.0


def identity() -> dict[str, str | int | bool]:
    """What the bits of this process depend on: versions, processor, threads."""
    machine = machine_facts()
    return {
        "esper": machine["esper"],
        "torch": machine["torch"],
        "python": platform.python_version(),
        "platform": machine["platform"],
        "cpu_capability": machine["cpu_capability"],
        "threads": torch.get_num_threads(),
        "native": NATIVE_VERSION,
    }


def identity_differences(stored: Identity, present: Identity) -> tuple[str, ...]:
    """What has changed, one line each, such as "torch 2.12.0 -> 2.13.0"; empty: the bits can be the same."""
    pairs = {key: (stored.get(key, "unknown"), present.get(key, "unknown")) for key in sorted({**stored, **present})}
    return tuple(f"{key} {old} -> {new}" for key, (old, new) in pairs.items() if old != new)


def config_hash(config: TrainingConfig) -> str:
    """sha256 of the configuration in canonical form."""
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def run_started(
    config: TrainingConfig,
    task: TaskSpec,
    data: Dataset,
    layout: HostLayout,
    *,
    workers: tuple[str, int],
    resumed_from: str | None,
    differences: tuple[str, ...],
) -> RunStarted:
    """The first event of a session."""
    commit, dirty = _git()
    return RunStarted(
        esper_version=esper.__version__,
        python_version=platform.python_version(),
        torch_version=str(torch.__version__),
        numpy_version=np.__version__,
        cuda_version=torch.version.cuda,
        git_commit=commit,
        git_dirty=dirty,
        config_hash=config_hash(config),
        argv=tuple(sys.argv),
        run_seed=config.seed,
        task=task.name,
        data_sha256=data.sha256,
        split_sizes=data.split_sizes,
        num_rounds=config.rounds,
        num_envs=config.envs,
        epochs_per_episode=task.horizon,
        slot_ids=layout.slot_ids,
        host_params=layout.host_params,
        param_budget=task.lifecycle.param_budget,
        controller=config.controller,
        reward_mode=config.reward_mode,
        worker_kind=workers[0],
        num_workers=workers[1],
        backend=backend_version(config.backend),
        devices=tuple(config.device.split(",")),
        amp_dtype=None if config.amp == "off" else config.amp,
        level=config.level,
        resumed_from=resumed_from,
        resume_differences=differences,
    )


def _git() -> tuple[str | None, bool | None]:
    """Commit of the source this runs from, and whether it was changed; None where that is not known."""
    try:
        return _ask_git("rev-parse", "HEAD"), bool(_ask_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _ask_git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()
