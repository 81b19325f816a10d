"""A configuration is checked field by field, then as a whole, and survives a trip through JSON."""

import json
import math
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.agent.config import PPOConfig
from esper.simic.agent.gym import GymConfig
from esper.simic.rewards import Calibration, RewardWeights
from esper.simic.training.config import (
    FREE_ON_RESUME,
    PRESETS,
    TrainingConfig,
    config_from_json,
    preset,
    read_config,
    resume_differences,
    with_overrides,
)

BAD = [
    ("seed", -1),
    ("seed", 10_000),
    ("rounds", 0),
    ("envs", 0),
    ("episode_length", 0),
    ("param_budget", 0),
    ("workers", 0),
    ("gamma", 0.0),
    ("gamma", 1.2),
    ("gamma", float("nan")),
    ("calibration_runs", -1),
    ("calibration_runs", 3),
    ("advantage_std_floor", 0.0),
    ("lam", 1.1),
    ("ppo_epochs", 0),
    ("minibatches", 0),
    ("clip_ratio", 0.0),
    ("clip_ratio", 1.5),
    ("target_kl", 0.0),
    ("lr", 0.0),
    ("lr", float("inf")),
    ("lr_final_share", -0.1),
    ("entropy_coef", -0.1),
    ("entropy_coef_final", -1.0),
    ("anneal_fraction", 0.0),
    ("epsilon_op", 0.6),
    ("epsilon", -0.1),
    ("value_coef", -1.0),
    ("max_grad_norm", 0.0),
    ("width", 0),
    ("keep_checkpoints", 0),
    ("escalation_epochs", -1),
    ("checkpoint_s", -1.0),
    ("worker_kind", "thread"),
    ("level", "loud"),
    ("reward_mode", "generous"),
    ("op_prior", (0.0,)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name.replace("reward_mode", "reward mode")) as caught:
        TrainingConfig(**{name: value})
    assert str(value) in str(caught.value) or repr(value) in str(caught.value) or name == "op_prior"


def test_every_number_has_a_range():
    numbers = {entry.name for entry in fields(TrainingConfig) if type(entry.default) in (int, float)} | {
        "episode_length",
        "param_budget",
        "workers",
        "gamma",
        "minibatches",
    }
    assert numbers == {entry.name for entry in fields(TrainingConfig) if entry.metadata.get("range") is not None}


@pytest.mark.parametrize("config", [TrainingConfig, PPOConfig, GymConfig])
def test_a_hyper_parameter_has_one_range_wherever_it_is_used(config):
    for name, value, words in (
        ("gamma", 1.2, r"in \(0, 1\]"),
        ("lam", -0.1, r"in \[0, 1\]"),
        ("lr", 0.0, "above 0 and at most 1e30"),
        ("advantage_std_floor", 1e308, "above 0 and at most 1e30"),
        ("value_coef", 1e31, "at least 0 and at most 1e30"),
        ("clip_ratio", 1.5, r"in \(0, 1\]"),
        ("minibatches", 2.5, "a whole number of at least 1 and at most 4,096"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be {words}, got {re.escape(str(value))}"):
            config(**{name: value})


def test_numbers_that_single_precision_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="logits between -1000 and 1000"):
        TrainingConfig(op_prior=(1e30, 0.0, 0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="terminal must be at least 0 and at most 1e30, got 1e\\+200"):
        RewardWeights(terminal=1e200)


def test_an_unset_number_of_minibatches_adapts_and_a_chosen_one_counts():
    def minibatches(**fields):
        return TrainingConfig(**fields).ppo_config(episode_length=5, gamma=0.99).minibatches

    assert [minibatches(envs=envs) for envs in (1, 3, 16)] == [1, 3, 4]
    assert minibatches(envs=16, minibatches=8) == 8
    with pytest.raises(
        ValueError, match=r"envs=1 but minibatches=4: a minibatch holds whole envs. Lower --minibatches"
    ):
        TrainingConfig(envs=1, minibatches=4)


def test_impossible_combinations_name_the_remedy():
    with pytest.raises(ValueError, match=r"at most one worker per env. Lower --workers"):
        TrainingConfig(envs=4, workers=8)
    with pytest.raises(ValueError, match="Lower --minibatches or raise --envs"):
        TrainingConfig(envs=2, minibatches=4)
    assert TrainingConfig(envs=2, minibatches=4, controller="heuristic").envs == 2, "a rule has no minibatches"
    with pytest.raises(ValueError, match="inline has one worker"):
        TrainingConfig(worker_kind="inline", workers=2)
    with pytest.raises(ValueError, match="needs a calibrated scale"):
        TrainingConfig(reward_mode="basic", calibration_runs=0)
    with pytest.raises(ValueError, match=r"level=off keeps none. Drop one of the two"):
        TrainingConfig(require_complete=True, level="off")
    with pytest.raises(ValueError, match=r"exporters=tensorboard show what is logged, but level=off logs nothing"):
        TrainingConfig(exporters=("tensorboard",), level="off")


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ValueError, match=r"unknown key 'entropy_ceof'. Did you mean 'entropy_coef'"):
        config_from_json('{"entropy_ceof": 0.1}', "my-run.json")
    with pytest.raises(ValueError, match="unknown key 'gama'"):
        with_overrides(TrainingConfig(), {"gama": 0.9})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"rounds": "3"}', r"Expected `int`, got `str` - at `\$.rounds`"),
        ('{"rounds": 2.5}', "Expected `int`"),
        ('{"gamma": NaN}', "NaN is not JSON"),
        ('{"reward_weights": {"rent": -1}}', "rent must be"),
    ],
)
def test_damaged_files_say_where(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        config_from_json(text, "my-run.json")
    assert str(caught.value).startswith("my-run.json: ")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_config(tmp_path / "none.json")


@given(
    rounds=st.integers(1, 500),
    envs=st.integers(4, 64),
    gamma=st.none() | st.floats(0.5, 1.0),
    lr=st.floats(1e-6, 1.0),
    mode=st.sampled_from(["shaped", "sparse", "escrow"]),
)
def test_json_keeps_every_field(rounds, envs, gamma, lr, mode):
    config = TrainingConfig(rounds=rounds, envs=envs, gamma=gamma, lr=lr, reward_mode=mode)
    assert config_from_json(config.to_json(), "x") == config


def test_a_file_changes_only_what_it_names():
    base = TrainingConfig(rounds=7)
    assert config_from_json('{"envs": 8}', "x", base) == TrainingConfig(rounds=7, envs=8)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name):
    assert isinstance(preset(name), TrainingConfig)


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"unknown preset 'fast'. Known: default"):
        preset("fast")


def test_ppo_config_takes_every_hyper_parameter_from_the_run():
    config = TrainingConfig(lr=0.5, lam=0.5, ppo_epochs=7, clip_ratio=0.3, width=32, rounds=10, envs=4)
    ppo = config.ppo_config(episode_length=20, gamma=0.9)
    assert (ppo.lr, ppo.lam, ppo.ppo_epochs, ppo.clip_ratio, ppo.width) == (0.5, 0.5, 7, 0.3, 32)
    assert ppo.gamma == 0.9
    assert ppo.schedule_steps == 10 * 4 * 20


def test_defaults_of_run_and_agent_agree():
    ours, agents = TrainingConfig().ppo_config(episode_length=25, gamma=0.995), PPOConfig()
    assert {**asdict(ours), "schedule_steps": 0} == {**asdict(agents), "schedule_steps": 0}


def test_resume_may_change_the_machine_and_the_length_only():
    old = TrainingConfig()
    assert resume_differences(old, TrainingConfig(rounds=99, workers=1, level="debug")) == []
    assert resume_differences(old, TrainingConfig(gamma=0.95)) == ["gamma None -> 0.95"]
    assert set(FREE_ON_RESUME) <= {entry.name for entry in fields(TrainingConfig)}


def test_text_is_plain_json():
    assert json.loads(TrainingConfig().to_json())["task"] == "digits_blind"


@pytest.mark.parametrize("content", [b'{"task": "\xff"}', b'{"lr": NaN}', b'{"lr": ' + b"[" * 100_000])
def test_a_file_that_is_no_json_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.json: not JSON"):
        read_config(tmp_path / "mine.json")


def test_a_round_has_a_size_that_memory_can_hold() -> None:
    TrainingConfig(envs=20, episode_length=100_000)
    with pytest.raises(ValueError, match=r"a round may have at most 2,000,000 steps\. Lower one of the two"):
        TrainingConfig(envs=21, episode_length=100_000)


def test_inline_workers_are_refused_with_words_that_help_a_resume_too() -> None:
    with pytest.raises(ValueError, match=r"got workers=2\. Give --workers 1 with it"):
        with_overrides(TrainingConfig(workers=2), {"worker_kind": "inline"})


@pytest.mark.parametrize("points", [{"floor": math.nan}, {"ceiling": math.inf}, {"reference": (1.0, math.nan)}])
def test_a_scale_has_finite_points(points: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        Calibration(**{"family": "loss", "floor": 0.0, "ceiling": 1.0, "reference": None} | points)
