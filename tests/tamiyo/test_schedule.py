"""Schedules: played as written, refused where hopeless, retried where late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from esper.leyline import LifecycleOp
from esper.tamiyo import Setting
from esper.tamiyo.schedule import ScheduleController, ScheduleEntry
from tests.fakes import Step, run_policy, seeds, world

ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


def plant(epoch: int, slot: str = "r0c0", blueprint: str = "good", blend: str = "linear_fast") -> ScheduleEntry:
    return ScheduleEntry(epoch=epoch, op=LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, blend=blend)


def op(epoch: int, what: LifecycleOp, slot: str = "r0c0") -> ScheduleEntry:
    return ScheduleEntry(epoch=epoch, op=what, slot=slot)


def play(entries: list[ScheduleEntry], **changes: object) -> tuple[list[Step], ScheduleController]:
    spec = world(**{"horizon": 20, **changes})  # type: ignore[arg-type]
    setting = Setting(layout=spec.layout, lifecycle=spec.lifecycle, run_seed=0)
    controller = ScheduleController(setting, entries)
    return run_policy(spec, controller, seeds(2))[1], controller


def taken(steps: list[Step]) -> list[tuple[int, LifecycleOp, str | None]]:
    return [(t, s.outcome.op, s.outcome.slot) for t, s in enumerate(steps) if s.outcome.op is not LifecycleOp.WAIT]


def test_a_schedule_is_played_as_written() -> None:
    entries = [plant(2, "r0c1"), op(4, ADVANCE, "r0c1"), plant(5, "r0c2"), op(9, FOSSILIZE, "r0c1")]
    steps, controller = play(entries)
    assert taken(steps) == [(e.epoch, e.op, e.slot) for e in entries]
    for progress in controller.memory.values():
        assert progress.pending == []
        assert progress.delays == {0: 0, 1: 0, 2: 0, 3: 0}


def test_a_closed_gate_is_retried_and_the_delay_noted() -> None:
    steps, controller = play([plant(0), op(1, ADVANCE), op(2, FOSSILIZE)])
    assert taken(steps) == [(0, LifecycleOp.GERMINATE, "r0c0"), (1, ADVANCE, "r0c0"), (4, FOSSILIZE, "r0c0")]
    assert controller.memory[1].delays == {0: 0, 1: 0, 2: 2}


def test_an_embargo_delays_the_next_seed_but_not_another_slot() -> None:
    steps, _ = play([plant(0), op(1, PRUNE), plant(2), plant(3, "r0c1")])
    germinations = [(t, slot) for t, what, slot in taken(steps) if what is LifecycleOp.GERMINATE]
    assert germinations == [(0, "r0c0"), (3, "r0c1"), (5, "r0c0")]


def test_late_entries_keep_their_order_within_a_slot() -> None:
    """PRUNE is legal while ADVANCE still waits for its gate; the written order holds all the same."""
    spec = world()
    patient = replace(spec.lifecycle, min_training=4)
    steps, _ = play([plant(0), op(1, ADVANCE), op(2, PRUNE)], lifecycle=patient)
    assert taken(steps) == [(0, LifecycleOp.GERMINATE, "r0c0"), (4, ADVANCE, "r0c0"), (5, PRUNE, "r0c0")]


def test_what_never_became_legal_is_left_over() -> None:
    spec = world()
    picky = replace(spec.lifecycle, min_contribution=50.0)
    steps, controller = play([plant(0), op(1, ADVANCE), op(4, FOSSILIZE)], lifecycle=picky)
    assert len(taken(steps)) == 2
    assert controller.memory[1].pending == [2]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([plant(-1)], "epochs start at 0"),
        ([plant(3), op(3, ADVANCE)], "each epoch takes one op"),
        ([plant(0, slot="r9c9")], "unknown slot 'r9c9'"),
        ([plant(0, blueprint="ghost")], "unknown blueprint 'ghost'"),
        ([plant(0, blend="ghost")], "unknown blend 'ghost'"),
        ([op(0, ADVANCE)], "only have reached DORMANT"),
        ([plant(0), plant(1)], "only have reached TRAINING"),
        ([plant(0), op(5, FOSSILIZE)], "only have reached TRAINING"),
        ([plant(0), op(1, ADVANCE), op(5, FOSSILIZE), op(6, PRUNE)], "only have reached FOSSILIZED"),
    ],
)
def test_what_can_never_be_legal_is_refused_before_the_start(entries: list[ScheduleEntry], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        play(entries)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"op": LifecycleOp.WAIT}, "WAIT takes no slot, got 'r0c0'"),
        ({"op": LifecycleOp.GERMINATE}, "GERMINATE needs blueprint, got None"),
        ({"op": ADVANCE, "blend": "linear"}, "ADVANCE takes no blend, got 'linear'"),
    ],
)
def test_an_entry_has_the_heads_of_its_op(what: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleEntry(epoch=0, slot="r0c0", **what)


def test_a_blueprint_that_does_not_fit_its_slot_is_refused() -> None:
    spec = world()
    blueprints = tuple(replace(blueprint, fits=blueprint.name != "bad") for blueprint in spec.blueprints)
    layout = replace(spec, blueprints=blueprints).layout
    layout = replace(layout, cards=(spec.layout.cards[0], *layout.cards[1:]))
    setting = Setting(layout=layout, lifecycle=spec.lifecycle, run_seed=0)
    ScheduleController(setting, [plant(0, "r0c0", "bad")])
    with pytest.raises(ValueError, match="does not fit this slot"):
        ScheduleController(setting, [plant(0, "r0c1", "bad")])


def test_an_entry_beyond_the_horizon_is_refused_at_the_start_of_an_episode() -> None:
    with pytest.raises(ValueError, match="beyond the horizon of 20"):
        play([plant(20)])
