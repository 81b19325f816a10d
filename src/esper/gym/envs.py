"""Growing a network as a Gymnasium env, alone or many side by side."""

# N envs, A joint choices

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.gym.game import Game, Turn, choose_tasks, open_tasks, open_world
from esper.leyline import Action, EpisodeSeed, SeedStage
from esper.leyline.rng import TRAINING_RUN_SEEDS

Observation = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]


class _GameEnv(gymnasium.Env[Observation, np.int64]):
    """One host of a game."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (as Gymnasium has it)

    def __init__(self, game: Game, render_mode: str | None) -> None:
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode must be 'ansi' or None, got {render_mode!r}")
        self.render_mode = render_mode
        self.observation_space, self.action_space = _spaces(game)
        self.choices: tuple[Action, ...] = game.choices
        """What each action does."""
        self.columns: tuple[str, ...] = game.columns
        """What each number of an observation is."""
        self.gamma = game.gamma
        """The discount that rewards were made for."""
        self._game, self._turn = game, None
        self._run_seed, self._episode = None, 0

    _turn: Turn | None
    _run_seed: int | None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode on a fresh host. A seed fixes this episode and all that follow."""
        super().reset(seed=seed)
        if seed is not None or self._run_seed is None:
            self._run_seed, self._episode = _draw_run_seed(self.np_random), 0
        else:
            self._episode += 1
        task = self._game.tasks[self._episode % len(self._game.tasks)]
        episode = EpisodeSeed(env_id=0, episode=self._episode, run_seed=self._run_seed, task=task)
        self._turn = self._game.begin([episode])[0]
        return self._turn.observation, _info(self._turn)

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One choice, then one epoch of the host. A choice that is not legal is carried out as WAIT."""
        before = self._before()
        if before.report.terminal or before.lost:
            raise gymnasium.error.ResetNeeded("the episode is over; call reset() to begin another")
        if not self.action_space.contains(np.int64(action)):
            raise ValueError(f"action must be in 0..{len(self.choices) - 1}, got {action}")
        self._turn = turn = self._game.play({0: int(action)})[0]
        return turn.observation, _paid(turn), _terminated(turn), turn.lost, _info(turn, before, int(action))

    def action_masks(self) -> Masks:
        """`[A]`: which actions are legal now."""
        return self._before().legal.copy()

    def render(self) -> str | None:
        """The host in a few lines; None without a render mode."""
        return None if self.render_mode is None else _describe(self._before())

    def close(self) -> None:
        """Ends the worker."""
        self._game.close()

    def _before(self) -> Turn:
        if self._turn is None:
            raise gymnasium.error.ResetNeeded("no episode has begun; call reset() first")
        return self._turn


class GrowEnv(_GameEnv):
    """A small network that trains on a task; each step is one lifecycle op and one epoch. Registered as esper/Grow-v0.

    Args:
        task: What the host is trained on; `esper tasks` lists them. Of several, episodes take one after the other.
            "nursery" stands for a set of small drawn tasks.
        use_test_set: Plays the nursery's held-out tasks instead.
        budget: Most parameters of host and seeds; None for the task's own.
        horizon: Epochs of an episode; None for the task's own.
        reward_mode: As for `esper train`.
        calibration_runs: Hosts per kind that set the scale of scores when the env is made; 0: from chance to 100.
        backend: What trains the host: native, torch, or auto, as for `esper train`.
        data_dir: Where the data lies, if not in a usual place.
        render_mode: "ansi" for `render()` as text.
    """

    def __init__(
        self,
        task: str | Sequence[str] = "digits_conv",
        budget: int | None = None,
        horizon: int | None = None,
        use_test_set: bool = False,
        reward_mode: str = "shaped",
        calibration_runs: int = 0,
        backend: str = "auto",
        data_dir: Path | None = None,
        render_mode: str | None = None,
    ) -> None:
        game = open_tasks(
            choose_tasks(task, budget=budget, horizon=horizon, use_test_set=use_test_set),
            reward_mode=reward_mode,
            calibration_runs=calibration_runs,
            workers=1,
            backend=backend,
            data_dir=data_dir,
        )
        super().__init__(game, render_mode)


class WorldEnv(_GameEnv):
    """A simulated world with a known optimum: the same ops, gates and masks over a host that is a formula.

    Args:
        world: Name of a sandbox.
        render_mode: "ansi" for `render()` as text.
    """

    def __init__(self, world: str, render_mode: str | None = None) -> None:
        super().__init__(open_world(world), render_mode)


class GrowVectorEnv(VectorEnv[Observation, npt.NDArray[np.int64], npt.NDArray[Any]]):
    """Many hosts side by side in worker processes. An episode that is over begins anew on the next step.

    Args:
        tasks: What the hosts are trained on, one or several; "nursery" as for `GrowEnv`.
        num_envs: Hosts.
        workers: Processes that the hosts are spread over; 1 stays in this one. Their number changes no result.
        options: As for `GrowEnv`.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (as Gymnasium has it)

    def __init__(
        self,
        tasks: str | Sequence[str] = "digits_conv",
        num_envs: int = 2,
        workers: int = 2,
        budget: int | None = None,
        horizon: int | None = None,
        use_test_set: bool = False,
        reward_mode: str = "shaped",
        calibration_runs: int = 0,
        backend: str = "auto",
        data_dir: Path | None = None,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self._game = game = open_tasks(
            choose_tasks(tasks, budget=budget, horizon=horizon, use_test_set=use_test_set),
            reward_mode=reward_mode,
            calibration_runs=calibration_runs,
            workers=min(workers, num_envs),
            backend=backend,
            data_dir=data_dir,
        )
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = _spaces(game)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.choices: tuple[Action, ...] = game.choices
        self.columns: tuple[str, ...] = game.columns
        self.gamma = game.gamma
        self._turns: dict[int, Turn] = {}
        self._run_seed: int | None = None
        self._episodes = [0] * num_envs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode in every env. A seed fixes these and all that follow."""
        super().reset(seed=seed)
        if seed is not None or self._run_seed is None:
            self._run_seed, self._episodes = _draw_run_seed(self.np_random), [-1] * self.num_envs
        self._begin(range(self.num_envs))
        return self._observations(), self._infos({})

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[Observation, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """One choice and one epoch in every env; those whose episode is over begin another instead."""
        if len(self._turns) != self.num_envs:
            raise gymnasium.error.ResetNeeded("no episode has begun; call reset() first")
        before = dict(self._turns)
        over = [env for env, turn in before.items() if turn.report.terminal or turn.lost]
        played = {env: int(actions[env]) for env in range(self.num_envs) if env not in over}
        if played:
            self._turns |= self._game.play(played)
        if over:
            self._begin(over)
        now = [self._turns[env] for env in range(self.num_envs)]
        return (
            self._observations(),
            np.array([_paid(turn) for turn in now]),
            np.array([_terminated(turn) for turn in now]),
            np.array([turn.lost for turn in now]),
            self._infos({env: (before[env], action) for env, action in played.items()}),
        )

    def action_masks(self) -> Masks:
        """`[N, A]`: which actions are legal now."""
        return np.stack([self._turns[env].legal for env in range(self.num_envs)])

    def close_extras(self, **kwargs: Any) -> None:
        """Ends the workers."""
        self._game.close()

    def _begin(self, envs: Sequence[int]) -> None:
        assert self._run_seed is not None
        for env in envs:
            self._episodes[env] += 1
        seeds = [
            EpisodeSeed(env_id=env, episode=self._episodes[env], run_seed=self._run_seed, task=self._task(env))
            for env in envs
        ]
        self._turns |= self._game.begin(seeds)

    def _task(self, env: int) -> str:
        """Side by side, and from episode to episode, envs go through the tasks."""
        return self._game.tasks[(env + self._episodes[env] * self.num_envs) % len(self._game.tasks)]

    def _observations(self) -> Observation:
        return np.stack([self._turns[env].observation for env in range(self.num_envs)])

    def _infos(self, played: Mapping[int, tuple[Turn, int]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for env in range(self.num_envs):
            infos = self._add_info(infos, _info(self._turns[env], *played.get(env, ())), env)
        return infos


def make_vector(task: str | Sequence[str] = "digits_conv", **options: Any) -> GrowVectorEnv:
    """For `gymnasium.make_vec`, which then takes the same words as `gymnasium.make`."""
    return GrowVectorEnv(task, **options)


def _spaces(game: Game) -> tuple[spaces.Space[Observation], spaces.Space[np.int64]]:
    seen: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (len(game.columns),), np.float32)
    return seen, spaces.Discrete(len(game.choices))


def _draw_run_seed(generator: np.random.Generator) -> int:
    """Of those that policies are trained with, so that no evaluation meets an episode that was learned from."""
    return int(generator.integers(TRAINING_RUN_SEEDS.start, TRAINING_RUN_SEEDS.stop))


def _paid(turn: Turn) -> float:
    return 0.0 if turn.reward is None else turn.reward.components.total


def _terminated(turn: Turn) -> bool:
    """The horizon belongs to the task: it is observed, and the outcome is paid at its end. So nothing is cut off."""
    return turn.report.terminal and not turn.lost


def _info(turn: Turn, before: Turn | None = None, action: int | None = None) -> dict[str, Any]:
    """What else is known: the report, what became of the choice and what each reward term paid.

    Equal seeds give equal infos, so the report is without the two times that it has of the machine.
    """
    report = replace(turn.report, train_ms=0.0, val_ms=0.0)
    known: dict[str, Any] = {"report": report, "action_mask": turn.legal.copy(), "task": turn.context.task}
    if before is not None:
        known["was_legal"] = bool(before.legal[action])
        known["outcome"] = turn.outcome
        known["reward_terms"] = {} if turn.reward is None else dict(turn.reward.components.amounts)
    return known


def _describe(turn: Turn) -> str:
    report = turn.report
    head = f"epoch {report.epochs_done} of {report.signals.horizon}  {report.val_accuracy_pct:.1f} %"
    lines = [f"{head}  {report.total_params:,} parameters  {report.governor_state.value}"]
    for slot in report.slots:
        worth = "" if slot.contribution_pp is None else f"  {slot.contribution_pp:+.1f} pp"
        seed = "" if slot.stage is SeedStage.DORMANT else f"  {slot.blueprint or ''}  alpha {slot.alpha:.2f}{worth}"
        lines.append(f"{slot.slot_id}  {slot.stage.name.lower()}{seed}")
    return "\n".join(lines)
