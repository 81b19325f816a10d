"""Rewards and sums of episodes: lost workers, rollbacks, and what a step pays."""

from dataclasses import replace

import pytest

from esper.leyline import RollbackReason, SeedStage
from esper.simic.client import SimicClient
from esper.simic.training.episode_rewards import EpisodeRewards, num_contributing_fossils, price_step
from esper.simic.training.vectorized import open_trainer
from tests.simic.training.runs import TINY, Listening


@pytest.fixture(scope="module")
def played():
    heard = Listening()
    with open_trainer(replace(TINY, rounds=1), heard) as trainer:
        trainer.run()
        assert isinstance(trainer.client, SimicClient)
    return heard.steps, trainer.client


def changed(state, env, **fields):
    reports = [replace(report, **fields) if i == env else report for i, report in enumerate(state.reports)]
    return replace(state, reports=tuple(reports))


def priced(steps, client, change=lambda number, after: after):
    rewards = EpisodeRewards(client.rewards.pricing)
    rewards.begin(steps[0].before)
    before, rows = steps[0].before, []
    for number, facts in enumerate(steps):
        after = change(number, facts.after)
        paid = price_step(rewards, before, after)
        rows.append(tuple(None if each is None else rewards.last_step(env) for env, each in enumerate(paid)))
        before = after
    return rows, rewards.episodes()


def test_replaying_the_steps_gives_the_same_rewards_and_episodes(played):
    steps, client = played
    rows, episodes = priced(steps, client)
    assert rows == [facts.rewards for facts in steps]
    assert episodes == client.episode_stats()


def test_a_rollback_is_paid_where_it_happened_and_ends_the_episode(played):
    steps, client = played

    def roll_back(number, after):
        if number < 1:
            return after
        return changed(after, 0, terminal=True, rollback_reason=RollbackReason.DIVERGENCE)

    rows, episodes = priced(steps, client, roll_back)
    penalty = client.rewards.pricing.config.weights.rollback
    assert rows[1][0].components.amounts["rollback"] == -penalty
    assert [row[0] for row in rows[2:]] == [None, None]
    assert episodes[0].end == "rolled_back"
    assert episodes[0].num_epochs == 2
    assert episodes[1] == client.episode_stats()[1], "the other env is not concerned"


@pytest.mark.parametrize(("worth", "expected"), [((2.0, -1.0), 1), ((2.0, None), None), ((), 0)])
def test_fossils_are_counted_as_contributing_only_if_all_were_measured(played, worth, expected):
    report = played[0][-1].after.reports[0]
    kept = [replace(report.slots[0], stage=SeedStage.FOSSILIZED, contribution_pp=gain) for gain in worth]
    assert num_contributing_fossils(replace(report, slots=tuple(kept))) == expected


def test_a_lost_worker_ends_the_episode_without_a_price(played):
    steps, client = played

    def lose(number, after):
        if number < 2:
            return after
        gone = changed(after, 1, terminal=True)
        return replace(gone, truncated_bootstrap_targets={gone.reports[1].env_id: None})

    rows, episodes = priced(steps, client, lose)
    assert rows[1][1] is not None
    assert [row[1] for row in rows[2:]] == [None, None]
    assert (episodes[1].end, episodes[1].num_epochs) == ("worker_lost", 2)


def test_a_lost_env_counts_on_with_the_critics_value():
    """Losing a worker is outside the game: its last complete row is cut off, and the critic says what would follow."""
    heard = Listening()
    with open_trainer(replace(TINY, rounds=1), heard) as trainer:
        client = trainer.client
        assert isinstance(client, SimicClient)
        trainer.run_round()
        steps = list(heard.steps)
        client.begin(steps[0].before)
        before = steps[0].before
        for number, facts in enumerate(steps):
            client.act(before)
            after = facts.after
            if number >= 2:
                gone = changed(after, 1, terminal=True)
                after = replace(gone, truncated_bootstrap_targets={gone.reports[1].env_id: None})
            values = client._decision.values_N.clone()
            client.store(before, after)
            if number == 2:
                expected = values[1]
            before = after
        rollout = client.buffer.rollout()
    assert rollout.truncated_TN[:, 1].tolist() == [False, True, False, False]
    assert rollout.bootstraps_TN[1, 1] == expected
    assert rollout.valid_TN[:, 1].tolist() == [True, True, False, False]
    assert not rollout.truncated_TN[:, 0].any()
