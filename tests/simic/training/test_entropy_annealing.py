"""How long the schedules of a run last, and what they do on the way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.agent.config import PPOConfig
from esper.simic.training.config import TrainingConfig
from esper.simic.training.runner import UpdatesFailed, calculate_entropy_anneal_steps, check_updates, run_ppo_updates


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 200), st.floats(0.01, 1.0))
def test_steps_are_the_share_of_all_env_steps(rounds, envs, epochs, fraction):
    steps = calculate_entropy_anneal_steps(rounds, envs, epochs, fraction)
    assert steps == max(1, round(rounds * envs * epochs * fraction))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 1, 1, 1.0), "total_episodes"),
        ((1, 0, 1, 1.0), "batches_per_episode"),
        ((1, 1, 0, 1.0), "epochs_per_batch"),
        ((1, 1, 1, 0.0), "anneal_fraction"),
        ((1, 1, 1, 1.5), "anneal_fraction"),
    ],
)
def test_impossible_lengths_are_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        calculate_entropy_anneal_steps(*arguments)


def test_the_coefficient_falls_to_its_end_when_the_run_ends():
    config = TrainingConfig(rounds=10, envs=4, entropy_coef=0.2, entropy_coef_final=0.02)
    ppo = config.ppo_config(episode_length=5, gamma=0.99)
    assert ppo.entropy_coef_at(0) == 0.2
    assert ppo.entropy_coef_at(100) == pytest.approx(0.11)
    assert ppo.entropy_coef_at(200) == pytest.approx(0.02)
    assert ppo.entropy_coef_at(10_000) == pytest.approx(0.02)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_the_coefficient_never_rises(first, second):
    ppo = PPOConfig(schedule_steps=500)
    early, late = sorted((first, second))
    assert ppo.entropy_coef_at(late) <= ppo.entropy_coef_at(early)


class Skipping:
    def __init__(self, performed: bool) -> None:
        self.performed = performed

    def update(self):
        return {"performed": self.performed, "skip_reason": "a return is not finite", "kl_stopped": False}

    def end_round(self):
        pass


def test_skipped_updates_are_counted_and_the_third_in_a_row_ends_the_run():
    _, count = run_ppo_updates(Skipping(performed=False), 0)
    assert count == 1
    _, count = run_ppo_updates(Skipping(performed=True), count)
    assert count == 0
    for _ in range(2):
        metrics, count = run_ppo_updates(Skipping(performed=False), count)
        check_updates(metrics, count)
    metrics, count = run_ppo_updates(Skipping(performed=False), count)
    with pytest.raises(UpdatesFailed, match=r"3 updates in a row were skipped, .* a return is not finite"):
        check_updates(metrics, count)
