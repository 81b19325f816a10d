"""Training over several GPUs: one run on all of them, with hosts on each."""

import math
from dataclasses import replace

import pytest
import torch

from esper.simic import train_ppo_vectorized
from tests.simic.training.runs import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_a_run_over_all_gpus_learns_finite_things():
    devices = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    config = replace(TINY, envs=2 * torch.cuda.device_count(), device=devices, task="digits_blind")
    agent, history = train_ppo_vectorized(config)
    assert agent.updates == config.rounds
    assert all(math.isfinite(summary.return_mean) for summary in history)
