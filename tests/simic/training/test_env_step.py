"""Whole steps of real hosts in one process: growth, reports, rollbacks, snapshots, and no hidden randomness."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.leyline import (
    EpisodeSeed,
    GovernorState,
    IllegalOperation,
    LifecycleOp,
    RollbackReason,
    SeedStage,
    TelemetryEventType,
    wait,
)
from esper.simic.training.parallel_env_state import ParallelEnvState
from esper.simic.training.rollout import episode_seeds
from esper.tamiyo.masks import masks
from esper.tolaria.engine import VectorizedEngine
from tests.tolaria import worlds
from tests.tolaria.worlds import ALL_EVENTS, HORIZON, SGD, act, engine, facts, spoil_weights, tiny_task

Engine = VectorizedEngine[ParallelEnvState]
ONE = episode_seeds(7, 3, 1)


def at_epoch(worker: Engine, env_id: int, epoch: int, damage: Callable[[ParallelEnvState], None]) -> None:
    """Damages an env after the last training batch of an epoch."""
    env = worker.envs[env_id]
    original = worker._ops.eval_batch

    def eval_batch(which: ParallelEnvState, batch: object) -> None:
        if which is env and which.epoch == epoch:
            damage(which)
            which.begin_validation()
        original(which, batch)  # type: ignore[arg-type]

    object.__setattr__(worker._ops, "eval_batch", eval_batch)


def test_a_seed_lives_its_life_in_an_env() -> None:
    worker = engine()
    worker.reset(ONE)
    plan = {
        0: act(0, "GERMINATE", "r0c0", "cnn.conv", "linear_fast"),
        1: act(0, "ADVANCE", "r0c0"),
        4: act(0, "FOSSILIZE", "r0c0"),
    }
    stages, kinds = [], []
    for epoch in range(6):
        result = worker.step([plan.get(epoch, wait(0))], ALL_EVENTS)
        stages.append(result.reports[0].slots[0].stage.name)
        kinds.append([event.type.value for event in result.reports[0].events])
    assert stages == ["TRAINING", "BLENDING", "BLENDING", "HOLDING", "FOSSILIZED", "FOSSILIZED"]
    assert kinds[0] == ["SEED_GERMINATED", "SEED_STAGE_CHANGED"]
    assert kinds[4] == ["SEED_FOSSILIZED"]
    report = result.reports[0]
    assert report.slots[0].seed_id == "0.3.r0c0.1"
    assert report.committed_params == report.total_params > report.host_params
    assert report.committed_accuracy_pct == report.val_accuracy_pct


@pytest.mark.parametrize("blueprint", ["cnn.conv", "cnn.conv_deep"])
def test_seeds_live_in_channels_last_hosts_too(blueprint: str) -> None:
    """Also across a snapshot, whose copies are laid out otherwise."""
    task = tiny_task("digits_conv", channels_last=True, optimizer=SGD)
    worker, other = engine(task), engine(task)
    worker.reset(ONE)
    plan = {0: act(0, "GERMINATE", "r0c0", blueprint, "linear_fast"), 1: act(0, "ADVANCE", "r0c0")}
    for epoch in range(4):
        other.restore(worker.snapshot())
        expected = facts(worker.step([plan.get(epoch, wait(0))], ALL_EVENTS))
        assert repr(facts(other.step([plan.get(epoch, wait(0))], ALL_EVENTS))) == repr(expected)
        assert worlds.digest(other) == worlds.digest(worker)


def test_an_illegal_op_is_a_defect_and_raises() -> None:
    worker = engine()
    worker.reset(ONE)
    with pytest.raises(IllegalOperation, match="slot r0c0"):
        worker.step([act(0, "PRUNE", "r0c0")])


def test_the_last_step_of_the_horizon_is_terminal() -> None:
    worker = engine()
    worker.reset(ONE)
    ends = [worker.step([wait(0)]).reports[0].terminal for _ in range(HORIZON)]
    assert ends == [False] * (HORIZON - 1) + [True]
    late = worker.step([act(0, "PRUNE", "r0c0")])
    assert not late.outcomes[0].applied
    assert late.reports[0].epoch == HORIZON - 1


@pytest.mark.parametrize("epoch", [0, 3, HORIZON - 1])
def test_a_rollback_ends_the_episode_in_the_step_that_caused_it(epoch: int) -> None:
    worker = engine()
    start = worker.reset(ONE).reports[0]
    at_epoch(worker, 0, epoch, spoil_weights)
    for _ in range(epoch):
        assert worker.step([wait(0)], ALL_EVENTS).reports[0].rollback_reason is None
    outcome = worker.step([wait(0)], ALL_EVENTS)
    report = outcome.reports[0]
    assert outcome.outcomes[0].applied, "the causing step is the one that is stored"
    assert (report.epoch, report.terminal) == (epoch, True)
    assert report.rollback_reason is RollbackReason.NONFINITE
    assert report.governor_state is GovernorState.PANIC
    if epoch < 5:  # nothing was kept since the untrained host
        assert (report.val_loss, report.train_loss) == (start.val_loss, None)
    (event,) = report.events
    assert event.type is TelemetryEventType.GOVERNOR_STATE_CHANGED
    assert (event.data.rolled_back, event.data.first_epoch) == (True, epoch)  # type: ignore[attr-defined]
    assert (event.data.op, event.data.slot_id, event.data.seeds_removed) == ("WAIT", None, ())  # type: ignore[attr-defined]
    assert event.data.restored_epoch == (None if epoch < 5 else 4)  # type: ignore[attr-defined]
    assert all(torch.isfinite(p).all() for p in worker.envs[0].model.parameters())
    legal = masks(report, worker.layout, worker.lifecycle)
    assert legal.op == (True, False, False, False, False)
    after = worker.step([wait(0)])
    assert not after.outcomes[0].applied


def test_weights_that_are_not_finite_are_noticed_before_they_matter() -> None:
    """A seed behind the host takes no part in validation, so only its weights can give it away."""
    worker = engine()
    worker.reset(ONE)

    def spoil_seed(env: ParallelEnvState) -> None:
        with torch.no_grad():
            next(iter(env.model.slot("r0c0").parameters())).fill_(float("nan"))

    at_epoch(worker, 0, 0, spoil_seed)
    report = worker.step(worlds.specs_at(0, [0]), ALL_EVENTS).reports[0]
    assert report.rollback_reason is RollbackReason.NONFINITE
    governor = report.events[-1].data
    assert governor.value == governor.value, "the loss itself was a number"  # type: ignore[attr-defined]
    assert (governor.op, governor.slot_id) == ("GERMINATE", "r0c0")  # type: ignore[attr-defined]
    assert governor.seeds_removed == ("0.3.r0c0.1",)  # type: ignore[attr-defined]


def test_two_envs_roll_back_at_once_and_a_third_does_not_notice() -> None:
    calm = engine()
    calm.reset(episode_seeds(7, 3, 3))
    worker = engine()
    worker.reset(episode_seeds(7, 3, 3))
    at_epoch(worker, 0, 1, spoil_weights)
    at_epoch(worker, 2, 1, spoil_weights)
    for epoch in range(3):
        expected = calm.step([wait(i) for i in range(3)])
        seen = worker.step([wait(i) for i in range(3)])
        assert worlds.without_times(seen.reports[1]) == worlds.without_times(expected.reports[1])
        assert [seen.reports[i].terminal for i in range(3)] == ([False] * 3 if epoch < 1 else [True, False, True])


def test_a_panic_before_the_fossil_was_kept_takes_the_fossil_back() -> None:
    worker = engine()
    worker.reset(ONE)
    for epoch in range(4):
        worker.step(worlds.specs_at(epoch, [0]))
    at_epoch(worker, 0, 4, spoil_weights)
    result = worker.step(worlds.specs_at(4, [0]), ALL_EVENTS)
    assert (result.outcomes[0].op, result.outcomes[0].applied) == (LifecycleOp.FOSSILIZE, True)
    assert result.reports[0].slots[0].stage is SeedStage.DORMANT
    assert result.reports[0].committed_params == result.reports[0].host_params


def test_a_healthy_fossil_is_kept_at_once_and_survives_a_later_panic() -> None:
    """It comes an epoch after the regular keeping, which must not be waited for."""
    worker = engine(tiny_task(horizon=12))
    worker.reset(ONE)
    worker.step([wait(0)])
    for epoch in range(5):
        report = worker.step(worlds.specs_at(epoch, [0])).reports[0]
    at_epoch(worker, 0, 6, spoil_weights)
    rolled_back = worker.step(worlds.specs_at(5, [0])).reports[0]
    assert rolled_back.slots[0].stage is SeedStage.FOSSILIZED
    assert rolled_back.slots[2].stage is SeedStage.DORMANT, "the seed born in the failed epoch is gone"
    assert rolled_back.val_loss == report.val_loss


def test_no_state_is_kept_while_the_host_is_suspect() -> None:
    """A spike in epochs 8 and 9, when a state is due, puts keeping off to the first healthy epoch after it."""
    worker = engine(tiny_task(horizon=40))
    worker.reset(ONE)
    env = worker.envs[0]
    original = worker._ops.eval_batch

    def eval_batch(which: ParallelEnvState, batch: object) -> None:
        original(which, batch)  # type: ignore[arg-type]
        if which.epoch in (8, 9):
            which.val_losses.add_(1e4)

    object.__setattr__(worker._ops, "eval_batch", eval_batch)
    states, kept = [], []
    for _ in range(11):
        states.append(worker.step([wait(0)]).reports[0].governor_state)
        assert env.kept is not None
        kept.append(env.kept.facts["extra"]["epoch"])
    assert states[8:] == [GovernorState.SUSPECT, GovernorState.SUSPECT, GovernorState.HEALTHY]
    assert kept == [None] * 4 + [4] * 6 + [10]


def test_where_the_product_is_the_host_training_goes_on_after_a_rollback() -> None:
    worker = engine(ends=False)
    worker.reset(ONE)
    at_epoch(worker, 0, 2, spoil_weights)
    reports = [worker.step([wait(0)], ALL_EVENTS).reports[0] for _ in range(HORIZON)]
    assert [r.epoch for r in reports] == list(range(HORIZON))
    assert [r.terminal for r in reports] == [False] * (HORIZON - 1) + [True]
    assert [r.rollback_reason is not None for r in reports] == [epoch == 2 for epoch in range(HORIZON)]
    waiting = [not any(masks(r, worker.layout, worker.lifecycle).op[1:]) for r in reports]
    assert waiting == [False, False, True, True, True, False, False, True]
    assert [len(r.events) for r in reports] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert [r.epochs_done for r in reports] == list(range(1, HORIZON + 1))
    assert worker.envs[0].governor.num_rollbacks == 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_snapshot_at_any_point_continues_to_the_bit(optimizer: str) -> None:
    """Snapshot, step, restore elsewhere, the same step: at every stage of a seed, after a prune and a rollback."""
    task = tiny_task() if optimizer == "adamw" else tiny_task(optimizer=SGD)
    worker = engine(task)
    worker.reset(episode_seeds(7, 3, worlds.NUM_ENVS))
    at_epoch(worker, 2, 2, spoil_weights)
    other = engine(task)
    seen_stages = set()
    for epoch in range(HORIZON):
        packed = worker.snapshot()
        expected = [facts(worker.step(worlds.specs_at(epoch), ALL_EVENTS))]
        seen_stages |= {slot.stage for env in worker.envs.values() for slot in env.model.all_slots()}
        if epoch == 2:
            continue  # the injected fault belongs to the first engine
        other.restore(packed)
        again = [facts(other.step(worlds.specs_at(epoch), ALL_EVENTS))]
        assert repr(again) == repr(expected)
        assert worlds.digest(other) == worlds.digest(worker)
    assert seen_stages >= {
        *(SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING),
        *(SeedStage.FOSSILIZED, SeedStage.EMBARGOED, SeedStage.DORMANT),
    }


def test_a_kept_state_travels_with_the_snapshot() -> None:
    """A rollback after moving to another process goes back to the same state as without moving."""
    worker, other = engine(), engine()
    worker.reset(ONE)
    for epoch in range(6):
        worker.step(worlds.specs_at(epoch, [0]))
    other.restore(worker.snapshot())
    for each in (worker, other):
        at_epoch(each, 0, 6, spoil_weights)
    expected = facts(worker.step(worlds.specs_at(6, [0]), ALL_EVENTS))
    assert repr(facts(other.step(worlds.specs_at(6, [0]), ALL_EVENTS))) == repr(expected)


def test_snapshots_of_another_version_or_task_are_refused() -> None:
    worker = engine()
    worker.reset(ONE)
    packed = worker.snapshot()[0]
    with pytest.raises(ValueError, match="version 2, got 1"):
        worker.restore({0: replace(packed, version=1)})
    with pytest.raises(ValueError, match="expected a snapshot of task 'digits_conv', got 'digits_blind'"):
        engine(tiny_task("digits_conv")).restore({0: packed})


def test_a_round_draws_from_no_global_generator() -> None:
    worker = engine()
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]
    worlds.play(worker)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]


def test_what_is_observed_changes_nothing() -> None:
    """The same episode with all events, with none, and beside other envs."""
    seen = []
    for count, wanted in ((1, ALL_EVENTS), (1, frozenset()), (4, ALL_EVENTS)):
        worker = engine()
        worker.reset(episode_seeds(7, 3, count))
        for epoch in range(5):
            worker.step(worlds.specs_at(epoch, range(count)), wanted)  # type: ignore[arg-type]
        seen.append(worlds.digest(worker)[0])
    assert len(set(seen)) == 1


def test_episodes_differ_by_seed_env_and_episode() -> None:
    worker = engine()
    losses = set()
    for seed in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]:
        env_id, episode, run_seed = seed
        result = worker.reset([EpisodeSeed(env_id=env_id, episode=episode, run_seed=run_seed)])
        losses.add(result.reports[env_id].val_loss)
    assert len(losses) == 4


@pytest.mark.parametrize("name", ["digits_mlp", "digits_blind", "digits_conv", "pydoc_lm"])
def test_every_embedded_kind_of_host_runs(name: str) -> None:
    changes = {"samples_per_epoch": 64, "batch_size": 32, "val_samples": 16, "val_chunk_rows": 12}
    worker = engine(tiny_task(name, **changes))
    start = worker.reset(ONE).reports[0]
    report = worker.step([wait(0)]).reports[0]
    assert report.train_loss is not None
    assert report.val_loss != start.val_loss
    env = worker.envs[0]
    assert env.val_rows == 16 * (64 if name == "pydoc_lm" else 1)
