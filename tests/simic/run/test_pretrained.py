"""The policy that comes with Esper: its files, its range, what stands in where it does not know, and a warm start."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from esper.growth.controllers import choose_controller
from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline import EpisodeSeed, HostLayout, ModelFileError
from esper.runtime.tasks import TaskSpec, get_task_spec, load_task_data
from esper.simic.agent.agent_files import FACTS_FILE, OPTIMIZER_FILE, POLICY_FILE
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.client import FrozenPolicy, network_shape
from esper.simic.run import pretrained
from esper.simic.run.pretrained import CARD_FILE, Card, KnownRange, is_shipped, load_pretrained, read_agent, why_outside
from esper.simic.run.run_state import load_policy
from esper.simic.training.env_factory import build_worker, make_worker_spec, task_layout
from esper.simic.training.rollout import run_episodes
from esper.simic.training.vectorized import train_ppo_vectorized, warm_started
from esper.tamiyo.controllers import DEFAULT_RULE
from esper.tolaria.pool import EnginePool

RANGE = KnownRange(topologies=("mlp", "cnn"), max_budget_ratio=16.0, min_horizon=8, max_horizon=30, max_classes=10)
CARD = Card(
    trained_on="two rounds",
    recipe="none",
    code="0",
    nursery_sha256="0",
    run_seed=3,
    rounds=2,
    episodes=8,
    host_epochs=80,
    cpu_hours=0.1,
    range=RANGE,
    validation={"pretrained": 1.0},
    held_out={},
    limits="all",
)
TASK = replace(get_task_spec("nursery:8"), horizon=8)


def small_agent() -> PPOAgent:
    return PPOAgent(network_shape(tuple(BLUEPRINTS)), PPOConfig(width=16), run_seed=1)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PPOAgent:
    agent = small_agent()
    for name, content in agent.to_files().items():
        if name != OPTIMIZER_FILE:
            (tmp_path / name).write_bytes(content)
    (tmp_path / CARD_FILE).write_text(json.dumps(asdict(CARD)))
    monkeypatch.setattr(pretrained, "card_folder", lambda: tmp_path)
    monkeypatch.setattr("esper.simic.run.run_state.card_folder", lambda: tmp_path)
    return agent


def weights(agent: PPOAgent) -> list[torch.Tensor]:
    return list(agent.network.state_dict().values())


def test_weights_and_card_are_all_that_is_needed(shipped: PPOAgent) -> None:
    agent, card = load_pretrained()
    assert card == CARD
    assert all(torch.equal(a, b) for a, b in zip(weights(agent), weights(shipped), strict=True))
    loaded = load_policy("pretrained")
    assert (loaded.run_id, loaded.rounds, loaded.trained_run_seeds) == ("pretrained", 2, {3})


def test_a_release_without_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "card_folder", lambda: tmp_path)
    assert not is_shipped()
    with pytest.raises(ValueError, match="no pretrained controller; leave controller out"):
        load_policy("pretrained")


def test_what_is_shipped_can_be_loaded_and_is_small() -> None:
    agent, card = load_pretrained()
    size = sum(len(pretrained.card_folder().joinpath(name).read_bytes()) for name in (POLICY_FILE, FACTS_FILE))
    assert size < 1_000_000
    assert card.validation["pretrained"] == max(card.validation.values())
    assert card.held_out.keys() == card.validation.keys()
    assert card.range.max_horizon == 30
    FrozenPolicy(agent, run_seed=0, greedy=True)


def test_other_columns_are_refused() -> None:
    content = small_agent().to_files()
    facts = json.loads(content[FACTS_FILE])
    facts["shape"]["slot_columns"][0] = "mood"
    with pytest.raises(ModelFileError, match="built for other features: slot_columns"):
        FrozenPolicy(read_agent({**content, FACTS_FILE: json.dumps(facts).encode()}), run_seed=0, greedy=True)


def layout_of(task: TaskSpec) -> HostLayout:
    return task_layout(task, load_task_data(task))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"horizon": 31}, "8 to 30 epochs, and this has 31"),
        ({"num_classes": 100}, "up to 10 classes, and these are 100"),
        ({"budget": 10**9}, "up to 16 times the host"),
        ({"budget": None}, "within a budget, and there is none"),
        ({"topology": "mixed"}, "mlp, cnn hosts, and this one is mixed"),
        ({}, None),
    ],
)
def test_hosts_outside_the_range_are_named(changes: dict[str, object], words: str | None) -> None:
    layout, lifecycle = layout_of(TASK), TASK.lifecycle
    layout = replace(layout, topology=str(changes.get("topology", layout.topology)))
    if "budget" in changes:
        lifecycle = replace(lifecycle, param_budget=changes["budget"])  # type: ignore[arg-type]
    horizon, classes = int(changes.get("horizon", 8)), int(changes.get("num_classes", 7))  # type: ignore[call-overload]
    found = why_outside(RANGE, layout, lifecycle, horizon=horizon, num_classes=classes)
    assert (found is None) == (words is None)
    assert words is None or words in str(found)


def test_outside_its_range_the_default_rule_decides_and_says_so(shipped: PPOAgent) -> None:
    layout, lifecycle = layout_of(TASK), TASK.lifecycle
    inside = choose_controller("pretrained", layout, lifecycle, epochs=8, seed=0, num_classes=7, params={})
    assert inside.name == "pretrained"
    with pytest.warns(UserWarning, match=r"outside what it knows: .* 40\. The rule 'schedule' decides"):
        outside = choose_controller("pretrained", layout, lifecycle, epochs=40, seed=0, num_classes=7, params={})
    assert outside.name == DEFAULT_RULE


def test_a_blueprint_or_a_host_that_came_later_is_played(shipped: PPOAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy knows blueprints by name where it was trained with them, and all others by their cards."""
    monkeypatch.setitem(BLUEPRINTS, "cnn.later", replace(BLUEPRINTS["cnn.conv"], key="cnn.later"))
    agent, _ = load_pretrained()
    task = replace(get_task_spec("digits_blind"), name="later", blueprints=("cnn.later",), horizon=6)
    task = replace(task, lifecycle=replace(task.lifecycle, param_budget=2_000))
    assert "cnn.later" not in agent.shape.blueprints
    with EnginePool(build_worker, make_worker_spec(task, load_task_data(task))) as pool:
        policy = FrozenPolicy(agent, run_seed=0, greedy=False)
        seeds = [EpisodeSeed(env_id=env_id, episode=0, run_seed=0) for env_id in range(3)]
        final = run_episodes(pool, policy, seeds, 6)
    assert {slot.blueprint for report in final.reports for slot in report.slots} == {"cnn.later", None}


def test_a_warm_start_begins_with_the_weights_of_another(shipped: PPOAgent) -> None:
    agent = warm_started(shipped, PPOConfig(width=16, lr=0.5), run_seed=7)
    assert all(torch.equal(a, b) for a, b in zip(weights(agent), weights(shipped), strict=True))
    assert (agent.config.lr, agent.env_steps) == (0.5, 0)
    with pytest.raises(ValueError, match=r"width 16, this run 32\. Give --width 16"):
        warm_started(shipped, PPOConfig(width=32), run_seed=7)


def test_training_goes_on_from_what_is_shipped(shipped: PPOAgent) -> None:
    tiny = {"task": "digits_blind", "rounds": 1, "envs": 2, "episode_length": 3, "calibration_runs": 0}
    warm, _ = train_ppo_vectorized(**tiny, worker_kind="inline", width=16, warm_start="pretrained", lr=1e-12)
    before = dict(shipped.network.named_parameters())
    for name, tensor in warm.network.named_parameters():
        if not name.startswith("value.out"):  # rescaled with the first returns, whatever the learning rate
            assert torch.allclose(tensor, before[name], atol=1e-3), name
