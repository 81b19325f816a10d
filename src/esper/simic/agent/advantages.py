"""Rollout tensors, raw and with GAE. Terminated, truncated and valid are three facts and stay apart."""

# T steps, N envs, H heads

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor

from esper.simic.agent.policy import SequenceInputs

InputsT = TypeVar("InputsT", bound=SequenceInputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(Generic[InputsT]):
    """T steps of N envs."""

    inputs: InputsT
    actions_TNH: Tensor
    log_probs_TNH: Tensor
    """As sampled: the reference of every ratio."""
    usable_TNH: Tensor
    """True where the head had more than one legal choice."""
    values_TN: Tensor
    rewards_TN: Tensor
    terminated_TN: Tensor
    """The episode ended here for real: by its horizon or by a rollback. Nothing follows."""
    truncated_TN: Tensor
    """The row is the last one for a reason outside the episode, such as a lost worker."""
    valid_TN: Tensor
    """False for an env that sits out: its row means nothing."""
    bootstraps_TN: Tensor
    """Value of the state after a truncated row; unused elsewhere."""

    def tensors(self) -> dict[str, Tensor]:
        """All but the inputs, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "inputs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(Generic[InputsT]):
    """A rollout with returns and advantages."""

    rollout: Rollout[InputsT]
    usable_TNH: Tensor
    """Valid rows on which the head had a choice."""
    returns_TN: Tensor
    raw_advantages_TN: Tensor
    advantages_TNH: Tensor
    """For each head centred, and shrunk to a spread of 1, over the rows on which it had a choice."""

    @property
    def decided_TN(self) -> Tensor:
        """Rows on which any head had a choice."""
        return self.usable_TNH.any(dim=-1)


def with_gae(rollout: Rollout[InputsT], *, gamma: float, lam: float, std_floor: float) -> Experience[InputsT]:
    """A rollout with its returns and advantages; advantages that spread less than `std_floor` are not magnified."""
    advantages_TN, returns_TN = compute_advantages(rollout, gamma=gamma, lam=lam)
    usable_TNH = rollout.usable_TNH & rollout.valid_TN[..., None]
    return Experience(
        rollout=rollout,
        usable_TNH=usable_TNH,
        returns_TN=returns_TN,
        raw_advantages_TN=advantages_TN,
        advantages_TNH=_normalize(advantages_TN, usable_TNH, std_floor),
    )


@torch.no_grad()
def compute_advantages(rollout: Rollout[InputsT], *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation per env, backwards in time.

    A terminated row is followed by nothing: its next value is 0. A truncated row is followed by a state outside
    these rows, whose value is `bootstraps_TN`. An invalid row belongs to no episode and touches nothing.

    Returns:
        Advantages, and the returns that the value should have predicted; both `[T, N]`, 0 on invalid rows.

    Raises:
        ValueError: A valid row is followed by an invalid one or by the end without being terminated or truncated;
            its return would be made up.
    """
    rewards_TN, values_TN, valid_TN = rollout.rewards_TN, rollout.values_TN, rollout.valid_TN
    terminated_TN, truncated_TN = rollout.terminated_TN, rollout.truncated_TN
    ends_TN = terminated_TN | truncated_TN
    _check_every_sequence_ends(ends_TN, valid_TN)
    advantages_TN = torch.zeros_like(rewards_TN)
    next_advantage_N = torch.zeros_like(rewards_TN[0])
    next_value_N = torch.zeros_like(rewards_TN[0])
    for step in reversed(range(rewards_TN.shape[0])):
        ends_N, valid_N = ends_TN[step], valid_TN[step]
        outside_N = torch.where(truncated_TN[step] & ~terminated_TN[step], rollout.bootstraps_TN[step], 0.0)
        following_N = torch.where(ends_N, outside_N, next_value_N)
        delta_N = rewards_TN[step] + gamma * following_N - values_TN[step]
        carried_N = torch.where(ends_N, 0.0, next_advantage_N)
        advantages_TN[step] = torch.where(valid_N, delta_N + gamma * lam * carried_N, 0.0)
        next_advantage_N, next_value_N = advantages_TN[step], values_TN[step]
    return advantages_TN, torch.where(valid_TN, advantages_TN + values_TN, 0.0)


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


def _normalize(advantages_TN: Tensor, usable_TNH: Tensor, std_floor: float) -> Tensor:
    """Each head by itself: what the op was worth would only be noise to a head that chooses after it."""
    rows_H = usable_TNH.sum(dim=(0, 1)).clamp(min=1)
    mean_H = torch.where(usable_TNH, advantages_TN[..., None], 0.0).sum(dim=(0, 1)) / rows_H
    centred_TNH = torch.where(usable_TNH, advantages_TN[..., None] - mean_H, 0.0)
    std_H = (centred_TNH.square().sum(dim=(0, 1)) / rows_H).sqrt()
    return centred_TNH / std_H.clamp(min=std_floor)
