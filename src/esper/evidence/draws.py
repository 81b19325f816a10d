"""Controllers on many draws of the nursery at once: rules are tuned here, recipes and checkpoints chosen.

All draws share one pool, and every controller sees the same hosts. Scores are those of the committed network on
controller-validation; the test split takes no part.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from esper.evidence.arms import BASELINE
from esper.evidence.host_runs import default_schedule
from esper.leyline import ActionExecutionResult, EpisodeSeed, FeatureContext, PolicyProtocol, record
from esper.leyline.files import loads_json, write_atomic
from esper.leyline.rng import TUNING_RUN_SEEDS
from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.runtime.nursery import NURSERY, VALIDATION
from esper.runtime.tasks import get_task_spec, load_task_data
from esper.simic.client import FrozenPolicy
from esper.simic.rewards.types import loss_points
from esper.simic.run.run_state import load_policy
from esper.simic.training.backend import choose_backend
from esper.simic.training.env_factory import build_worker, make_worker_spec
from esper.simic.training.rollout import run_episodes
from esper.tamiyo.controller import Setting
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.side_by_side import OnePerHost
from esper.tolaria.kinds import Workers
from esper.tolaria.pool import EnginePool

VALIDATION_DRAWS = 96
"""On so many draws checkpoints are judged. Gains differ widely between them: with 24 the order was luck."""
CHOSEN = "chosen.json"


@record
class DrawnRun:
    """One host of one draw after its last epoch."""

    task: str
    run_seed: int
    points: float
    """Accuracy in percent, or how far the loss has fallen from that of a guess."""
    params_ratio: float
    num_kept: int


class DrawnHosts(ExitStack):
    """Workers for draws of the nursery, used in a `with` block.

    Args:
        numbers: Which draws.
        seeds: Run seeds on each of them, from those that tune.
        workers: A number of processes, 1 runs everything in this one; or workers of a kind.
        backend: What trains the hosts; the draws that compiled code cannot train are left to torch.
    """

    def __init__(self, numbers: Sequence[int], *, seeds: int, workers: Workers | int, backend: str = "auto") -> None:
        super().__init__()
        self.names = [f"{NURSERY}:{number}" for number in numbers]
        self._horizon = max(get_task_spec(name).horizon for name in self.names)
        first = get_task_spec(self.names[0])
        data = load_task_data(first)
        chosen = choose_backend(backend, first, data).name
        spec = make_worker_spec(first, data, backend=chosen)
        place = Workers.of(workers)
        self._pool = self.enter_context(
            EnginePool(build_worker, spec, kind=place.row.name, workers=place.count, options=place.options)
        )
        pairs = [(name, TUNING_RUN_SEEDS[seed]) for name in self.names for seed in range(seeds)]
        self.seeds = [
            EpisodeSeed(env_id=env_id, episode=0, run_seed=run_seed, task=name)
            for env_id, (name, run_seed) in enumerate(pairs)
        ]

    def run(self, policy: PolicyProtocol) -> list[DrawnRun]:
        """One episode of every draw and run seed under a controller."""
        final = run_episodes(self._pool, policy, self.seeds, self._horizon)
        return [_result(seed, final, position) for position, seed in enumerate(self.seeds)]


def _result(seed: EpisodeSeed, final: ActionExecutionResult, position: int) -> DrawnRun:
    assert seed.task is not None
    task, report = get_task_spec(seed.task), final.reports[position]
    accuracy, loss = report.committed_accuracy_pct, report.committed_loss
    assert accuracy is not None
    assert loss is not None
    return DrawnRun(
        task=seed.task,
        run_seed=seed.run_seed,
        points=accuracy if task.metric == "accuracy" else loss_points(loss, task.chance_loss),
        params_ratio=report.committed_params / report.host_params,
        num_kept=sum(slot.stage.name == "FOSSILIZED" for slot in report.slots),
    )


def rule_on_all(name: str, params: Mapping[str, Any]) -> OnePerHost:
    """A rule on hosts that differ."""

    def make(context: FeatureContext, horizon: int) -> PolicyProtocol:
        setting = Setting(layout=context.layout, lifecycle=context.lifecycle, run_seed=0)
        if name == "schedule":
            return make_controller(name, setting, entries=default_schedule(setting, horizon, **params))
        return make_controller(name, setting, **params)

    return OnePerHost(make)


def mean_gain(runs: Sequence[DrawnRun], waiting: Sequence[DrawnRun]) -> float:
    """Points over waiting on the same hosts, mean over all."""
    return statistics.fmean(run.points - alone.points for run, alone in zip(runs, waiting, strict=True))


def waiting_runs(hosts: DrawnHosts) -> list[DrawnRun]:
    """What the hosts reach when they are left alone."""
    return hosts.run(rule_on_all(BASELINE, {}))


def validation_hosts(workers: Workers | int) -> DrawnHosts:
    """The draws on which checkpoints are judged: of the training families, and seen by no training."""
    return DrawnHosts(range(VALIDATION, VALIDATION + VALIDATION_DRAWS), seeds=1, workers=workers)


def judge(hosts: DrawnHosts, arms: Mapping[str, PolicyProtocol], log: Callable[[str], None]) -> dict[str, float]:
    """Mean points over waiting of some controllers, by name."""
    waiting, found = waiting_runs(hosts), {}
    for name, arm in arms.items():
        runs = hosts.run(arm)
        found[name] = mean_gain(runs, waiting)
        size = statistics.fmean(run.params_ratio for run in runs)
        log(f"{name}: {found[name]:+.2f} points over waiting, {size:.2f}x parameters")
    return found


def choose_checkpoint(run: Path, workers: Workers | int, log: Callable[[str], None]) -> Path:
    """The late checkpoint of a run over the nursery that, played greedily, gains most over waiting on validation draws.

    The choice is written down in the run's folder with its figures and is not made twice.
    """
    place = run / CHOSEN
    if not place.is_file():
        agents = {path.name: load_policy(path).agent for path in late_checkpoints(run)}
        arms = {name: FrozenPolicy(agent, run_seed=0, greedy=True) for name, agent in agents.items()}
        with validation_hosts(workers) as hosts:
            found = judge(hosts, arms, lambda line: log(f"{run.name}, {line}"))
        write_atomic(place, (json.dumps(found, indent=1) + "\n").encode())
    gains: dict[str, float] = loads_json(place.read_bytes())
    return run / CHECKPOINTS_DIR / max(gains, key=gains.__getitem__)


def late_checkpoints(run: Path) -> list[Path]:
    """Those that may be chosen: after five, six, seven and eight eighths of what was saved."""
    saved = sorted(path for path in (run / CHECKPOINTS_DIR).iterdir() if path.is_dir())
    return sorted({saved[max(len(saved) * eighths // 8, 1) - 1] for eighths in range(5, 9)})
