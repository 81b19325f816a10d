"""The scale of scores: what a host of a task reaches when it is left alone, and when it grows wherever it can.

Measured once per task, host, optimizer, horizon, budget and split, on controller-validation, with run seeds that no
policy trains on; kept in a file under the hash of all that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from esper import __version__
from esper.leyline import ActionExecutionResult, ActionSpec, EpisodeSeed, EpochReport, PolicyProtocol
from esper.leyline.files import loads_json, read_regular, write_atomic
from esper.leyline.rng import TUNING_RUN_SEEDS
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.rewards import Calibration, RewardConfig, RewardWeights, calibrate, uncalibrated
from esper.simic.rewards.types import committed_points
from esper.simic.training.action_execution import EnvPool
from esper.simic.training.rollout import StepObserver, run_episodes
from esper.tamiyo.controller import Setting
from esper.tamiyo.controllers import make_controller
from esper.tolaria.executor.available import backend_version

MAX_BYTES = 10_000_000
"""A larger file is none of ours."""


def reward_config(task: TaskSpec, gamma: float, weights: RewardWeights, scale: Calibration | None) -> RewardConfig:
    """What the reward terms know about a task. Without a scale: from chance level to perfection."""
    family = "loss" if task.metric == "loss" else "contribution"
    return RewardConfig(
        horizon=task.horizon,
        gamma=gamma,
        calibration=uncalibrated(family, task.num_classes) if scale is None else scale,
        lifecycle=task.lifecycle,
        loss_ref=task.chance_loss,
        weights=weights,
    )


def load_or_calibrate(
    pool: EnvPool, task: TaskSpec, data: Dataset, runs: int, folder: Path | None, backend: str = "torch"
) -> Calibration:
    """The scale from its file, or measured now on `runs` hosts of each kind and filed; without a folder, measured.

    Raises:
        ValueError: The file is damaged.
    """
    if folder is None:
        return measure_scale(pool, task, runs)
    key = json.dumps(
        [asdict(task), data.sha256, runs, __version__, backend_version(backend)], sort_keys=True, default=str
    )
    path = folder / f"{task.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    try:
        return msgspec.convert(loads_json(read_regular(path, MAX_BYTES)), Calibration)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a calibration ({error}); delete it and it is measured again") from error
    scale = measure_scale(pool, task, runs)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(asdict(scale), indent=2) + "\n").encode())
    return scale


def measure_scale(pool: EnvPool, task: TaskSpec, runs: int) -> Calibration:
    """Plays hosts left alone and hosts that grow whenever they can, and takes their points."""
    config = reward_config(task, 1.0, RewardWeights(), None)
    setting = Setting(layout=pool.context.layout, lifecycle=pool.context.lifecycle, run_seed=TUNING_RUN_SEEDS.start)
    seeds = [EpisodeSeed(env_id=n, episode=0, run_seed=TUNING_RUN_SEEDS[n]) for n in range(runs)]
    waiting = _play(pool, make_controller("wait_only", setting), seeds, task.horizon)
    curves = [[_points(report, config) for report in reports] for reports in waiting]
    eager = make_controller("periodic", setting, every_epochs=1, blend="linear_fast")
    finals = [_points(reports[-1], config) for reports in _play(pool, eager, seeds, task.horizon)]
    return calibrate(config.calibration.family, curves, finals)


def _points(report: EpochReport, config: RewardConfig) -> float:
    points = committed_points(report, config)
    assert points is not None, "a host without fossils is its own committed network"
    return points


def _play(pool: EnvPool, policy: PolicyProtocol, seeds: Sequence[EpisodeSeed], horizon: int) -> list[list[EpochReport]]:
    history = _ReportHistory()
    run_episodes(pool, policy, seeds, horizon, [history])
    return history.reports


class _ReportHistory(StepObserver):
    """Every report of every env, the one at reset included."""

    def __init__(self) -> None:
        self.reports: list[list[EpochReport]] = []

    def reset(self, state: ActionExecutionResult) -> None:
        self.reports = [[report] for report in state.reports]

    def executed(self, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        for kept, report in zip(self.reports, after.reports, strict=True):
            kept.append(report)
