"""Studies: what is claimed about, and on how much, fixed before any result exists; and the policies they judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline.files import TEMP_PREFIX
from esper.tolaria.kinds import Workers

if TYPE_CHECKING:
    from esper.simic.run.session import RunStart
    from esper.simic.training.config import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is claimed about, and on how much."""

    description: str
    preset: str | None = None
    """Recipe of the policies; it names the task. None: nothing is learned."""
    task: str | None = None
    """Where there is no recipe."""
    epochs: int | None = None
    """Of every run where there is no recipe; None: the task's own."""
    rows: int | None = None
    """Training rows per epoch, likewise."""
    budgets: tuple[int, ...] = ()
    """Where there is no recipe, one evaluation for each: the study is about size."""
    arms: tuple[str, ...] = ("all",)
    subject: str | None = None
    policies: int = 5
    """Policies that are trained independently, with run seeds 0, 1, ..."""
    seeds: int = 20
    """Paired run seeds of the evaluation."""
    tune_episodes: int = 64
    """Episodes that each tunable arm gets; 0: nothing is tuned."""
    search_episodes: int = 960
    """Episodes that each search for a schedule gets."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe that differ."""


RIVALS = ("schedule", "largest", "periodic", "plateau", "fragrow", "heuristic", "search_random", "search_tpe")
_FRONTIER = Study(
    description="digits: the best plain network of each size against rules and a search that grow a small sighted one",
    task="digits_conv",
    epochs=20,
    budgets=(600, 1_000, 1_300, 2_500),
    arms=("schedule", "largest", "search_tpe", "static_final", "static_frontier"),
    subject="search_tpe",
    policies=0,
    tune_episodes=256,  # 12 run seeds for each plain network, more for the best: with 4 a weak one can be chosen
)

UNIVERSAL = "universal"
STUDIES: dict[str, Study] = {
    "demo": Study(
        description="one short training and five pairs: shows the way, proves nothing",
        preset="demo",
        policies=1,
        seeds=5,
        tune_episodes=0,
    ),
    "digits_blind": Study(description="growth is needed: where and what both matter", preset="digits_blind"),
    "digits_saturated": Study(
        description="growth is not needed: the right answer is to wait", preset="digits_saturated"
    ),
    "frontier-digits": _FRONTIER,
    "rivals-digits": replace(
        _FRONTIER,
        description="digits, 1,300 parameters: every rule, both searches and an outside library",
        budgets=(1_300,),
        arms=(*RIVALS, "gromo", "static_final", "static_frontier"),
    ),
    "frontier-fashion": replace(
        _FRONTIER,
        description="the same on Fashion-MNIST, with few rows per epoch: 12 epochs of 2,000",
        task="fashion_tiny",
        budgets=(8_000, 12_000, 20_000),
        arms=("largest", "search_tpe", "static_final", "static_frontier"),
        epochs=12,
        rows=2_000,
        seeds=10,
        tune_episodes=64,
        search_episodes=128,
    ),
    "frontier-pydoc": replace(
        _FRONTIER,
        description="the same for a small language model, measured by its loss",
        task="pydoc_lm",
        budgets=(32_000, 48_000),
        arms=("largest", "static_final", "static_frontier"),
        subject="largest",
        epochs=None,
        seeds=5,
        tune_episodes=16,
    ),
    "digits_conv": Study(description="a small sighted host with some room to grow", preset="digits_conv"),
    UNIVERSAL: Study(
        description="one controller for many hosts, judged on tasks that training never saw", preset="nursery"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutOptions:
    """How much of the held-out list the study `universal` plays; other studies have one task and ignore these."""

    tasks: int = 52
    """Held-out tasks, spread over the list."""
    task_seeds: int = 5
    """Paired run seeds on each of them."""
    clock_only: int = 1
    """Policies trained beside the others that see time and budget only: what is the rest of the observation worth?"""
    search: tuple[int, ...] = (4, 16, 64, 256)
    """Episodes that searches get on each task; each number is one point of the break-even curve."""
    tuning_tasks: int = 200
    """Draws of the training families on which the rules are tuned; 200 cost them together as many episodes as the
    training of one policy. 0: they keep their defaults."""
    data_dir: Path | None = None
    """Where Fashion-MNIST and CIFAR-10 lie, if not in a usual place."""


QUICK_LIST = HeldOutOptions(tasks=6, task_seeds=2, search=(4,), tuning_tasks=2)


def policy_config(study: Study, workers: Workers) -> TrainingConfig:
    """The recipe of a study's policies, but for their run seeds."""
    from esper.simic.training.config import preset, with_overrides

    assert study.preset is not None, "nothing is learned in this study"
    recipe = preset(study.preset)
    place = {
        "workers": min(workers.count, recipe.envs),
        "worker_kind": workers.kind,
        "ray_address": workers.ray_address,
    }
    return with_overrides(recipe, {**study.changes, **place})


def start_policy(config: TrainingConfig, path: Path) -> RunStart | None:
    """The training of one policy: from its newest checkpoint, or from the beginning; None if it is complete.

    Raises:
        RunBusy: Another process has begun it and saved nothing yet.
    """
    from esper.simic.run.run_dir import open_run, remove
    from esper.simic.run.session import start_again, start_new

    if path.is_dir():
        run = open_run(path)
        if any(not place.name.startswith(TEMP_PREFIX) for place in run.checkpoints.iterdir()):
            place = {name: getattr(config, name) for name in ("workers", "worker_kind", "ray_address")}
            start = start_again(path, place)
            return None if start.rounds_done >= start.config.rounds and log_problem(path) is None else start
        with run.lock():  # unless another process trains it: it was stopped before its first checkpoint
            remove(path)
    return start_new(replace(config, require_complete=True), path.parent, path.name)


def log_problem(path: Path) -> str | None:
    """What the event log of a training lacks; None if it is whole. One that lacks its end gets it from a resume."""
    from esper.karn.integrity import check_run

    found = check_run(path)
    lost = (f"{found.num_missing_seq} events are lost",) if found.num_missing_seq else ()
    return next(iter((*found.problems, *lost)), None)
