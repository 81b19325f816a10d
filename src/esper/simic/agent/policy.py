"""What the update needs of a network: one forward pass over whole env sequences. Knows no heads by name.

The Tamiyo network and the network for Gymnasium envs both offer this, so they share sampling, advantages and update.
"""

# T steps, N envs, B = T x N rows, W width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from esper.simic.agent.recurrence import LSTMState
from esper.simic.agent.sampling import HeadMasks, LogitsFn

if TYPE_CHECKING:
    from esper.simic.agent.value_head import ValueHead


class SequenceInputs(Protocol):
    """Inputs of T steps of N envs."""

    def select(self, envs: Tensor) -> Self:
        """The sequences of some envs, in the order given."""


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
    """Memory at the end of the sequences."""


InputsT_contra = TypeVar("InputsT_contra", bound=SequenceInputs, contravariant=True)


class RecurrentPolicy(Protocol[InputsT_contra]):
    """A network that can be trained by `run_epochs`."""

    value: ValueHead

    def __call__(self, inputs: InputsT_contra) -> ForwardPass:
        """Runs whole sequences."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""

    def head_parameters(self) -> tuple[list[nn.Parameter], ...]:
        """The weights that serve one head alone, by head in storage order."""


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A layer without values yet: its default initialisation would draw from the global generator."""
    return nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device="cpu")


def lstm(num_inputs: int, width: int) -> nn.LSTM:
    """A memory without values yet."""
    return nn.LSTM(num_inputs, width, device="meta").to_empty(device="cpu")


def initialize_(module: nn.Module, generator: torch.Generator) -> None:
    """Orthogonal weights with gain sqrt 2, zero biases; memories orthogonal per gate with forget bias 1."""
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
