"""SIGKILL at any moment: the run goes on from its newest checkpoint and ends with the bits and events of an
undisturbed one."""

import random

import pytest

from tests.integration.kills import final_bits, finish, kill_and_resume, run_through, training_facts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = run_through(tmp_path_factory.mktemp("runs"), "whole", workers=1)
    return final_bits(run), training_facts(run)


def survive(runs, undisturbed, delays, workers):
    run = runs / "killed"
    kills = kill_and_resume(run, delays, workers)
    finish(run, workers)
    assert final_bits(run) == undisturbed[0]
    assert training_facts(run) == undisturbed[1]
    return kills


def test_three_kills_change_nothing(tmp_path, undisturbed):
    assert survive(tmp_path, undisturbed, [0.3, 0.9, 0.1], workers=1) >= 1


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tmp_path, undisturbed):
    seed = random.randrange(1 << 30)
    print(f"kills are drawn with seed {seed}")
    chance, kills = random.Random(seed), 0
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        delays = [chance.uniform(0.0, 2.5) for _ in range(4)]
        kills += survive(folder, undisturbed, delays, workers=1 + number % 2)
    assert kills >= 20
