"""Random hosts that live random lives, natively and by torch."""

from __future__ import annotations

import random

import pytest

from esper.simic.training.native_executor import NativeExecutor
from tests.simic.training.lives import random_task, run_lives


@pytest.mark.parametrize("host", range(20))
def test_two_hundred_random_lives_as_torch_lives_them(host):
    num_fragile = run_lives(random_task(random.Random(host)), NativeExecutor(), range(1000 * host, 1000 * host + 10))
    assert num_fragile <= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("host", range(1000, 1500))
def test_ten_thousand_random_lives_as_torch_lives_them(host):
    num_fragile = run_lives(random_task(random.Random(host)), NativeExecutor(), range(1000 * host, 1000 * host + 20))
    assert num_fragile <= 9  # about one in ten is; more than nine of twenty by chance in none of these hosts
