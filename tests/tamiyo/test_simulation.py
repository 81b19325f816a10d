"""The simulated worker: the lifecycle of the stage table, the formulas of its spec, equal bits for equal seeds."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import (
    BLENDS,
    PROTOCOL_VERSION,
    TRANSITIONS,
    GovernorState,
    LifecycleOp,
    RollbackReason,
    SeedStage,
    TelemetryEventType,
    coalition_mask,
    wait,
)
from esper.tamiyo.simulation import Cue, HostCurve, SimulatedBlueprint, SimulatedWorker, SimulationSpec, Synergy
from tests.fakes import Step, act_on, germinate, play, random_chooser, script_chooser, seeds, world

ADVANCE, PRUNE, FOSSILIZE = LifecycleOp.ADVANCE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE


def flat(**changes: object) -> SimulationSpec:
    """A world whose host does not move, so that every difference is a seed's."""
    return world(host=HostCurve(start_pct=50.0, final_pct=50.0), **changes)


def stages(steps: list[Step], slot: int = 0) -> list[SeedStage]:
    return [step.after.slots[slot].stage for step in steps]


@pytest.mark.parametrize("blend", BLENDS)
def test_the_fastest_life_takes_as_long_as_the_lifecycle_says(blend: str) -> None:
    ramp = BLENDS[blend].ramp_epochs
    plan = [(0, germinate("r0c0", "good", blend)), (1, act_on(ADVANCE, "r0c0")), (1 + ramp, act_on(FOSSILIZE, "r0c0"))]
    steps = play(world(horizon=14), script_chooser(plan))
    expected = [SeedStage.TRAINING, *[SeedStage.BLENDING] * (ramp - 1), SeedStage.HOLDING]
    assert stages(steps)[: ramp + 1] == expected
    assert set(stages(steps)[ramp + 1 :]) == {SeedStage.FOSSILIZED}
    alphas = [step.after.slots[0].alpha for step in steps[1 : ramp + 1]]
    assert alphas == [BLENDS[blend].alpha(done) for done in range(1, ramp + 1)]


def test_a_pruned_slot_rests_for_the_embargo() -> None:
    plan = [(0, germinate("r0c0", "good")), (1, act_on(PRUNE, "r0c0")), (5, germinate("r0c0", "good"))]
    steps = play(world(), script_chooser(plan))
    embargo = [SeedStage.EMBARGOED] * 3
    assert stages(steps)[:6] == [SeedStage.TRAINING, *embargo, SeedStage.DORMANT, SeedStage.TRAINING]
    assert steps[5].after.slots[0].epochs_in_stage == 1


@pytest.mark.parametrize("opens", [0, 1, 6])
def test_slots_may_be_closed_at_the_start(opens: int) -> None:
    steps = play(world(opens_epoch=opens), script_chooser([(opens, germinate("r0c0", "good"))]))
    legal = [any(step.masks.slot_by_op[LifecycleOp.GERMINATE]) for step in steps[: opens + 1]]
    assert legal == [False] * opens + [True]


@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_every_move_is_in_the_stage_table(seed: int) -> None:
    for step in play(world(horizon=20), random_chooser(random.Random(seed))):
        for before, after in zip(step.before.slots, step.after.slots, strict=True):
            if before.stage is not after.stage:
                middle = [stage for stage in SeedStage if (before.stage, stage) in TRANSITIONS]
                direct = (before.stage, after.stage) in TRANSITIONS
                assert direct or any((stage, after.stage) in TRANSITIONS for stage in middle)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0.0, 2.0))
def test_equal_seeds_and_actions_give_equal_bits_and_snapshots_continue_them(seed: int, noise: float) -> None:
    spec = world(noise_pp=noise)
    steps = play(spec, random_chooser(random.Random(seed)))
    assert play(spec, random_chooser(random.Random(seed))) == steps


def test_a_restored_worker_continues_the_same_life() -> None:
    spec = world(noise_pp=1.0)
    worker = SimulatedWorker(spec)
    worker.reset(seeds(2))
    worker.step([germinate("r0c0", "good"), wait(1)])
    twin = SimulatedWorker(spec)
    twin.restore(worker.snapshot())
    actions = [act_on(ADVANCE, "r0c0"), germinate("r0c1", "bad", env_id=1)]
    assert twin.step(actions) == worker.step(actions)


def test_envs_do_not_depend_on_their_neighbours() -> None:
    spec = world(noise_pp=1.0)
    many, one = SimulatedWorker(spec), SimulatedWorker(spec)
    assert many.reset(seeds(4)).reports[2] == one.reset(seeds(4)[2:3]).reports[2]
    many_step = many.step([wait(i) for i in range(4)])
    assert many_step.reports[2] == one.step([wait(2)]).reports[2]
    assert many_step.protocol_version == PROTOCOL_VERSION


def test_a_kept_seed_brings_its_gain_and_nothing_more() -> None:
    plan = [(0, germinate("r0c1", "good")), (1, act_on(ADVANCE, "r0c1")), (4, act_on(FOSSILIZE, "r0c1"))]
    last = play(flat(), script_chooser(plan))[-1].after
    assert last.val_accuracy_pct == pytest.approx(56.0)
    assert last.committed_accuracy_pct == pytest.approx(56.0)
    assert last.committed_params == last.total_params == 1500


def test_a_seed_that_is_only_held_is_not_committed_and_the_host_lacks_it() -> None:
    plan = [(0, germinate("r0c1", "parasite")), (1, act_on(ADVANCE, "r0c1"))]
    last = play(flat(horizon=60), script_chooser(plan))[-1].after
    assert last.val_accuracy_pct == pytest.approx(49.5)
    assert last.committed_accuracy_pct == pytest.approx(35.0, abs=0.1)
    assert last.slots[1].contribution_pp == pytest.approx(14.5, abs=0.1)


def test_a_host_recovers_from_a_prune() -> None:
    plan = [(0, germinate("r0c1", "parasite")), (1, act_on(ADVANCE, "r0c1")), (20, act_on(PRUNE, "r0c1"))]
    steps = play(flat(horizon=60), script_chooser(plan))
    assert steps[20].after.val_accuracy_pct < 40.0
    assert steps[-1].after.val_accuracy_pct == pytest.approx(50.0, abs=0.1)


def test_synergy_needs_both() -> None:
    spec = flat(synergies=(Synergy(first="good", second="inert", gain_pp=5.0),), horizon=14)
    plan = [(0, germinate("r0c0", "inert")), (1, germinate("r0c1", "good"))]
    plan += [(2, act_on(ADVANCE, "r0c0")), (3, act_on(ADVANCE, "r0c1"))]
    table = play(spec, script_chooser(plan))[-1].after.coalitions
    alone = table.accuracy_pct[coalition_mask(table, ["r0c1"])]
    both = table.accuracy_pct[coalition_mask(table, ["r0c0", "r0c1"])]
    assert both - alone == pytest.approx(5.0)
    assert table.accuracy_pct[0] <= 50.0


def test_a_window_gives_the_gain_only_to_seeds_planted_in_time() -> None:
    late = SimulatedBlueprint(name="late", gain_pp=(9.0, 9.0, 9.0), window=(3, 4))
    gains = []
    for epoch in (2, 3, 4, 5):
        plan = [(epoch, germinate("r0c0", "late")), (epoch + 1, act_on(ADVANCE, "r0c0"))]
        gains.append(play(flat(blueprints=(late,), horizon=12), script_chooser(plan))[-1].after.val_accuracy_pct - 50.0)
    assert gains == pytest.approx([0.0, 9.0, 9.0, 0.0])


def test_coins_fall_both_ways_and_only_the_contribution_tells() -> None:
    coin = SimulatedBlueprint(name="coin", gain_pp=(5.0, 5.0, 5.0), harm_share=0.5, harm_pp=4.0)
    plan = [(0, germinate("r0c0", "coin")), (1, act_on(ADVANCE, "r0c0"))]
    ends = [play(flat(blueprints=(coin,)), script_chooser(plan), seed)[-1].after for seed in seeds_of_episodes(40)]
    worth = [round(end.val_accuracy_pct - 50.0, 6) for end in ends]
    assert set(worth) == {5.0, -4.0}
    assert 10 <= worth.count(5.0) <= 30
    assert [end.slots[0].contribution_pp for end in ends] == pytest.approx(worth)


def seeds_of_episodes(count: int):
    return [replace(seeds(1)[0], episode=episode) for episode in range(count)]


def test_a_cue_shows_at_reset_only_and_names_the_right_blueprint() -> None:
    blueprints = tuple(SimulatedBlueprint(name=name, gain_pp=(8.0, 8.0, 8.0)) for name in ("a", "b"))
    spec = flat(blueprints=blueprints, cue=Cue(blueprints=("a", "b"), loss_step=0.5))
    plan = [(0, germinate("r0c0", "b")), (1, act_on(ADVANCE, "r0c0"))]
    reported = set()
    for seed in seeds_of_episodes(20):
        steps = play(spec, script_chooser(plan), seed)
        start, end = steps[0].before, steps[-1].after
        reported.add((round(start.val_loss, 3), round(end.val_accuracy_pct - 50.0, 6)))
        assert steps[0].after.val_loss == pytest.approx(0.5 * math.log(10)), "half right, half the loss of chance"
    assert len(reported) == 2
    (low, without), (high, with_gain) = sorted(reported)
    assert high - low == pytest.approx(0.5)
    assert (without, with_gain) == (0.0, 8.0)


def test_every_epoch_and_coalition_has_noise_of_its_own() -> None:
    plan = [(0, germinate("r0c0", "inert")), (1, act_on(ADVANCE, "r0c0"))]
    quiet = play(flat(horizon=40), script_chooser(plan))
    noisy = play(flat(horizon=40, noise_pp=1.0), script_chooser(plan))
    errors = [
        n.after.coalitions.accuracy_pct[mask] - q.after.coalitions.accuracy_pct[mask]
        for n, q in zip(noisy, quiet, strict=True)
        for mask in q.after.coalitions.accuracy_pct
    ]
    assert len(set(errors)) == len(errors) > 70
    assert sum(errors) / len(errors) == pytest.approx(0.0, abs=0.35)
    assert (sum(error**2 for error in errors) / len(errors)) ** 0.5 == pytest.approx(1.0, abs=0.25)


def test_a_rollback_ends_the_episode_with_the_last_healthy_state() -> None:
    plan = [(0, germinate("r0c0", "good")), (6, germinate("r0c1", "good"))]
    steps = play(world(rollback_epoch=7, horizon=20), script_chooser(plan))
    last = steps[-1].after
    assert len(steps) == 8
    assert last.terminal
    assert last.epoch == 7
    assert last.governor_state is GovernorState.PANIC
    assert last.rollback_reason is RollbackReason.DIVERGENCE
    assert last.val_accuracy_pct == steps[4].after.val_accuracy_pct
    assert last.slots[1].stage is SeedStage.DORMANT, "a seed born after the snapshot is gone"
    assert last.slots[0].stage is SeedStage.TRAINING


def test_an_env_that_is_over_sits_still() -> None:
    worker = SimulatedWorker(world(horizon=1))
    worker.reset(seeds(1))
    over = worker.step([wait(0)])
    assert over.reports[0].terminal
    again = worker.step([wait(0)])
    assert not again.outcomes[0].applied
    assert again.reports[0] == over.reports[0]


def test_events_are_reported_only_when_wanted_and_change_nothing() -> None:
    wanted = frozenset({TelemetryEventType.SEED_GERMINATED})
    loud, silent = SimulatedWorker(world()), SimulatedWorker(world())
    loud.reset(seeds(1))
    silent.reset(seeds(1))
    reported = loud.step([germinate("r0c0", "good")], wanted).reports[0]
    untold = silent.step([germinate("r0c0", "good")]).reports[0]
    assert [event.type for event in reported.events] == [TelemetryEventType.SEED_GERMINATED]
    assert untold.events == ()
    assert replace(reported, events=()) == untold


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 0}, "horizon"),
        ({"blueprints": ()}, "distinct names"),
        ({"blueprints": (SimulatedBlueprint(name="x", gain_pp=(1.0,)),)}, "one value per slot"),
        ({"synergies": (Synergy(first="good", second="ghost", gain_pp=1.0),)}, "ghost"),
        ({"slot_ids": ("r0c0", "r0c0", "r0c1")}, "duplicate"),
    ],
)
def test_impossible_worlds_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world(**changes)


def test_one_spec_per_env_is_required() -> None:
    worker = SimulatedWorker(world())
    worker.reset(seeds(2))
    with pytest.raises(ValueError, match="one spec for each"):
        worker.step([wait(0), wait(0)])
