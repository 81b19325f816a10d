"""Choices become specs, specs become consequences, and every controller plays in the same loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from esper.leyline import BLENDS, OPS, ActionExecutionResult, ActionSpec, LifecycleOp, SeedStage, wait
from esper.simic.training.action_execution import execute_actions, observe_reset, parse_sampled_action
from esper.simic.training.batch_ops import batch_signals_to_features
from esper.simic.training.env_factory import build_worker
from esper.simic.training.rollout import StepObserver, episode_seeds, run_episodes
from esper.tamiyo.features import GLOBAL_COLUMNS, SLOT_COLUMNS
from esper.tamiyo.masks import masks
from esper.tolaria.pool import EnginePool
from tests.tolaria import worlds
from tests.tolaria.worlds import HORIZON, act, tiny_task


@pytest.fixture(scope="module")
def pool() -> EnginePool:
    return EnginePool(build_worker, worlds.worker_spec())


class Scripted:
    """Plays the script and writes down what it was told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pairs: list[tuple[ActionExecutionResult, ActionExecutionResult]] = []

    def begin(self, state: ActionExecutionResult) -> None:
        self.log.append("begin")
        assert state.outcomes == ()

    def act(self, state: ActionExecutionResult) -> Sequence[ActionSpec]:
        self.log.append("act")
        return worlds.specs_at(state.reports[0].epochs_done, range(2))

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        self.log.append("store")
        self.pairs.append((before, after))


def test_the_loop_of_every_controller(pool: EnginePool) -> None:
    policy = Scripted()
    final = run_episodes(pool, policy, episode_seeds(7, 3, 2), HORIZON)
    assert policy.log == ["begin", *["act", "store"] * HORIZON]
    assert all(report.terminal and report.epoch == HORIZON - 1 for report in final.reports)
    for (_, after), (before, _) in zip(policy.pairs, policy.pairs[1:], strict=False):
        assert after is before
    assert final.post_action_slot_reports[0][0].stage is SeedStage.FOSSILIZED


class Witness(StepObserver):
    """Writes into the policy's log when it was called."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def reset(self, state: ActionExecutionResult) -> None:
        assert state.outcomes == ()
        self.log.append("observed reset")

    def acted(self, state: ActionExecutionResult, specs: Sequence[ActionSpec]) -> None:
        assert list(specs) == list(worlds.specs_at(state.reports[0].epochs_done, range(2)))
        self.log.append("observed act")

    def executed(self, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        assert [spec.op for spec in specs] == [outcome.op for outcome in after.outcomes]
        self.log.append("observed execute")

    def stored(self, before: ActionExecutionResult, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        assert before.reports[0].epochs_done + 1 == after.reports[0].epochs_done
        self.log.append("observed store")


def test_observers_see_every_phase_in_order_and_change_nothing(pool: EnginePool) -> None:
    policy = Scripted()
    seeds = episode_seeds(7, 3, 2)
    final = run_episodes(pool, policy, seeds, HORIZON, [Witness(policy.log), StepObserver()])
    step = ["act", "observed act", "observed execute", "store", "observed store"]
    assert policy.log == ["observed reset", "begin", *step * HORIZON]
    alone = run_episodes(pool, Scripted(), seeds, HORIZON)
    assert [report.val_loss for report in final.reports] == [report.val_loss for report in alone.reports]


def test_what_a_controller_sees_after_a_step(pool: EnginePool) -> None:
    observe_reset(pool, episode_seeds(7, 3, 2))
    result = execute_actions(pool, [act(0, "GERMINATE", "r1c0", "cnn.conv", "linear"), wait(1)])
    outcome = result.outcomes[0]
    assert (outcome.op, outcome.slot, outcome.applied) == (LifecycleOp.GERMINATE, "r1c0", True)
    assert result.reports[0].total_params > result.reports[0].host_params
    assert result.post_action_signals[0] is result.reports[0].signals
    assert result.post_action_masks[0] == masks(result.reports[0], pool.context.layout, pool.context.lifecycle)
    assert result.truncated_bootstrap_targets == {}
    assert result.reports[1].total_params == result.reports[1].host_params


def test_envs_of_a_lost_worker_are_marked_for_bootstrapping() -> None:
    class Lossy(EnginePool):
        lost_envs = frozenset({1})  # type: ignore[assignment]

    lossy = Lossy(build_worker, worlds.worker_spec())
    observe_reset(lossy, episode_seeds(7, 3, 2))
    lossy._members[0].abandoned = False
    result = execute_actions(lossy, [wait(0), wait(1)])
    assert result.truncated_bootstrap_targets == {1: None}


def test_sampled_indices_become_names(pool: EnginePool) -> None:
    layout = pool.context.layout
    blueprint = layout.blueprints.index("cnn.conv")
    spec = parse_sampled_action(3, {"op": 1, "slot": 2, "blueprint": blueprint, "blend": 4}, layout)
    assert spec == act(3, "GERMINATE", layout.slot_ids[2], "cnn.conv", tuple(BLENDS)[4])
    assert parse_sampled_action(3, {"op": 0, "slot": 2, "blueprint": 0, "blend": 0}, layout) == wait(3)
    assert parse_sampled_action(3, {"op": 3, "slot": 0, "blueprint": 9, "blend": 9}, layout) == act(
        3, "PRUNE", layout.slot_ids[0]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": len(OPS)}, "head 'op' must be in 0..4, got 5"),
        ({"slot": 3}, r"slot index 3 is outside 0..2"),
        ({"blueprint": -1}, "head 'blueprint' must be in"),
        ({"blend": 6}, "head 'blend' must be in 0..5, got 6"),
    ],
)
def test_indices_outside_their_table_are_refused(pool: EnginePool, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sampled_action(0, {"op": 1, "slot": 0, "blueprint": 0, "blend": 0, **changes}, pool.context.layout)


def test_features_of_all_envs_are_rows_of_one_length(pool: EnginePool) -> None:
    start = observe_reset(pool, episode_seeds(7, 3, 3))
    after = execute_actions(pool, [wait(i) for i in range(3)])
    for state, previous in ((start, None), (after, start)):
        seen = batch_signals_to_features(state, previous, range(3))
        assert seen.obs_ND.shape == (3, len(GLOBAL_COLUMNS))
        assert seen.slot_obs_NSF.shape == (3, 3, len(SLOT_COLUMNS))
    first, second = (batch_signals_to_features(after, previous, range(3)).obs_ND for previous in (start, None))
    assert not first.equal(second)


def test_the_learning_rate_follows_the_schedule() -> None:
    worker = worlds.engine(tiny_task())
    worker.reset(episode_seeds(7, 3, 1))
    optimizer = worker.envs[0].optimizer
    seen = []
    for _ in range(HORIZON):
        worker.step([wait(0)])
        seen.append(optimizer.lr)
    base = worker.envs[0].recipe.task.optimizer.lr
    assert seen[0] == base
    assert seen[-1] == pytest.approx(0.05 * base)
    assert seen == sorted(seen, reverse=True)
