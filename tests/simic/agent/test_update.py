"""The update: what it moves, what it must never move, and what it says about itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import BLENDS, HEAD_NAMES, LifecycleOp
from esper.simic.agent import tamiyo_buffer
from esper.simic.agent.advantages import Rollout, with_gae
from esper.simic.agent.policy import ValueHead, initialize_
from esper.simic.agent.ppo import PolicyOutput, PPOAgent
from esper.simic.agent.ppo_update import UpdateSettings, compute_losses, env_minibatches
from esper.simic.agent.tamiyo_buffer import FIRST_ROWS, TamiyoRolloutBuffer, _tensors
from esper.simic.agent.tamiyo_inputs import OP, Cards, EnvGroup, Observation, TamiyoInputs, one_step
from tests.simic.agent.rounds import evaluate, learn_from, lived_buffer, same_bits, small_agent, small_world, weights


@given(st.integers(1, 40), st.integers(1, 10), st.integers(0, 2**31))
def test_minibatches_hold_every_env_exactly_once(num_envs: int, num_minibatches: int, rng_seed: int) -> None:
    groups = list(env_minibatches(num_envs, num_minibatches, torch.Generator().manual_seed(rng_seed)))
    assert sorted(torch.cat(groups).tolist()) == list(range(num_envs))
    assert len(groups) == min(num_envs, num_minibatches)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_the_ratio_is_one_at_first_and_moves_after() -> None:
    spec = small_world()
    agent = small_agent(spec, lr=1e-3)
    rollout = lived_buffer(agent, spec, envs=8).rollout()
    experience = with_gae(rollout, gamma=0.99, lam=0.95, std_floor=1.0)
    log_ratio = []
    for envs in env_minibatches(8, 4, torch.Generator().manual_seed(0)):
        losses = compute_losses(
            agent.network, experience, envs, UpdateSettings.at(agent.config, agent.env_steps, agent.exploration)
        )
        log_ratio.append(float(losses.joint_log_ratio_B.abs().max()))
        agent.optimizer.zero_grad()
        losses.total.backward()  # type: ignore[no-untyped-call]
        agent.optimizer.step()
    assert log_ratio[0] < 1e-5
    assert min(log_ratio[1:]) > 1e-3


def test_a_head_that_no_gradient_reaches_is_reported_as_missing() -> None:
    spec = small_world()
    agent = small_agent(spec)
    for parameter in agent.network.head_parameters()["blend"]:
        parameter.requires_grad_(False)
    heads = agent.update(lived_buffer(agent, spec, envs=8))["heads"]
    assert (heads["blend"].grad_state, heads["blend"].grad_norm) == ("missing", None)
    assert heads["op"].grad_state == "ok"


def test_an_update_reports_a_moving_ratio_and_every_head() -> None:
    spec = small_world()
    agent = small_agent(spec, lr=1e-3, target_kl=10.0)
    metrics = learn_from(agent, lived_buffer(agent, spec, envs=8))
    assert metrics["performed"]
    assert metrics["num_optimizer_steps"] == 16
    assert metrics["ratio_min"] is not None
    assert metrics["ratio_max"] is not None
    assert metrics["ratio_min"] < 0.99 < 1.01 < metrics["ratio_max"]
    assert metrics["env_steps"] == agent.env_steps == 8 * spec.horizon
    assert {name: metrics["heads"][name].grad_state for name in HEAD_NAMES} == dict.fromkeys(HEAD_NAMES, "ok")


def test_passes_stop_once_the_policy_has_moved_far_enough() -> None:
    spec = small_world()
    agent = small_agent(spec, lr=1e-2, target_kl=1e-3)
    metrics = agent.update(lived_buffer(agent, spec, envs=8))
    assert metrics["kl_stopped"]
    assert 0 < metrics["num_optimizer_steps"] < 16


def test_a_gradient_that_is_not_finite_reaches_no_weight() -> None:
    spec = small_world()
    agent = small_agent(spec, target_kl=10.0)
    buffer = lived_buffer(agent, spec, envs=8)
    before = weights(agent)
    buffer.storage.inputs.obs_TND[3, 5, 0] = torch.nan
    metrics = agent.update(buffer)
    assert metrics["gradient_stats"]["num_nonfinite"] == agent.config.ppo_epochs
    assert metrics["num_optimizer_steps"] == agent.config.ppo_epochs * (agent.config.minibatches - 1)
    after = weights(agent)
    assert all(torch.isfinite(tensor.double()).all() for tensor in after.values())
    assert not torch.equal(before["memory.weight_ih_l0"], after["memory.weight_ih_l0"])
    assert all(torch.isfinite(s).all() for state in agent.optimizer.state.values() for s in state.values())


def test_a_return_that_is_not_finite_changes_nothing() -> None:
    spec = small_world()
    agent = small_agent(spec)
    buffer = lived_buffer(agent, spec)
    before = weights(agent)
    buffer.storage.rewards_TN[2, 1] = torch.inf
    metrics = learn_from(agent, buffer)
    assert metrics["skip_reason"] == "a return is not finite"
    assert metrics["policy_loss"] is None
    assert same_bits(before, weights(agent))
    assert agent.env_steps == 0


def test_invalid_rows_teach_nothing() -> None:
    spec = small_world(rollback_epoch=5)
    first, second = small_agent(spec), small_agent(spec)
    buffer, other = lived_buffer(first, spec), lived_buffer(second, spec)
    other.storage.inputs.obs_TND[6:] = 5.0
    other.storage.inputs.slot_obs_TNSF[6:] = -5.0
    other.storage.usable_TNH[6:] = True
    other.storage.rewards_TN[6:] = 77.0
    other.storage.values_TN[6:] = -3.0
    other.storage.log_probs_TNH[6:] = -1.0
    metrics = [learn_from(first, buffer), learn_from(second, other)]
    assert same_bits(weights(first), weights(second))
    assert metrics[0]["heads"] == metrics[1]["heads"]
    num_valid = 4 * 6
    assert metrics[0]["env_steps"] == num_valid
    assert first.network.value.returns.count == first.network.obs_norm.stats.count == num_valid
    assert first.network.slot_norm.stats.count == 3 * num_valid


def test_an_update_without_a_valid_row_says_so() -> None:
    spec = small_world()
    agent = small_agent(spec)
    buffer = lived_buffer(agent, spec)
    buffer.storage.valid_TN.zero_()
    assert agent.update(buffer)["skip_reason"] == "no valid step"


def _row(buffer: TamiyoRolloutBuffer, step: int) -> Rollout[TamiyoInputs]:
    tensors = {name: tensor[step : step + 1] for name, tensor in buffer.storage.tensors().items()}
    return Rollout(inputs=buffer.storage.inputs.map(lambda tensor: tensor[step : step + 1]), **tensors)


def test_the_buffer_takes_a_round_and_no_more() -> None:
    spec = small_world()
    buffer = lived_buffer(small_agent(spec), spec)
    with pytest.raises(IndexError, match="holds 10 steps"):
        buffer.write(_row(buffer, 0))


def test_a_buffer_for_a_million_steps_takes_memory_as_it_is_filled() -> None:
    spec = small_world()
    lived = lived_buffer(small_agent(spec), spec)
    buffer = TamiyoRolloutBuffer.allocate(10**6, [_group(_moment(lived), lived.storage.inputs.cards)])
    assert len(buffer.storage.valid_TN) == FIRST_ROWS
    for step in range(FIRST_ROWS + 1):
        buffer.write(_row(lived, step % spec.horizon))
    assert len(buffer.storage.valid_TN) == 2 * FIRST_ROWS
    again = TamiyoRolloutBuffer.rollout(lived)
    for start in range(0, FIRST_ROWS - spec.horizon, spec.horizon):
        for name, tensor in again.tensors().items():
            assert torch.equal(buffer.rollout().tensors()[name][start : start + spec.horizon], tensor)


@pytest.mark.parametrize("room", [1, 3, 256])
def test_the_buffer_gives_back_what_was_written(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tamiyo_buffer, "FIRST_ROWS", room)
    spec = small_world()
    lived, generator = lived_buffer(small_agent(spec), spec), torch.Generator().manual_seed(0)
    stored = _tensors(lived.storage)
    for tensor in stored:
        tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
    copy = TamiyoRolloutBuffer.allocate(spec.horizon, [_group(_moment(lived), lived.storage.inputs.cards)])
    for step in range(spec.horizon):
        copy.write(_row(lived, step))
    assert len(stored) == 16
    assert all(torch.equal(a, b) for a, b in zip(_tensors(copy.storage), stored, strict=True))
    assert [a.dtype for a in _tensors(copy.storage)] == [b.dtype for b in stored]


def _moment(buffer: TamiyoRolloutBuffer) -> Observation:
    """The first row of a round: every slot is empty, so all that can be done is wait or germinate."""
    seen = buffer.storage.inputs.map(lambda tensor: tensor[0])
    return Observation(
        obs_ND=seen.obs_TND, slot_obs_NSF=seen.slot_obs_TNSF, offers_NSPK=seen.offers_TNSPK, masks=seen.masks
    )


def _group(moment: Observation, cards: Cards) -> EnvGroup:
    return EnvGroup(envs_G=torch.arange(len(moment.obs_ND)), observation=moment, cards=cards)


def _wait_or_not(agent: PPOAgent, moment: Observation, cards: Cards, episode: int) -> tuple[Tensor, PolicyOutput]:
    """A choice at that moment, and 1 for waiting."""
    draws_NH = torch.rand(moment.obs_ND.shape[0], len(HEAD_NAMES), generator=torch.Generator().manual_seed(episode))
    decision = agent.act(moment, cards, None, draws_NH)
    return (decision.choice.actions_BH[:, OP] == LifecycleOp.WAIT).float(), decision


def _germinate_all(agent: PPOAgent, moment: Observation, cards: Cards) -> PolicyOutput:
    """Every env germinates, each something else: choices of which every head was a part."""
    decision = agent.act(moment, cards, None, None)
    num_envs, num_slots, num_blueprints = moment.masks.blueprint_NSP.shape
    columns = [torch.arange(num_envs) % size for size in (num_slots, num_blueprints, len(BLENDS))]
    actions_NH = torch.stack([*columns, torch.full((num_envs,), int(LifecycleOp.GERMINATE))], dim=1)
    choice, _ = evaluate(agent, one_step(moment, cards, None), actions_NH[None])
    return replace(decision, choice=choice)


def _head_norms(agent: PPOAgent, buffer: TamiyoRolloutBuffer) -> list[float]:
    """Gradient of each head's own weights if everything in the round had turned out well."""
    experience = with_gae(buffer.rollout(), gamma=0.99, lam=0.95, std_floor=1.0)
    experience = replace(experience, advantages_TNH=torch.ones_like(experience.advantages_TNH))
    agent.optimizer.zero_grad()
    compute_losses(
        agent.network, experience, torch.arange(8), UpdateSettings.at(agent.config, agent.env_steps, agent.exploration)
    ).policy.backward()  # type: ignore[no-untyped-call]
    grads = [[p.grad for p in own if p.grad is not None] for own in agent.network.head_parameters().values()]
    return [float(torch.nn.utils.get_total_norm(own)) if own else 0.0 for own in grads]


def _one_step_episodes(
    moment: Observation, cards: Cards, decision: PolicyOutput, rewards_N: Tensor
) -> TamiyoRolloutBuffer:
    buffer = TamiyoRolloutBuffer.allocate(1, [_group(moment, cards)])
    yes_N = torch.ones(len(rewards_N), dtype=torch.bool)
    buffer.write(
        Rollout(
            inputs=one_step(moment, cards, None),
            actions_TNH=decision.choice.actions_BH[None],
            log_probs_TNH=decision.choice.log_probs_BH[None],
            usable_TNH=decision.choice.usable_BH[None],
            values_TN=decision.values_N[None],
            rewards_TN=rewards_N[None],
            terminated_TN=yes_N[None],
            truncated_TN=~yes_N[None],
            valid_TN=yes_N[None],
            bootstraps_TN=torch.zeros(1, len(rewards_N)),
        )
    )
    return buffer


@pytest.mark.slow
def test_no_head_is_dead_after_a_thousand_steps_towards_waiting() -> None:
    spec = small_world()
    agent = small_agent(
        spec,
        lr=1e-3,
        ppo_epochs=20,
        minibatches=1,
        target_kl=1e9,
        entropy_coef=0.0,
        entropy_coef_final=0.0,
        schedule_steps=10**9,
    )
    lived = lived_buffer(agent, spec, envs=8)
    moment, cards, waited = _moment(lived), lived.storage.inputs.cards, []
    for episode in range(50):
        rewards_N, decision = _wait_or_not(agent, moment, cards, episode)
        waited.append(float(rewards_N.mean()))
        assert learn_from(agent, _one_step_episodes(moment, cards, decision, rewards_N))["num_optimizer_steps"] == 20
    assert sum(waited[:3]) / 3 < 0.75
    assert sum(waited[-10:]) / 10 > 0.95
    decision = _germinate_all(agent, moment, cards)
    norms = _head_norms(agent, _one_step_episodes(moment, cards, decision, torch.ones(8)))
    assert all(norm > 1e-5 for norm in norms), norms


def test_rescaling_the_value_keeps_its_predictions() -> None:
    spec = small_world()
    head = small_agent(spec).network.value
    features = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    head.rescale(torch.tensor([1.0, 2.0]))
    before = head.denormalize(head(features))
    for returns in ([3.0, 5.0, 40.0], [-200.0, 7.0]):
        head.rescale(torch.tensor(returns))
        assert torch.allclose(head.denormalize(head(features)), before, atol=1e-4)
    assert math.isclose(float(head.normalize(torch.tensor(float(head.returns.mean)))), 0.0, abs_tol=1e-5)


def test_the_first_returns_do_not_blow_the_critic_up() -> None:
    """Returns that hardly vary set a small scale; an untrained critic must start within it, not far outside."""
    head = ValueHead(8, 8)
    initialize_(head, torch.Generator().manual_seed(0))
    features = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    before = head(features)
    head.rescale(torch.linspace(0.7, 0.9, 50))
    assert torch.equal(head(features), before), "normalised predictions stay small"
    reported = head.denormalize(head(features))
    head.rescale(torch.linspace(1.5, 3.5, 50))
    assert torch.allclose(head.denormalize(head(features)), reported, atol=1e-5), "later ones survive a new scale"
