"""A toy that needs memory and masks: a cue at the first step says which action is right some steps later."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces


class CueRecall(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """One cue, `delay` blank steps, one answer.

    On every step a random half of the actions is legal; on the last one the right action is always among them. Only
    the last action counts: 1 if it is the cued one, else 0. Whoever forgets the cue but keeps to the masks is right
    in 2 / `choices` of the episodes. Nothing is checked here: an illegal last action is simply wrong.
    """

    def __init__(self, choices: int = 8, delay: int = 6, *, show_cue: bool = True) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (choices + 1,), np.float32)
        self.action_space = spaces.Discrete(choices)
        self._choices = choices
        self._delay = delay
        self._show_cue = show_cue

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Draws a cue and shows it, unless it is to stay hidden."""
        super().reset(seed=seed)
        self._step = 0
        self._cue = int(self.np_random.integers(self._choices))
        self._draw_legal()
        obs = self._blank()
        obs[self._cue] = float(self._show_cue)
        return obs, {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Counts down; judges the answer at the end."""
        answered = self._step > self._delay
        self._step += 1
        self._draw_legal()
        reward = float(answered and int(action) == self._cue)
        return self._blank(), reward, answered, False, {}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """What is legal now."""
        return self._legal.copy()

    def _blank(self) -> npt.NDArray[np.float32]:
        """Nothing but whether the answer is due."""
        obs = np.zeros(self._choices + 1, dtype=np.float32)
        obs[-1] = float(self._step > self._delay)
        return obs

    def _draw_legal(self) -> None:
        order = self.np_random.permutation(self._choices)
        if self._step > self._delay:
            order = np.concatenate([[self._cue], order[order != self._cue]])
        self._legal = np.zeros(self._choices, dtype=np.bool_)
        self._legal[order[: self._choices // 2]] = True
