"""What a policy usually does, as a schedule for hosts whose slots and blueprints have other names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.evidence.draws import DrawnHosts, rule_on_all
from esper.evidence.usual import UsualSeed, usual_schedule, usual_seeds
from esper.leyline import BLENDS, LifecycleOp
from esper.runtime.tasks import get_task_spec, load_task_data
from esper.simic.training.env_factory import task_layout
from esper.tamiyo.controller import Setting
from esper.tamiyo.schedule import check_schedule

TASKS = {name: get_task_spec(name) for name in ("nursery:8", "digits_conv")}
SETTINGS = {
    name: Setting(layout=task_layout(task, load_task_data(task)), lifecycle=task.lifecycle, run_seed=0)
    for name, task in TASKS.items()
}

SHARE = st.floats(0.0, 1.0)
SEEDS = st.lists(
    st.builds(
        UsualSeed, planted=SHARE, place=SHARE, size_rank=st.integers(0, 9), blend=st.sampled_from(sorted(BLENDS))
    ),
    max_size=6,
)


@given(seeds=SEEDS, name=st.sampled_from(sorted(TASKS)))
def test_any_habit_is_a_legal_schedule_within_the_budget(seeds: list[UsualSeed], name: str) -> None:
    setting, horizon = SETTINGS[name], TASKS[name].horizon
    entries = usual_schedule(seeds, setting, horizon)
    check_schedule(entries, setting.layout)
    assert all(entry.epoch < horizon for entry in entries)
    planted = [(entry.slot, entry.blueprint) for entry in entries if entry.blueprint is not None]
    assert sum(setting.layout.card(*seed).params for seed in planted) <= setting.room
    assert len(planted) <= len(seeds)


def test_place_and_size_are_kept_where_the_host_allows() -> None:
    setting = SETTINGS["digits_conv"]
    largest = UsualSeed(planted=0.0, place=1.0, size_rank=0, blend="linear")
    (first, *_) = usual_schedule([largest], setting, 20)
    assert (first.op, first.epoch, first.slot) == (LifecycleOp.GERMINATE, 0, setting.layout.slot_ids[-1])
    smaller = usual_schedule([UsualSeed(planted=0.5, place=1.0, size_rank=2, blend="linear")], setting, 20)[0]
    assert smaller.epoch == 10
    assert smaller.slot is not None
    cards = {
        name: setting.layout.card(first.slot, name).params for name in (first.blueprint, smaller.blueprint) if name
    }
    assert list(cards.values()) == sorted(cards.values(), reverse=True)
    assert len(cards) == 2


@pytest.mark.parametrize(("rule", "expected"), [("wait_only", 0), ("largest", 1)])
def test_what_a_controller_usually_does_is_seen_on_drawn_hosts(rule: str, expected: int) -> None:
    with DrawnHosts((1_000_000, 1_000_002), seeds=1, workers=1) as hosts:
        seeds = usual_seeds(rule_on_all(rule, {}), hosts)
    assert len(seeds) >= expected
    assert [(seed.planted, seed.size_rank) for seed in seeds[:1]] == [(0.0, 0)] * expected
