"""The composition root is the one path of every run, and what it names is what the run uses."""

from dataclasses import replace

import pytest

from esper.leyline.rundir import CHECKPOINTS_DIR
from esper.scripts.cli import main
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import SimicClient
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.run.session import RunStart, start_again, start_new
from esper.simic.run.stop_signals import StopSignals
from esper.simic.training import helpers, vectorized
from esper.simic.training.helpers import run_session, train_heuristic
from esper.simic.training.vectorized import open_session, train_ppo_vectorized
from esper.tolaria.batches import SharedBatchIterator
from tests.simic.training.runs import TINY
from tests.telemetry.logs import events_of, open_log

ONE = replace(TINY, rounds=1)
SMOKE = ["--preset", "smoke", "--task", "digits_mlp", "--rounds", "1", "--worker-kind", "inline", "--console", "off"]


@pytest.fixture
def opened(monkeypatch):
    """The controllers of the trainers that the root has opened."""
    controllers, build = [], vectorized.open_trainer

    def note(config, *rest, **more):
        controllers.append(config.controller)
        return build(config, *rest, **more)

    monkeypatch.setattr(vectorized, "open_trainer", note)
    return controllers


def test_python_commands_and_comparisons_open_their_runs_in_the_same_place(opened, tmp_path):
    train_ppo_vectorized(ONE)
    train_heuristic(ONE)
    main(["train", "ppo", *SMOKE, "--runs", str(tmp_path)])
    main(["train", "heuristic", *SMOKE, "--runs", str(tmp_path)])
    main(["train", "ppo", *SMOKE, "--runs", str(tmp_path), "--dual-ab", "shaped", "sparse"])
    assert opened == ["ppo", "heuristic", "ppo", "heuristic", "ppo", "ppo"]


def test_a_run_with_a_directory_learns_what_one_without_does(tmp_path):
    agent, history = train_ppo_vectorized(TINY)
    end = run_session(start_new(TINY, tmp_path, "a"), StopSignals())
    kept = PPOAgent.load(tmp_path / "a" / CHECKPOINTS_DIR / "ckpt-00000002")
    assert kept.to_files() == agent.to_files()
    assert [row.return_mean for row in end.history] == [row.return_mean for row in history]


@pytest.mark.parametrize(("controller", "name"), [("ppo", "train_ppo_vectorized"), ("heuristic", "train_heuristic")])
def test_the_command_trains_through_the_function(monkeypatch, tmp_path, controller, name):
    returned, real = [], getattr(helpers, name)

    def note(*args, **kwargs):
        returned.append(real(*args, **kwargs))

    monkeypatch.setattr(helpers, name, note)
    main(["train", controller, *SMOKE, "--runs", str(tmp_path)])
    (result,) = returned
    agent, rounds = result if controller == "ppo" else (None, result)
    assert len(rounds) == 1
    assert agent is None or agent.updates == 1


def test_an_open_run_of_a_fixed_controller_trains_no_policy():
    with (
        open_session(RunStart(config=replace(ONE, controller="heuristic"))) as session,
        pytest.raises(ValueError, match="controller must be 'ppo' to train a policy, got 'heuristic'"),
    ):
        train_ppo_vectorized(session=session)


# ---- the parts that the root names


def test_events_of_a_run_without_a_directory_go_to_the_hub_of_the_process(monkeypatch, tmp_path):
    with open_log(tmp_path, strict=True) as log:
        monkeypatch.setattr(vectorized, "get_hub", lambda: log)
        train_ppo_vectorized(ONE)
    assert [event["type"] for event in events_of(tmp_path, "RUN_STARTED", "RUN_ENDED")] == ["RUN_STARTED", "RUN_ENDED"]


def test_rewards_are_scaled_by_the_normalizer_of_the_root(monkeypatch):
    class Doubling(RewardNormalizer):
        @property
        def scale(self):
            return 2.0 * super().scale

    agent, _ = train_ppo_vectorized(ONE)
    monkeypatch.setattr(vectorized, "RewardNormalizer", Doubling)
    other, _ = train_ppo_vectorized(ONE)
    assert other.to_files() != agent.to_files()


def test_hosts_are_trained_on_the_batches_of_the_root(monkeypatch):
    epochs = []

    class Noting(SharedBatchIterator):
        def epoch(self, episode, epoch):
            epochs.append((episode, epoch))
            return super().epoch(episode, epoch)

    monkeypatch.setattr(vectorized, "SharedBatchIterator", Noting)
    train_ppo_vectorized(ONE)
    assert epochs == [(0, epoch) for epoch in range(ONE.episode_length)]


def test_the_policy_is_the_agent_of_the_root(monkeypatch):
    class Mine(PPOAgent):
        pass

    monkeypatch.setattr(vectorized, "PPOAgent", Mine)
    agent, _ = train_ppo_vectorized(ONE)
    assert type(agent) is Mine


def test_a_resume_loads_the_agent(monkeypatch, tmp_path):
    run_session(start_new(ONE, tmp_path, "a"), StopSignals())
    loaded, load = [], PPOAgent.load

    def note(source):
        loaded.append(load(source))
        return loaded[-1]

    monkeypatch.setattr(vectorized.PPOAgent, "load", note)
    with open_session(start_again(tmp_path / "a", {"rounds": 2})) as session:
        session.run()
    assert len(loaded) == 1
    assert session.trainer.client.agent is loaded[0]
    assert loaded[0].updates == 2


def test_debug_looks_at_gradients_and_at_an_alarm_at_weights_through_the_root(monkeypatch, tmp_path):
    looks = []

    def noting(name):
        real = getattr(vectorized, name)

        def note(*args):
            looks.append(name)
            return real(*args)

        monkeypatch.setattr(vectorized, name, note)

    noting("collect_per_layer_gradients")
    noting("check_numerical_stability")
    update = SimicClient.update
    monkeypatch.setattr(SimicClient, "update", lambda client: {**update(client), "ratio_max": 1e6})
    with open_log(tmp_path, strict=True) as log:
        monkeypatch.setattr(vectorized, "get_hub", lambda: log)
        train_ppo_vectorized(ONE, level="debug")
    alarms = [event["data"] for event in events_of(tmp_path, "ANOMALY_DETECTED")]
    (alarm,) = [data for data in alarms if data["metric"] == "ratio_max"]
    assert alarm["debug"]["layers"]["num_layers"] > 0
    assert alarm["debug"]["stability"] is not None
    assert alarm["debug"]["grad_norm"] > 0.0
    assert looks == ["collect_per_layer_gradients", "collect_per_layer_gradients", "check_numerical_stability"]
