"""The policy's side of a run: what it refuses to learn from, and what it counts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from esper.evidence.sandbox_training import SandboxPricing, make_learner, play_episodes
from esper.evidence.sandboxes import Reward
from esper.leyline import OPS, ActionOutcome, EpisodeSeed, EpochReport, ModelFileError, NumericFailure
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.tamiyo_inputs import OP
from esper.simic.client import FrozenPolicy, SimicClient, network_shape
from tests.fakes import seeds
from tests.simic.agent.rounds import (
    SMALL,
    evaluate,
    growth,
    learn,
    play_round,
    same_bits,
    small_agent,
    small_world,
    weights,
)

SPEC = small_world()


def next_round(learner: SimicClient, reward: Reward, episode: int) -> None:
    learner.rewards.pricing = SandboxPricing(reward)
    play_episodes(SPEC, learner, reward, seeds(4, episode))


# ---- policies of other releases

SHAPE = network_shape(SPEC.layout.blueprints)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_columns": ("time_past", *SHAPE.global_columns[1:])}, r"global_columns\[0\] is 'time_past' in it and"),
        ({"slot_columns": SHAPE.slot_columns[:1] + SHAPE.slot_columns[:0:-1]}, r"slot_columns\[1\] is"),
        ({"card_columns": (*SHAPE.card_columns, "price")}, r"is 'price' in it and nothing in this release"),
        ({"card_columns": SHAPE.card_columns[:-1]}, r"is nothing in it and '.*' in this release"),
        ({"global_normalised": tuple(not flag for flag in SHAPE.global_normalised)}, r"global_normalised\[0\] is"),
        ({"slot_normalised": tuple(not flag for flag in SHAPE.slot_normalised)}, r"slot_normalised\[0\] is"),
    ],
)
def test_a_policy_made_for_other_features_is_refused_with_the_first_of_them(change: Any, words: str) -> None:
    agent = PPOAgent(replace(SHAPE, **change), SMALL, run_seed=0)
    saved = PPOAgent.load(agent.to_files())
    with pytest.raises(ModelFileError, match=f"{words}.*[Uu]se it with the release that made it, or train a new one"):
        FrozenPolicy(saved, run_seed=0, greedy=True)
    with pytest.raises(ModelFileError, match=words):
        make_learner(SPEC, saved, growth, run_seed=0)


# ---- what the most likely choice is where it would be to wait for ever


@pytest.mark.parametrize(
    ("likelier", "planted_and_kept"),
    [
        ({"WAIT": 2.0}, (0, 0)),
        ({"WAIT": 0.1, "PRUNE": -5.0}, (3, 3)),
        ({"GERMINATE": 5.0, "WAIT": 0.1, "PRUNE": -5.0}, (3, 3)),
        ({"GERMINATE": 5.0, "WAIT": 0.2, "PRUNE": 0.1}, (9, 0)),
    ],
    ids=["waiting that is meant", "waiting that is a tie", "seeds are carried on", "or pruned, where that is likelier"],
)
def test_the_greedy_policy_waits_no_longer_than_half_of_all_samples(
    likelier: dict[str, float], planted_and_kept: tuple[int, int]
) -> None:
    spec = small_world(num_slots=3, horizon=20)
    agent = small_agent(spec, op_prior=tuple(likelier.get(op.name, 0.0) for op in OPS))
    episodes = play_episodes(spec, FrozenPolicy(agent, run_seed=0, greedy=True), growth, seeds(2))
    assert [(episode.num_germinated, len(episode.kept)) for episode in episodes] == [planted_and_kept] * 2


# ---- what the policy sees, draws and remembers


def column(learner: SimicClient, name: str) -> torch.Tensor:
    assert learner.buffer is not None
    return learner.buffer.storage.inputs.obs_TND[..., SHAPE.global_columns.index(name)]


def test_the_policy_sees_what_its_last_step_changed() -> None:
    learner = play_round(small_agent(SPEC), SPEC)
    assert learner.buffer is not None
    for name in ("val_loss", "train_loss"):
        now, change, known = (column(learner, name + suffix) for suffix in ("", "_delta", "_delta_measured"))
        first = int(known[:, 0].argmax())
        assert first == {"val_loss": 1, "train_loss": 2}[name], "nothing was trained before the reset"
        assert not known[:first].any()
        assert known[first:].all()
        torch.testing.assert_close(change[first:], (now[1:] - now[:-1])[first - 1 :])
        assert (change[first:] != 0.0).all()
    ops = learner.buffer.storage.actions_TNH[..., OP]
    seen = torch.stack([column(learner, f"last_op_{op.name.lower()}") for op in OPS], dim=-1)
    assert not seen[0].any()
    assert torch.equal(seen[1:].argmax(dim=-1), ops[:-1])
    assert len(ops.unique()) > 2


def test_a_learner_begins_every_round_without_a_memory_and_counts_its_rewards_once() -> None:
    agent = small_agent(SPEC)
    learner = make_learner(SPEC, agent, growth, run_seed=0)
    for episode in range(2):
        play_episodes(SPEC, learner, growth, seeds(4, episode))
        assert learner.buffer is not None
        rollout = learner.buffer.rollout()
        choice, values_B = evaluate(agent, rollout.inputs, rollout.actions_TNH)
        assert torch.allclose(choice.log_probs_BH, rollout.log_probs_TNH.flatten(0, 1), atol=1e-5)
        assert torch.allclose(values_B, rollout.values_TN.flatten(), atol=1e-5)
        assert not column(learner, "val_loss_delta_measured")[0].any()
        learn(learner)
        assert learner.scale.count == (episode + 1) * 4 * SPEC.horizon


def test_every_env_episode_and_step_has_draws_of_its_own() -> None:
    agent = small_agent(SPEC)

    def actions(starts: list[EpisodeSeed]) -> torch.Tensor:
        learner = make_learner(SPEC, agent, growth, run_seed=0)
        play_episodes(SPEC, learner, growth, starts)
        assert learner.buffer is not None
        return learner.buffer.storage.actions_TNH.clone()

    together, later = actions(seeds(8)), actions(seeds(8, episode=1))
    assert len({tuple(env.flatten().tolist()) for env in together.unbind(dim=1)}) == 8
    assert not torch.equal(together, later)
    assert torch.equal(actions(seeds(8)[5:6])[:, 0], together[:, 5]), "who plays beside it does not matter"


# ---- rewards that are no numbers


def broken_at(amount: float, env_id: int, epoch: int) -> Reward:
    def reward(before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
        return amount if (after.env_id, after.epochs_done) == (env_id, epoch) else growth(before, outcome, after)

    return reward


@pytest.mark.parametrize("amount", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounds_before", [0, 1])
def test_a_reward_that_is_not_finite_ends_the_run_and_touches_nothing(amount: float, rounds_before: int) -> None:
    agent = small_agent(SPEC)
    learner = make_learner(SPEC, agent, growth, run_seed=0)
    for episode in range(rounds_before):
        next_round(learner, growth, episode)
        learn(learner)
    scale, policy = learner.scale.state_dict(), weights(agent)
    where = rf"env 2, episode {rounds_before}, epoch 4: expected a finite reward, got {amount} from its term 'reward'"
    with pytest.raises(NumericFailure, match=where):
        next_round(learner, broken_at(amount, env_id=2, epoch=4), rounds_before)
    assert learner.scale.state_dict() == scale
    assert same_bits(weights(agent), policy)
    assert learner.buffer is not None
    assert learner.buffer.position == 3, "the step is not in the buffer"


# ---- rewards that are too large


def spike_at(epoch: int, size: float) -> Reward:
    """One in each of four envs, against 36 rewards of 1."""
    return lambda before, outcome, after: size if after.epochs_done == epoch else 1.0


def test_limited_rewards_are_counted_by_round() -> None:
    agent = small_agent(SPEC)
    learner = make_learner(SPEC, agent, growth, run_seed=0)
    # A spike is in every tenth reward: about sqrt(10) times the root mean square of its own round, so it stays whole.
    counts = []
    for episode, reward in enumerate([spike_at(3, 50.0), spike_at(3, 1.0), spike_at(5, 500.0), spike_at(5, 1.0)]):
        next_round(learner, reward, episode)
        counts.append(learn(learner)["num_rewards_clipped"])
    assert counts == [0, 0, 4, 0]


def test_a_lonely_spike_of_the_first_round_is_limited_and_counted() -> None:
    def reward(before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
        return 1000.0 if (after.env_id, after.epochs_done) == (0, 3) else 0.0

    agent = small_agent(SPEC)
    learner = make_learner(SPEC, agent, reward, run_seed=0)
    play_episodes(SPEC, learner, reward, seeds(16))
    # One reward in 160: it is sqrt(160) = 12.6 times the root mean square.
    assert learn(learner)["num_rewards_clipped"] == 1
    assert learner.buffer is not None
    assert float(learner.buffer.storage.rewards_TN[2, 0]) == 10.0


def test_an_agent_without_a_client_has_counted_nothing() -> None:
    learner = play_round(small_agent(SPEC), SPEC)
    assert learner.buffer is not None
    assert learner.agent.update(learner.buffer)["num_rewards_clipped"] is None
