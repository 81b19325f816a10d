"""Searches stay within their episodes, propose only what can be played, and find what is there."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.evidence.host_runs import HostRunner
from esper.evidence.runs import ops_of
from esper.evidence.search import SEARCH, all_choices, draw_schedule, halving_rungs, neighbour, warm_starts
from esper.leyline import EpisodeSeed, LifecycleOp
from esper.runtime.tasks import get_task_spec, load_task_data, override
from esper.simic.training.env_factory import task_layout
from esper.tamiyo import Setting
from esper.tamiyo.schedule import ScheduleEntry, check_schedule, read_schedule, schedule_json
from esper.tamiyo.side_by_side import SideBySide

TASK = override(get_task_spec("digits_conv"), horizon=20, param_budget=1_300)
SETTING = Setting(layout=task_layout(TASK, load_task_data(TASK)), lifecycle=TASK.lifecycle, run_seed=0)


@given(episodes=st.integers(1, 5_000))
def test_halving_never_plays_more_than_its_episodes(episodes: int) -> None:
    played = before = 0
    for count, num_seeds in halving_rungs(episodes):
        played, before = played + count * (num_seeds - before), num_seeds
    assert 0 < played <= episodes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), horizon=st.integers(1, 40))
def test_what_is_drawn_can_be_played_and_fits_the_budget(seed: int, horizon: int) -> None:
    rng = random.Random(seed)
    entries = draw_schedule(SETTING, horizon, lambda name, options: rng.choice(options))
    check_schedule(entries, SETTING.layout)
    assert all(entry.epoch < horizon for entry in entries)
    assert read_schedule(schedule_json(entries)) == entries
    planted = [entry for entry in entries if entry.op is LifecycleOp.GERMINATE]
    size = sum(SETTING.layout.card(entry.slot, str(entry.blueprint)).params for entry in planted)
    assert SETTING.layout.host_params + size <= 1_300
    kept = {entry.slot for entry in entries if entry.op is LifecycleOp.FOSSILIZE}
    assert kept == {entry.slot for entry in planted}, "every seed may live to its end"


@pytest.mark.parametrize("horizon", [3, 20])
def test_warm_starts_are_schedules_of_the_space_and_the_first_fills_the_budget(horizon: int) -> None:
    found = [all_choices(SETTING, horizon, some) for some in warm_starts(SETTING, horizon)]
    drawn = [draw_schedule(SETTING, horizon, lambda name, options, chosen=one: chosen[name]) for one in found]
    for entries in drawn:
        check_schedule(entries, SETTING.layout)
    if horizon == 20:
        planted = [[entry for entry in entries if entry.op is LifecycleOp.GERMINATE] for entries in drawn]
        sizes = [sum(SETTING.layout.card(entry.slot, str(entry.blueprint)).params for entry in one) for one in planted]
        assert sizes == sorted(sizes, reverse=True)
        assert 0.95 * 1_300 < SETTING.layout.host_params + sizes[0] <= 1_300
        fitting = [card for row in SETTING.layout.cards for card in row if card.fits and card.params <= 1_300 - 438]
        assert len(found) == len(fitting)


def worth(entries: Sequence[ScheduleEntry]) -> float:
    """One blueprint in one slot is what matters, and early is better."""
    return sum(
        10.0 - 0.1 * entry.epoch for entry in entries if (entry.slot, entry.blueprint) == ("r0c1", "cnn.depthwise")
    )


@pytest.mark.parametrize("name", list(SEARCH))
def test_a_search_finds_what_is_planted_within_its_episodes(name: str) -> None:
    if name == "search_tpe":
        pytest.importorskip("optuna", reason="needs the extra `search`")
    played = 0

    def score(entries: tuple[ScheduleEntry, ...], numbers: Sequence[int]) -> list[float]:
        nonlocal played
        played += len(numbers)
        return [worth(entries)] * len(numbers)

    best = SEARCH[name](SETTING, 20, 240, score)
    assert played <= 240
    assert worth(best[0].what) > 9.0
    assert [one.mean for one in best] == sorted((one.mean for one in best), reverse=True)


@given(seed=st.integers(0, 2**32))
def test_a_neighbour_has_another_blueprint_in_one_slot(seed: int) -> None:
    choices = all_choices(SETTING, 20, warm_starts(SETTING, 20)[seed % 7])
    found = neighbour(SETTING, 20, choices, random.Random(seed))
    assert found.keys() == choices.keys()
    (changed,) = [name for name in choices if found[name] != choices[name]]
    slot, _, what = changed.partition(" ")
    assert what == "blueprint"
    assert found[changed] is None or SETTING.layout.card(slot, found[changed]).fits


def test_tpe_tries_neighbours_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="needs the extra `search`")
    parents: list[dict[str, Any]] = []

    def watched(setting: Setting, horizon: int, choices: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        parents.append(choices)
        return neighbour(setting, horizon, choices, rng)

    monkeypatch.setattr("esper.evidence.search.neighbour", watched)
    SEARCH["search_tpe"](SETTING, 20, 240, lambda entries, numbers: [worth(entries)] * len(numbers))
    assert parents
    assert all(choices["r0c1 blueprint"] == "cnn.depthwise" for choices in parents[-3:])


def test_lives_replayed_as_a_schedule_lead_to_the_same_network() -> None:
    task = override(get_task_spec("digits_limited"), horizon=9)
    seeds = [EpisodeSeed(env_id=0, episode=0, run_seed=5)]
    with HostRunner(task, load_task_data(task)) as runner:
        (first,) = runner.run(SideBySide({0: runner.controller("largest", 5)}), seeds)
        entries = ops_of(first.grown_seeds)
        assert [entry.op for entry in entries][:2] == [LifecycleOp.GERMINATE, LifecycleOp.ADVANCE]
        (again,) = runner.run(runner.controller("schedule", 5, entries=entries), seeds)
    assert again.grown_seeds == first.grown_seeds
    assert again.committed_scores == first.committed_scores
