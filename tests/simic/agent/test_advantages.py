"""Advantages against a sum written out by hand, over episodes that end in every way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.simic.agent.advantages import Rollout, compute_advantages, with_gae
from tests.simic.agent.rounds import play_round, small_agent, small_world

GAMMA, LAM = 0.9, 0.8


@dataclass
class Rows:
    """One env after another, rows in time: kind is one of . (goes on), T, C (truncated), B (both), x (invalid)."""

    kinds: list[str]
    rng_seed: int

    def __post_init__(self) -> None:
        shape = (len(self.kinds[0]), len(self.kinds))
        generator = torch.Generator().manual_seed(self.rng_seed)
        self.rewards, self.values, self.bootstraps = (torch.randn(shape, generator=generator) for _ in range(3))
        self.valid, self.terminated, self.truncated = (self._where(kinds) for kinds in (".TCB", "TB", "CB"))

    def _where(self, wanted: str) -> Tensor:
        return torch.tensor([[kind in wanted for kind in env] for env in self.kinds]).T

    def compute(self, rewards: Tensor | None = None) -> tuple[Tensor, Tensor]:
        unread = torch.zeros(())
        rollout = Rollout(
            inputs=cast(Any, None),
            actions_TNH=unread,
            log_probs_TNH=unread,
            usable_TNH=unread,
            rewards_TN=self.rewards if rewards is None else rewards,
            values_TN=self.values,
            terminated_TN=self.terminated,
            truncated_TN=self.truncated,
            valid_TN=self.valid,
            bootstraps_TN=self.bootstraps,
        )
        return compute_advantages(rollout, gamma=GAMMA, lam=LAM)

    def by_hand(self, step: int, env: int) -> float:
        """Sum over the rest of this row's own episode of discounted one-step errors."""
        total, weight = 0.0, 1.0
        for row in range(step, len(self.kinds[env])):
            kind = self.kinds[env][row]
            following = {".": None, "C": self.bootstraps[row, env]}.get(kind, 0.0)
            if following is None:
                following = self.values[row + 1, env]
            total += weight * float(self.rewards[row, env] + GAMMA * following - self.values[row, env])
            if kind != ".":
                return total
            weight *= GAMMA * LAM
        raise AssertionError("an episode without end")


def _closed(kinds: list[str]) -> str:
    """Ends what would otherwise have no end."""
    for i, kind in enumerate(kinds):
        if kind == "." and (i + 1 == len(kinds) or kinds[i + 1] == "x"):
            kinds[i] = "T"
    return "".join(kinds)


rows_st = st.integers(1, 9).flatmap(
    lambda steps: st.builds(
        Rows,
        kinds=st.lists(
            st.lists(st.sampled_from("...TCBx"), min_size=steps, max_size=steps).map(_closed), min_size=1, max_size=3
        ),
        rng_seed=st.integers(0, 2**31),
    )
)


@given(rows_st)
def test_every_row_gets_the_discounted_errors_of_its_own_episode(rows: Rows) -> None:
    advantages_TN, returns_TN = rows.compute()
    for env, kinds in enumerate(rows.kinds):
        for step, kind in enumerate(kinds):
            expected = 0.0 if kind == "x" else rows.by_hand(step, env)
            assert float(advantages_TN[step, env]) == pytest.approx(expected, abs=1e-4)
            target = 0.0 if kind == "x" else expected + float(rows.values[step, env])
            assert float(returns_TN[step, env]) == pytest.approx(target, abs=1e-4)


@given(rows_st, st.data())
def test_a_reward_never_reaches_another_env_or_episode(rows: Rows, data: st.DataObject) -> None:
    env = data.draw(st.integers(0, len(rows.kinds) - 1))
    step = data.draw(st.integers(0, len(rows.kinds[env]) - 1))
    paid = rows.rewards.clone()
    paid[step, env] += 100.0
    changed = rows.compute(paid)[0] != rows.compute()[0]
    expected = torch.zeros_like(changed)
    row = step
    while rows.kinds[env][step] != "x" and row >= 0 and (row == step or rows.kinds[env][row] == "."):
        expected[row, env] = True
        row -= 1
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("kinds", ["...", "..x", ".xT"])
def test_an_episode_without_an_end_is_refused(kinds: str) -> None:
    with pytest.raises(ValueError, match="neither terminated nor truncated"):
        Rows([kinds], 0).compute()


def test_a_rollback_is_charged_to_the_step_that_caused_it() -> None:
    crash = 6
    spec = small_world(rollback_epoch=crash)
    agent = small_agent(spec)
    learner = play_round(
        agent, spec, reward=lambda before, outcome, after: -5.0 if after.rollback_reason is not None else 0.0
    )
    assert learner.buffer is not None
    rollout = learner.buffer.rollout()
    expected = torch.zeros_like(rollout.rewards_TN)
    expected[crash] = -5.0
    assert torch.equal(rollout.rewards_TN, expected)
    assert rollout.terminated_TN[crash].all()
    assert rollout.valid_TN[: crash + 1].all()
    assert not rollout.valid_TN[crash + 1 :].any()
    rollout.values_TN.zero_()
    only_that_step = with_gae(rollout, gamma=GAMMA, lam=0.0, std_floor=1.0)
    assert torch.equal(only_that_step.raw_advantages_TN, expected)
    assert not only_that_step.usable_TNH[crash + 1 :].any()


@pytest.mark.parametrize(("size", "std_floor"), [(1.0, 1e-3), (1.0, 50.0), (1e-3, 1.0)])
def test_each_head_is_centred_and_shrunk_but_never_magnified_beyond_the_floor(size: float, std_floor: float) -> None:
    spec = small_world()
    learner = play_round(
        small_agent(spec), spec, reward=lambda before, outcome, after: size * (outcome.op + 10.0 * after.num_live)
    )
    assert learner.buffer is not None
    experience = with_gae(learner.buffer.rollout(), gamma=GAMMA, lam=0.9, std_floor=std_floor)
    for head in range(len(HEAD_NAMES)):
        usable_TN = experience.usable_TNH[..., head]
        raw, scaled = experience.raw_advantages_TN[usable_TN], experience.advantages_TNH[..., head][usable_TN]
        spread = raw.std(unbiased=False)
        assert float(spread) > 0.0
        assert torch.allclose(scaled, (raw - raw.mean()) / spread.clamp(min=std_floor), atol=1e-4)
        assert not experience.advantages_TNH[..., head][~usable_TN].any()
