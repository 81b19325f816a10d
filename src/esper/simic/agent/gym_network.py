"""The network for Gymnasium envs: encoder, memory, one linear head per action dimension, V(s)."""

# T steps, N envs, B = T x N rows, D observation, A choices of all heads side by side, H heads, W width

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from esper.simic.agent.policy import ForwardPass, initialize_, linear, lstm, scale_output_
from esper.simic.agent.recurrence import LSTMState, unroll
from esper.simic.agent.value_head import ValueHead
from esper.simic.control.normalization import RunningMeanStd


@dataclass(frozen=True, slots=True, kw_only=True)
class GymInputs:
    """T steps of N envs, as the network takes them."""

    obs_TND: Tensor
    legal_TNA: Tensor
    starts_TN: Tensor
    """Memory is cleared before these steps."""
    state: LSTMState
    """Memory before the first step."""

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
        first = sum(self.sizes[:head])
        return self.legal_BA[:, first : first + self.sizes[head]]


class GymNetwork(nn.Module):
    """Policy and value over one trunk: the encoded observation plus what the memory adds to it."""

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
