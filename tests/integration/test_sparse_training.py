"""The sparse reward in a real run: nothing is paid before the end, and the policy still learns from it."""

from dataclasses import replace

import pytest

from esper.simic.training.vectorized import open_trainer
from tests.simic.training.runs import TINY, Listening


@pytest.fixture(scope="module")
def heard():
    heard = Listening()
    with open_trainer(replace(TINY, reward_mode="sparse"), heard) as trainer:
        trainer.run()
    return heard


def test_only_the_last_step_is_paid(heard):
    for facts in heard.steps:
        for account, report in zip(facts.rewards, facts.after.reports, strict=True):
            if not report.terminal:
                assert account.components.total == 0.0


def test_the_return_is_the_score_of_the_committed_network_and_its_size(heard):
    for _, _, episodes in heard.rounds:
        for episode in episodes:
            assert set(episode.components_sum) == {"terminal", "size", "rollback"}
            # Uncalibrated: chance scores 0, perfection 1.
            score = (episode.committed_accuracy_pct - 10.0) / 90.0
            assert episode.components_sum["terminal"] == pytest.approx(score)


def test_updates_are_performed(heard):
    assert all(metrics["performed"] for _, metrics, _ in heard.rounds)
