"""Growing as Gymnasium envs: spaces, masks, seeds, ends of episodes, and learners that play them."""

import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import esper.gym
from benchmarks.grow_env import MASKABLE, RANDOM, Setting, run_maskable, run_random
from esper.gym import WORLDS, GrowEnv, GrowVectorEnv, WorldEnv
from esper.gym.choices import joint_choices
from esper.leyline import LifecycleOp, RollbackReason
from esper.simic.agent.gym import GymConfig, RecurrentPPO, call_action_masks

IDS = ("esper/Grow-v0", *(f"esper/{world.capitalize()}-v0" for world in WORLDS))
SHORT = {"task": "digits_blind", "budget": 1300, "horizon": 4, "backend": "torch"}


def make(env_id: str) -> gymnasium.Env:
    return gymnasium.make(env_id, **(SHORT if env_id == "esper/Grow-v0" else {}))


def play(env: gymnasium.Env, seed: int | None, rng: np.random.Generator) -> list[tuple[bytes, float, bool, bool]]:
    """One episode of random legal actions, as bits."""
    obs, info = env.reset(seed=seed)
    rows, over = [(obs.tobytes(), 0.0, False, False)], False
    while not over:
        action = rng.choice(np.flatnonzero(info["action_mask"]))
        obs, reward, terminated, truncated, info = env.step(action)
        assert info["was_legal"]
        over = terminated or truncated
        rows.append((obs.tobytes(), reward, terminated, truncated))
    return rows


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_own_checks_pass(env_id: str) -> None:
    env = make(env_id)
    with warnings.catch_warnings():
        warnings.filterwarnings("error")
        warnings.filterwarnings("ignore", message=".*Box observation space m.*mum value is -?infinity.*")
        check_env(env.unwrapped, skip_render_check=False)
    env.close()


@pytest.mark.parametrize("env_id", ["esper/Grow-v0", "esper/Coin-v0"])
def test_the_same_seed_gives_the_same_trajectory(env_id: str) -> None:
    first, second = make(env_id), make(env_id)
    play(second, 5, np.random.default_rng(9))  # what happened before does not matter
    kept = [play(first, seed, np.random.default_rng(seed)) for seed in (7, 8)]
    assert [play(second, seed, np.random.default_rng(seed)) for seed in (7, 8)] == kept
    following = play(first, None, np.random.default_rng(1))
    assert play(second, None, np.random.default_rng(1)) == following, "later episodes follow from the seed too"
    assert following[0] != kept[0][0] or env_id != "esper/Grow-v0", "and are others"
    first.close()
    second.close()


def test_an_episode_ends_at_its_horizon_and_needs_a_reset() -> None:
    env = GrowEnv(**SHORT)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step(0)
    rows = play(env, 0, np.random.default_rng(0))
    assert [row[2:] for row in rows] == [(False, False)] * 4 + [(True, False)]
    with pytest.raises(gymnasium.error.ResetNeeded, match="episode is over"):
        env.step(0)
    env.close()


def test_the_info_carries_report_and_reward_terms() -> None:
    env = GrowEnv(**SHORT)
    _, info = env.reset(seed=0)
    assert info["report"].epochs_done == 0
    action = next(i for i, choice in enumerate(env.choices) if choice.op is LifecycleOp.GERMINATE and i in _legal(info))
    _, reward, _, _, info = env.step(action)
    chosen = env.choices[action]
    assert info["outcome"].op is LifecycleOp.GERMINATE
    assert {slot.slot_id: slot.blueprint for slot in info["report"].slots}[chosen.slot] == chosen.blueprint
    assert sum(info["reward_terms"].values()) == pytest.approx(reward)
    env.close()


def _legal(info: dict) -> set[int]:
    return set(np.flatnonzero(info["action_mask"]).tolist())


def test_an_illegal_action_waits_and_says_so() -> None:
    env, patient = WorldEnv("decoy"), WorldEnv("decoy")
    env.reset(seed=0)
    patient.reset(seed=0)
    illegal = int(np.flatnonzero(~env.action_masks())[0])
    obs, _, _, _, info = env.step(illegal)
    waited, _, _, _, waited_info = patient.step(0)
    assert obs.tobytes() == waited.tobytes()
    assert (info["was_legal"], waited_info["was_legal"]) == (False, True)
    with pytest.raises(ValueError, match=r"action must be in 0\.\.117, got 118"):
        env.step(118)


def test_unknown_worlds_tasks_and_render_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown world 'moon'\. Known: decoy"):
        WorldEnv("moon")
    with pytest.raises(ValueError, match="moon"):
        GrowEnv(task="moon")
    with pytest.raises(ValueError, match="render_mode must be 'ansi' or None, got 'human'"):
        WorldEnv("decoy", render_mode="human")
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        GrowVectorEnv(num_envs=0)


def test_a_host_is_shown_as_text() -> None:
    env = WorldEnv("decoy", render_mode="ansi")
    env.reset(seed=0)
    env.step(next(i for i, choice in enumerate(env.choices) if choice.op is LifecycleOp.GERMINATE))
    shown = env.render()
    assert shown is not None
    assert shown.splitlines()[0].startswith("epoch 1 of ")
    assert "training  inert_a  alpha 0.00" in shown


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_masks_are_exact(seed: int) -> None:
    """Every action that is legal is carried out as it is; the world would refuse it otherwise."""
    env = WorldEnv("parasite")
    rng = np.random.default_rng(seed)
    _, info = env.reset(seed=seed)
    over = False
    while not over:
        assert set(np.flatnonzero(env.action_masks())) == _legal(info)
        action = int(rng.choice(sorted(_legal(info))))
        _, _, over, _, info = env.step(action)
        chosen, outcome = env.choices[action], info["outcome"]
        assert (outcome.op, outcome.slot, outcome.applied) == (chosen.op, chosen.slot, True)


def test_choices_of_several_layouts_are_one_list() -> None:
    decoy, coin = WorldEnv("decoy"), WorldEnv("coin")
    layouts = [env._game._pool.context.layout for env in (decoy, coin)]
    both = joint_choices(layouts)
    assert both[: len(decoy.choices)] == decoy.choices
    assert set(both) == {*decoy.choices, *coin.choices}
    assert len(set(both)) == len(both)


# ---- several tasks


def test_several_tasks_have_one_space_and_take_turns() -> None:
    env = GrowEnv(("digits_blind", "digits_mlp"), horizon=2, backend="torch")
    played = []
    for seed in (0, None, None):
        rows = play(env, seed, np.random.default_rng(0))
        assert len(rows) == 3
        played.append(env._before().context.task)
    assert played == ["digits_blind", "digits_mlp", "digits_blind"]
    own = {name for name in env.columns if name.startswith("r")}
    assert {name.split(".")[0] for name in own} == {choice.slot for choice in env.choices if choice.slot}
    assert {choice.blueprint.split(".")[0] for choice in env.choices if choice.blueprint} == {"cnn", "mlp"}
    env.close()
    side = GrowVectorEnv(("digits_blind", "digits_mlp"), num_envs=3, workers=1, backend="torch", horizon=2)
    assert side.single_action_space == env.action_space
    _, infos = side.reset(seed=0)
    assert infos["task"].tolist() == ["digits_blind", "digits_mlp", "digits_blind"]
    side.close()


def test_the_nursery_has_a_test_set_in_the_same_spaces() -> None:
    train, test = GrowEnv("nursery", backend="torch"), GrowEnv("nursery", use_test_set=True, backend="torch")
    assert train.observation_space == test.observation_space
    assert (train.choices, train.columns) == (test.choices, test.columns), "a policy of one can play the other"
    names = []
    for env in (train, test):
        obs, info = env.reset(seed=0)
        assert env.observation_space.contains(obs)
        names.append(info["task"].partition(":")[0])
        env.step(int(np.flatnonzero(info["action_mask"])[-1]))
        env.close()
    assert names == ["nursery", "heldout"]
    with pytest.raises(ValueError, match="only the task 'nursery' has a test set, got digits_blind"):
        GrowEnv("digits_blind", use_test_set=True)
    with pytest.raises(ValueError, match="calibration_runs must be 0 with several tasks"):
        GrowEnv(("digits_blind", "digits_mlp"), calibration_runs=5)


# ---- side by side


def run_vector(envs: GrowVectorEnv, steps: int, seed: int) -> list[tuple[bytes, ...]]:
    rng = np.random.default_rng(seed)
    obs, _ = envs.reset(seed=seed)
    rows = [(obs.tobytes(),)]
    for _ in range(steps):
        actions = np.array([rng.choice(np.flatnonzero(legal)) for legal in envs.action_masks()])
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        assert len(infos["report"]) == envs.num_envs
        rows.append((obs.tobytes(), rewards.tobytes(), terminated.tobytes(), truncated.tobytes()))
    envs.close()
    return rows


def test_workers_do_not_change_a_vector_env() -> None:
    alone = run_vector(GrowVectorEnv("digits_blind", num_envs=2, workers=1, backend="torch", horizon=3), 8, 3)
    spread = run_vector(GrowVectorEnv("digits_blind", num_envs=2, workers=2, backend="torch", horizon=3), 8, 3)
    assert alone == spread


def test_vector_episodes_begin_anew_on_the_step_after_their_end() -> None:
    envs = gymnasium.make_vec("esper/Grow-v0", num_envs=2, task="digits_blind", workers=1, backend="torch", horizon=2)
    envs.reset(seed=0)
    ends = []
    for _ in range(6):
        _, rewards, terminated, _, infos = envs.step(np.zeros(2, dtype=np.int64))
        ends.append((terminated.tolist(), [report.epochs_done for report in infos["report"]], bool(rewards.any())))
    assert [end for end, _, _ in ends] == [[False] * 2, [True] * 2, [False] * 2] * 2
    assert [done for _, done, _ in ends] == [[1, 1], [2, 2], [0, 0]] * 2
    assert not ends[2][2], "a step that only resets pays nothing"
    envs.close()


def test_an_env_that_ends_early_begins_anew_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 1 diverges in its second epoch; host 0 goes on as if nothing had happened beside it."""
    from esper.simic.training import parallel_env_state
    from esper.tolaria.governor import Verdict

    real = parallel_env_state.ParallelEnvState.judge

    def judge(env: parallel_env_state.ParallelEnvState, values: list[float]) -> Verdict:
        found = real(env, values)
        if (env.env_id, env.episode, env.epoch) == (1, 0, 1):
            values = [float("nan")] * len(values)
            found = real(env, values)
            assert env.governor is not None
        return found

    calm = GrowVectorEnv("digits_blind", num_envs=2, workers=1, backend="torch", horizon=4)
    calm.reset(seed=0)
    kept = [calm.step(np.zeros(2, dtype=np.int64)) for _ in range(4)]
    calm.close()
    monkeypatch.setattr(parallel_env_state.ParallelEnvState, "judge", judge)
    envs = GrowVectorEnv("digits_blind", num_envs=2, workers=1, backend="torch", horizon=4)
    envs.reset(seed=0)
    seen = [envs.step(np.zeros(2, dtype=np.int64)) for _ in range(4)]
    envs.close()
    assert [row[2].tolist() for row in seen] == [[False, False], [False, True], [False, False], [True, False]]
    assert seen[1][4]["report"][1].rollback_reason is RollbackReason.NONFINITE
    assert [row[4]["report"][1].epochs_done for row in seen] == [1, 2, 0, 1]
    assert [row[0][0].tobytes() for row in seen] == [row[0][0].tobytes() for row in kept]


# ---- learners


def test_our_learner_plays_it_through_the_same_interface(tmp_path: Path) -> None:
    envs = GrowVectorEnv("digits_blind", num_envs=2, workers=1, backend="torch", horizon=3)
    config = GymConfig(steps_per_round=6, schedule_steps=12, width=8, minibatches=1, gamma=envs.gamma)
    ppo = RecurrentPPO(envs, config, run_seed=0, masks=call_action_masks)
    updates = list(ppo.learn())
    assert all(update["performed"] for update in updates)
    assert len(ppo.episode_returns) >= 2
    envs.close()


def test_the_cue_is_found_with_memory_in_many_envs() -> None:
    envs = SyncVectorEnv([lambda: gymnasium.make("esper/Inert-v0")] * 4)
    ppo = RecurrentPPO(
        envs, GymConfig(steps_per_round=20, schedule_steps=80, width=8), run_seed=0, masks=call_action_masks
    )
    assert len(list(ppo.learn())) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_maskable_ppo_improves_on_random_within_two_minutes() -> None:
    """By a clear margin: the worst quarter of its episodes beats the best quarter of random ones."""
    setting = Setting(task="digits_blind", budget=1_300, horizon=20, minutes=2.0)
    by_chance, learned = run_random(setting, 0), run_maskable(setting, 0)
    assert (by_chance.learner, learned.learner) == (RANDOM, MASKABLE)
    chance = sorted(episode.total for episode in by_chance.tested)
    reached = sorted(episode.total for episode in learned.tested)
    assert reached[len(reached) // 4] > chance[-len(chance) // 4]


def test_everything_is_registered_on_import() -> None:
    assert set(IDS) <= set(gymnasium.registry)
    assert esper.gym.__all__ == ["WORLDS", "GrowEnv", "GrowVectorEnv", "WorldEnv"]
