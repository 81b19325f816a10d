"""The reward scale is part of a checkpoint: without it, a resumed run would learn from other numbers."""

import json

import pytest

from esper.leyline import ModelFileError
from esper.simic.control.normalization import RewardNormalizer
from esper.simic.run.run_state import STATE_FILE, read_run_files, run_files
from esper.simic.training.vectorized import open_trainer
from tests.simic.training.runs import TINY, Listening


@pytest.fixture(scope="module")
def files():
    with open_trainer(TINY, Listening()) as trainer:
        trainer.run()
        return run_files(trainer), trainer.client.scale.state_dict()


def test_a_checkpoint_holds_the_scale_exactly(files):
    state = read_run_files(files[0])
    restored = RewardNormalizer()
    restored.load_state_dict(state.facts["reward_scale"])
    assert restored.state_dict() == files[1]
    assert restored.count == 2 * 2 * 4


def test_a_resumed_run_scales_as_the_old_one_would(files):
    state = read_run_files(files[0])
    with open_trainer(TINY, Listening(), saved=state) as trainer:
        assert trainer.client.scale.state_dict() == files[1]
        original = RewardNormalizer()
        original.load_state_dict(files[1])
        assert trainer.client.scale.normalize_only(0.123) == original.normalize_only(0.123)


@pytest.mark.parametrize("key", ["reward_scale", "counters", "history", "calibration", "config"])
def test_a_checkpoint_without_a_part_is_refused(files, key):
    state = json.loads(files[0][STATE_FILE])
    del state[key]
    damaged = {**files[0], STATE_FILE: json.dumps(state).encode()}
    with pytest.raises(ModelFileError, match=STATE_FILE):
        read_run_files(damaged)
