"""Tuning parity: every fixed arm with parameters gets the same number of episodes to choose them.

Points of the static frontier choose their network the same way. Searches for a schedule get a number of their own, so
that it can be that of a policy's training. Settings are judged by the committed network on controller-validation, on
run seeds of their own. Knows no test split.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from esper.evidence.arms import BASELINE, SEARCHES, TUNABLE, Arm, line_up
from esper.evidence.host_runs import DEFAULT_BLUEPRINT, HostRun, HostRunner
from esper.evidence.manifest import code_version
from esper.evidence.search import BLENDS_TRIED, SEARCH, Schedule, Tried, judge_again, require_optuna
from esper.evidence.static_networks import StaticNetwork, describe_host, read_host, static_family
from esper.leyline import EpisodeSeed, HostLayout, derive_seed
from esper.leyline.files import loads_json, read_regular, write_atomic
from esper.leyline.rng import TUNING_RUN_SEEDS
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TaskSpec
from esper.tamiyo.rules import PLACES
from esper.tamiyo.schedule import read_schedule, schedule_json
from esper.tamiyo.side_by_side import SideBySide
from esper.tolaria.executor.available import backend_version
from esper.tolaria.kinds import Workers

SEEDS_PER_SETTING = 4
FINAL_SHARE = 4
"""One in so many episodes goes to the best settings: on four run seeds each, luck would choose among many."""
TUNED_FORMAT = 3
MAX_TUNED_BYTES = 2**24
OnSetting = Callable[[str, int], None]


def grids(layout: HostLayout, horizon: int) -> dict[str, dict[str, list[Any]]]:
    """Values to try, by arm and parameter. The first of each is the default."""
    fitting = [name for name in layout.blueprints if any(layout.card(slot, name).fits for slot in layout.slot_ids)]
    usual = DEFAULT_BLUEPRINT[layout.topology]
    first = [usual] if usual in fitting else []
    planted: dict[str, list[Any]] = {"blueprint": [None, *fitting]}
    blends: dict[str, list[Any]] = {"blend": ["linear", *(b for b in BLENDS_TRIED if b != "linear")]}
    intervals: list[Any] = list(dict.fromkeys([6, 1, 2, max(1, horizon // 10), max(1, horizon // 4)]))
    return {
        "schedule": {
            "blueprint": [*first, *(name for name in fitting if name not in first)],
            "blend": list(BLENDS_TRIED),
            "gap": [1, 3],
            "fill": [False, True],
        },
        "largest": {
            "place": list(PLACES),
            "blueprint": [None, *first, *(name for name in fitting if name not in first)],
            "blend": list(BLENDS_TRIED),
            "max_live": [1, 2, 3],
        },
        "periodic": {"every_epochs": intervals, **planted, **blends},
        "plateau": {"min_gain": [0.01, 0.001, 0.05], "patience": [4, 2, 8], **planted, **blends},
        "fragrow": {"max_interval": [20.0, 5.0, 10.0, 40.0], **planted, **blends},
        "heuristic": {"plateau_epochs": [0, 1, 3], "audition_epochs": [3, 1, 5, 8], "blend": list(BLENDS_TRIED)},
    }


def tunable_arms(asked: Sequence[str], budgets: Sequence[int] = ()) -> list[Arm]:
    """Those among the arms asked for that have something to choose; all fixed rules if none was named.

    Raises:
        ValueError: None of them has, or a library is missing.
    """
    lineup = line_up(asked or TUNABLE, has_policy=False, subject=None, can_widen=False, budgets=budgets)
    arms = [arm for arm in lineup.arms if arm.tunable or arm.searched]
    if not arms:
        names = ", ".join([*TUNABLE, *SEARCHES])
        raise ValueError(f"nothing to tune among {', '.join(asked)}; these can be: {names}, static_frontier")
    if any(arm.name == "search_tpe" for arm in arms):
        require_optuna()
    return arms


def every_setting(arm: Arm, layout: HostLayout, task: TaskSpec) -> list[dict[str, Any]]:
    """All settings of an arm, the default first."""
    if arm.budget is not None:
        return [{"host": asdict(host)} for host in static_family(task, arm.budget)]
    grid = grids(layout, task.horizon)[arm.name]
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def candidates(arm: str, every: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Settings to try: the default, then others drawn at random, none twice.

    Random search beats a regular grid of the same size where only some parameters matter.
    """
    rng = random.Random(derive_seed(0, None, None, None, f"tune:{arm}"))
    return [every[0], *rng.sample(every[1:], min(len(every), most) - 1)]


class Tuner:
    """Plays settings on tuning run seeds, and keeps account of what that cost.

    Args:
        task: Host, epochs, budget.
        data: Train and val are read.
        workers: A number of processes, or workers of a kind.
        backend: What trains the hosts.
    """

    def __init__(self, task: TaskSpec, data: Dataset, *, workers: Workers | int, backend: str = "torch") -> None:
        self._task = task
        self._data = data
        self._workers = workers
        self._backend = backend
        self.num_episodes = 0
        self.training_macs = 0
        self._runner: HostRunner | None = None

    def __enter__(self) -> Tuner:
        self._runner = HostRunner(self._task, self._data, workers=self._workers, backend=self._backend)
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.close()

    @property
    def runner(self) -> HostRunner:
        """Workers with the task's own hosts."""
        assert self._runner is not None, "used in a with block"
        return self._runner

    def scores(self, arm: Arm, params: Mapping[str, Any], numbers: Sequence[int]) -> list[float]:
        """Committed validation score of one setting on these tuning run seeds, side by side; higher is better."""
        if not numbers:
            return []
        # A run seed keeps its env id, so that its host is the same under every setting.
        seeds = [EpisodeSeed(env_id=n, episode=0, run_seed=TUNING_RUN_SEEDS[n]) for n in numbers]
        runs = self._play(arm, params, seeds)
        self.num_episodes += len(runs)
        self.training_macs += sum(run.training_macs for run in runs)
        scores = [run.committed_scores for run in runs]
        return [accuracy if self._task.metric == "accuracy" else -loss for loss, accuracy in scores]

    def _play(self, arm: Arm, params: Mapping[str, Any], seeds: Sequence[EpisodeSeed]) -> Sequence[HostRun]:
        if arm.budget is None:
            return self.runner.run(self._controllers(arm, params, seeds), seeds)
        network = StaticNetwork(host=read_host(params["host"]), kept=())
        networks = {seed.run_seed: network for seed in seeds}
        with HostRunner(
            self._task, self._data, workers=self._workers, networks=networks, backend=self._backend
        ) as runner:
            return runner.run(runner.controller(BASELINE), seeds)

    def _controllers(self, arm: Arm, params: Mapping[str, Any], seeds: Sequence[EpisodeSeed]) -> SideBySide:
        name = "schedule" if arm.searched else arm.name
        return SideBySide({seed.env_id: self.runner.controller(name, seed.run_seed, **params) for seed in seeds})


def tune(
    task: TaskSpec,
    data: Dataset,
    arms: Sequence[Arm],
    *,
    episodes: int,
    search_episodes: int,
    workers: Workers | int,
    before: Mapping[str, Any] | None = None,
    backend: str = "torch",
    on_setting: OnSetting = lambda line, num_done: None,
    on_arm: Callable[[Mapping[str, Any]], None] = lambda content: None,
) -> dict[str, Any]:
    """Chooses the parameters of every arm with the same number of episodes, and returns the content of tuned.json.

    Args:
        task: Host, epochs, budget.
        data: Train and val are read.
        arms: What to tune.
        episodes: Of every arm.
        search_episodes: Of every search for a schedule.
        workers: A number of processes, or workers of a kind.
        backend: What trains the hosts.
        before: The content of an earlier tuned.json; arms that it holds under the same conditions are kept, and not
            tuned again.
        on_setting: Called after every setting with a line about it, and how many episodes it took.
        on_arm: Called with all there is so far whenever an arm is done.

    Raises:
        ValueError: The episodes are too few, or cannot be shared out evenly.
    """
    if episodes < SEEDS_PER_SETTING or episodes % SEEDS_PER_SETTING:
        raise ValueError(
            f"--tune-episodes must be a multiple of {SEEDS_PER_SETTING}, the run seeds per setting, got {episodes}"
        )
    content = _conditions(task, data, backend)
    known = before["arms"] if before is not None and {**before, "arms": {}} == {**content, "arms": {}} else {}
    content["arms"] = dict(known)
    for arm in arms:
        wanted = search_episodes if arm.searched else episodes
        if arm.name in known and known[arm.name]["asked_episodes"] == wanted:
            continue
        with Tuner(task, data, workers=workers, backend=backend) as tuner:
            choose = _search if arm.searched else _choose
            found = choose(arm, task, tuner, wanted, on_setting)
            cost = {"episodes": tuner.num_episodes, "training_macs": tuner.training_macs}
        content["arms"][arm.name] = {**found, "asked_episodes": wanted, **cost}
        on_arm(content)
    return content


def _conditions(task: TaskSpec, data: Dataset, backend: str) -> dict[str, Any]:
    return {
        "format": TUNED_FORMAT,
        "code": code_version(),
        "task": task.name,
        "data_sha256": data.sha256,
        "horizon": task.horizon,
        "rows": task.samples_per_epoch,
        "budget": task.lifecycle.param_budget,
        "backend": backend_version(backend),
        "first_seed": TUNING_RUN_SEEDS.start,
        "metric": f"committed controller-validation {task.metric}",
        "arms": {},
    }


def _choose(arm: Arm, task: TaskSpec, tuner: Tuner, episodes: int, on_setting: OnSetting) -> dict[str, Any]:
    """The best of some settings, all on the same run seeds, then the best of those on more."""

    def score(params: dict[str, Any], numbers: Sequence[int]) -> list[float]:
        return _shown(arm, words_of(params), tuner.scores(arm, params, numbers), on_setting)

    every = every_setting(arm, tuner.runner.layout, task)
    last = episodes // FINAL_SHARE // SEEDS_PER_SETTING * SEEDS_PER_SETTING
    # Plain networks are few and differ by more than run seeds do: each of them is tried, if only once.
    at_least = SEEDS_PER_SETTING if arm.budget is None else 1
    tried = [Tried(params) for params in candidates(arm.name, every, (episodes - last) // at_least)]
    for one in tried:
        one.judge(score, (episodes - last) // len(tried))
    return best_setting(tried, judge_again(tried, last, score)[0])


def best_setting(tried: Sequence[Tried[dict[str, Any]]], best: Tried[dict[str, Any]]) -> dict[str, Any]:
    """What a tuned.json says of an arm, but for what it cost; the first setting is the default."""
    return {
        "chosen": best.what,
        "score": best.mean,
        "default_score": tried[0].mean,
        "run_seeds": len(best.scores),
        "tried": [{"params": one.what, "score": one.mean, "run_seeds": len(one.scores)} for one in tried],
    }


def _search(arm: Arm, task: TaskSpec, tuner: Tuner, episodes: int, on_setting: OnSetting) -> dict[str, Any]:
    """The best schedule that a search finds."""

    def score(entries: Schedule, numbers: Sequence[int]) -> list[float]:
        return _shown(arm, f"{len(entries)} ops", tuner.scores(arm, {"entries": entries}, numbers), on_setting)

    best = SEARCH[arm.name](tuner.runner.setting(0), task.horizon, episodes, score)
    found = [Tried({"entries": schedule_json(one.what)}, one.scores) for one in best]
    return {**best_setting(found, found[0]), "default_score": None}


def _shown(arm: Arm, what: str, scores: list[float], on_setting: OnSetting) -> list[float]:
    if scores:
        on_setting(f"{arm.name} {what}: {statistics.fmean(scores):.4g}", len(scores))
    return scores


def write_tuned(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a tuned.json by what `tune` returned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def load_tuned(path: Path) -> dict[str, Any]:
    """The content of a tuned.json.

    Raises:
        ValueError: There is none, or it is of another version.
    """
    try:
        content = loads_json(read_regular(path, MAX_TUNED_BYTES))
        if content["format"] != TUNED_FORMAT:
            raise ValueError(f"format {content['format']}, this version of Esper reads {TUNED_FORMAT}")
        for arm, found in content["arms"].items():
            if missing := {"chosen", "score", "episodes", "training_macs"} - found.keys():
                raise ValueError(f"arm {arm} lacks {', '.join(sorted(missing))}")
    except OSError as error:
        raise ValueError(f"--tuned {path}: {error.strerror or error}; make it with --tune") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--tuned {path} is not a tuned.json of this version: {error}") from error
    return dict(content)


def read_tuned(path: Path, task: TaskSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that a tuned.json has chosen, by arm, and how they were chosen.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    content = load_tuned(path)
    settings = {arm: found["chosen"] for arm, found in content["arms"].items()}
    same = content["task"] == task.name and content["horizon"] == task.horizon
    same = same and content["budget"] == task.lifecycle.param_budget and content["rows"] == task.samples_per_epoch
    facts = {
        "on task": content["task"],
        "conditions": "the same" if same else "other than here",
        "by": content["metric"],
        "scores": {arm: found["score"] for arm, found in content["arms"].items()},
        "episodes": {arm: found["episodes"] for arm, found in content["arms"].items()},
        "training MACs": {arm: found["training_macs"] for arm, found in content["arms"].items()},
    }
    return settings, facts


def tuned_table(content: Mapping[str, Any]) -> Table:
    """What was chosen, and what it brought over the defaults."""
    title = f"{content['task']}: {content['metric']}"
    table = Table(title=title, title_justify="left")
    for name in ("arm", "chosen", "score", "default", "episodes"):
        table.add_column(name, justify="left" if name in ("arm", "chosen") else "right")
    for arm, found in content["arms"].items():
        default = "" if found["default_score"] is None else f"{found['default_score']:.3f}"
        table.add_row(arm, words_of(found["chosen"]), f"{found['score']:.3f}", default, str(found["episodes"]))
    return table


def words_of(params: Mapping[str, Any]) -> str:
    """A setting of an arm in a few words."""
    if "host" in params:
        return describe_host(read_host(params["host"]))
    if "entries" in params:
        planted = [entry for entry in read_schedule(params["entries"]) if entry.blueprint is not None]
        return ", ".join(f"{entry.blueprint} in {entry.slot} at {entry.epoch}" for entry in planted)
    return ", ".join(f"{name} {'largest' if value is None else value}" for name, value in params.items())
