"""Generalised advantage estimation per env. Terminated, truncated and valid are three facts and stay apart."""

# T steps, N envs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Per step: how much better than expected, and the return the value should have predicted. 0 on invalid rows."""

    advantages_TN: Tensor
    returns_TN: Tensor


@torch.no_grad()
def compute_advantages(
    *,
    rewards_TN: Tensor,
    values_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    valid_TN: Tensor,
    bootstraps_TN: Tensor,
    gamma: float,
    lam: float,
) -> Advantages:
    """Walks each env backwards.

    A terminated row is followed by nothing: its next value is 0. A truncated row is followed by a state outside
    these rows, whose value is `bootstraps_TN`. An invalid row belongs to no episode and touches nothing.

    Raises:
        ValueError: A valid row is followed by an invalid one or by the end without being terminated or truncated;
            its return would be made up.
    """
    ends_TN = terminated_TN | truncated_TN
    _check_every_sequence_ends(ends_TN, valid_TN)
    advantages_TN = torch.zeros_like(rewards_TN)
    next_advantage_N = torch.zeros_like(rewards_TN[0])
    next_value_N = torch.zeros_like(rewards_TN[0])
    for step in reversed(range(rewards_TN.shape[0])):
        ends_N, valid_N = ends_TN[step], valid_TN[step]
        outside_N = torch.where(truncated_TN[step] & ~terminated_TN[step], bootstraps_TN[step], 0.0)
        following_N = torch.where(ends_N, outside_N, next_value_N)
        delta_N = rewards_TN[step] + gamma * following_N - values_TN[step]
        carried_N = torch.where(ends_N, 0.0, next_advantage_N)
        advantages_TN[step] = torch.where(valid_N, delta_N + gamma * lam * carried_N, 0.0)
        next_advantage_N, next_value_N = advantages_TN[step], values_TN[step]
    returns_TN = torch.where(valid_TN, advantages_TN + values_TN, 0.0)
    return Advantages(advantages_TN=advantages_TN, returns_TN=returns_TN)


def _check_every_sequence_ends(ends_TN: Tensor, valid_TN: Tensor) -> None:
    nothing_follows_TN = torch.ones_like(valid_TN)
    nothing_follows_TN[:-1] = ~valid_TN[1:]
    open_TN = valid_TN & nothing_follows_TN & ~ends_TN
    if bool(open_TN.any()):
        step, env = (int(index) for index in open_TN.nonzero()[0])
        raise ValueError(
            f"step {step} of env {env} is the last valid one but neither terminated nor truncated; "
            "mark how the episode ended"
        )
