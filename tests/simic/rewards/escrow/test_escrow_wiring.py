"""Escrow in the real loop: credit is measured by the envs, kept in one ledger each, and settled in full at the end."""

from dataclasses import replace

import pytest

from esper.simic.training.episode_rewards import EpisodeRewards, price_step
from esper.simic.training.vectorized import open_trainer
from tests.simic.training.runs import TINY, Listening

RUN = replace(TINY, task="digits_blind", reward_mode="escrow", rounds=1, envs=4, episode_length=16)


@pytest.fixture(scope="module")
def played():
    heard = Listening()
    with open_trainer(RUN, heard) as trainer:
        trainer.run()
    return heard, trainer


def test_credit_is_paid_in_advance_and_settled(played):
    heard, trainer = played
    gamma = trainer.client.rewards.pricing.config.gamma
    for env in range(4):
        paid = [facts.rewards[env].components.amounts["credit"] for facts in heard.steps]
        discounted = sum(gamma**step * amount for step, amount in enumerate(paid))
        assert discounted == pytest.approx(0.0, abs=1e-9)
    everything = [facts.rewards[env].components.amounts["credit"] for facts in heard.steps for env in range(4)]
    assert max(everything) > 0.0, "somebody must have earned an advance, or this test shows nothing"


def test_every_env_has_a_ledger_of_its_own(played):
    heard, trainer = played
    alone = EpisodeRewards(trainer.client.rewards.pricing)
    # Env 2 priced by itself must get what it got beside the others.
    first = heard.steps[0].before
    alone.begin(replace(first, reports=first.reports[2:3], contexts=first.contexts[2:3]))
    for facts in heard.steps:
        before = replace(facts.before, reports=facts.before.reports[2:3])
        after = replace(facts.after, reports=facts.after.reports[2:3], outcomes=facts.after.outcomes[2:3])
        price_step(alone, before, after)
        assert alone.last_step(2) == facts.rewards[2]


def test_a_new_round_starts_with_empty_ledgers():
    heard = Listening()
    with open_trainer(replace(RUN, rounds=2, envs=2, episode_length=8), heard) as trainer:
        trainer.run()
    first_of_second = heard.steps[8]
    assert all(account.components.amounts["credit"] == 0.0 for account in first_of_second.rewards)
