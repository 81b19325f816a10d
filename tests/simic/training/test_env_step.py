"""Whole steps of real hosts in one process: growth, reports, rollbacks, snapshots, and no hidden randomness."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.leyline import (
    Attribution,
    EpisodeSeed,
    EpochReport,
    GovernorState,
    IllegalOperation,
    LifecycleOp,
    RollbackReason,
    SeedStage,
    SlotTally,
    TelemetryEventType,
    lr_factor,
    wait,
)
from esper.simic.training.parallel_env_state import SNAPSHOT_VERSION, ParallelEnvState
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
    executor = worlds.torch_executor(worker)
    original = executor.eval_batch

    def eval_batch(which: ParallelEnvState, batch: object) -> None:
        if which is env and which.epoch == epoch:
            damage(which)
            which.begin_validation()
        original(which, batch)  # type: ignore[arg-type]

    executor.eval_batch = eval_batch  # type: ignore[assignment]


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


def test_the_learning_rate_of_a_seed_falls_from_its_birth_on_and_ends_with_the_hosts() -> None:
    task = tiny_task(optimizer=SGD)
    worker = engine(task)
    worker.reset(ONE)
    optimizer, rates = worker.envs[0].optimizer, []
    for epoch in range(HORIZON):
        worker.step([act(0, "GERMINATE", "r0c0", "cnn.conv", "linear_fast") if epoch == 3 else wait(0)], ALL_EVENTS)
        rates.append((optimizer.rates("host")[0], optimizer.rates("r0c0")[0]))
    assert [host for host, _ in rates] == [SGD.lr * lr_factor("cosine", epoch, HORIZON) for epoch in range(HORIZON)]
    assert [seed for _, seed in rates[3:]] == [SGD.lr * lr_factor("cosine", age, HORIZON - 3) for age in range(5)]
    assert rates[3][1] == SGD.lr > rates[3][0]
    assert rates[-1][0] == rates[-1][1]


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
    legal = masks(report, worker.envs[0].context.layout, worker.envs[0].context.lifecycle)
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
    executor = worlds.torch_executor(worker)
    original = executor.eval_batch

    def eval_batch(which: ParallelEnvState, batch: object) -> None:
        original(which, batch)  # type: ignore[arg-type]
        if which.epoch in (8, 9):
            which.val_losses.add_(1e4)

    executor.eval_batch = eval_batch  # type: ignore[assignment]
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
    context = worker.envs[0].context
    waiting = [not any(masks(r, context.layout, context.lifecycle).op[1:]) for r in reports]
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


# ---- what is counted by slot over an episode


def tallied(reports: list[EpochReport]) -> dict[str, SlotTally]:
    """Tallies from the reports of an episode without a rollback: each seed's last measured contribution is its gain."""
    seeds: dict[str, dict[str, float | None]] = {slot.slot_id: {} for slot in reports[0].slots}
    fossils: dict[str, set[str]] = {slot_id: set() for slot_id in seeds}
    for slot in (slot for report in reports for slot in report.slots if slot.seed_id is not None):
        assert slot.seed_id is not None
        known = seeds[slot.slot_id].get(slot.seed_id)
        seeds[slot.slot_id][slot.seed_id] = known if slot.contribution_pp is None else slot.contribution_pp
        if slot.stage is SeedStage.FOSSILIZED:
            fossils[slot.slot_id].add(slot.seed_id)
    tallies = {}
    for slot_id, worth in seeds.items():
        gains = [gain for gain in worth.values() if gain is not None]
        tallies[slot_id] = SlotTally(
            num_germinated=len(worth),
            num_fossilized=len(fossils[slot_id]),
            contribution_gain_pp=sum(gains) if gains else None,
        )
    return tallies


def test_slots_are_tallied_over_the_episode_and_anew_in_the_next() -> None:
    worker = engine()
    for _ in range(2):
        start = worker.reset(episode_seeds(7, 3, worlds.NUM_ENVS)).reports
        none = SlotTally(num_germinated=0, num_fossilized=0)
        assert all(tally == none for report in start.values() for tally in (report.tallies or {}).values())
        steps = [worker.step(worlds.specs_at(epoch)).reports for epoch in range(HORIZON)]
        for env_id in range(worlds.NUM_ENVS):
            played = [reports[env_id] for reports in steps]
            assert [report.tallies for report in played] == [tallied(played[: n + 1]) for n in range(HORIZON)]
    last = steps[-1]
    kept = last[0].tallies["r0c0"]  # type: ignore[index]
    assert (kept.num_germinated, kept.num_fossilized) == (1, 1)
    assert kept.contribution_gain_pp == last[0].slots[0].contribution_pp is not None
    assert last[1].tallies["r1c0"] == SlotTally(num_germinated=2, num_fossilized=0), "never blended in"  # type: ignore[index]


def test_a_gain_that_is_not_measured_leaves_the_tally_as_it_was() -> None:
    worker = engine()
    worker.reset(ONE)
    env, gains = worker.envs[0], []
    birth = env.model.germinate("r0c0", "cnn.conv", "linear_fast", 1)
    for planted, worth in ((True, 1.5), (False, None), (False, 0.25), (True, None), (False, -2.0)):
        if planted:
            env.note_move(birth)
        found = Attribution(contribution_pp=worth, solo_pp=None, interaction_pp=None)
        env.note_attributions({"r0c0": found})
        gains.append(env.tallies["r0c0"].contribution_gain_pp)
    assert gains == [1.5, 1.5, 0.25, 0.25, -1.75]
    assert env.tallies["r0c0"].num_germinated == 2


def test_the_gains_of_a_second_seed_come_on_top_and_return_with_a_captured_state() -> None:
    worker = engine(tiny_task(horizon=24))
    worker.reset(ONE)
    born = {0: act(0, "GERMINATE", "r0c0", "cnn.conv", "linear_fast"), 1: act(0, "ADVANCE", "r0c0")}
    plan = {**born, 4: act(0, "PRUNE", "r0c0")}
    reports = []
    for epoch in range(24):
        free = reports and reports[-1].slots[0].stage is SeedStage.DORMANT and epoch > 4
        if free and max(plan) == 4:
            plan |= {epoch + ahead: spec for ahead, spec in born.items()}
        reports.append(worker.step([plan.get(epoch, wait(0))]).reports[0])
        if epoch == 5:
            captured, then = worker.envs[0].capture(), dict(worker.envs[0].tallies)
    assert reports[-1].tallies == tallied(reports)
    assert reports[-1].tallies["r0c0"].num_germinated == 2
    worths = {
        slot.seed_id: slot.contribution_pp for r in reports for slot in r.slots if slot.contribution_pp is not None
    }
    assert len(worths) == 2, "both seeds must have been measured"
    worker.envs[0].restore(captured)
    assert worker.envs[0].tallies == then != reports[-1].tallies


def test_a_rollback_takes_gains_back_but_not_what_was_planted() -> None:
    worker = engine(tiny_task(horizon=12), ends=False)
    worker.reset(ONE)
    worker.step([wait(0)])
    for epoch in range(5):
        report = worker.step(worlds.specs_at(epoch, [0])).reports[0]
    at_epoch(worker, 0, 7, spoil_weights)
    worker.step(worlds.specs_at(5, [0]))
    rolled_back = worker.step(worlds.specs_at(6, [0])).reports[0]
    assert rolled_back.rollback_reason is not None
    kept, undone = (rolled_back.tallies[slot] for slot in ("r0c0", "r0c1"))  # type: ignore[index]
    assert kept == report.tallies["r0c0"]  # type: ignore[index]
    assert undone == SlotTally(num_germinated=1, num_fossilized=0)
    assert worker.step([wait(0)]).reports[0].tallies["r0c1"] == undone  # type: ignore[index]


def test_snapshots_of_another_version_or_task_are_refused() -> None:
    worker = engine()
    worker.reset(ONE)
    packed = worker.snapshot()[0]
    with pytest.raises(ValueError, match=f"version {SNAPSHOT_VERSION}, got 1"):
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
