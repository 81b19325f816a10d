"""The composition root and the round loop: what is built, in which order things happen, what a round says."""

import ast
import inspect
from dataclasses import replace

import pytest
import torch

from esper.karn.integrity import check_run
from esper.nissa import set_hub
from esper.simic import train_ppo_vectorized
from esper.simic.client import FixedClient, SimicClient
from esper.simic.run.stop_signals import StopSignals
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from esper.simic.training.helpers import train_heuristic
from esper.simic.training.vectorized import check_controller, open_trainer, worker_plan
from esper.tolaria.governor import RollbackLimitReached
from tests.simic.training.runs import TINY, Listening
from tests.telemetry.logs import events_of, open_log


def test_a_policy_is_trained_and_its_rounds_are_summed_up():
    agent, history = train_ppo_vectorized(TINY)
    assert agent.updates == 2
    assert agent.env_steps == 2 * 2 * 4
    assert len(history) == 2
    assert history[-1].num_episodes_total == 4
    assert history[-1].num_env_steps_total == 16
    assert all(row.update_performed for row in history)


@pytest.fixture
def log(tmp_path):
    """The log of the process."""
    with open_log(tmp_path, strict=True) as hub:
        set_hub(hub)
        yield hub
        set_hub(None)


def test_a_log_of_the_process_is_reported_the_whole_run(log):
    _, history = train_ppo_vectorized(TINY)
    assert log.close().complete
    assert check_run(log.run_dir).problems == ()
    first, *_, last = events_of(log.run_dir)
    assert (first["type"], last["type"]) == ("RUN_STARTED", "RUN_ENDED")
    assert (last["data"]["status"], last["data"]["num_rounds_total"]) == ("completed", 2)
    assert last["data"]["final_accuracy_pct"] == history[-1].accuracy_mean_pct
    assert len(events_of(log.run_dir, "ROUND_COMPLETED")) == 2


@pytest.mark.parametrize(("error", "status"), [(KeyError("ours"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_a_log_of_the_process_is_reported_how_a_run_was_broken_off(log, monkeypatch, error, status):
    def broken(self):
        raise error

    monkeypatch.setattr(SimicClient, "update", broken)
    with pytest.raises(type(error)):
        train_ppo_vectorized(TINY)
    log.close()
    (end,) = events_of(log.run_dir, "RUN_ENDED")
    assert (end["data"]["status"], end["data"]["num_rounds_total"]) == (status, 0)
    assert end["data"]["error_type"] == ("KeyError" if status == "failed" else None)


def test_overrides_are_checked_like_the_configuration():
    with pytest.raises(ValueError, match=r"unknown key 'round'. Did you mean 'rounds'"):
        train_ppo_vectorized(TINY, round=3)
    with pytest.raises(ValueError, match="gamma must be in"):
        train_ppo_vectorized(TINY, gamma=2.0)
    with pytest.raises(ValueError, match="controller must be 'ppo'"):
        train_ppo_vectorized(TINY, controller="heuristic")
    with pytest.raises(ValueError, match="unknown task"):
        train_ppo_vectorized(TINY, task="digit_cnn")


def test_the_policy_changes_and_its_input_does_not():
    with open_trainer(TINY, Listening()) as trainer:
        assert isinstance(trainer.client, SimicClient)
        before = {name: value.clone() for name, value in trainer.client.agent.network.named_parameters()}
        trainer.run()
        after = dict(trainer.client.agent.network.named_parameters())
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_recorder_hears_every_step_and_round_in_order():
    heard = Listening()
    with open_trainer(TINY, heard) as trainer:
        trainer.run()
    assert len(heard.steps) == 2 * 4
    assert [facts.after.reports[0].epoch for facts in heard.steps] == [0, 1, 2, 3] * 2
    assert heard.checkpoints == [(1, False), (2, True)]
    for summary, _, episodes in heard.rounds:
        returns = [episode.return_raw for episode in episodes]
        assert summary.return_mean == pytest.approx(sum(returns) / len(returns))


def test_paid_rewards_add_up_to_the_return_of_each_episode():
    heard = Listening()
    with open_trainer(replace(TINY, rounds=1), heard) as trainer:
        trainer.run()
    ((_, _, episodes),) = heard.rounds
    for env, episode in enumerate(episodes):
        paid = [facts.rewards[env].components.total for facts in heard.steps]
        assert sum(paid) == pytest.approx(episode.return_raw)
        assert sum(episode.components_sum.values()) == pytest.approx(episode.return_raw)
        assert episode.num_germinated == episode.num_fossilized + episode.num_pruned + episode.num_alive
        assert sum(tally.num_germinated for tally in episode.slots.values()) == episode.num_germinated
        assert sum(tally.num_fossilized for tally in episode.slots.values()) == episode.num_fossilized


def test_rewards_are_scaled_by_a_scale_that_is_frozen_during_a_round():
    heard = Listening()
    with open_trainer(TINY, heard) as trainer:
        trainer.run_round()
        assert isinstance(trainer.client, SimicClient)
        scale = trainer.client.scale.scale
        trainer.run_round()
    for facts in heard.steps[4:]:
        for account, scaled in zip(facts.rewards, facts.scaled, strict=True):
            assert scaled == pytest.approx(account.components.total / scale)


def test_the_first_round_is_learned_in_the_units_of_the_later_ones():
    """Nothing is known of the scale before the first round; it is applied to the whole round before the update."""
    heard = Listening()
    with open_trainer(TINY, heard) as trainer:
        trainer.run_round()
        assert isinstance(trainer.client, SimicClient)
        learned = trainer.client.buffer.rollout().rewards_TN
        paid = [[account.components.total for account in facts.rewards] for facts in heard.steps]
        assert torch.allclose(learned, torch.tensor(paid) / trainer.client.scale.scale, atol=1e-6)
    assert all(scaled is None for facts in heard.steps for scaled in facts.scaled)


@pytest.mark.parametrize(("given", "used"), [(None, 0.995), (0.9, 0.9)])
def test_the_policy_and_the_reward_have_one_discount(given, used):
    """Shaping cancels only under the discount it was made with."""
    with open_trainer(replace(TINY, gamma=given), Listening()) as trainer:
        assert isinstance(trainer.client, SimicClient)
        assert trainer.client.agent.config.gamma == used
        assert trainer.client.rewards.pricing.config.gamma == used


@pytest.mark.parametrize(("gamma", "warned"), [(None, False), (0.92, False), (0.91, True)])
def test_a_discount_that_hides_the_end_of_an_episode_is_reported_once(gamma, warned, capsys):
    """0.92 ** 4 = 0.716, 0.91 ** 4 = 0.686."""
    with open_trainer(replace(TINY, gamma=gamma), Listening()):
        reported = capsys.readouterr().err
    words = "gamma 0.91 over episodes of T = 4 epochs leaves gamma ** T = 0.69 of what is paid at the end; below 0.7"
    assert reported.count(words) == int(warned)
    assert reported.count("\n") == int(warned)
    assert ("Leave --gamma out, or use 0.995" in reported) == warned


def test_a_fixed_controller_runs_in_the_same_loop():
    heard = Listening()
    with open_trainer(replace(TINY, controller="wait_only", rounds=1), heard) as trainer:
        history = trainer.run()
        assert isinstance(trainer.client, FixedClient)
    assert not history[0].update_performed
    assert history[0].num_ops == {"WAIT": 8, "GERMINATE": 0, "ADVANCE": 0, "PRUNE": 0, "FOSSILIZE": 0}
    assert all(facts.decision is None for facts in heard.steps)


def test_train_heuristic_is_the_same_loop_with_the_heuristic():
    history = train_heuristic(TINY, rounds=1)
    assert len(history) == 1
    assert not history[0].update_performed


def test_a_stop_request_ends_the_run_at_the_boundary_and_saves():
    stop, heard = StopSignals(), Listening()
    stop.after_round = True
    with open_trainer(TINY, heard, stop) as trainer:
        assert len(trainer.run()) == 1
    assert heard.checkpoints == [(1, True)]


def test_too_many_rollbacks_end_the_run(monkeypatch):
    with open_trainer(TINY, Listening()) as trainer:
        monkeypatch.setattr(trainer.rollbacks, "cap", 0)
        trainer.rollbacks.num_total = 1
        with pytest.raises(RollbackLimitReached):
            trainer.run()


@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        ({"workers": 1}, ("inline", None)),
        ({"workers": 2}, ("process", 2)),
        ({"workers": 2, "worker_kind": "process", "envs": 4}, ("process", 2)),
        ({"worker_kind": "inline"}, ("inline", None)),
        ({"worker_kind": "simulated", "workers": 3}, ("simulated", 3)),
        ({"workers": 1, "worker_kind": "process"}, ("process", 1)),
    ],
)
def test_where_hosts_run(changes, plan):
    assert worker_plan(TrainingConfig(**{"envs": 16, **changes})) == plan


def test_controllers_that_need_a_declaration_cannot_be_run_by_name():
    check_controller("ppo")
    check_controller("heuristic")
    for name in ("schedule", "rate_matched", "heuristik"):
        with pytest.raises(ValueError, match=f"unknown controller '{name}'. Known: ppo, wait_only"):
            check_controller(name)


def test_the_composition_root_hides_no_functions():
    tree = ast.parse(inspect.getsource(vectorized))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    nested = [
        inner.name
        for outer in functions
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and inner is not outer
    ]
    assert nested == []
