"""Events made from reports: complete, measured values only, and told once."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from esper.leyline import (
    BLENDS,
    CoalitionTable,
    EpochReport,
    LifecycleOp,
    SeedStage,
    Severity,
    gate_blend,
    shapley,
)
from esper.simic.rewards.suspicion import HackingSuspicion
from esper.simic.telemetry.choices import ChoiceCounter
from esper.simic.telemetry.records import EnvContext
from esper.simic.telemetry.report_events import (
    GateWatch,
    describe_coalitions,
    emit_coalitions_measured,
    emit_epoch_completed,
    emit_suspicions,
    emit_trend,
    find_trend,
)
from tests.fakes import Step, germinate, play, random_chooser, script_chooser, world
from tests.simic.telemetry.updates import ListSink


def ctx(report: EpochReport) -> EnvContext:
    assert report.epoch is not None
    return EnvContext(round=report.episode, episode=report.episode, env=report.env_id, epoch=report.epoch)


def busy_episode(seed: int = 5) -> list[Step]:
    return play(world(3), random_chooser(random.Random(seed)))


def test_an_epoch_with_all_its_slots() -> None:
    for step in busy_episode():
        sink = ListSink()
        emit_epoch_completed(sink, ctx(step.after), step.after, lr=0.1)
        (data,) = sink.of("EPOCH_COMPLETED")
        assert (data.val_loss, data.train_loss, data.lr) == (step.after.val_loss, step.after.train_loss, 0.1)
        assert tuple(data.slots) == tuple(slot.slot_id for slot in step.after.slots)
        fossils = [slot for slot in step.after.slots if slot.stage is SeedStage.FOSSILIZED]
        assert data.params_fossil == sum(slot.params for slot in fossils)
        for slot in step.after.slots:
            assert data.slots[slot.slot_id].stage == slot.stage.name
            assert data.slots[slot.slot_id].contribution_pp == slot.contribution_pp


def test_coalitions_agree_with_the_slot_reports() -> None:
    told = 0
    for seed in range(6):
        for step in busy_episode(seed):
            sink = ListSink()
            emit_coalitions_measured(sink, ctx(step.after), step.after)
            assert len(sink.events) == bool(step.after.coalitions.slot_ids)
            for data in sink.of("COALITION_MEASURED"):
                told += 1
                worth = {s.slot_id: s.contribution_pp for s in step.after.slots if s.contribution_pp is not None}
                assert {slot: data.contribution_pp[slot] for slot in worth} == pytest.approx(worth)
                full = next(row for row in data.rows if "0" not in row.mask)
                assert full.accuracy_pct == step.after.val_accuracy_pct
                kept = next(row for row in data.rows if row.mask == data.committed_mask)
                assert kept.accuracy_pct == step.after.committed_accuracy_pct
    assert told > 20


def table_of(num_slots: int, masks: range | list[int]) -> CoalitionTable:
    rng = random.Random(1)
    values = {mask: rng.uniform(0, 100) for mask in masks}
    slot_ids = tuple(f"r0c{i}" for i in range(num_slots))
    return CoalitionTable(slot_ids=slot_ids, accuracy_pct=values, loss=dict.fromkeys(masks, 1.0))


def test_only_what_was_measured_is_told() -> None:
    full = describe_coalitions(table_of(3, range(8)), ["r0c1"])
    assert (full.strategy, full.committed_mask, len(full.rows)) == ("full", "010", 8)
    assert set(full.interaction_pp) == {"r0c0+r0c1", "r0c0+r0c2", "r0c1+r0c2"}
    fair = shapley(table_of(3, range(8)).accuracy_pct, 3)
    assert full.shapley_pp is not None
    assert tuple(full.shapley_pp.values()) == fair
    sparse = describe_coalitions(table_of(4, [0, 0b0111, 0b1011, 0b1101, 0b1110, 0b1111]), [])
    assert (sparse.strategy, sparse.shapley_pp, sparse.interaction_pp) == ("leave_one_out", None, {})
    assert set(sparse.contribution_pp) == {"r0c0", "r0c1", "r0c2", "r0c3"}
    assert [row.mask for row in sparse.rows] == ["0000", "1110", "1101", "1011", "0111", "1111"]


def test_a_table_without_rows_says_why() -> None:
    report = busy_episode()[-1].after
    empty = CoalitionTable(slot_ids=("r0c0",), accuracy_pct={}, loss={})
    sink = ListSink()
    emit_coalitions_measured(sink, ctx(report), replace(report, coalitions=empty))
    (data,) = sink.of("COALITION_MEASURED")
    assert data.unavailable == "no coalition was measured"


def test_gates_are_told_when_their_answer_changes() -> None:
    spec = world(2)
    steps = play(spec, script_chooser([(0, germinate("r0c0", "good"))]))
    watch, sink = GateWatch(), ListSink()
    for step in steps:
        watch.emit(sink, ctx(step.after), step.after, spec.lifecycle)
    told = sink.of("GATE_EVALUATED")
    assert 0 < len(told) < len(steps)
    answers = [(data.passed, tuple((check.name, check.passed) for check in data.checks)) for data in told]
    assert all(first != second for first, second in pairwise(answers))
    assert {(data.gate.value, data.target_stage, data.slot_id) for data in told} == {("G2", "BLENDING", "r0c0")}
    last = next(slot for slot in steps[-1].after.slots if slot.slot_id == "r0c0")
    assert told[-1].passed == gate_blend(last, spec.lifecycle).passed
    always = ListSink()
    for step in steps:
        GateWatch().emit(always, ctx(step.after), step.after, spec.lifecycle, always=True)
    assert len(always.events) == sum(step.after.slots[0].stage is SeedStage.TRAINING for step in steps)


def test_a_new_host_is_told_about_anew() -> None:
    spec = world(2)
    step = play(spec, script_chooser([(0, germinate("r0c0", "good"))]))[3]
    watch, sink = GateWatch(), ListSink()
    watch.emit(sink, ctx(step.after), step.after, spec.lifecycle)
    watch.emit(sink, ctx(step.after), step.after, spec.lifecycle)
    assert len(sink.events) == 1
    watch.emit(sink, replace(ctx(step.after), epoch=0), step.after, spec.lifecycle)
    assert len(sink.events) == 2
    watch.emit(sink, replace(ctx(step.after), env=1), step.after, spec.lifecycle)
    assert len(sink.events) == 3


def test_suspicions() -> None:
    sink = ListSink()
    signs = [
        HackingSuspicion(pattern=p, slot_id="r0c0", contribution_pp=2.0, improvement_pp=-1.0, ratio=r)
        for p, r in (("ransomware", None), ("attribution_ratio", 6.0))
    ]
    emit_suspicions(sink, EnvContext(round=0, episode=0, env=0, epoch=2), signs)
    assert [event.severity for event in sink.events] == [Severity.CRITICAL, Severity.WARNING]
    assert [data.ratio for data in sink.of("REWARD_HACKING_SUSPECTED")] == [None, 6.0]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (0.0, "plateau"),
        (0.49, "plateau"),
        (-0.49, "plateau"),
        (0.51, None),
        (1.99, None),
        (-1.99, None),
        (2.0, "improvement"),
        (-2.0, "degradation"),
        (50.0, "improvement"),
    ],
)
def test_trends_have_bands(change: float, kind: str | None) -> None:
    trend = find_trend([90.0] * 10 + [90.0 + change], num_rounds=20)
    assert (trend and trend.kind) == kind


def test_a_small_score_degrades_by_its_own_measure() -> None:
    trend = find_trend([10.0] * 10 + [9.4], num_rounds=20)
    assert trend is not None
    assert (trend.kind, trend.previous_pct, trend.rolling_pct) == ("degradation", 10.0, 9.4)


def test_trends_need_a_window_and_a_tenth_of_the_run() -> None:
    assert find_trend([50.0] * 10, num_rounds=20) is None
    assert find_trend([50.0] * 11, num_rounds=20) is not None
    assert find_trend([50.0] * 20, num_rounds=200) is None
    assert find_trend([50.0] * 21, num_rounds=200) is not None
    sink = ListSink()
    emit_trend(sink, 3, None)
    emit_trend(sink, 3, find_trend([50.0] * 11, 20))
    emit_trend(sink, 4, find_trend([50.0] * 10 + [40.0], 20))
    assert [(event.round, event.severity) for event in sink.events] == [(3, Severity.INFO), (4, Severity.WARNING)]


def test_choices_are_counted_under_the_masks_they_were_made_with() -> None:
    spec = world(3)
    counter = ChoiceCounter(spec.layout)
    specs, steps = [], []
    for seed in range(5):
        choose = random_chooser(random.Random(seed))
        made = []

        def note(state, layout, choose=choose, made=made):  # type: ignore[no-untyped-def]
            made.append(choose(state, layout))
            return made[-1]

        steps += play(spec, note)
        specs += made
    for made_spec, step in zip(specs, steps, strict=True):
        counter.add(step.masks, made_spec, step.outcome)
    ops = counter.stats("op")
    assert ops.num_decisions == len(steps)
    assert sum(count.num_chosen for count in ops.choices.values()) == len(steps)
    assert ops.num_forced == sum(sum(step.masks.op) == 1 for step in steps)
    germinations = sum(made.op is LifecycleOp.GERMINATE for made in specs)
    by_head = {stats.head: stats for stats in counter.others()}
    assert list(by_head) == ["slot", "blueprint", "blend"]
    assert by_head["blend"].num_decisions == by_head["blueprint"].num_decisions == germinations > 0
    assert by_head["slot"].num_decisions == sum(made.op is not LifecycleOp.WAIT for made in specs)
    for stats in (ops, *by_head.values()):
        for count in stats.choices.values():
            assert count.num_ok <= count.num_chosen <= count.num_legal <= stats.num_decisions
    assert set(by_head["blend"].choices) == set(BLENDS)
    counter.begin()
    assert counter.stats("op").num_decisions == 0
