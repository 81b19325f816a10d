"""The PPO losses of one minibatch of whole env sequences, and what they say about the policy.

Each head has its own clipped ratio, averaged over the steps on which it had a choice, and all heads weigh the same: a
head that is seldom used learns as fast as one that is used on every step. Steps without a choice cost the policy
nothing; every valid step trains the value.
"""

# T steps, N envs, B = T x N rows, H heads

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.simic.agent.experience import Experience, InputsT
from esper.simic.agent.policy import ForwardPass, RecurrentPolicy
from esper.simic.agent.sampling import Choice, Exploration, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """The numbers in force for one update."""

    epochs: int
    minibatches: int
    clip_ratio: float
    target_kl: float
    entropy_coef: float
    value_coef: float
    max_grad_norm: float
    exploration: Exploration


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses of a minibatch and the detached evidence beside them."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    total: Tensor
    joint_log_ratio_B: Tensor
    """Of the whole action, on rows where anything was decided."""
    head_sums_4H: Tensor
    """Per head, summed over usable rows: entropy share, k3 KL, clipped, rows."""
    forward: ForwardPass

    @property
    def approx_kl(self) -> Tensor:
        """Mean k3 estimate of the joint KL from the rollout's policy; 0 where nothing was decided."""
        return k3(self.joint_log_ratio_B).mean() if self.joint_log_ratio_B.numel() else torch.zeros(())


def compute_losses(
    policy: RecurrentPolicy[InputsT], experience: Experience[InputsT], envs: Tensor, settings: UpdateSettings
) -> Losses:
    """Runs the sequences of some envs and compares them with what was done and what came of it."""
    usable_BH = experience.usable_TNH[:, envs].flatten(0, 1)
    forward = policy(experience.inputs.select(envs))
    actions_BH = experience.actions_TNH[:, envs].flatten(0, 1)
    choice = choose(forward.logits_fn, forward.masks, settings.exploration, actions_BH=actions_BH)
    old_BH = experience.log_probs_TNH[:, envs].flatten(0, 1)
    log_ratio_BH = torch.where(usable_BH, choice.log_probs_BH - old_BH, 0.0)

    weights_BH = _head_weights(experience.usable_TNH, usable_BH, len(envs))
    advantages_BH = experience.advantages_TNH[:, envs].flatten(0, 1)
    policy_loss = -(weights_BH * _clipped_surrogate(log_ratio_BH, advantages_BH, settings.clip_ratio)).sum()
    entropy_loss = (weights_BH * choice.prior_gaps_BH).sum()
    value_loss = _value_loss(policy, experience, envs, forward.values_B)
    return Losses(
        policy=policy_loss,
        value=value_loss,
        entropy=entropy_loss,
        total=policy_loss + settings.value_coef * value_loss + settings.entropy_coef * entropy_loss,
        joint_log_ratio_B=log_ratio_BH.detach().sum(dim=1)[usable_BH.any(dim=1)],
        head_sums_4H=_head_sums(choice, log_ratio_BH.detach(), usable_BH, settings.clip_ratio),
        forward=forward,
    )


def k3(log_ratio: Tensor) -> Tensor:
    """KL estimate r - 1 - ln r: never negative, and exact to second order."""
    return torch.expm1(log_ratio) - log_ratio


def _head_weights(round_usable_TNH: Tensor, usable_BH: Tensor, num_envs: int) -> Tensor:
    """Weight of every (row, head): 1 / usable rows of the head, as a mean over the heads in use.

    Rows are counted over the round, in proportion to this minibatch, so that one that holds a single usable step of a
    head does not give that step the weight of many.
    """
    rows_H = round_usable_TNH.sum(dim=(0, 1)) * (num_envs / round_usable_TNH.shape[1])
    in_use = (rows_H > 0).sum().clamp(min=1)
    return usable_BH / (rows_H.clamp(min=1.0) * in_use)


def _clipped_surrogate(log_ratio_BH: Tensor, advantages_BH: Tensor, clip_ratio: float) -> Tensor:
    ratio_BH = log_ratio_BH.exp()
    clipped_BH = ratio_BH.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    return torch.minimum(ratio_BH * advantages_BH, clipped_BH * advantages_BH)


def _value_loss(
    policy: RecurrentPolicy[InputsT], experience: Experience[InputsT], envs: Tensor, values_B: Tensor
) -> Tensor:
    valid_B = experience.valid_TN[:, envs].flatten()
    targets_B = policy.value.normalize(experience.returns_TN[:, envs].flatten())
    error_B = torch.where(valid_B, values_B - targets_B, 0.0)
    return error_B.square().sum() / valid_B.sum().clamp(min=1)


@torch.no_grad()
def _head_sums(choice: Choice, log_ratio_BH: Tensor, usable_BH: Tensor, clip_ratio: float) -> Tensor:
    clipped_BH = (log_ratio_BH.exp() - 1.0).abs() > clip_ratio
    rows_4BH = torch.stack([choice.entropies_BH, k3(log_ratio_BH), clipped_BH.float(), torch.ones_like(log_ratio_BH)])
    return torch.where(usable_BH, rows_4BH, 0.0).sum(dim=1)
