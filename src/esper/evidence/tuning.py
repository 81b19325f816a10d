"""Tuning parity: every fixed arm with parameters gets the same number of episodes to choose them.

Settings are judged by the committed network on controller-validation, on run seeds of their own. Knows no test split.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from esper.evidence.arms import TUNABLE, line_up
from esper.evidence.host_runs import DEFAULT_BLUEPRINT, HostRunner, SideBySide
from esper.leyline import EpisodeSeed, HostLayout, derive_seed
from esper.leyline.files import loads_json, write_atomic
from esper.leyline.rng import TUNING_RUN_SEEDS
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec

SEEDS_PER_SETTING = 4
TUNED_FORMAT = 1
OnSetting = Callable[[str, int], None]
BLENDS_TRIED = ("linear_fast", "linear", "sigmoid")


def grids(layout: HostLayout, horizon: int) -> dict[str, dict[str, list[Any]]]:
    """Values to try, by arm and parameter. The first of each is the default."""
    fitting = [name for name in layout.blueprints if any(layout.card(slot, name).fits for slot in layout.slot_ids)]
    usual = DEFAULT_BLUEPRINT[layout.topology]
    first = [usual] if usual in fitting else []
    planted: dict[str, list[Any]] = {"blueprint": [None, *fitting]}
    blends: dict[str, list[Any]] = {"blend": ["linear", *(b for b in BLENDS_TRIED if b != "linear")]}
    intervals: list[Any] = list(dict.fromkeys([6, 2, max(1, horizon // 10), max(1, horizon // 4)]))
    return {
        "schedule": {
            "blueprint": [*first, *(name for name in fitting if name not in first)],
            "blend": list(BLENDS_TRIED),
            "gap": [1, 3],
        },
        "periodic": {"every_epochs": intervals, **planted, **blends},
        "plateau": {"min_gain": [0.01, 0.001, 0.05], "patience": [4, 2, 8], **planted, **blends},
        "fragrow": {"max_interval": [20.0, 5.0, 10.0, 40.0], **planted, **blends},
        "heuristic": {"plateau_epochs": [3, 1, 2, 5], "audition_epochs": [3, 1, 5, 8], **blends},
    }


def tunable_arms(asked: Sequence[str]) -> list[str]:
    """Those among the arms asked for that have parameters to choose; all such arms if none was named.

    Raises:
        ValueError: None of them has.
    """
    lineup = line_up(asked or TUNABLE, has_policy=False, subject=None, can_widen=False)
    names = [name for name in lineup.names if name in TUNABLE]
    if not names:
        raise ValueError(f"nothing to tune among {', '.join(asked)}; these can be: {', '.join(TUNABLE)}")
    return names


def candidates(arm: str, grid: Mapping[str, Sequence[Any]], episodes: int) -> list[dict[str, Any]]:
    """Settings of a grid to share the episodes among: the default, then others drawn at random, none twice.

    Random search beats a regular grid of the same size where only some parameters matter. Each setting gets at least
    SEEDS_PER_SETTING run seeds, more where the grid is small, and all episodes are used.
    """
    every = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    most = min(len(every), episodes // SEEDS_PER_SETTING)
    count = max(number for number in range(1, most + 1) if episodes % number == 0)
    rng = random.Random(derive_seed(0, None, None, None, f"tune:{arm}"))
    return [every[0], *rng.sample(every[1:], count - 1)]


def tune(
    task: TaskSpec,
    data: Dataset,
    arms: Sequence[str],
    *,
    episodes: int,
    workers: int,
    on_setting: OnSetting = lambda line, num_done: None,
) -> dict[str, Any]:
    """Chooses the parameters of every arm with the same number of episodes, and returns the content of tuned.json.

    `on_setting` is called after every setting with a line about it, and how many episodes it took.

    Raises:
        ValueError: The episodes are too few, or cannot be shared out evenly.
    """
    if episodes < SEEDS_PER_SETTING or episodes % SEEDS_PER_SETTING:
        raise ValueError(
            f"--tune-episodes must be a multiple of {SEEDS_PER_SETTING}, the run seeds per setting, got {episodes}"
        )
    found = {}
    with HostRunner(task, data, workers=workers) as runner:
        for arm in arms:
            grid = grids(runner.layout, task.horizon)[arm]
            settings = candidates(arm, grid, episodes)
            share, scores = episodes // len(settings), []
            for params in settings:
                scores.append(statistics.fmean(_scores(runner, task, arm, params, share)))
                on_setting(f"{arm} {_words(params)}: {scores[-1]:.4g}", share)
            # The first of equals: the default, if it is among them.
            best = max(range(len(settings)), key=scores.__getitem__)
            found[arm] = {
                "chosen": settings[best],
                "score": scores[best],
                "default_score": scores[0],
                "seeds_per_setting": share,
                "tried": [{"params": params, "score": score} for params, score in zip(settings, scores, strict=True)],
            }
    return {
        "format": TUNED_FORMAT,
        "task": task.name,
        "data_sha256": data.sha256,
        "horizon": task.horizon,
        "budget": task.lifecycle.param_budget,
        "episodes_per_arm": episodes,
        "first_seed": TUNING_RUN_SEEDS.start,
        "metric": f"committed controller-validation {task.metric}",
        "arms": found,
    }


def _scores(runner: HostRunner, task: TaskSpec, arm: str, params: Mapping[str, Any], count: int) -> list[float]:
    """Committed validation score of one setting on each tuning run seed, side by side; higher is better."""
    seeds = [EpisodeSeed(env_id=n, episode=0, run_seed=TUNING_RUN_SEEDS[n]) for n in range(count)]
    controllers = {seed.env_id: runner.controller(arm, seed.run_seed, **params) for seed in seeds}
    scores = [run.committed_scores for run in runner.run(SideBySide(controllers), seeds)]
    return [accuracy if task.metric == "accuracy" else -loss for loss, accuracy in scores]


def write_tuned(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a tuned.json by what `tune` returned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def read_tuned(path: Path, task: TaskSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that a tuned.json has chosen, by arm, and how they were chosen.

    Raises:
        ValueError: There is none, it is damaged, or it was made for another topology.
    """
    try:
        content = loads_json(path.read_bytes())
        if content["format"] != TUNED_FORMAT:
            raise ValueError(f"format {content['format']}, this version of Esper reads {TUNED_FORMAT}")
        settings = {arm: found["chosen"] for arm, found in content["arms"].items()}
    except OSError as error:
        raise ValueError(f"--tuned {path}: {error.strerror}; make it with --tune") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--tuned {path} is not a tuned.json of this version: {error}") from error
    same = content["task"] == task.name and content["horizon"] == task.horizon
    same = same and content["budget"] == task.lifecycle.param_budget
    facts = {
        "episodes per arm": content["episodes_per_arm"],
        "on task": content["task"],
        "conditions": "the same" if same else "other than here",
        "by": content["metric"],
    }
    return settings, facts


def tuned_table(content: Mapping[str, Any]) -> Table:
    """What was chosen, and what it brought over the defaults."""
    title = f"{content['task']}: {content['episodes_per_arm']} episodes per arm, {content['metric']}"
    table = Table(title=title, title_justify="left")
    for name in ("arm", "chosen", "score", "default"):
        table.add_column(name, justify="left" if name in ("arm", "chosen") else "right")
    for arm, found in content["arms"].items():
        table.add_row(arm, _words(found["chosen"]), f"{found['score']:.3f}", f"{found['default_score']:.3f}")
    return table


def _words(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'largest' if value is None else value}" for name, value in params.items())
