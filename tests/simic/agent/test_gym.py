"""PPO over Gymnasium envs: it learns, keeps to the masks, remembers, repeats, and knows how episodes end."""

import json
import math
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from benchmarks.cue_recall import CueRecall
from esper.leyline import ModelFileError, NumericFailure
from esper.simic.agent.advantages import with_gae
from esper.simic.agent.gym import GymConfig, RecurrentPPO, call_action_masks
from esper.simic.agent.gym_envs import TensorEnvs

QUICK = {"steps_per_round": 32, "minibatches": 2, "width": 32, "lr": 3e-3, "gamma": 0.9}


class TwoDials(gymnasium.Env[Any, Any]):
    """Each dial pays for its highest legal action; a random choice of each is illegal and must never come."""

    observation_space = spaces.Discrete(2, start=5)
    action_space = spaces.MultiDiscrete([3, 4], start=[10, -1])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self._draw()
        return 5, {}

    def _draw(self) -> None:
        self.banned = self.np_random.integers([3, 4])

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        dials = np.asarray(action) - [10, -1]
        assert self.action_space.contains(np.asarray(action))
        assert (dials != self.banned).all(), "an illegal action was taken"
        best = [size - 1 - (ban == size - 1) for size, ban in zip((3, 4), self.banned, strict=True)]
        self.steps += 1
        self._draw()
        return 6, float((dials == best).mean()), self.steps == 4, False, {}

    def action_masks(self) -> Any:
        legal = [np.arange(size) != ban for size, ban in zip((3, 4), self.banned, strict=True)]
        # Nothing is legal after the end, as in many real envs.
        return np.concatenate(legal) & (self.steps < 4)


class Clock(gymnasium.Env[Any, Any]):
    """Pays 1, 2, 3 ... and ends after some steps, one way or the other. The observation is the step."""

    observation_space = spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, *, truncates: bool, length: int = 3) -> None:
        self.truncates = truncates
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.now = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        over = self.now == self.length
        obs = np.array([self.now], np.float32)
        return obs, float(self.now), over and not self.truncates, over and self.truncates, {}


class Broken(Clock):
    """A clock whose steps go wrong, by default the last of its three."""

    def __init__(self, *, truncates: bool = True, reward: float = 1.0, reading: float = 1.0, since: int = 3) -> None:
        super().__init__(truncates=truncates)
        self.reward, self.reading, self.since = reward, reading, since

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        wrong = self.now >= self.since
        return (obs * self.reading if wrong else obs), (self.reward if wrong else reward), *rest  # type: ignore[return-value]


class Endless(Clock):
    """Never over."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([1.0], np.float32), 1.0, False, False, {}


def cue_recall(num_envs: int, *, show_cue: bool = True) -> SyncVectorEnv:
    return SyncVectorEnv([partial(CueRecall, choices=4, delay=2, show_cue=show_cue)] * num_envs)


def mean_return_on_cues(*, show_cue: bool, memory: bool) -> float:
    config = GymConfig(schedule_steps=8_000, memory=memory, **QUICK)
    ppo = RecurrentPPO(cue_recall(16, show_cue=show_cue), config, run_seed=0, masks=call_action_masks)
    for _ in ppo.learn():
        pass
    return float(np.mean(ppo.evaluate(cue_recall(200, show_cue=show_cue), env_seed=1)))


def test_a_cue_is_remembered() -> None:
    assert mean_return_on_cues(show_cue=True, memory=True) > 0.95


@pytest.mark.parametrize(("show_cue", "memory"), [(False, True), (True, False)])
def test_without_cue_or_without_memory_only_the_masks_help(show_cue: bool, memory: bool) -> None:
    # Two of four actions are legal at the end. 0.65 is more than four deviations of 200 coin flips above.
    assert 0.35 < mean_return_on_cues(show_cue=show_cue, memory=memory) < 0.65


def test_masked_multi_discrete_actions_are_learned_and_never_broken() -> None:
    config = GymConfig(schedule_steps=4_000, **QUICK)
    ppo = RecurrentPPO(SyncVectorEnv([TwoDials] * 8), config, run_seed=0, masks=call_action_masks)
    for _ in ppo.learn():
        pass
    # The masks are not observed, yet the best rule needs only them: prefer high actions.
    assert np.mean(ppo.episode_returns[:20]) < 3.0
    assert np.mean(ppo.evaluate(SyncVectorEnv([TwoDials] * 20), env_seed=1)) == 4.0


def rollout_of_clock(*, truncates: bool) -> Any:
    config = GymConfig(schedule_steps=100, steps_per_round=6, width=8)
    ppo = RecurrentPPO(SyncVectorEnv([partial(Clock, truncates=truncates)]), config, run_seed=0)
    return ppo, ppo.collect()


@pytest.mark.parametrize("truncates", [False, True])
def test_returns_of_ended_and_cut_episodes_by_hand(truncates: bool) -> None:
    _, rollout = rollout_of_clock(truncates=truncates)
    # Row 3 shows the last observation and only resets; rows 4 and 5 begin an episode that the round cuts.
    assert rollout.inputs.obs_TND[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1]
    assert rollout.inputs.starts_TN[:, 0].tolist() == [True, False, False, False, True, False]
    assert rollout.valid_TN[:, 0].tolist() == [True, True, True, False, True, True]
    assert rollout.rewards_TN[:, 0].tolist() == [1, 2, 3, 0, 1, 2]
    beyond = rollout.bootstraps_TN[5, 0]
    after = rollout.values_TN[3, 0] if truncates else torch.tensor(0.0)
    returns = with_gae(rollout, gamma=0.5, lam=1.0, std_floor=1.0).returns_TN[:, 0]
    expected = torch.stack(
        [
            1 + 0.5 * 2 + 0.25 * 3 + 0.125 * after,
            2 + 0.5 * 3 + 0.25 * after,
            3 + 0.5 * after,
            torch.tensor(0.0),
            1 + 0.5 * 2 + 0.25 * beyond,
            2 + 0.5 * beyond,
        ]
    )
    assert float(rollout.values_TN[3, 0]) != 0.0
    torch.testing.assert_close(returns, expected)


def test_the_value_beyond_a_round_is_the_first_of_the_next_one() -> None:
    ppo, rollout = rollout_of_clock(truncates=True)
    following = ppo.collect()
    assert following.inputs.obs_TND[0, 0, 0] == 2
    assert torch.equal(following.values_TN[0], rollout.bootstraps_TN[-1])


def test_a_whole_round_at_once_gives_what_step_by_step_gave() -> None:
    ppo, first = rollout_of_clock(truncates=False)
    second = ppo.collect()
    assert not second.inputs.starts_TN[0].any(), "it begins in mid-episode"
    assert float(second.inputs.state[0].abs().sum()) > 0.0, "with memory"
    for rollout in (first, second):
        with torch.no_grad():
            values_TN = ppo.network.value.denormalize(ppo.network(rollout.inputs).values_B).view(6, 1)
        torch.testing.assert_close(values_TN, rollout.values_TN)


def test_a_round_is_learned_from_as_it_was_lived() -> None:
    """Under the statistics it was acted with, at the rate of its schedule, and from the steps of episodes alone."""
    config = GymConfig(
        schedule_steps=36, steps_per_round=8, width=8, ppo_epochs=3, minibatches=1, target_kl=1e9, lr=1e-2
    )
    ppo = RecurrentPPO(SyncVectorEnv([partial(Clock, truncates=True)] * 2), config, run_seed=0)
    for steps_before, update in zip((0, 12, 24), ppo.learn(), strict=True):
        assert ppo.last_ratios_B is not None
        first, *later = ppo.last_ratios_B.chunk(3)
        assert update["ratio_max"] == ppo.last_ratios_B.max()
        assert torch.allclose(first, torch.ones_like(first), rtol=0.0, atol=1e-5)
        assert min(float((ratios - 1.0).abs().max()) for ratios in later) > 1e-4
        assert [group["lr"] for group in ppo.optimizer.param_groups] == [config.learning_rate_at(steps_before)]
        assert ppo.network.obs_stats.count == ppo.network.value.returns.count == ppo.env_steps == steps_before + 12
    assert float(ppo.network.obs_stats.mean) == 1.0, "0, 1 and 2: the observation after the last step is not acted on"


def test_an_episode_is_evaluated_once_also_beside_longer_ones() -> None:
    ppo, _ = rollout_of_clock(truncates=True)
    envs = SyncVectorEnv([partial(Clock, truncates=True, length=length) for length in (3, 9, 4)])
    assert ppo.evaluate(envs, env_seed=0) == [6.0, 45.0, 10.0]


TRIED: dict[str, Any] = {
    "schedule_steps": 150,
    "steps_per_round": 24,
    "memory": False,
    "width": 9,
    "gamma": 0.5,
    "lam": 0.5,
    "ppo_epochs": 3,
    "minibatches": 1,
    "clip_ratio": 0.05,
    "target_kl": 1e-4,
    "advantage_std_floor": 0.7,
    "lr": 1e-2,
    "lr_final_share": 0.9,
    "entropy_coef": 0.5,
    "entropy_coef_final": 0.5,
    "epsilon": 0.3,
    "value_coef": 0.1,
    "max_grad_norm": 0.01,
}


def weights_with(**changes: Any) -> list[bytes]:
    usual = {"schedule_steps": 100, "steps_per_round": 16, "width": 8, "lr": 3e-2, "target_kl": 1e9}
    ppo = RecurrentPPO(cue_recall(4), GymConfig(**usual | changes), run_seed=0, masks=call_action_masks)
    for _ in ppo.learn():
        pass
    return [value.numpy().tobytes() for value in ppo.network.state_dict().values()]


def test_each_setting_matters() -> None:
    assert TRIED.keys() | {"epsilon_op", "op_prior"} == {field.name for field in fields(GymConfig)}, (
        "the two of Tamiyo's op"
    )
    usual = weights_with()
    assert [name for name, value in TRIED.items() if weights_with(**{name: value}) == usual] == []


def weights_after_training(run_seed: int) -> list[bytes]:
    config = GymConfig(schedule_steps=1_500, **QUICK)
    ppo = RecurrentPPO(cue_recall(8), config, run_seed=run_seed, masks=call_action_masks)
    for _ in ppo.learn():
        pass
    return [value.numpy().tobytes() for value in ppo.network.state_dict().values()]


def test_the_same_seed_gives_the_same_bits() -> None:
    first = weights_after_training(3)
    torch.rand(5)  # global draws of others change nothing
    assert weights_after_training(3) == first
    assert weights_after_training(4) != first


def test_a_saved_learner_plays_as_before_and_goes_on_learning(tmp_path: Path) -> None:
    ppo = RecurrentPPO(cue_recall(4), GymConfig(schedule_steps=300, **QUICK), run_seed=3, masks=call_action_masks)
    next(ppo.learn())
    ppo.save(tmp_path / "learner")
    again = RecurrentPPO.load(tmp_path / "learner", cue_recall(4), masks=call_action_masks)
    assert (again.config, again.run_seed, again.env_steps, again.updates) == (ppo.config, 3, ppo.env_steps, 1)
    assert again.evaluate(cue_recall(8), env_seed=5) == ppo.evaluate(cue_recall(8), env_seed=5)
    for name, weights in ppo.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], weights), name
    for mine, theirs in zip(ppo.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(ppo.optimizer.state[mine]["exp_avg"], again.optimizer.state[theirs]["exp_avg"])
    for _ in again.learn():
        pass
    assert again.env_steps >= 300


def test_a_learner_is_loaded_whole_or_refused(tmp_path: Path) -> None:
    ppo = RecurrentPPO(cue_recall(2), GymConfig(**QUICK), run_seed=3)
    ppo.save(tmp_path)
    with pytest.raises(
        ModelFileError, match=r"trained with 5 observed numbers and \(4,\) choices, but the envs have 4"
    ):
        RecurrentPPO.load(tmp_path, gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"))
    RecurrentPPO(cue_recall(2), GymConfig(**QUICK), run_seed=3, masks=call_action_masks).save(str(tmp_path / "masked"))
    with pytest.raises(ModelFileError, match=r"trained with action masks. Give `masks` here too"):
        RecurrentPPO.load(str(tmp_path / "masked"), cue_recall(2))
    facts = json.loads((tmp_path / "agent.json").read_text())
    (tmp_path / "agent.json").write_text(json.dumps(facts | {"config": facts["config"] | {"gamma": 2.0}}))
    with pytest.raises(ModelFileError, match=r"does not describe a learner .*gamma must be in \(0, 1\], got 2.0"):
        RecurrentPPO.load(tmp_path, cue_recall(2))
    (tmp_path / "policy.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"policy.safetensors is missing"):
        RecurrentPPO.load(tmp_path, cue_recall(2))


def test_only_steps_of_episodes_count() -> None:
    config = GymConfig(schedule_steps=12, steps_per_round=4, width=8)
    ppo = RecurrentPPO(SyncVectorEnv([partial(Clock, truncates=True)] * 2), config, run_seed=0)
    counts = [ppo.env_steps for _ in ppo.learn()]
    assert counts == [6, 12]
    assert ppo.episode_returns == [6.0] * 4


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    same_step = SyncVectorEnv([partial(Clock, truncates=True)], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="autoreset_mode NEXT_STEP"):
        RecurrentPPO(same_step, GymConfig(), run_seed=0)
    with pytest.raises(ValueError, match="MultiDiscrete actions, got Box"):
        TensorEnvs(gymnasium.make_vec("Pendulum-v1", 1, vectorization_mode="sync"), None)
    with pytest.raises(ValueError, match=r"shape \(1, 2\), got \(1, 3\)"):
        TensorEnvs(SyncVectorEnv([partial(Clock, truncates=True)]), lambda envs: np.ones((1, 3), bool)).reset(0)
    with pytest.raises(ValueError, match=r"expected a vector env, got .*Clock.*make_vec"):
        RecurrentPPO(Clock(truncates=True), GymConfig(), run_seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected masks to be a function of the vector env.*, got \[\[ True"):
        TensorEnvs(SyncVectorEnv([partial(Clock, truncates=True)]), np.ones((1, 2), bool))  # type: ignore[arg-type]
    ppo, _ = rollout_of_clock(truncates=True)
    with pytest.raises(ValueError, match=r"with 1 observed numbers and \(2,\) choices, got 5 and \(4,\)"):
        ppo.evaluate(cue_recall(1), env_seed=0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gamma", 1.5, r"must be in \(0, 1\], got 1.5"),
        ("gamma", math.nan, r"must be in \(0, 1\], got nan"),
        ("ppo_epochs", 2.5, "must be a whole number of at least 1 and at most [0-9,]+, got 2.5"),
        ("ppo_epochs", 0, "must be a whole number of at least 1 and at most [0-9,]+, got 0"),
        ("schedule_steps", math.inf, "must be a whole number of at least 1 and at most [0-9,]+, got inf"),
        ("lr", math.inf, "must be above 0 and at most 1e30, got inf"),
        ("max_grad_norm", math.nan, "must be above 0 and at most 1e30, got nan"),
        ("value_coef", math.inf, "must be at least 0 and at most 1e30, got inf"),
        ("entropy_coef", math.nan, "must be at least 0 and at most 1e30, got nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(field: str, value: float, words: str) -> None:
    with pytest.raises(ValueError, match=f"{field} {words}"):
        GymConfig(**{field: value})  # type: ignore[arg-type]


def test_masks_of_0_and_1_mean_what_booleans_mean_and_others_are_refused() -> None:
    def masked(*row: float, dtype: Any) -> Any:
        envs = SyncVectorEnv([partial(Clock, truncates=True)])
        return TensorEnvs(envs, lambda _: np.array([row], dtype)).reset(0).legal_NA

    assert masked(0, 1, dtype=np.int8).tolist() == masked(0, 1, dtype=bool).tolist() == [[False, True]]
    assert masked(0, 1, dtype=np.int8).dtype == torch.bool
    listed = TensorEnvs(SyncVectorEnv([partial(Clock, truncates=True)]), lambda _: [[False, True]])
    assert listed.reset(0).legal_NA.tolist() == [[False, True]]
    for row, dtype in (((0, 2), np.int64), ((0.0, 1.0), np.float32)):
        with pytest.raises(ValueError, match="expected action masks of booleans, or of 0 and 1, got"):
            masked(*row, dtype=dtype)


class Stuck(TwoDials):
    """From its third step on the second dial cannot be set at all."""

    def action_masks(self) -> Any:
        return super().action_masks() & ((np.arange(7) < 3) | (self.steps < 2))


def test_an_env_that_leaves_nothing_legal_is_named() -> None:
    config = GymConfig(schedule_steps=100, steps_per_round=12, width=8)
    ppo = RecurrentPPO(SyncVectorEnv([TwoDials, Stuck]), config, run_seed=0, masks=call_action_masks)
    with pytest.raises(
        ValueError, match=r"env 1, step 2 since its reset: .* got none of 4 in dimension 1; mend its masks"
    ):
        next(ppo.learn())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reward": math.nan}, r"env 1, step 3 since its reset: expected finite numbers, got reward = nan"),
        ({"reward": math.inf}, r"env 1, step 3 .* got reward = inf"),
        ({"reading": math.nan}, r"env 1, step 3 .* got observation\[0\] = nan"),
        ({"reading": math.inf, "truncates": False}, r"env 1, step 3 .* got observation\[0\] = inf"),
        ({"reward": 3e38, "since": 1}, r"env 1, step 0 of the rollout: expected a finite return, got inf"),
    ],
)
def test_a_number_that_is_not_finite_is_reported_before_anything_learns_from_it(wrong: Any, words: str) -> None:
    envs = SyncVectorEnv([partial(Clock, truncates=True), partial(Broken, **wrong)])
    ppo = RecurrentPPO(envs, GymConfig(schedule_steps=100, steps_per_round=12, width=8, lam=1.0, gamma=1.0), run_seed=0)
    before = [value.clone() for value in ppo.network.state_dict().values()]
    with pytest.raises(NumericFailure, match=words):
        next(ppo.learn())
    assert all(torch.equal(*pair) for pair in zip(before, ppo.network.state_dict().values(), strict=True))


def test_an_evaluation_without_end_says_so() -> None:
    ppo, _ = rollout_of_clock(truncates=True)
    with pytest.raises(ValueError, match=r"2 of 3 episodes are not over after 20 steps; .*TimeLimit"):
        ppo.evaluate(
            SyncVectorEnv([partial(kind, truncates=True) for kind in (Clock, Endless, Endless)]),
            env_seed=0,
            max_steps=20,
        )


def test_without_gymnasium_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['gymnasium'] = None; import esper.simic.agent.gym"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'esper-growth[gym]'" in done.stderr
