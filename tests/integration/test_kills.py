"""SIGKILL at any moment: the run goes on from its newest checkpoint and ends with the bits and events of an
undisturbed one."""

import random

import pytest

from esper.karn.integrity import check_run
from esper.scripts.cli import main
from tests.integration.kills import (
    check_prefix,
    final_bits,
    finish,
    kill_and_resume,
    kill_before_checkpoint,
    run_through,
    training_facts,
)
from tests.nissa.events import log_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = run_through(tmp_path_factory.mktemp("runs"), "whole", workers=1)
    return final_bits(run), training_facts(run)


def survive(runs, undisturbed, delays, workers):
    run = runs / "killed"
    kills = kill_and_resume(run, delays, workers)
    finish(run, workers)
    assert check_run(run).problems == ()
    assert final_bits(run) == undisturbed[0]
    assert training_facts(run) == undisturbed[1]
    return kills


@pytest.mark.slow
def test_three_kills_change_nothing(tmp_path, undisturbed):
    assert survive(tmp_path, undisturbed, [0.3, 0.9, 0.1], workers=1) >= 1


def test_a_kill_before_the_first_checkpoint_leaves_a_readable_log_and_no_way_to_go_on(tmp_path, capsys):
    run = tmp_path / "killed"
    kill_before_checkpoint(run)
    check_prefix(run)
    before = log_path(run).read_bytes()
    with pytest.raises(SystemExit) as caught:
        main(["train", "--resume", str(run)])
    assert caught.value.code == 4
    assert "no checkpoint yet" in capsys.readouterr().err
    assert log_path(run).read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(10))
def test_many_kills_at_random_moments_change_nothing(tmp_path, undisturbed, number):
    """Ten runs with at least two kills each; the moments differ from one execution to the next."""
    seed = random.randrange(1 << 30)
    print(f"kills are drawn with seed {seed}")
    chance = random.Random(seed)
    delays = [chance.uniform(0.0, 2.0) for _ in range(4)]
    assert survive(tmp_path, undisturbed, delays, workers=1 + number % 2) >= 2
