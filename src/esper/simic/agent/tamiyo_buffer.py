"""Storage of one rollout: every step of every env, written once into preallocated tensors.

Episodes start from a zero LSTM state at row 0, so none is stored. Observations are raw; normaliser statistics stay
fixed from the first step of a rollout to its last update, so what is learned from is what was acted on.
"""

# T steps, N envs, H heads; other axes as in tamiyo_inputs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.simic.agent.advantages import Rollout
from esper.simic.agent.tamiyo_inputs import EnvGroup, RolloutInputs, step_of


@dataclass(slots=True)
class TamiyoRolloutBuffer:
    """Room for T steps of N envs. Filled by `write`, read as a whole, emptied by `clear`."""

    storage: Rollout[RolloutInputs]
    """All T rows, also those not written yet."""
    position: int = 0

    @classmethod
    def allocate(cls, num_steps: int, groups: Sequence[EnvGroup]) -> TamiyoRolloutBuffer:
        """Makes room for `num_steps` steps of envs like these."""
        num_envs = sum(len(group.envs_G) for group in groups)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_steps, num_envs, *shape, dtype=dtype)

        return cls(
            Rollout(
                inputs=step_of(groups).map(lambda row: torch.zeros(num_steps, *row.shape[1:], dtype=row.dtype)),
                actions_TNH=zeros(torch.long, len(HEAD_NAMES)),
                log_probs_TNH=zeros(torch.float32, len(HEAD_NAMES)),
                usable_TNH=zeros(torch.bool, len(HEAD_NAMES)),
                values_TN=zeros(torch.float32),
                rewards_TN=zeros(torch.float32),
                terminated_TN=zeros(torch.bool),
                truncated_TN=zeros(torch.bool),
                valid_TN=zeros(torch.bool),
                bootstraps_TN=zeros(torch.float32),
            )
        )

    @property
    def num_envs(self) -> int:
        """N."""
        return self.storage.valid_TN.shape[1]

    def write(self, step: Rollout[RolloutInputs]) -> None:
        """Copies one step, a rollout of length 1, into the next row.

        Raises:
            IndexError: The buffer is full; a rollout has exactly `num_steps` steps.
        """
        num_steps = self.storage.valid_TN.shape[0]
        if self.position >= num_steps:
            raise IndexError(f"rollout buffer is full: it holds {num_steps} steps; update and clear it first")
        for stored_TN, new_1N in zip(_tensors(self.storage), _tensors(step), strict=True):
            stored_TN[self.position].copy_(new_1N[0])
        self.position += 1

    def truncate(self, env: int, bootstrap: float) -> None:
        """Cuts an env's sequence off after the row written last, which is bootstrapped with this value."""
        if self.position:
            self.storage.truncated_TN[self.position - 1, env] = True
            self.storage.bootstraps_TN[self.position - 1, env] = bootstrap

    def rollout(self) -> Rollout[RolloutInputs]:
        """The rows written so far, without copying."""
        rows = slice(self.position)
        tensors = {name: tensor[rows] for name, tensor in self.storage.tensors().items()}
        return Rollout(inputs=self.storage.inputs.map(lambda tensor: tensor[rows]), **tensors)

    def clear(self) -> None:
        """Starts the next rollout. Rows are overwritten before they are read again."""
        self.position = 0


def _tensors(rollout: Rollout[RolloutInputs]) -> list[Tensor]:
    return [*rollout.inputs.tensors(), *rollout.tensors().values()]
