"""The update against numbers worked out by hand: losses, schedules, what is clipped, and the order things happen in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.evidence.sandbox_training import make_learner, play_episodes
from esper.leyline import ActionOutcome, EpochReport
from esper.simic.agent.advantages import Experience, Rollout
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.gym import FlatMasks
from esper.simic.agent.policy import ForwardPass
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.ppo_update import Losses, UpdateSettings, _head_weights, compute_losses, run_epochs
from esper.simic.agent.sampling import Exploration
from esper.simic.agent.tamiyo_inputs import OP
from esper.simic.client import FrozenPolicy
from tests.fakes import seeds
from tests.simic.agent.rounds import evaluate, learn, learn_from, lived_buffer, play_round, small_agent, small_world

# ---- a policy that is a table: one step of two envs, two heads of two choices


@dataclass(frozen=True)
class Envs:
    """All there is to see is which env it is."""

    numbers: Tensor

    def parts(self, envs: Tensor) -> list[tuple[Tensor, Envs]]:
        return [(envs, Envs(self.numbers[envs]))]


class Table(nn.Module):
    """Answers each env with given probabilities and a given value; returns are normalised as (return - 1) / 2."""

    value: Any = SimpleNamespace(normalize=lambda returns: (returns - 1.0) / 2.0)

    def __init__(self, first_of_head: list[list[float]], values: list[float]) -> None:
        super().__init__()
        firsts_HN = torch.tensor(first_of_head)
        self.logits_HNC = nn.Parameter(torch.stack([firsts_HN, 1.0 - firsts_HN], dim=-1).log())
        self.values_N = nn.Parameter(torch.tensor(values))

    def forward(self, inputs: Envs) -> ForwardPass:
        envs = inputs.numbers
        memory_1NW = torch.zeros(1, len(envs), 1)
        return ForwardPass(
            logits_fn=lambda head, actions_BH: self.logits_HNC[head, envs],
            masks=FlatMasks(torch.ones(len(envs), 4, dtype=torch.bool), (2, 2)),
            values_B=self.values_N[envs],
            memory_TNW=memory_1NW,
            state=(memory_1NW, memory_1NW),
        )

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        return {"first": [], "second": []}


# Every choice was the first one. The second head had none in the first env.
NOW = [[0.6, 0.3], [0.9, 0.25]]
THEN = [[0.4, 0.6], [0.9, 0.2]]
USABLE = [[True, True], [False, True]]
ADVANTAGES = [[2.0, -1.0], [9.0, -2.0]]
VALUES, RETURNS = [0.5, -1.0], [3.0, 5.0]
PRIOR = (log(0.8), log(0.2))


def settings(learning_rate: float = 0.1, entropy_coef: float = 0.1, **changes: float) -> UpdateSettings:
    usual = PPOConfig(ppo_epochs=1, minibatches=1, clip_ratio=0.2, target_kl=1e9, value_coef=0.5, max_grad_norm=1e9)
    return UpdateSettings(
        config=replace(usual, **changes),  # type: ignore[arg-type]
        learning_rate=learning_rate,
        entropy_coef=entropy_coef,
        exploration=Exploration(epsilons=(0.0, 0.0), priors=(PRIOR, None)),
    )


def two_rows() -> tuple[Table, Experience[Envs]]:
    def by_env(values: Any) -> Tensor:
        return torch.tensor(values).T[None]

    yes_TN = torch.ones(1, 2, dtype=torch.bool)
    rollout = Rollout(
        inputs=Envs(torch.arange(2)),
        actions_TNH=torch.zeros(1, 2, 2, dtype=torch.long),
        log_probs_TNH=by_env(THEN).log(),
        usable_TNH=by_env(USABLE),
        values_TN=torch.tensor([VALUES]),
        rewards_TN=torch.tensor([RETURNS]),
        terminated_TN=yes_TN,
        truncated_TN=~yes_TN,
        valid_TN=yes_TN,
        bootstraps_TN=torch.zeros(1, 2),
    )
    experience = Experience(
        rollout=rollout,
        usable_TNH=rollout.usable_TNH,
        returns_TN=torch.tensor([RETURNS]),
        raw_advantages_TN=torch.zeros(1, 2),
        advantages_TNH=by_env(ADVANTAGES),
    )
    return Table(NOW, VALUES), experience


def losses_of(**changes: float) -> Losses:
    table, experience = two_rows()
    return compute_losses(table, experience, torch.arange(2), settings(**changes))


# Ratios 1.5 and 0.5 of the first head, 1.25 of the second: all beyond the clip of 0.2. Both heads count half; the two
# rows of the first share its half.
POLICY = -(0.25 * min(1.5 * 2, 1.2 * 2) + 0.25 * min(0.5 * -1, 0.8 * -1) + 0.5 * min(1.25 * -2, 1.2 * -2))
VALUE = ((0.5 - 1.0) ** 2 + (-1.0 - 2.0) ** 2) / 2


def pull_to_the_prior(first: float) -> float:
    """KL from the prior to the policy, in units of ln 2."""
    return (0.8 * log(0.8 / first) + 0.2 * log(0.2 / (1.0 - first))) / log(2)


def lack_of_entropy(first: float) -> float:
    return 1.0 + (first * log(first) + (1.0 - first) * log(1.0 - first)) / log(2)


PULL = 0.25 * pull_to_the_prior(0.6) + 0.25 * pull_to_the_prior(0.3) + 0.5 * lack_of_entropy(0.25)


def test_the_losses_of_two_rows_by_hand() -> None:
    found = losses_of()
    assert found.policy.item() == pytest.approx(POLICY, abs=1e-6)
    assert found.value.item() == pytest.approx(VALUE, abs=1e-6)
    assert found.entropy.item() == pytest.approx(PULL, abs=1e-6)


@pytest.mark.parametrize("weights", [{}, {"value_coef": 0.0}, {"entropy_coef": 0.0}, {"value_coef": 2.0}])
def test_the_total_weighs_value_and_pull_by_their_coefficients(weights: dict[str, float]) -> None:
    used = {"value_coef": 0.5, "entropy_coef": 0.1} | weights
    expected = POLICY + used["value_coef"] * VALUE + used["entropy_coef"] * PULL
    assert losses_of(**weights).total.item() == pytest.approx(expected, abs=1e-6)


def test_the_kl_is_that_of_the_whole_action() -> None:
    joint = 1.5, 0.5 * 1.25
    assert losses_of().joint_log_ratio_B.exp().tolist() == pytest.approx(joint, abs=1e-6)
    expected = sum(ratio - 1.0 - log(ratio) for ratio in joint) / 2
    assert losses_of().approx_kl.item() == pytest.approx(expected, abs=1e-6)


def test_a_step_without_a_choice_trains_the_value_alone() -> None:
    table, experience = two_rows()
    forced = replace(experience, usable_TNH=experience.usable_TNH & torch.tensor([False, True])[None, :, None])
    found = compute_losses(table, forced, torch.arange(2), settings())
    assert found.value.item() == pytest.approx(VALUE, abs=1e-6)
    assert found.policy.item() == pytest.approx(-(0.5 * 0.8 * -1 + 0.5 * 1.25 * -2), abs=1e-6)
    found.total.backward()  # type: ignore[no-untyped-call]
    assert table.logits_HNC.grad is not None
    assert table.values_N.grad is not None
    assert not table.logits_HNC.grad[:, 0].any()
    assert table.values_N.grad.all()


def test_the_value_is_judged_on_valid_rows_alone() -> None:
    table, experience = two_rows()
    half = replace(experience, rollout=replace(experience.rollout, valid_TN=torch.tensor([[True, False]])))
    found = compute_losses(table, half, torch.arange(2), settings())
    assert found.value.item() == pytest.approx((0.5 - 1.0) ** 2, abs=1e-6)


def test_a_lonely_step_of_a_minibatch_weighs_no_more_than_others_of_its_round() -> None:
    """The first head has a choice on 1 row of the first env and 2 of each other, the second on 3 of the last."""
    round_TNH = torch.zeros(3, 4, 2, dtype=torch.bool)
    round_TNH[:2, :, 0] = True
    round_TNH[0, 0, 0] = False
    round_TNH[:, 3, 1] = True
    for envs in ([0, 1], [2, 3]):
        usable_BH = round_TNH[:, envs].flatten(0, 1)
        weights_BH = _head_weights(round_TNH, usable_BH, len(envs))
        # 7 rows of the first and 3 of the second in the round, half of them per minibatch; two heads in use.
        expected = usable_BH / torch.tensor([2 * 3.5, 2 * 1.5])
        assert torch.allclose(weights_BH, expected)


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_skipped() -> None:
    table, experience = two_rows()
    table.values_N.register_hook(lambda grad: grad * torch.inf)
    before = [parameter.detach().clone() for parameter in table.parameters()]
    adam = torch.optim.Adam(table.parameters(), lr=0.1)
    metrics = run_epochs(table, adam, experience, settings(), torch.Generator().manual_seed(0)).metrics
    assert (metrics["num_optimizer_steps"], metrics["skip_reason"]) == (0, "no finite minibatch")
    assert (metrics["gradient_stats"]["num_nonfinite"], metrics["gradient_stats"]["grad_norm"]) == (1, None)
    assert all(torch.equal(*pair) for pair in zip(before, table.parameters(), strict=True))


def test_steps_towards_the_prior_lower_the_loss() -> None:
    """The first head likes its first choice less than the prior does, so descent must raise its logit."""
    table, experience = two_rows()
    nothing_at_stake = replace(experience, advantages_TNH=torch.zeros(1, 2, 2))
    compute_losses(table, nothing_at_stake, torch.arange(2), settings()).total.backward()  # type: ignore[no-untyped-call]
    assert table.logits_HNC.grad is not None
    assert (table.logits_HNC.grad[0, :, 0] < 0.0).all()


def test_what_an_update_tells_of_clipping_is_measured_at_the_limit() -> None:
    table, experience = two_rows()
    still = torch.optim.SGD(table.parameters(), lr=0.0)
    result = run_epochs(table, still, experience, settings(0.0), torch.Generator().manual_seed(0)).metrics
    # Joint ratios 1.5 and 0.625; twice the limit would let the second pass, and the 1.25 of the second head.
    assert result["clip_fraction"] == 1.0
    assert [head.clip_fraction for head in result["heads"].values()] == [1.0, 1.0]
    assert (result["ratio_min"], result["ratio_max"]) == pytest.approx((0.625, 1.5), abs=1e-6)
    assert [head.kl for head in result["heads"].values()] == pytest.approx(
        [(1.5 - 1 - log(1.5) + 0.5 - 1 - log(0.5)) / 2, 1.25 - 1 - log(1.25)], abs=1e-6
    )
    wide = run_epochs(table, still, experience, settings(0.0, clip_ratio=0.4), torch.Generator().manual_seed(0)).metrics
    assert wide["clip_fraction"] == 0.5
    assert [head.clip_fraction for head in wide["heads"].values()] == [1.0, 0.0]


# ---- one whole update of a small agent

SPEC = small_world()


def watched_steps(agent: PPOAgent, look: Callable[[], None]) -> None:
    """Has `look` called before each step of the optimizer."""
    step = agent.optimizer.step

    def looked() -> None:
        look()
        step()

    agent.optimizer.step = looked  # type: ignore[method-assign, assignment]


def grad_norm(agent: PPOAgent) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in agent.network.parameters() if p.grad is not None]))


def test_no_step_is_taken_on_a_gradient_longer_than_the_limit() -> None:
    agent, norms = small_agent(SPEC, max_grad_norm=0.01, target_kl=1e9), list[float]()
    watched_steps(agent, lambda: norms.append(grad_norm(agent)))
    metrics = agent.update(lived_buffer(agent, SPEC, envs=8))
    assert len(norms) == metrics["num_optimizer_steps"] == 16
    assert metrics["gradient_stats"]["grad_norm"] is not None
    assert metrics["gradient_stats"]["grad_norm"] > 0.1, "what is told is the norm before"
    assert max(norms) <= 0.01 * (1.0 + 1e-5)
    assert min(norms) > 0.0099


@pytest.mark.parametrize(("share_done", "left"), [(0.0, 1.0), (0.5, 0.55), (1.0, 0.1), (3.0, 0.1)])
def test_steps_are_taken_at_the_learning_rate_of_the_schedule(share_done: float, left: float) -> None:
    agent = small_agent(SPEC, lr=1e-3, schedule_steps=1000)
    agent.env_steps = int(1000 * share_done)
    rates: list[float] = []
    watched_steps(agent, lambda: rates.extend(group["lr"] for group in agent.optimizer.param_groups))
    metrics = agent.update(lived_buffer(agent, SPEC))
    assert rates
    assert rates == pytest.approx([1e-3 * left] * len(rates))
    assert metrics["learning_rate"] == rates[0]
    assert metrics["entropy_coef"] == pytest.approx(0.1 - 0.09 * min(1.0, share_done))


@pytest.mark.parametrize(("env_steps", "share"), [(0, 1.0), (500, 1.0), (750, 0.5), (1000, 0.0), (2000, 0.0)])
def test_exploration_fades_over_the_last_half(env_steps: int, share: float) -> None:
    assert PPOConfig(schedule_steps=1000).epsilon_share_at(env_steps) == share
    agent = small_agent(SPEC, schedule_steps=1000, epsilon=0.2, epsilon_op=0.04)
    agent.env_steps = env_steps
    expected = [0.04 * share if head == OP else 0.2 * share for head in range(4)]
    assert agent.exploration.epsilons == pytest.approx(expected)


@pytest.mark.parametrize("memory", [True, False])
def test_a_second_update_begins_at_ratio_one_and_moves_on(memory: bool) -> None:
    """Observation statistics, exploration and memory of the first pass are those the round was lived with."""
    agent = small_agent(SPEC, lr=1e-3, minibatches=1, ppo_epochs=4, target_kl=1e9, schedule_steps=100, memory=memory)
    for episode in range(2):
        learn_from(agent, lived_buffer(agent, SPEC, envs=8, episode=episode))
        assert agent.last_ratios_B is not None
        first, *later = agent.last_ratios_B.chunk(4)
        assert torch.allclose(first, torch.ones_like(first), rtol=0.0, atol=1e-5)
        assert min(float((ratios - 1.0).abs().max()) for ratios in later) > 1e-3
    assert agent.network.obs_norm.stats.count == 2 * 8 * SPEC.horizon, "afterwards they have caught up"


def test_returns_are_discounted_by_the_agents_own_gamma() -> None:
    agent = small_agent(SPEC, gamma=0.5, lam=1.0)
    learner = play_round(agent, SPEC, reward=lambda before, outcome, after: float(after.epochs_done))
    assert learner.buffer is not None
    metrics = agent.update(learner.buffer)
    rewards = [float(epoch) for epoch in range(1, SPEC.horizon + 1)]
    returns = [sum(0.5 ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]
    assert metrics["return_mean"] == pytest.approx(sum(returns) / len(returns), rel=1e-5)


# ---- the habit an agent is born with


def delivered(before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
    """Only what was kept counts, and only at the end: keeping early and keeping late earn the same."""
    assert after.committed_accuracy_pct is not None
    return after.committed_accuracy_pct / 10.0 if after.terminal else 0.0


@pytest.mark.parametrize("run_seed", [1, 3])
def test_where_acting_can_wait_the_most_likely_choice_still_acts(run_seed: int) -> None:
    """By plain arg max, run seed 1 ends at 6.4 greedy and 7.7 sampled without a prior for keeping, run seed 3 never
    plants anything."""
    spec = small_world(1, horizon=14)
    agent = small_agent(spec, run_seed, lr=1e-3, schedule_steps=12 * 8 * 14)
    learner = make_learner(spec, agent, delivered, run_seed=run_seed)
    for episode in range(12):
        play_episodes(spec, learner, delivered, seeds(8, episode, run_seed))
        learn(learner)

    def mean_return(greedy: bool) -> float:
        policy = FrozenPolicy(agent, run_seed=run_seed, greedy=greedy)
        return mean(e.total for e in play_episodes(spec, policy, delivered, seeds(16, 1000, run_seed)))

    assert mean_return(greedy=True) >= mean_return(greedy=False) - 0.05


def test_the_first_policy_is_the_prior_over_what_is_legal_and_is_not_pulled_away() -> None:
    prior = (0.5, -1.0, 2.0, -2.0, 1.0)
    agent = small_agent(SPEC, op_prior=prior)
    rollout = lived_buffer(agent, SPEC, envs=8).rollout()
    choice, _ = evaluate(agent, rollout.inputs, rollout.actions_TNH)
    ops = choice.distributions[OP]
    expected = torch.tensor(prior).expand_as(ops.log_policy_BC).masked_fill(~ops.legal_BC, -torch.inf).softmax(dim=-1)
    assert int(ops.num_legal_B.max()) >= 3
    # Output weights start small, not at zero.
    assert torch.allclose(ops.log_policy_BC.exp() * ops.legal_BC, expected, atol=0.03)
    free_B = ops.num_legal_B > 1
    assert float(choice.prior_gaps_BH[free_B, OP].max()) < 0.01
    assert float((1.0 - choice.entropies_BH[free_B, OP]).max()) > 0.3, "a pull to uniform choice would be another"
