"""The step loop of every controller: rules, schedules, chance and learned policies play the same game."""

from __future__ import annotations

from collections.abc import Sequence

from esper.leyline import ActionExecutionResult, EpisodeSeed, PolicyProtocol
from esper.simic.training.action_execution import EnvPool, execute_actions, observe_reset


def episode_seeds(run_seed: int, episode: int, num_envs: int) -> tuple[EpisodeSeed, ...]:
    """One episode of the same index in every env."""
    return tuple(EpisodeSeed(env_id=env_id, episode=episode, run_seed=run_seed) for env_id in range(num_envs))


def run_episodes(
    pool: EnvPool, policy: PolicyProtocol, seeds: Sequence[EpisodeSeed], horizon: int
) -> ActionExecutionResult:
    """Plays one episode per seed, all in step, and returns their last state.

    Envs that end early sit still until the others are done.
    """
    state = observe_reset(pool, seeds)
    policy.begin(state)
    for _ in range(horizon):
        after = execute_actions(pool, policy.act(state))
        policy.store(state, after)
        state = after
    return state
