"""The scale of scores: what a host of a task reaches when it is left alone, and when it grows wherever it can.

Measured once per task, host, optimizer, horizon, budget and split, on controller-validation, with run seeds that no
policy trains on; kept in a file under the hash of all that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from esper import __version__
from esper.leyline import ActionExecutionResult, ActionSpec, EpisodeSeed, EpochReport, PolicyProtocol
from esper.leyline.files import write_atomic
from esper.runtime.datasets import Dataset
from esper.runtime.tasks import TaskSpec
from esper.simic.rewards import Calibration, RewardConfig, RewardWeights, calibrate, uncalibrated
from esper.simic.rewards.families import committed_points
from esper.simic.training.action_execution import EnvPool
from esper.simic.training.rollout import StepObserver, run_episodes
from esper.tamiyo.controller import Setting
from esper.tamiyo.controllers import make_controller

FIRST_RUN_SEED = 10_000
"""Run seeds from here on tune and calibrate; policies train below."""


def reward_config(task: TaskSpec, gamma: float, weights: RewardWeights, scale: Calibration | None) -> RewardConfig:
    """What the reward terms are told about a task. Without a scale: from chance level to perfection."""
    family = "loss" if task.metric == "loss" else "contribution"
    return RewardConfig(
        horizon=task.horizon,
        gamma=gamma,
        calibration=uncalibrated(family, task.num_classes) if scale is None else scale,
        lifecycle=task.lifecycle,
        loss_ref=task.chance_loss,
        weights=weights,
    )


def calibration_key(task: TaskSpec, data: Dataset, runs: int) -> str:
    """Under which name a scale is kept: it holds for exactly this task, data, number of runs and release."""
    facts = json.dumps([asdict(task), data.sha256, runs, __version__], sort_keys=True, default=str)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def load_or_calibrate(pool: EnvPool, task: TaskSpec, data: Dataset, runs: int, folder: Path | None) -> Calibration:
    """The scale from its file, or measured now and filed.

    Args:
        pool: Workers of the task; they play `runs` hosts left alone, then as many that grow.
        task: What is calibrated.
        data: Its data.
        runs: Hosts of each kind.
        folder: Where scales are kept; None measures every time.
    """
    path = None if folder is None else folder / f"{task.name}-{calibration_key(task, data, runs)}.json"
    if path is not None and path.is_file():
        return read_calibration(path)
    scale = measure(pool, task, runs)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(asdict(scale), indent=2) + "\n").encode())
    return scale


def read_calibration(path: Path) -> Calibration:
    """Reads a filed scale.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return calibration_from(facts)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a calibration ({error}); delete it and it is measured again") from error


def calibration_from(facts: dict[str, object]) -> Calibration:
    """Builds a scale from its JSON form."""
    scale = Calibration(**facts)  # type: ignore[arg-type]
    return replace(scale, reference=None if scale.reference is None else tuple(scale.reference))


def measure(pool: EnvPool, task: TaskSpec, runs: int) -> Calibration:
    """Plays hosts left alone and hosts that grow at every chance, and takes their points."""
    config = reward_config(task, 1.0, RewardWeights(), None)
    setting = Setting(layout=pool.layout, lifecycle=pool.lifecycle, run_seed=FIRST_RUN_SEED)
    seeds = [EpisodeSeed(env_id=n, episode=0, run_seed=FIRST_RUN_SEED + n) for n in range(runs)]
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
