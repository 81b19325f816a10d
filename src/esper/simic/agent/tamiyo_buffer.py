"""One round of experience: every step of every env, stored once in preallocated tensors. How they were made is unknown.

Episodes start from an empty memory at row 0, so no hidden state is stored. Observations are raw; normaliser
statistics stay fixed from the first step of a round to its last update, so what is learned from is what was acted on.
"""

# T steps, N envs, H heads; other axes as in tamiyo_inputs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.simic.agent.experience import Rollout
from esper.simic.agent.tamiyo_inputs import Cards, Observation, TamiyoInputs, TamiyoMasks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step of N envs."""

    observation: Observation
    actions_NH: Tensor
    log_probs_NH: Tensor
    usable_NH: Tensor
    """True where the head had more than one legal choice."""
    values_N: Tensor
    rewards_N: Tensor
    """Scaled by the round's frozen scale."""
    terminated_N: Tensor
    """The episode ended here for real: by its horizon or by a rollback. Nothing follows."""
    truncated_N: Tensor
    """The row is the last one for a reason outside the episode, such as a lost worker."""
    valid_N: Tensor
    """False for an env that sits out: its row means nothing."""
    bootstraps_N: Tensor
    """Value of the state after a truncated row; unused elsewhere."""


@dataclass(slots=True, kw_only=True)
class TamiyoRolloutBuffer:
    """Storage for T steps of N envs. Filled by `write`, read as a whole, emptied by `clear`."""

    num_steps: int
    num_envs: int
    cards: Cards
    obs_TND: Tensor
    slot_obs_TNSF: Tensor
    op_masks_TNO: Tensor
    slot_masks_TNOS: Tensor
    blueprint_masks_TNSP: Tensor
    blend_masks_TNL: Tensor
    actions_TNH: Tensor
    log_probs_TNH: Tensor
    usable_TNH: Tensor
    values_TN: Tensor
    rewards_TN: Tensor
    terminated_TN: Tensor
    truncated_TN: Tensor
    valid_TN: Tensor
    bootstraps_TN: Tensor
    position: int = 0

    @classmethod
    def allocate(cls, num_steps: int, example: Observation, cards: Cards) -> TamiyoRolloutBuffer:
        """Makes room for `num_steps` steps of observations like `example`."""
        num_envs = example.obs_ND.shape[0]

        def like(tensor: Tensor) -> Tensor:
            return torch.zeros(num_steps, *tensor.shape, dtype=tensor.dtype)

        def per_row(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_steps, num_envs, *shape, dtype=dtype)

        return cls(
            num_steps=num_steps,
            num_envs=num_envs,
            cards=cards,
            obs_TND=like(example.obs_ND),
            slot_obs_TNSF=like(example.slot_obs_NSF),
            op_masks_TNO=like(example.masks.op_NO),
            slot_masks_TNOS=like(example.masks.slot_NOS),
            blueprint_masks_TNSP=like(example.masks.blueprint_NSP),
            blend_masks_TNL=like(example.masks.blend_NL),
            actions_TNH=per_row(len(HEAD_NAMES), dtype=torch.long),
            log_probs_TNH=per_row(len(HEAD_NAMES), dtype=torch.float32),
            usable_TNH=per_row(len(HEAD_NAMES), dtype=torch.bool),
            values_TN=per_row(dtype=torch.float32),
            rewards_TN=per_row(dtype=torch.float32),
            terminated_TN=per_row(dtype=torch.bool),
            truncated_TN=per_row(dtype=torch.bool),
            valid_TN=per_row(dtype=torch.bool),
            bootstraps_TN=per_row(dtype=torch.float32),
        )

    def write(self, step: StepBatch) -> None:
        """Copies one step into the next row.

        Raises:
            IndexError: The buffer is full; a round has exactly `num_steps` steps.
        """
        if self.position >= self.num_steps:
            raise IndexError(f"rollout buffer is full: it holds {self.num_steps} steps; update and clear it first")
        row, masks = self.position, step.observation.masks
        for storage_TN, values_N in (
            (self.obs_TND, step.observation.obs_ND),
            (self.slot_obs_TNSF, step.observation.slot_obs_NSF),
            (self.op_masks_TNO, masks.op_NO),
            (self.slot_masks_TNOS, masks.slot_NOS),
            (self.blueprint_masks_TNSP, masks.blueprint_NSP),
            (self.blend_masks_TNL, masks.blend_NL),
            (self.actions_TNH, step.actions_NH),
            (self.log_probs_TNH, step.log_probs_NH),
            (self.usable_TNH, step.usable_NH),
            (self.values_TN, step.values_N),
            (self.rewards_TN, step.rewards_N),
            (self.terminated_TN, step.terminated_N),
            (self.truncated_TN, step.truncated_N),
            (self.valid_TN, step.valid_N),
            (self.bootstraps_TN, step.bootstraps_N),
        ):
            storage_TN[row].copy_(values_N)
        self.position += 1

    def truncate(self, env: int, bootstrap: float) -> None:
        """Cuts an env's sequence off after the row written last, which then counts on with this value."""
        if self.position:
            self.truncated_TN[self.position - 1, env] = True
            self.bootstraps_TN[self.position - 1, env] = bootstrap

    def rollout(self) -> Rollout[TamiyoInputs]:
        """The rows written so far, without copying."""
        rows = slice(self.position)
        inputs = TamiyoInputs(
            obs_TND=self.obs_TND[rows],
            slot_obs_TNSF=self.slot_obs_TNSF[rows],
            masks=TamiyoMasks(
                op_NO=self.op_masks_TNO[rows],
                slot_NOS=self.slot_masks_TNOS[rows],
                blueprint_NSP=self.blueprint_masks_TNSP[rows],
                blend_NL=self.blend_masks_TNL[rows],
            ),
            cards=self.cards,
            state=None,
            starts_TN=None,
        )
        return Rollout(
            inputs=inputs,
            actions_TNH=self.actions_TNH[rows],
            log_probs_TNH=self.log_probs_TNH[rows],
            usable_TNH=self.usable_TNH[rows],
            values_TN=self.values_TN[rows],
            rewards_TN=self.rewards_TN[rows],
            terminated_TN=self.terminated_TN[rows],
            truncated_TN=self.truncated_TN[rows],
            valid_TN=self.valid_TN[rows],
            bootstraps_TN=self.bootstraps_TN[rows],
        )

    def clear(self) -> None:
        """Starts the next round. Rows are overwritten before they are read again."""
        self.position = 0
