"""The parts of recurrent policies: what the update needs of a network, its LSTM, its value head, its initial weights.

The Tamiyo network and the network for Gymnasium envs are made of these, so they share sampling, advantages and update.
"""

# T steps, N envs, B = T x N rows, D inputs, W width, M segments

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from esper.simic.agent.sampling import HeadMasks, LogitsFn
from esper.simic.control.normalization import RunningMeanStd

# In scaled reward units. Returns that vary less are not worth magnifying, nor fit to judge a critic by.
RETURN_STD_FLOOR = 0.1

LSTMState = tuple[Tensor, Tensor]
"""(h, c), each `[1, N, W]`."""


class SequenceInputs(Protocol):
    """Inputs of T steps of N envs."""

    def parts(self, envs: Tensor) -> Sequence[tuple[Tensor, Any]]:
        """The sequences of some envs as a network takes them: one part, or one for each shape that they have.

        Each part comes with the envs in it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """A network's answer for B = T x N rows, step-major."""

    logits_fn: LogitsFn
    masks: HeadMasks
    values_B: Tensor
    """Normalised; the value head turns them into units of reward."""
    memory_TNW: Tensor
    """Outputs of the LSTM."""
    state: LSTMState
    """LSTM state at the end of the sequences."""


class RecurrentPolicy(Protocol):
    """A network that can be trained by `run_epochs`."""

    value: ValueHead

    def __call__(self, inputs: Any) -> ForwardPass:
        """Runs whole sequences: one part of what was stored."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""

    def head_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The weights that serve one head alone, by head in storage order."""


# ---- initial weights


def empty_linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A layer without values yet: its default initialisation would draw from the global generator."""
    return nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device="cpu")


def empty_lstm(num_inputs: int, width: int) -> nn.LSTM:
    """An LSTM without values yet."""
    return nn.LSTM(num_inputs, width, device="meta").to_empty(device="cpu")


def initialize_(module: nn.Module, generator: torch.Generator) -> None:
    """Orthogonal weights with gain sqrt 2, zero biases; LSTMs orthogonal per gate with forget bias 1."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            scale_output_(part, 2.0**0.5, generator)
        elif isinstance(part, nn.LSTM):
            _initialize_lstm_(part, generator)


def scale_output_(layer: nn.Linear, gain: float, generator: torch.Generator) -> None:
    """Draws a layer afresh with another gain: 0.01 for policy outputs, so that the first policy is the prior."""
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)


@torch.no_grad()
def _initialize_lstm_(memory: nn.LSTM, generator: torch.Generator) -> None:
    for name, parameter in memory.named_parameters():
        # Gates are stored as input, forget, cell, output.
        gates = parameter.chunk(4)
        if name.startswith("weight"):
            for gate in gates:
                nn.init.orthogonal_(gate, generator=generator)
        else:
            parameter.zero_()
            gates[1].fill_(1.0 if name.startswith("bias_ih") else 0.0)


# ---- value head


class ValueHead(nn.Module):
    """MLP with one output in normalised units. Never sees an action: a baseline that does starves the policy."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(empty_linear(width, hidden), nn.SiLU())
        self.out = empty_linear(hidden, 1)
        self.returns = RunningMeanStd(1)

    def forward(self, features: Tensor) -> Tensor:
        """Normalised value of rows `[..., W]`, shape `[...]`."""
        normalized: Tensor = self.out(self.body(features))[..., 0]
        return normalized

    def denormalize(self, values: Tensor) -> Tensor:
        """Normalised values in units of reward."""
        mean, scale = self._scale()
        return values * scale + mean

    def normalize(self, returns: Tensor) -> Tensor:
        """Returns in the units this head predicts."""
        mean, scale = self._scale()
        return (returns - mean) / scale

    @torch.no_grad()
    def rescale(self, returns_B: Tensor) -> None:
        """Takes new returns into the statistics and changes the output layer so that predictions stay as they were.

        The very first predictions mean nothing. Keeping them would blow the output up by however much smaller than 1
        the first returns spread, and the critic's error would drown the policy in the shared gradient for many rounds.
        """
        untrained = self.returns.count.item() == 0
        old_mean, old_scale = self._scale()
        self.returns.update(returns_B[:, None])
        if untrained:
            return
        new_mean, new_scale = self._scale()
        self.out.weight.mul_(old_scale / new_scale)
        self.out.bias.mul_(old_scale / new_scale).add_((old_mean - new_mean) / new_scale)

    def _scale(self) -> tuple[Tensor, Tensor]:
        return self.returns.mean.float(), self.returns.var.sqrt().clamp(min=RETURN_STD_FLOOR).float()


# ---- recurrence


def zero_state(lstm: nn.LSTM, num_envs: int) -> LSTMState:
    """The state at the start of an episode."""
    zeros = torch.zeros(1, num_envs, lstm.hidden_size, device=next(lstm.parameters()).device)
    return zeros, zeros.clone()


def unroll(lstm: nn.LSTM, inputs_TND: Tensor, state: LSTMState, starts_TN: Tensor | None) -> tuple[Tensor, LSTMState]:
    """Runs T steps from `state`, clearing the LSTM state before every step that starts an episode.

    One packed call instead of a loop over steps: the segments between episode starts become the sequences of a packed
    batch, so the state never crosses a start and no step is padded.

    Returns:
        Outputs `[T, N, W]` and the state at the end: `[1, N, W]` without starts after step 0, else one entry per
        segment.
    """
    if starts_TN is not None:
        keep_N1 = (~starts_TN[0])[:, None].to(state[0].dtype)
        state = state[0] * keep_N1, state[1] * keep_N1
        if bool(starts_TN[1:].any()):
            return _unroll_segments(lstm, inputs_TND, state, starts_TN)
    outputs_TNW, final = lstm(inputs_TND, state)
    return outputs_TNW, final


def _unroll_segments(
    lstm: nn.LSTM, inputs_TND: Tensor, state: LSTMState, starts_TN: Tensor
) -> tuple[Tensor, LSTMState]:
    num_steps, num_envs, _ = inputs_TND.shape
    device = inputs_TND.device
    begins_TN = starts_TN.clone()
    begins_TN[0] = True
    steps_T1 = torch.arange(num_steps, device=device)[:, None]
    age_TN = steps_T1 - torch.where(begins_TN, steps_T1, 0).cummax(dim=0).values
    # Number the segments env by env, then rank them by length: a packed batch wants the longest first.
    segment_TN = (begins_TN.T.reshape(-1).cumsum(0) - 1).reshape(num_envs, num_steps).T
    lengths_M = torch.bincount(segment_TN.reshape(-1))
    by_length_M = torch.argsort(lengths_M, descending=True, stable=True)
    rank_M = torch.argsort(by_length_M)
    packed_order = torch.argsort((age_TN * len(lengths_M) + rank_M[segment_TN]).reshape(-1))

    first_env_M = torch.arange(num_envs, device=device).expand(num_steps, -1).T[begins_TN.T][by_length_M]
    first_step_M = steps_T1.expand(-1, num_envs).T[begins_TN.T][by_length_M]
    carries_M1 = (first_step_M == 0)[:, None].to(inputs_TND.dtype)
    initial = (state[0][:, first_env_M] * carries_M1, state[1][:, first_env_M] * carries_M1)

    flat = inputs_TND.reshape(num_steps * num_envs, -1)
    batch_sizes = torch.bincount(age_TN.reshape(-1)).cpu()
    packed, final = lstm(PackedSequence(flat[packed_order], batch_sizes), initial)
    outputs_TNW = packed.data[torch.argsort(packed_order)].reshape(num_steps, num_envs, -1)
    return outputs_TNW, final
