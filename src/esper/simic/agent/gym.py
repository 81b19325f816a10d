"""The same learner over any Gymnasium vector env: Discrete or MultiDiscrete actions, optional action masks.

Sampling, recurrence, advantages and update are the ones that train Tamiyo; only the network and the way a rollout is
collected differ. Knows nothing of Esper's hosts. Needs the `bench` extra.
"""

# T steps, N envs, B = T x N rows, D observation, A choices of all heads side by side, H heads, W width

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn

from esper.leyline import derive_seed
from esper.simic.agent.experience import Rollout, price
from esper.simic.agent.losses import UpdateSettings
from esper.simic.agent.policy import ForwardPass, initialize_, linear, lstm, scale_output_
from esper.simic.agent.ppo_update import UpdateResult, run_epochs
from esper.simic.agent.recurrence import LSTMState, unroll, zero_state
from esper.simic.agent.sampling import Choice, Exploration, choose
from esper.simic.agent.value_head import ValueHead
from esper.simic.control.normalization import RunningMeanStd

MaskSource = Callable[[VectorEnv], npt.NDArray[np.bool_]]
"""Legal choices `[N, A]` of the envs as they stand, heads side by side."""


def call_action_masks(envs: VectorEnv) -> npt.NDArray[np.bool_]:
    """Masks of envs that offer an `action_masks()` method."""
    return np.stack([np.asarray(mask, dtype=np.bool_) for mask in envs.call("action_masks")])


@dataclass(frozen=True, slots=True, kw_only=True)
class GymConfig:
    """Hyper-parameters of PPO on a vector env."""

    steps_per_round: int = 128
    """Steps of every env between updates."""
    total_steps: int = 300_000
    """Env steps over which the learning rate falls to a tenth and epsilon to 0."""
    width: int = 64
    gamma: float = 0.99
    lam: float = 0.95
    epochs: int = 4
    minibatches: int = 4
    clip_ratio: float = 0.2
    target_kl: float = 0.03
    learning_rate: float = 1e-3
    entropy_coef: float = 0.01
    epsilon: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GymInputs:
    """T steps of N envs, as the network takes them."""

    obs_TND: Tensor
    legal_TNA: Tensor
    starts_TN: Tensor
    state: LSTMState

    def select(self, envs: Tensor) -> Self:
        """The sequences of some envs."""
        return type(self)(
            obs_TND=self.obs_TND[:, envs],
            legal_TNA=self.legal_TNA[:, envs],
            starts_TN=self.starts_TN[:, envs],
            state=(self.state[0][:, envs], self.state[1][:, envs]),
        )


@dataclass(frozen=True, slots=True)
class FlatMasks:
    """Masks of heads that do not depend on each other."""

    legal_BA: Tensor
    sizes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """B."""
        return self.legal_BA.shape[0]

    @property
    def sampling_order(self) -> tuple[int, ...]:
        """As declared."""
        return tuple(range(len(self.sizes)))

    def legal(self, head: int, actions_BH: Tensor) -> Tensor:
        """The columns of this head."""
        return self.legal_BA.split(self.sizes, dim=1)[head]


class GymNetwork(nn.Module):
    """Encoder, memory with residual, one linear head per action dimension, V(s)."""

    def __init__(self, obs_size: int, sizes: tuple[int, ...], width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = sizes
        self.obs_stats = RunningMeanStd(obs_size)
        self.encoder = nn.Sequential(linear(obs_size, width), nn.Tanh(), linear(width, width), nn.Tanh())
        self.memory = lstm(width, width)
        self.heads = nn.ModuleList(linear(width, size) for size in sizes)
        self.value = ValueHead(width, width)
        initialize_(self, generator)
        for head in self.heads:
            assert isinstance(head, nn.Linear)
            scale_output_(head, 0.01, generator)
        scale_output_(self.value.out, 1.0, generator)

    def forward(self, inputs: GymInputs) -> ForwardPass:
        """Runs T steps of N envs."""
        encoded_TNW = self.encoder(self.obs_stats(inputs.obs_TND))
        memory_TNW, state = unroll(self.memory, encoded_TNW, inputs.state, inputs.starts_TN)
        trunk_BW = (encoded_TNW + memory_TNW).flatten(0, 1)
        return ForwardPass(
            logits_fn=partial(self._logits, trunk_BW),
            masks=FlatMasks(inputs.legal_TNA.flatten(0, 1), self.sizes),
            values_B=self.value(trunk_BW),
            memory_TNW=memory_TNW,
            state=state,
        )

    def head_parameters(self) -> tuple[list[nn.Parameter], ...]:
        """The weights of each head."""
        return tuple(list(head.parameters()) for head in self.heads)

    def _logits(self, trunk_BW: Tensor, head: int, actions_BH: Tensor) -> Tensor:
        logits: Tensor = self.heads[head](trunk_BW)
        return logits


@dataclass(slots=True)
class _Now:
    """Where the envs stand between two steps."""

    obs_ND: Tensor
    starts_N: Tensor
    """The env's episode begins here."""
    resetting_N: Tensor
    """The env's episode is over: the next step only resets it and its action is ignored."""
    state: LSTMState


class RecurrentPPO:
    """Recurrent, maskable PPO over a vector env that resets on the step after an episode's end."""

    def __init__(self, envs: VectorEnv, config: GymConfig, *, run_seed: int, masks: MaskSource | None = None) -> None:
        _check_autoreset(envs)
        self.envs = envs
        self.config = config
        self.run_seed = run_seed
        self.masks = masks
        self.env_steps = 0
        self.updates = 0
        self.finished: list[float] = []
        """Returns of the training episodes, in the order they ended."""
        self._encode, obs_size = _observation_encoder(envs.single_observation_space)
        self._to_env, self.sizes = _action_decoder(envs.single_action_space)
        generator = self._generator("policy")
        self.network = GymNetwork(obs_size, self.sizes, config.width, generator)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self._totals_N = np.zeros(envs.num_envs)
        self._now = self._reset(derive_seed(run_seed, None, None, None, "envs") % 2**31)

    def learn(self, total_steps: int) -> Iterator[UpdateResult]:
        """Trains until at least so many env steps are done; yields after every update."""
        while self.env_steps < total_steps:
            progress = min(1.0, self.env_steps / self.config.total_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate * (1.0 - 0.9 * progress)
            settings = self._settings(progress)
            rollout = self._collect(settings.exploration)
            experience = price(rollout, gamma=self.config.gamma, lam=self.config.lam)
            self.network.value.rescale(experience.returns_TN[experience.valid_TN])
            result = run_epochs(self.network, self.optimizer, experience, settings, self._generator("ppo"))
            self.network.obs_stats.update(rollout.inputs.obs_TND[rollout.valid_TN])
            self.env_steps += int(rollout.valid_TN.sum())
            self.updates += 1
            yield result

    def evaluate(self, envs: VectorEnv, num_episodes: int, *, env_seed: int) -> list[float]:
        """Returns of greedy episodes in other envs."""
        now, totals_N, returns = self._start(envs, env_seed), np.zeros(envs.num_envs), []
        while len(returns) < num_episodes:
            choice, _, now.state = self._decide(envs, now, self._settings(1.0).exploration, greedy=True)
            rewards, over_N = self._advance(envs, now, choice)[:2]
            totals_N += rewards
            returns += totals_N[over_N].tolist()
            totals_N[over_N] = 0.0
        return returns[:num_episodes]
