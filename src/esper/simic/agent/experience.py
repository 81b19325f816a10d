"""A round as it was lived, and as it is learned from."""

# T steps, N envs, H heads

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from esper.simic.agent.advantages import compute_advantages
from esper.simic.agent.policy import SequenceInputs

InputsT = TypeVar("InputsT", bound=SequenceInputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(Generic[InputsT]):
    """T steps of N envs as they happened."""

    inputs: InputsT
    actions_TNH: Tensor
    log_probs_TNH: Tensor
    usable_TNH: Tensor
    values_TN: Tensor
    rewards_TN: Tensor
    terminated_TN: Tensor
    truncated_TN: Tensor
    valid_TN: Tensor
    bootstraps_TN: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(Generic[InputsT]):
    """A round priced: what each step turned out to be worth. Invalid rows are usable for no head."""

    inputs: InputsT
    actions_TNH: Tensor
    log_probs_TNH: Tensor
    """As sampled in the rollout: the reference of every ratio."""
    usable_TNH: Tensor
    """Valid rows on which the head had a choice."""
    valid_TN: Tensor
    returns_TN: Tensor
    raw_advantages_TN: Tensor
    advantages_TNH: Tensor
    """For each head centred, and shrunk to a spread of 1, over the rows on which it had a choice."""

    @property
    def decided_TN(self) -> Tensor:
        """Rows on which any head had a choice."""
        return self.usable_TNH.any(dim=-1)


def price(rollout: Rollout[InputsT], *, gamma: float, lam: float, std_floor: float) -> Experience[InputsT]:
    """Computes returns and advantages of a rollout; those that spread less than `std_floor` are not magnified."""
    estimate = compute_advantages(
        rewards_TN=rollout.rewards_TN,
        values_TN=rollout.values_TN,
        terminated_TN=rollout.terminated_TN,
        truncated_TN=rollout.truncated_TN,
        valid_TN=rollout.valid_TN,
        bootstraps_TN=rollout.bootstraps_TN,
        gamma=gamma,
        lam=lam,
    )
    usable_TNH = rollout.usable_TNH & rollout.valid_TN[..., None]
    return Experience(
        inputs=rollout.inputs,
        actions_TNH=rollout.actions_TNH,
        log_probs_TNH=rollout.log_probs_TNH,
        usable_TNH=usable_TNH,
        valid_TN=rollout.valid_TN,
        returns_TN=estimate.returns_TN,
        raw_advantages_TN=estimate.advantages_TN,
        advantages_TNH=_normalize(estimate.advantages_TN, usable_TNH, std_floor),
    )


def _normalize(advantages_TN: Tensor, usable_TNH: Tensor, std_floor: float) -> Tensor:
    """Each head by itself: what the op was worth would only be noise to a head that chooses after it."""
    rows_H = usable_TNH.sum(dim=(0, 1)).clamp(min=1)
    mean_H = torch.where(usable_TNH, advantages_TN[..., None], 0.0).sum(dim=(0, 1)) / rows_H
    centred_TNH = torch.where(usable_TNH, advantages_TN[..., None] - mean_H, 0.0)
    std_H = (centred_TNH.square().sum(dim=(0, 1)) / rows_H).sqrt()
    return centred_TNH / std_H.clamp(min=std_floor)
