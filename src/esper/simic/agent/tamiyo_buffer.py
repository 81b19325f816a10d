"""Storage of one rollout: every step of every env, written once into tensors that grow with it.

Episodes start from a zero LSTM state at row 0, so none is stored. Observations are raw; normaliser statistics stay
fixed from the first step of a rollout to its last update, so what is learned from is what was acted on.
"""

# T steps, N envs, H heads; other axes as in tamiyo_inputs

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.simic.agent.advantages import Rollout
from esper.simic.agent.tamiyo_inputs import EnvGroup, RolloutInputs, step_of

FIRST_ROWS = 256
"""Steps that there is room for at once; doubled when they are full, so that long episodes take memory as they go."""


@dataclass(slots=True)
class TamiyoRolloutBuffer:
    """Holds up to T steps of N envs. Filled by `write`, read as a whole, emptied by `clear`."""

    storage: Rollout[RolloutInputs]
    """All rows that there is room for, also those not written yet."""
    num_steps: int
    """T."""
    position: int = 0

    @classmethod
    def allocate(cls, num_steps: int, groups: Sequence[EnvGroup]) -> TamiyoRolloutBuffer:
        """A buffer for up to `num_steps` steps of envs like these."""
        num_envs, num_rows = sum(len(group.envs_G) for group in groups), min(num_steps, FIRST_ROWS)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows, num_envs, *shape, dtype=dtype)

        return cls(
            Rollout(
                inputs=step_of(groups).map(lambda row: torch.zeros(num_rows, *row.shape[1:], dtype=row.dtype)),
                actions_TNH=zeros(torch.long, len(HEAD_NAMES)),
                log_probs_TNH=zeros(torch.float32, len(HEAD_NAMES)),
                usable_TNH=zeros(torch.bool, len(HEAD_NAMES)),
                values_TN=zeros(torch.float32),
                rewards_TN=zeros(torch.float32),
                terminated_TN=zeros(torch.bool),
                truncated_TN=zeros(torch.bool),
                valid_TN=zeros(torch.bool),
                bootstraps_TN=zeros(torch.float32),
            ),
            num_steps,
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
        if self.position >= self.num_steps:
            raise IndexError(f"rollout buffer is full: it holds {self.num_steps} steps; update and clear it first")
        if self.position >= (num_rows := len(self.storage.valid_TN)):
            more = min(num_rows, self.num_steps - num_rows)
            self.storage = _map(self.storage, lambda rows: torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]))
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
        return _map(self.storage, lambda rows: rows[: self.position])

    def clear(self) -> None:
        """Starts the next rollout. Rows are overwritten before they are read again."""
        self.position = 0


def _tensors(rollout: Rollout[RolloutInputs]) -> list[Tensor]:
    return [*rollout.inputs.tensors(), *rollout.tensors().values()]


def _map(rollout: Rollout[RolloutInputs], change: Callable[[Tensor], Tensor]) -> Rollout[RolloutInputs]:
    changed = {name: change(tensor) for name, tensor in rollout.tensors().items()}
    return Rollout(inputs=rollout.inputs.map(change), **changed)
