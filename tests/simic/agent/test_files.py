"""An agent as files: what comes back goes on with the same bits, and damage is refused whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from esper.evidence.sandbox_training import make_learner, play_episodes
from esper.leyline import ModelFileError
from esper.simic.agent.agent_files import FACTS_FILE, OPTIMIZER_FILE, POLICY_FILE
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.types import PPOUpdateMetrics
from tests.fakes import seeds
from tests.simic.agent.rounds import growth, learn, play_round, same_bits, small_agent, small_world, weights

SPEC = small_world()


def next_round(agent: PPOAgent, scale: dict[str, float]) -> PPOUpdateMetrics:
    learner = make_learner(SPEC, agent, growth, run_seed=agent.run_seed)
    learner.scale.load_state_dict(scale)
    play_episodes(SPEC, learner, growth, seeds(4, episode=7, run_seed=agent.run_seed))
    return learn(learner)


def test_a_loaded_agent_goes_on_bit_for_bit(tmp_path: Path) -> None:
    agent = small_agent(SPEC, run_seed=3, schedule_steps=200)
    for episode in range(2):
        learner = play_round(agent, SPEC, episode=episode)
        learn(learner)
    agent.save(tmp_path / "agent")
    loaded = PPOAgent.load(tmp_path / "agent")
    assert (loaded.env_steps, loaded.updates, loaded.config, loaded.shape) == (
        agent.env_steps,
        agent.updates,
        agent.config,
        agent.shape,
    )
    scale = learner.scale.state_dict()
    first, second = next_round(agent, scale), next_round(loaded, scale)
    assert first == second
    assert same_bits(weights(agent), weights(loaded))
    moments = [[s for state in a.optimizer.state.values() for s in state.values()] for a in (agent, loaded)]
    assert len(moments[0]) == len(moments[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


def test_an_agent_that_never_learned_can_be_saved(tmp_path: Path) -> None:
    agent = small_agent(SPEC)
    agent.save(tmp_path)
    assert same_bits(weights(agent), weights(PPOAgent.load(tmp_path)))


def _without_a_tensor(files: dict[str, bytes]) -> None:
    tensors = load(files[POLICY_FILE])
    del tensors["op_embedding"]
    files[POLICY_FILE] = save(tensors)


def _of_another_shape(files: dict[str, bytes]) -> None:
    tensors = load(files[POLICY_FILE])
    tensors["op_embedding"] = tensors["op_embedding"][:, :3].contiguous()
    files[POLICY_FILE] = save(tensors)


def _half_an_optimizer(files: dict[str, bytes]) -> None:
    moments = load(files[OPTIMIZER_FILE])
    files[OPTIMIZER_FILE] = save(dict(list(moments.items())[:5]))


def _another_format(files: dict[str, bytes]) -> None:
    files[FACTS_FILE] = json.dumps({**json.loads(files[FACTS_FILE]), "format": 99}).encode()


def _no_config(files: dict[str, bytes]) -> None:
    files[FACTS_FILE] = json.dumps({k: v for k, v in json.loads(files[FACTS_FILE]).items() if k != "config"}).encode()


def _pickled(files: dict[str, bytes]) -> None:
    files[POLICY_FILE] = b"\x80\x04K\x01."


def _no_optimizer_file(files: dict[str, bytes]) -> None:
    del files[OPTIMIZER_FILE]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a_tensor, "missing .'op_embedding'"),
        (_of_another_shape, r"op_embedding has shape \(5, 3\), expected \(5, 16\)"),
        (_half_an_optimizer, "optimizer.safetensors: missing"),
        (_another_format, "format 99; this release reads format 3"),
        (_no_config, "does not describe an agent"),
        (_pickled, "not a safetensors file"),
        (_no_optimizer_file, "optimizer.safetensors is missing"),
    ],
)
def test_damaged_files_are_refused_with_their_reason(damage: object, message: str) -> None:
    agent = small_agent(SPEC)
    learn(play_round(agent, SPEC))
    files = agent.to_files()
    damage(files)  # type: ignore[operator]
    with pytest.raises(ModelFileError, match=message):
        PPOAgent.load(files)
