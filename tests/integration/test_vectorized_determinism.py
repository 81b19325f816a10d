"""Same seed, same bits: run by run, for any number and kind of workers, and after going on from any boundary."""

from dataclasses import replace

import pytest
import torch

from esper.simic.client import SimicClient
from esper.simic.run.run_state import STATE_FILE, read_run_files, run_files
from esper.simic.training.vectorized import open_trainer
from tests.simic.training.runs import TINY, Listening, timeless

RUN = replace(TINY, task="digits_blind", rounds=2, envs=4, episode_length=6, seed=7)


def play(config, saved=None, rounds=None):
    """Everything a run leaves behind that must not depend on the machine."""
    heard = Listening()
    with open_trainer(config, heard, saved=saved) as trainer:
        for _ in range(config.rounds - trainer.next_round if rounds is None else rounds):
            trainer.run_round()
        files = run_files(trainer)
        weights = {name: files[name] for name in files if name != STATE_FILE}
        history = [timeless(summary) for summary in trainer.history]
    facts = [
        (report.env_id, report.epoch, report.val_loss, report.train_loss, report.total_params, report.coalitions)
        for step in heard.steps
        for report in step.after.reports
    ]
    choices = [step.specs for step in heard.steps]
    return {"weights": weights, "history": history, "facts": facts, "choices": choices}, files


@pytest.fixture(scope="module")
def reference():
    return play(RUN)


def test_a_second_run_gives_the_same_bits(reference):
    assert play(RUN)[0] == reference[0]


@pytest.mark.slow
def test_processes_give_the_same_bits(reference):
    config = replace(RUN, worker_kind="process", workers=2)
    assert play(config)[0] == reference[0]


def test_going_on_from_a_boundary_gives_the_same_bits(reference):
    head, files = play(RUN, rounds=1)
    tail, _ = play(RUN, saved=read_run_files(files))
    whole = reference[0]
    assert tail["weights"] == whole["weights"]
    assert tail["history"] == whole["history"]
    assert head["facts"] + tail["facts"] == whole["facts"]
    assert head["choices"] + tail["choices"] == whole["choices"]


def test_another_seed_gives_other_bits(reference):
    other = play(replace(RUN, seed=8), rounds=1)[0]["facts"]
    assert other != reference[0]["facts"][: len(other)]


def test_training_draws_nothing_from_the_global_generator():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with open_trainer(replace(TINY, rounds=1), Listening()) as trainer:
        trainer.run()
    assert torch.equal(before, torch.random.get_rng_state())


def test_growth_really_happened(reference):
    """Equality of runs in which nothing happens would prove little."""
    ops = reference[0]["history"]
    assert sum(summary.num_ops["GERMINATE"] for summary in ops) > 0


def test_the_reward_scale_goes_on_too():
    with open_trainer(RUN, Listening()) as trainer:
        trainer.run_round()
        assert isinstance(trainer.client, SimicClient)
        state = read_run_files(run_files(trainer))
        assert state.facts["reward_scale"] == trainer.client.scale.state_dict()
        assert state.facts["reward_scale"]["count"] == 4 * 6
