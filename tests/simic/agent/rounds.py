"""Small agents and the rounds they live: a real simulated world, a network of width 16."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from esper.evidence.sandbox_training import make_learner, play_episodes
from esper.evidence.sandboxes import Reward
from esper.leyline import ActionOutcome, EpochReport
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.sampling import Choice, choose
from esper.simic.agent.tamiyo_buffer import TamiyoRolloutBuffer
from esper.simic.agent.tamiyo_inputs import TamiyoInputs
from esper.simic.agent.types import PPOUpdateMetrics
from esper.simic.client import SimicClient, network_shape
from esper.simic.training.runner import run_ppo_updates
from esper.tamiyo.simulation import SimulationSpec
from tests.fakes import seeds, world

SMALL = PPOConfig(width=16)


def growth(before: EpochReport, outcome: ActionOutcome, after: EpochReport) -> float:
    return (after.val_accuracy_pct - before.val_accuracy_pct) / 10.0


def small_agent(spec: SimulationSpec, run_seed: int = 0, **changes: object) -> PPOAgent:
    config = replace(SMALL, **changes)  # type: ignore[arg-type]
    return PPOAgent(network_shape(spec.layout.blueprints), config, run_seed=run_seed)


def play_round(
    agent: PPOAgent, spec: SimulationSpec, *, envs: int = 4, episode: int = 0, reward: Reward = growth
) -> SimicClient:
    """Plays one round; what happened is in the learner's buffer, nothing was learned yet."""
    learner = make_learner(spec, agent, reward, run_seed=agent.run_seed)
    play_episodes(spec, learner, reward, seeds(envs, episode, agent.run_seed))
    return learner


def lived_buffer(agent: PPOAgent, spec: SimulationSpec, **round_: int) -> TamiyoRolloutBuffer:
    buffer = play_round(agent, spec, **round_).buffer  # type: ignore[arg-type]
    assert buffer is not None
    return buffer


@torch.no_grad()
def evaluate(agent: PPOAgent, inputs: TamiyoInputs, actions_TNH: Tensor) -> tuple[Choice, Tensor]:
    """What the present policy thinks of actions taken: their distribution, and the values of their states."""
    forward = agent.network(agent._with_memory(inputs))
    choice = choose(forward.logits_fn, forward.masks, agent.exploration, actions_BH=actions_TNH.flatten(0, 1))
    return choice, agent.network.value.denormalize(forward.values_B)


def learn(learner: SimicClient) -> PPOUpdateMetrics:
    """The one update of a round that was played."""
    metrics, _ = run_ppo_updates(learner, 0)
    assert metrics is not None
    return metrics


def learn_from(agent: PPOAgent, buffer: TamiyoRolloutBuffer) -> PPOUpdateMetrics:
    """The same without a client."""
    metrics = agent.update(buffer)
    agent.end_round(buffer)
    return metrics


def weights(agent: PPOAgent) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in agent.network.state_dict().items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def small_world(num_slots: int = 3, **changes: object) -> SimulationSpec:
    return world(num_slots, **changes)
