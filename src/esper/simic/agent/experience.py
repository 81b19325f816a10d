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

ADVANTAGE_STD_FLOOR = 1e-3


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
    advantages_TN: Tensor
    """Normalised over the rows on which anything was decided."""

    @property
    def decided_TN(self) -> Tensor:
        """Rows on which any head had a choice."""
        return self.usable_TNH.any(dim=-1)


def price(rollout: Rollout[InputsT], *, gamma: float, lam: float) -> Experience[InputsT]:
    """Computes returns and advantages of a rollout."""
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
        advantages_TN=_normalize(estimate.advantages_TN, usable_TNH.any(dim=-1)),
    )


def _normalize(advantages_TN: Tensor, decided_TN: Tensor) -> Tensor:
    """Forced rows teach the policy nothing, so they do not set its scale either."""
    decided = advantages_TN[decided_TN]
    if decided.numel() == 0:
        return torch.zeros_like(advantages_TN)
    std = decided.std(unbiased=False).clamp(min=ADVANTAGE_STD_FLOOR)
    return (advantages_TN - decided.mean()) / std
