"""Runs are paired, alone with their controller, and fail alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from esper.evidence import limits, runs
from esper.evidence.arms import ARMS
from esper.evidence.evaluation import TIMES, same_again
from esper.evidence.host_runs import HostRun, HostRunner
from esper.evidence.results import ResultStore, RunResult
from esper.evidence.runs import Arena, FinishedRun, Job, realised_rates
from esper.leyline import ActionExecutionResult, ActionSpec, EpisodeSeed, LifecycleOp
from esper.runtime.data.splits import Dataset, Split
from esper.runtime.tasks import TaskSpec, get_task_spec, load_task_data, override
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.side_by_side import SideBySide
from tests.evidence.made_up import evaluation, row

SEEDS = tuple(EpisodeSeed(env_id=n, episode=0, run_seed=20_000 + n) for n in range(3))
SETTINGS = {"schedule": {"gap": 2}, "fragrow": {"max_interval": 2.0}}


@pytest.fixture(scope="module")
def task() -> TaskSpec:
    return override(get_task_spec("digits_limited"), horizon=8)


@pytest.fixture(scope="module")
def data(task: TaskSpec) -> Dataset:
    return load_task_data(task)


@pytest.fixture(scope="module")
def test_rows(data: Dataset) -> Split:
    return data.val  # the split that no test of runs needs to open


@pytest.fixture
def arena(task: TaskSpec, data: Dataset, tmp_path: Path) -> Iterator[Arena]:
    with Arena(evaluation(task, data, tmp_path, SETTINGS), workers=1) as made:
        yield made


def play(arena: Arena, arm: str, seeds: Sequence[EpisodeSeed], rows: Split) -> list[FinishedRun]:
    done = list(arena.play(Job(arm=ARMS[arm], policy_id="", seeds=tuple(seeds)), rows))
    for run in done:
        arena._evaluation.store.add(run.result, run.topology, run.curve)
    return done


def figures(result: RunResult) -> RunResult:
    return replace(result, arm="", **dict.fromkeys(TIMES, 0.0))  # type: ignore[arg-type]


def test_an_arm_that_plants_nothing_is_waiting_bit_for_bit(task: TaskSpec, data: Dataset, tmp_path: Path) -> None:
    never = {"periodic": {"every_epochs": 100}}
    with Arena(evaluation(task, data, tmp_path, never), workers=1) as arena:
        waiting = play(arena, "wait_only", SEEDS, data.val)
        idle = play(arena, "periodic", SEEDS, data.val)
    assert [figures(run.result) for run in waiting] == [figures(run.result) for run in idle]
    for one, other in zip(waiting, idle, strict=True):
        assert one.curve.drop(columns="arm").equals(other.curve.drop(columns="arm"))


def test_the_static_network_has_the_topology_that_was_grown(arena: Arena, test_rows: Split) -> None:
    grown = play(arena, "schedule", SEEDS[:2], test_rows)
    static = play(arena, "static_final", SEEDS[:2], test_rows)
    assert all(run.topology.kept for run in grown)
    for one, other in zip(grown, static, strict=True):
        assert other.topology.kept == one.topology.kept
        assert other.result.topology_sha == one.result.topology_sha
        assert other.result.params == one.result.params
        assert other.result.param_epochs == other.result.params * 8
        assert other.result.test_loss != one.result.test_loss
        assert other.topology.lives == ()


def test_a_network_that_diverged_has_the_scores_of_guessing(
    arena: Arena, test_rows: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostRun, "committed_scores", property(lambda run: (float("inf"), 50.0)))
    (run,) = play(arena, "wait_only", SEEDS[:1], test_rows)
    assert run.result.status == "failed: the network's output is not finite"
    assert run.result.val_loss == run.result.test_loss < 3.0
    assert run.result.val_accuracy_pct == run.result.test_accuracy_pct == 10.0


def test_what_grew_has_its_epochs(arena: Arena, test_rows: Split) -> None:
    (run,) = play(arena, "schedule", SEEDS[:1], test_rows)
    (life,) = run.topology.lives
    assert (life.slot, life.blueprint, life.planted, life.blended, life.kept, life.pruned) == (
        *("r0c0", "mlp.mlp"),
        *(0, 1, 4, None),
    )
    result = run.result
    assert (result.num_germinate, result.num_advance, result.num_fossilize, result.num_kept) == (1, 1, 1, 1)
    assert result.num_wait == 8 - 3
    assert result.param_epochs == run.curve["total_params"].sum()
    assert result.test_accuracy_pct == result.val_accuracy_pct, "here the validation rows stand in for the test rows"
    assert 0 < result.controller_s < result.run_s


def test_a_run_does_not_depend_on_who_runs_beside_it(arena: Arena, test_rows: Split) -> None:
    together = [figures(run.result) for run in play(arena, "random", SEEDS, test_rows)]
    alone = [figures(run.result) for seed in SEEDS for run in play(arena, "random", [seed], test_rows)]
    assert together == alone
    assert any(result.num_germinate for result in alone)


class Breaks:
    """Waits, and breaks in the third epoch of one host."""

    def __init__(self, inner: SideBySide, run_seed_env: int) -> None:
        self._inner, self._env = inner, run_seed_env

    def begin(self, state: ActionExecutionResult) -> None:
        self._inner.begin(state)

    def act(self, state: ActionExecutionResult) -> list[ActionSpec]:
        if any(report.env_id == self._env and report.epochs_done == 2 for report in state.reports):
            raise RuntimeError("a worm\nin the wood")
        return self._inner.act(state)

    def store(self, before: ActionExecutionResult, after: ActionExecutionResult) -> None:
        self._inner.store(before, after)


def test_a_crash_leaves_the_other_runs_intact(arena: Arena, test_rows: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [figures(run.result) for run in play(arena, "wait_only", SEEDS, test_rows)]
    monkeypatch.setattr(runs, "SideBySide", lambda controllers: Breaks(SideBySide(controllers), 1))
    broken = [run.result for run in play(arena, "periodic", SEEDS, test_rows)]
    assert [result.failed for result in broken] == [False, True, False]
    assert broken[1].status == "failed: RuntimeError: a worm in the wood"
    assert (broken[1].test_accuracy_pct, broken[1].params) == (10.0, 650), "guessing, with the bare host"
    assert [figures(broken[0]), figures(broken[2])] == [whole[0], whole[2]]
    monkeypatch.undo()
    assert not play(arena, "plateau", SEEDS[:1], test_rows)[0].result.failed, "the next arm has sound workers"


def test_many_rollbacks_are_a_failure_that_keeps_its_network(
    arena: Arena, test_rows: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_ROLLBACKS", -1)
    (run,) = play(arena, "wait_only", SEEDS[:1], test_rows)
    assert run.result.status == "failed: 0 rollbacks"
    assert run.result.test_accuracy_pct > 50


def test_a_network_that_puts_out_nonsense_counts_as_guessing(
    arena: Arena, test_rows: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "score_committed", lambda *args: (float("nan"), 93.0))
    (run,) = play(arena, "wait_only", SEEDS[:1], test_rows)
    assert run.result.failed
    assert run.result.test_accuracy_pct == 10.0


def test_the_same_run_again_is_the_same_and_another_is_not(arena: Arena, test_rows: Split) -> None:
    first, other = (run.result for run in play(arena, "schedule", SEEDS[:2], test_rows))
    (again,) = (run.result for run in play(arena, "schedule", SEEDS[:1], test_rows))
    assert same_again(first, again).passed is True
    check = same_again(first, replace(again, test_loss=again.test_loss + 1e-12))
    assert check.passed is False
    assert "test_loss" in check.found
    assert same_again(first, other).passed is False


def test_rates_are_those_of_the_sampled_policy_and_possible(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    ops = [(2, 2, 0, 1), (1, 2, 1, 1)]
    for number, (g, a, p, f) in enumerate(ops):
        made = row("ppo_sampled", number, 1.0, "abc", num_germinate=g, num_advance=a, num_prune=p, num_fossilize=f)
        store.results[made.key] = made
    store.results["ppo_sampled", "other", 0] = row("ppo_sampled", 0, 1.0, "other", num_germinate=9)
    rates = realised_rates(store, "abc")
    assert rates == {"GERMINATE": 1.5, "ADVANCE": 1.5, "PRUNE": 0.5, "FOSSILIZE": 1.0}, "no more advanced than planted"
    assert set(rates) == {op.name for op in LifecycleOp if op is not LifecycleOp.WAIT}


def test_random_ops_have_their_rates_on_a_real_host() -> None:
    task = override(get_task_spec("digits_mlp"), horizon=16)
    rates = {"GERMINATE": 2.0, "ADVANCE": 1.0, "PRUNE": 1.0, "FOSSILIZE": 0.0}
    seeds = [EpisodeSeed(env_id=n, episode=0, run_seed=n) for n in range(6)]
    with HostRunner(task, load_task_data(task)) as runner:
        controllers = {
            seed.env_id: make_controller("rate_matched", runner.setting(seed.run_seed), rates=rates) for seed in seeds
        }
        played = runner.run(SideBySide(controllers), seeds)
    for op in (LifecycleOp.GERMINATE, LifecycleOp.PRUNE):
        found = sum(run.num_ops[op] for run in played) / len(seeds)
        assert found == pytest.approx(rates[op.name], rel=0.1)
