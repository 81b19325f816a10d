"""The step loop: fixed controllers and learned policies, real and simulated hosts all run through it."""

from __future__ import annotations

from collections.abc import Sequence

from esper.leyline import ActionExecutionResult, ActionSpec, EpisodeSeed, PolicyProtocol
from esper.simic.training.action_execution import EnvPool, execute_actions, observe_reset


class StepObserver:
    """Hooks of the step loop, in the order in which they are called; override those you need.

    An observer sees everything and changes nothing.
    """

    def reset(self, state: ActionExecutionResult) -> None:
        """All envs have started an episode; the policy has not seen them yet."""

    def acted(self, state: ActionExecutionResult, specs: Sequence[ActionSpec]) -> None:
        """The policy has chosen for every env."""

    def executed(self, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        """All envs have carried out their op and trained an epoch."""

    def stored(self, before: ActionExecutionResult, specs: Sequence[ActionSpec], after: ActionExecutionResult) -> None:
        """The policy has stored the step, which is complete."""


def episode_seeds(run_seed: int, episode: int, num_envs: int) -> tuple[EpisodeSeed, ...]:
    """One episode of the same index in every env."""
    return tuple(EpisodeSeed(env_id=env_id, episode=episode, run_seed=run_seed) for env_id in range(num_envs))


def grouped_seeds(run_seed: int, episode: int, num_envs: int, tasks: Sequence[str | None]) -> tuple[EpisodeSeed, ...]:
    """One episode of the same index in every env; the envs are shared out equally among groups, one for each task."""
    size = num_envs // len(tasks)
    return tuple(
        EpisodeSeed(env_id=env_id, episode=episode, run_seed=run_seed, task=tasks[env_id // size], group=env_id // size)
        for env_id in range(num_envs)
    )


def run_episodes(
    pool: EnvPool,
    policy: PolicyProtocol,
    seeds: Sequence[EpisodeSeed],
    horizon: int,
    observers: Sequence[StepObserver] = (),
) -> ActionExecutionResult:
    """Runs one episode per seed, all in step, and returns their last state.

    Envs whose episode ends early idle until the others are done.
    """
    state = observe_reset(pool, seeds)
    for observer in observers:
        observer.reset(state)
    policy.begin(state)
    for _ in range(horizon):
        specs = policy.act(state)
        for observer in observers:
            observer.acted(state, specs)
        after = execute_actions(pool, specs)
        for observer in observers:
            observer.executed(specs, after)
        policy.store(state, after)
        for observer in observers:
            observer.stored(state, specs, after)
        state = after
    return state
