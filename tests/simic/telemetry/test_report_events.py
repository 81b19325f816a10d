"""Events made from reports: complete, measured values only, and told once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from esper.leyline import (
    BLENDS,
    CoalitionTable,
    EpochReport,
    LifecycleConfig,
    LifecycleOp,
    RewardHackingSuspected,
    RollbackReason,
    SeedStage,
    Severity,
    gate_blend,
    shapley,
)
from esper.leyline.thresholds import DEGRADATION_SHARE
from esper.simic.rewards.suspicion import ROWS
from esper.simic.telemetry.decisions import ChoiceCounter
from esper.simic.telemetry.emitters import brief_or_none
from esper.simic.telemetry.readings import EnvContext
from esper.simic.telemetry.report_events import (
    GateWatch,
    SuspicionWatch,
    describe_coalitions,
    emit_coalitions_measured,
    emit_epoch_completed,
    emit_trend,
    find_trend,
)
from esper.tamiyo.masks import masks
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
        assert data.lr == 0.1
        assert (data.val_loss, data.train_loss) == pytest.approx((step.after.val_loss, step.after.train_loss), rel=1e-6)
        assert tuple(data.slots) == tuple(slot.slot_id for slot in step.after.slots if slot.seed_id is not None)
        fossils = [slot for slot in step.after.slots if slot.stage is SeedStage.FOSSILIZED]
        assert data.params_fossil == sum(slot.params for slot in fossils)
        for slot in step.after.slots:
            if slot.seed_id is not None:
                assert data.slots[slot.slot_id].stage == slot.stage.name
                assert data.slots[slot.slot_id].contribution_pp == brief_or_none(slot.contribution_pp)


def test_coalitions_agree_with_the_slot_reports() -> None:
    reported = fossils_only = 0
    for seed in range(6):
        for step in busy_episode(seed):
            sink = ListSink()
            emit_coalitions_measured(sink, ctx(step.after), step.after, step.after.coalitions.accuracy_pct)
            players = set(step.after.coalitions.slot_ids)
            undecided = players - {s.slot_id for s in step.after.slots if s.stage is SeedStage.FOSSILIZED}
            assert len(sink.events) == (bool(undecided) or (step.after.terminal and bool(players)))
            for data in sink.of("COALITION_MEASURED"):
                reported += 1
                fossils_only += not undecided
                worth = {s.slot_id: s.contribution_pp for s in step.after.slots if s.contribution_pp is not None}
                assert {slot: data.contribution_pp[slot] for slot in worth} == pytest.approx(worth, abs=1e-5)
                full = next(row for row in data.rows if "0" not in row.mask)
                assert full.accuracy_pct == pytest.approx(step.after.val_accuracy_pct)
                kept = next(row for row in data.rows if row.mask == data.committed_mask)
                assert kept.accuracy_pct == pytest.approx(step.after.committed_accuracy_pct)
    assert reported > 20
    assert fossils_only > 0


def table_of(num_slots: int, masks: range | list[int]) -> CoalitionTable:
    rng = random.Random(1)
    values = {mask: rng.uniform(0, 100) for mask in masks}
    slot_ids = tuple(f"r0c{i}" for i in range(num_slots))
    return CoalitionTable(slot_ids=slot_ids, accuracy_pct=values, loss=dict.fromkeys(masks, 1.0))


def test_only_what_was_measured_is_reported() -> None:
    table = table_of(3, range(8))
    full = describe_coalitions(table, ["r0c1"], table.accuracy_pct)
    assert (full.strategy, full.committed_mask, len(full.rows)) == ("full", "010", 8)
    assert set(full.interaction_pp) == {"r0c0+r0c1", "r0c0+r0c2", "r0c1+r0c2"}
    fair = shapley(table_of(3, range(8)).accuracy_pct, 3)
    assert full.shapley_pp is not None
    assert tuple(full.shapley_pp.values()) == pytest.approx(fair)
    table = table_of(4, [0, 0b0111, 0b1011, 0b1101, 0b1110, 0b1111])
    sparse = describe_coalitions(table, [], table.accuracy_pct)
    assert (sparse.strategy, sparse.shapley_pp, sparse.interaction_pp) == ("leave_one_out", None, {})
    assert set(sparse.contribution_pp) == {"r0c0", "r0c1", "r0c2", "r0c3"}
    assert [row.mask for row in sparse.rows] == ["0000", "1110", "1101", "1011", "0111", "1111"]


def test_seeds_are_worth_what_the_given_points_say() -> None:
    table = table_of(2, range(4))
    points = {0: 0.0, 1: 1.0, 2: 10.0, 3: 15.0}
    data = describe_coalitions(table, [], points)
    assert (data.contribution_pp, data.interaction_pp) == ({"r0c0": 5.0, "r0c1": 14.0}, {"r0c0+r0c1": 4.0})
    assert data.shapley_pp == {"r0c0": 3.0, "r0c1": 12.0}
    assert [row.accuracy_pct for row in data.rows] == [brief_or_none(v) for v in table.accuracy_pct.values()]


def test_an_epoch_that_was_rolled_back_has_no_table() -> None:
    report = next(step.after for step in busy_episode() if step.after.coalitions.slot_ids)
    undone = replace(report, terminal=True, rollback_reason=RollbackReason.DIVERGENCE)
    sink = ListSink()
    emit_coalitions_measured(sink, ctx(report), undone, report.coalitions.accuracy_pct)
    (data,) = sink.of("COALITION_MEASURED")
    assert (data.unavailable, data.rows, data.contribution_pp) == ("the epoch was rolled back", (), {})


def training_seed() -> tuple[list[Step], LifecycleConfig]:
    """An episode with one seed that is never blended in, and limits that hold it up for its first epochs."""
    spec = world(2)
    return play(spec, script_chooser([(0, germinate("r0c0", "good"))])), replace(spec.lifecycle, min_training=4)


def look(
    watch: GateWatch,
    sink: ListSink,
    report: EpochReport,
    lifecycle: LifecycleConfig,
    at: EnvContext | None = None,
    always: bool = False,
) -> None:
    legal = masks(report, world(len(report.slots)).layout, lifecycle)
    watch.emit(sink, at or ctx(report), report, legal, lifecycle, always=always)


def test_gates_are_reported_when_they_are_found_closed_and_when_they_open() -> None:
    steps, lifecycle = training_seed()
    watch, sink = GateWatch(), ListSink()
    for step in steps:
        look(watch, sink, step.after, lifecycle)
    closed, opened = sink.of("GATE_EVALUATED")
    assert (closed.passed, opened.passed) == (False, True)
    assert (closed.gate.value, closed.target_stage, closed.slot_id) == ("G2", "BLENDING", "r0c0")
    assert [(check.name, check.passed) for check in closed.checks] == [("epochs_in_stage", False)]
    assert opened.checks == ()


def test_a_gate_that_is_found_open_holds_nobody_up() -> None:
    steps, lifecycle = training_seed()
    watch, sink = GateWatch(), ListSink()
    for step in steps[6:]:
        look(watch, sink, step.after, lifecycle)
    assert not sink.events


def test_at_debug_every_look_at_a_gate_is_reported_with_all_checks() -> None:
    steps, lifecycle = training_seed()
    watch, sink = GateWatch(), ListSink()
    for step in steps:
        look(watch, sink, step.after, lifecycle, always=True)
    reported = sink.of("GATE_EVALUATED")
    seeds = [step.after.slots[0] for step in steps if step.after.slots[0].stage is SeedStage.TRAINING]
    assert len(reported) == len(seeds) > 5
    for data, seed in zip(reported, seeds, strict=True):
        assert (data.passed, data.checks) == (
            gate_blend(seed, lifecycle).passed,
            gate_blend(seed, lifecycle).checks,
        )


def test_a_new_host_is_reported_about_anew() -> None:
    steps, lifecycle = training_seed()
    held = steps[2].after
    watch, sink = GateWatch(), ListSink()
    look(watch, sink, held, lifecycle)
    look(watch, sink, held, lifecycle)
    assert len(sink.events) == 1
    look(watch, sink, held, lifecycle, replace(ctx(held), epoch=0))
    assert len(sink.events) == 2
    look(watch, sink, held, lifecycle, replace(ctx(held), env=1))
    assert len(sink.events) == 3


def test_what_masks_know_already_is_what_the_gates_say() -> None:
    """Masks that forbid everything make the watch ask every gate itself."""
    reported = 0
    for seed in range(6):
        asked, trusted = (GateWatch(), ListSink()), (GateWatch(), ListSink())
        for step in busy_episode(seed):
            report, spec = step.after, world(3)
            over = masks(replace(report, terminal=True), spec.layout, spec.lifecycle)
            asked[0].emit(asked[1], ctx(report), report, over, spec.lifecycle)
            look(*trusted, report, spec.lifecycle)
        assert trusted[1].of("GATE_EVALUATED") == asked[1].of("GATE_EVALUATED")
        reported += len(trusted[1].events)
    assert reported > 10


def hostage(slot_id: str = "r0c0") -> RewardHackingSuspected:
    return RewardHackingSuspected(
        pattern="ransomware",
        slot_id=slot_id,
        contribution_pp=2.0,
        improvement_pp=-2.0,
        ratio=None,
    )


def over_claim(slot_id: str = "r0c0") -> RewardHackingSuspected:
    return replace(hostage(slot_id), pattern="attribution_ratio", ratio=12.0)


LASTING = ROWS["ransomware"].num_consecutive


def reported_of(epochs: list[list[RewardHackingSuspected]]) -> list[tuple[int | None, str, str]]:
    """(epoch, pattern, slot) of everything that is told of an episode with these signs."""
    watch, sink = SuspicionWatch(), ListSink()
    for epoch, found in enumerate(epochs):
        watch.emit(sink, EnvContext(round=0, episode=0, env=0, epoch=epoch), found)
    return [(event.epoch, event.data.pattern, event.data.slot_id) for event in sink.events]  # type: ignore[attr-defined]


def test_a_lasting_suspicion_is_reported_once() -> None:
    assert LASTING > 1
    assert reported_of([[hostage(), over_claim()]] * 50) == [
        (LASTING - 1, "ransomware", "r0c0"),
        (LASTING - 1, "attribution_ratio", "r0c0"),
    ]


def test_a_passing_sign_is_not_reported() -> None:
    assert reported_of(([[hostage()]] * (LASTING - 1) + [[]]) * 10) == []


def test_a_suspicion_is_reported_again_only_after_it_was_gone() -> None:
    assert [epoch for epoch, _, _ in reported_of([[hostage()]] * 9 + [[]] + [[hostage()]] * 9)] == [
        LASTING - 1,
        9 + LASTING,
    ]


def test_each_seed_is_suspected_by_itself_and_a_ratio_is_about_all() -> None:
    turns = [[hostage("r0c0")], [hostage("r0c1")]] * LASTING
    assert reported_of(turns) == []
    claims = [[over_claim("r0c0")], [over_claim("r0c1")]] * LASTING
    assert [pattern for _, pattern, _ in reported_of(claims)] == ["attribution_ratio"]


def test_envs_and_episodes_start_without_suspicion() -> None:
    watch, sink = SuspicionWatch(), ListSink()
    for episode in range(3):
        for epoch in range(LASTING):
            for env in (0, 1):
                found = [hostage()] if env == 0 or epoch != 1 else []
                watch.emit(sink, EnvContext(round=episode, episode=episode, env=env, epoch=epoch), found)
    assert [(event.episode, event.env, event.epoch) for event in sink.events] == [
        (episode, 0, LASTING - 1) for episode in range(3)
    ]
    assert {event.severity for event in sink.events} == {Severity.CRITICAL}


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


@pytest.mark.parametrize(("beyond", "kind"), [(1.01, "degradation"), (0.99, "plateau")])
def test_a_small_score_degrades_by_its_own_measure(beyond: float, kind: str) -> None:
    now = 5.0 * (1.0 - beyond * DEGRADATION_SHARE)
    trend = find_trend([5.0] * 10 + [now], num_rounds=20)
    assert trend is not None
    assert (trend.kind, trend.previous_pct, trend.rolling_pct) == (kind, 5.0, now)


def test_a_trend_is_over_ten_rounds() -> None:
    trend = find_trend([50.0 + index for index in range(13)], num_rounds=20)
    assert trend is not None
    assert (trend.rolling_pct, trend.previous_pct, trend.delta_pp, trend.window_rounds) == (62.0, 52.0, 10.0, 10)


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
    layout = spec.layout
    counter = ChoiceCounter()
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
        counter.add(step.masks, made_spec, step.outcome, layout)
    ops, *others = counter.stats()
    assert ops.num_decisions == len(steps)
    assert sum(count.num_chosen for count in ops.choices.values()) == len(steps)
    assert ops.num_forced == sum(sum(step.masks.op) == 1 for step in steps)
    germinations = sum(made.op is LifecycleOp.GERMINATE for made in specs)
    by_head = {stats.head: stats for stats in others}
    assert list(by_head) == ["slot", "blueprint", "blend"]
    assert by_head["blend"].num_decisions == by_head["blueprint"].num_decisions == germinations > 0
    assert by_head["slot"].num_decisions == sum(made.op is not LifecycleOp.WAIT for made in specs)
    for stats in (ops, *by_head.values()):
        for count in stats.choices.values():
            assert count.num_ok <= count.num_chosen <= count.num_legal <= stats.num_decisions
    assert set(by_head["blend"].choices) == set(BLENDS)
    counter.begin()
    assert counter.stats()[0].num_decisions == 0
