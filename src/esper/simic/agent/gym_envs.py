"""A Gymnasium vector env as the learner sees it: tensors in, tensors out, and where each episode begins and ends.

The one module of the learner that imports Gymnasium. Knows nothing of networks.
"""

# N envs, D observation, A choices of all heads side by side, H heads

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

try:
    from gymnasium import spaces
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
except ImportError as error:
    raise ImportError(
        "PPO over Gymnasium envs needs gymnasium, which is not installed; install it with: "
        "pip install 'esper-growth[gym]'"
    ) from error

from esper.leyline import NumericFailure

MaskSource = Callable[[VectorEnv], npt.ArrayLike]
"""Legal choices `[N, A]` of the envs as they stand, heads side by side: booleans, or 0 and 1."""


def call_action_masks(envs: VectorEnv) -> npt.NDArray[Any]:
    """Masks of envs that each offer an `action_masks()` method, or of a vector env that does for all of them."""
    base = envs.unwrapped
    if isinstance(base, SyncVectorEnv | AsyncVectorEnv):
        return np.stack([np.asarray(mask) for mask in base.call("action_masks")])
    if not hasattr(base, "action_masks"):
        raise ValueError(
            f"expected a vector env with action_masks(), or a SyncVectorEnv or AsyncVectorEnv, whose envs can be asked "
            f"one by one, got {base}; pass a function of your own as masks"
        )
    return np.asarray(base.action_masks())


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """N envs between two steps."""

    obs_ND: Tensor
    legal_NA: Tensor
    starts_N: Tensor
    """The env's episode begins here."""
    over_N: Tensor
    """The env's episode is over: this is its last observation, and the next step only resets the env."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step of N envs brought. All zero and False for envs that were only reset."""

    rewards_N: Tensor
    terminated_N: Tensor
    truncated_N: Tensor
    moment: Moment


class TensorEnvs:
    """Wraps a vector env that resets on the step after an episode's end, which is Gymnasium's default.

    Raises:
        ValueError: The envs, their spaces or their masks are of a kind that the learner cannot take.
        NumericFailure: A reward or an observation is not finite.
    """

    def __init__(self, envs: VectorEnv, masks: MaskSource | None) -> None:
        if not isinstance(envs, VectorEnv):
            raise ValueError(
                f"expected a vector env, got {envs}; make several side by side, such as "
                "gymnasium.make_vec(NAME, 16, vectorization_mode='sync') or SyncVectorEnv([MAKE_ENV] * 16)"
            )
        mode = envs.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise ValueError(
                f"expected a vector env with autoreset_mode NEXT_STEP, got {mode}; with it the last observation of "
                "every episode is seen. Make the env without another autoreset_mode"
            )
        if masks is not None and not callable(masks):
            raise ValueError(
                f"expected masks to be a function of the vector env, such as call_action_masks, got {masks}"
            )
        self.num_envs = int(envs.num_envs)
        self.obs_size = _obs_size(envs.single_observation_space)
        self.sizes, self._lowest_H = _choices(envs.single_action_space)
        self._envs = envs
        self._masks = masks
        self._num_steps = 0

    def reset(self, seed: int) -> Moment:
        """Begins an episode in every env."""
        obs, _ = self._envs.reset(seed=seed)
        self._num_steps = 0
        begun_N = torch.ones(self.num_envs, dtype=torch.bool)
        return self._moment(obs, starts_N=begun_N, over_N=~begun_N)

    def step(self, moment: Moment, actions_NH: Tensor) -> Outcome:
        """Acts in every env; those whose episode is over begin a new one instead."""
        actions = actions_NH.numpy() + self._lowest_H
        is_single = isinstance(self._envs.single_action_space, spaces.Discrete)
        obs, rewards, terminated, truncated, _ = self._envs.step(actions[:, 0] if is_single else actions)
        self._num_steps += 1
        rewards_N = torch.tensor(rewards, dtype=torch.float32)
        self._check_finite("reward", rewards_N)
        terminated_N, truncated_N = torch.from_numpy(terminated.copy()), torch.from_numpy(truncated.copy())
        return Outcome(
            rewards_N=rewards_N,
            terminated_N=terminated_N,
            truncated_N=truncated_N,
            moment=self._moment(obs, starts_N=moment.over_N, over_N=terminated_N | truncated_N),
        )

    def _moment(self, obs: npt.NDArray[Any], *, starts_N: Tensor, over_N: Tensor) -> Moment:
        legal_NA = torch.ones(self.num_envs, sum(self.sizes), dtype=torch.bool)
        if self._masks is not None:
            legal = np.asarray(self._masks(self._envs))
            if legal.shape != legal_NA.shape:
                raise ValueError(f"expected action masks of shape {tuple(legal_NA.shape)}, got {legal.shape}")
            is_integer = np.issubdtype(legal.dtype, np.integer)
            if legal.dtype != np.bool_ and not (is_integer and np.isin(legal, (0, 1)).all()):
                raise ValueError(
                    f"expected action masks of booleans, or of 0 and 1, got {legal.dtype} with values from "
                    f"{legal.min()} to {legal.max()}; say for each choice whether it is legal"
                )
            # After an episode nothing is chosen, so an env may have nothing legal to offer there.
            legal_NA = torch.from_numpy(legal.astype(np.bool_)) | over_N[:, None]
            self._check_possible(legal_NA)
        obs_ND = self._encode(obs)
        self._check_finite("observation", obs_ND)
        return Moment(obs_ND=obs_ND, legal_NA=legal_NA, starts_N=starts_N, over_N=over_N)

    def _check_possible(self, legal_NA: Tensor) -> None:
        for head, legal_NC in enumerate(torch.split(legal_NA, list(self.sizes), dim=1)):
            possible_N = legal_NC.any(dim=1)
            if not bool(possible_N.all()):
                env = int((~possible_N).nonzero()[0])
                raise ValueError(
                    f"env {env}, step {self._num_steps} since its reset: expected at least one legal choice in every "
                    f"dimension of the action, got none of {self.sizes[head]} in dimension {head}; mend its masks"
                )

    def _check_finite(self, what: str, values: Tensor) -> None:
        """Also of episodes that are over: in memories and running statistics such a number would stay for good."""
        if bool(torch.isfinite(values).all()):
            return
        env, *column = (~torch.isfinite(values)).nonzero()[0].tolist()
        place = f"{what}[{column[0]}]" if column else what
        raise NumericFailure(
            f"env {env}, step {self._num_steps} since its reset: expected finite numbers, got {place} = "
            f"{values[env, *column].item()}. Nothing was learned from it; mend the env"
        )

    def _encode(self, obs: npt.NDArray[Any]) -> Tensor:
        space = self._envs.single_observation_space
        if isinstance(space, spaces.Discrete):
            return F.one_hot(torch.tensor(obs) - int(space.start), self.obs_size).float()
        return torch.tensor(obs, dtype=torch.float32).flatten(1)


def _obs_size(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box):
        return int(np.prod(space.shape))
    raise ValueError(f"expected Box or Discrete observations, got {space}; wrap each env in FlattenObservation")


def _choices(space: spaces.Space[Any]) -> tuple[tuple[int, ...], npt.NDArray[np.int64]]:
    """Choices per head, and the lowest action of each head."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),), np.array([space.start], dtype=np.int64)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(int(size) for size in space.nvec), np.asarray(space.start, dtype=np.int64)
    raise ValueError(f"expected Discrete or one-dimensional MultiDiscrete actions, got {space}")
