"""Tuning is fair, stays away from evaluation run seeds and from the test split, and can be used."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from esper.evidence.arms import TUNABLE, Arm, get_arm
from esper.evidence.host_runs import HostRun, HostRunner
from esper.evidence.static_networks import read_host, static_family
from esper.evidence.tuning import SEEDS_PER_SETTING, Tuner, candidates, every_setting, grids, read_tuned, tune
from esper.leyline import EpisodeSeed
from esper.leyline.rng import FIRST_EVALUATION_SEED, TUNING_RUN_SEEDS
from esper.runtime.data.splits import Dataset
from esper.runtime.tasks import TASKS, count_host_params, get_task_spec, load_task_data, override
from esper.simic.training.env_factory import task_layout
from esper.tamiyo.schedule import read_schedule

TASK = override(get_task_spec("digits_limited"), horizon=10)


def closed(data: Dataset) -> Dataset:
    """The same data with a test split that cannot be opened."""

    def refuse() -> None:
        raise AssertionError("the test split was opened")

    return replace(data, reread=refuse)


@pytest.fixture(scope="module")
def data() -> Dataset:
    return closed(load_task_data(TASK))


def tune_arms(data: Dataset, *names: str, episodes: int, **options: Any) -> dict[str, Any]:
    return tune(TASK, data, [get_arm(n) for n in names], episodes=episodes, search_episodes=6, workers=1, **options)


@pytest.mark.parametrize("arm", TUNABLE)
@pytest.mark.parametrize("name", ["digits_blind", "digits_limited", "pydoc_lm"])
def test_every_candidate_is_a_controller_and_the_first_is_the_default(arm: str, name: str) -> None:
    task = TASKS[name]
    with HostRunner(task, load_task_data(task)) as runner:
        tried = candidates(arm, every_setting(get_arm(arm), runner.layout, task), 16)
        controllers = [runner.controller(arm, **params) for params in tried]
        default, first = runner.controller(arm), controllers[0]
    assert 8 <= len(tried) <= 16
    assert len({json.dumps(params, sort_keys=True) for params in tried}) == len(tried)
    same = {key: value for key, value in vars(first).items() if not key.startswith("_")}
    assert same == {key: value for key, value in vars(default).items() if not key.startswith("_")}


def test_every_arm_gets_the_same_episodes_on_seeds_of_its_own(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[EpisodeSeed] = []
    run = HostRunner.run

    def watched(self: HostRunner, controller: object, seeds: list[EpisodeSeed]) -> tuple[HostRun, ...]:
        used.extend(seeds)
        return run(self, controller, seeds)  # type: ignore[arg-type]

    monkeypatch.setattr(HostRunner, "run", watched)
    done: list[int] = []
    found = tune_arms(data, "schedule", "heuristic", episodes=8, on_setting=lambda line, n: done.append(n))
    assert len(used) == 16 == sum(done)
    assert [found["arms"][arm]["episodes"] for arm in ("schedule", "heuristic")] == [8, 8]
    assert all(found["arms"][arm]["training_macs"] > 0 for arm in ("schedule", "heuristic"))
    assert all(seed.run_seed in TUNING_RUN_SEEDS for seed in used)
    assert TUNING_RUN_SEEDS.stop <= FIRST_EVALUATION_SEED
    for arm in ("schedule", "heuristic"):
        tried = found["arms"][arm]["tried"]
        best = max(entry["score"] for entry in tried)
        assert found["arms"][arm]["score"] == best
        assert found["arms"][arm]["chosen"] in [entry["params"] for entry in tried if entry["score"] == best]


def test_the_winner_is_the_best_on_validation(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    worth = {1: 50.0, 2: 90.0, 3: 70.0}
    monkeypatch.setattr(
        "esper.evidence.tuning.grids", lambda layout, horizon: {"periodic": {"every_epochs": [1, 2, 3]}}
    )
    monkeypatch.setattr(
        Tuner, "scores", lambda self, arm, params, numbers: [worth[params["every_epochs"]]] * len(numbers)
    )
    found = tune_arms(data, "periodic", episodes=12)["arms"]["periodic"]
    assert found["chosen"] == {"every_epochs": 2}
    assert (found["score"], found["default_score"], found["run_seeds"]) == (90.0, 50.0, 4)


def test_luck_on_the_first_run_seeds_does_not_choose(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lucky setting is best on the four run seeds that all settings are judged on, and on no other."""

    def scores(self: Tuner, arm: Arm, params: dict[str, Any], numbers: Sequence[int]) -> list[float]:
        every = params["every_epochs"]
        lucky = [95.0 if number < SEEDS_PER_SETTING else 60.0 for number in numbers]
        return {6: lucky, 7: [90.0] * len(numbers)}.get(every, [50.0 + every] * len(numbers))

    monkeypatch.setattr(
        "esper.evidence.tuning.grids", lambda layout, horizon: {"periodic": {"every_epochs": list(range(1, 13))}}
    )
    monkeypatch.setattr(Tuner, "scores", scores)
    found = tune_arms(data, "periodic", episodes=64)["arms"]["periodic"]
    assert found["chosen"] == {"every_epochs": 7}
    seeds = {entry["params"]["every_epochs"]: entry["run_seeds"] for entry in found["tried"]}
    assert seeds[7] == found["run_seeds"] > SEEDS_PER_SETTING == seeds[1]
    assert 48 < sum(seeds.values()) <= 64


@pytest.mark.parametrize("episodes", [0, 3, 10])
def test_episodes_that_cannot_be_shared_out_are_refused(episodes: int, data: Dataset) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        tune_arms(data, "periodic", episodes=episodes)


def test_what_was_chosen_can_be_read_back(tmp_path: Path, data: Dataset) -> None:
    path = tmp_path / "tuned.json"
    found = tune_arms(data, "fragrow", episodes=4)
    path.write_text(json.dumps(found))
    settings, facts = read_tuned(path, TASK)
    assert settings == {"fragrow": found["arms"]["fragrow"]["chosen"]}
    assert facts["conditions"] == "the same"
    assert read_tuned(path, override(TASK, horizon=11))[1]["conditions"] == "other than here"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"not a tuned\.json"):
        read_tuned(path, TASK)
    with pytest.raises(ValueError, match="make it with --tune"):
        read_tuned(tmp_path / "none.json", TASK)


def test_a_plain_network_is_chosen_within_its_size(data: Dataset) -> None:
    found = tune_arms(data, "static_800", episodes=8)["arms"]["static_800"]
    host = read_host(found["chosen"]["host"])
    assert 0 < count_host_params(replace(TASK, host=host)) <= 800
    assert found["chosen"] in [entry["params"] for entry in found["tried"]]


def test_every_plain_network_of_a_size_is_tried(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "scores", lambda self, arm, params, numbers: [0.0] * len(numbers))
    family = [{"host": asdict(host)} for host in static_family(TASK, 800)]
    episodes = SEEDS_PER_SETTING * (len(family) // 2)
    found = tune_arms(data, "static_800", episodes=episodes)["arms"]["static_800"]
    assert [entry["params"] for entry in found["tried"]][:1] == family[:1]
    assert sorted(map(str, family)) == sorted(str(entry["params"]) for entry in found["tried"])


@pytest.mark.parametrize("name", ["search_random", "search_tpe"])
def test_a_search_finds_a_schedule_with_episodes_of_its_own(data: Dataset, name: str) -> None:
    content = tune_arms(data, name, episodes=4)
    found = content["arms"][name]
    assert 0 < found["episodes"] <= 6
    with HostRunner(TASK, data) as runner:
        runner.controller("schedule", entries=read_schedule(found["chosen"]["entries"]))


def test_arms_that_are_tuned_already_are_not_tuned_again(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[str]] = []
    first = tune_arms(data, "periodic", episodes=4)
    monkeypatch.setattr(Tuner, "scores", lambda self, arm, params, numbers: [0.0] * len(numbers))
    again = tune_arms(data, "periodic", "fragrow", episodes=4, before=first, on_arm=lambda c: kept.append([*c["arms"]]))
    assert again["arms"]["periodic"] == first["arms"]["periodic"]
    assert kept == [["periodic", "fragrow"]]
    assert "periodic" in tune_arms(data, "fragrow", episodes=4, before=first)["arms"], "what was chosen stays chosen"
    assert tune_arms(data, "periodic", episodes=8, before=first) != first, "with other episodes it is"


def test_grids_hold_only_seeds_that_fit(data: Dataset) -> None:
    layout = task_layout(TASK, data)
    for grid in grids(layout, TASK.horizon).values():
        for name in grid.get("blueprint", []):
            assert name is None or any(layout.card(slot, name).fits for slot in layout.slot_ids)
