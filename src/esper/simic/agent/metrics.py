"""Puts what an update measured into `PPOUpdateMetrics`, head by head. Pure."""

from __future__ import annotations

from typing import TypeVar, cast

from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.simic.agent.experience import Experience, InputsT
from esper.simic.agent.health import judge_critic
from esper.simic.agent.losses import UpdateSettings
from esper.simic.agent.ppo_update import HeadResult, UpdateResult
from esper.simic.agent.types import (
    GradientStats,
    GradState,
    HeadEntropies,
    HeadStats,
    HeadUpdates,
    LSTMStats,
    ObservationStats,
    PPOUpdateMetrics,
)

T = TypeVar("T")


def by_head(values: list[T]) -> dict[str, T]:
    """Names values that come in storage order."""
    return dict(zip(HEAD_NAMES, values, strict=True))


def skipped_metrics(reason: str, settings: UpdateSettings, learning_rate: float) -> PPOUpdateMetrics:
    """An update that did not happen. Nothing was measured."""
    nothing = HeadStats(kl=None, clip_fraction=None, grad_norm=None, num_usable=0, grad_state="skipped")
    return PPOUpdateMetrics(
        performed=False,
        skip_reason=reason,
        num_optimizer_steps=0,
        kl_stopped=False,
        policy_loss=None,
        value_loss=None,
        entropy_loss=None,
        total_loss=None,
        approx_kl=None,
        clip_fraction=None,
        ratio_mean=None,
        ratio_min=None,
        ratio_max=None,
        explained_variance=None,
        value_nrmse=None,
        return_corr=None,
        return_mean=None,
        return_std=None,
        advantage_mean=None,
        advantage_std=None,
        decision_share=None,
        num_rewards_clipped=None,
        gradient_stats=GradientStats(norm_mean=None, norm_max=None, clip_norm=settings.max_grad_norm, num_nonfinite=0),
        head_entropies=cast(HeadEntropies, by_head([None] * len(HEAD_NAMES))),
        heads=cast(HeadUpdates, by_head([nothing] * len(HEAD_NAMES))),
        lstm=None,
        observations=None,
        learning_rate=learning_rate,
        entropy_coef=settings.entropy_coef,
        clip_ratio=settings.clip_ratio,
        target_kl=settings.target_kl,
        env_steps=0,
    )


def performed_metrics(
    result: UpdateResult,
    experience: Experience[InputsT],
    values_TN: Tensor,
    observations: ObservationStats,
    settings: UpdateSettings,
    learning_rate: float,
) -> PPOUpdateMetrics:
    """An update that looked at its round. If every gradient was non-finite it still took no step."""
    valid_TN, decided_TN = experience.valid_TN, experience.decided_TN
    critic = judge_critic(values_TN[valid_TN], experience.returns_TN[valid_TN])
    advantages = experience.raw_advantages_TN[decided_TN].double()
    num_valid, num_decided = int(valid_TN.sum()), int(decided_TN.sum())
    num_usable = experience.usable_TNH.sum(dim=(0, 1)).tolist()
    memory = result.memory
    return PPOUpdateMetrics(
        performed=result.num_optimizer_steps > 0,
        skip_reason=None if result.num_optimizer_steps else "no finite minibatch",
        num_optimizer_steps=result.num_optimizer_steps,
        kl_stopped=result.kl_stopped,
        policy_loss=result.policy_loss,
        value_loss=result.value_loss,
        entropy_loss=result.entropy_loss,
        total_loss=result.total_loss,
        approx_kl=result.approx_kl,
        clip_fraction=result.clip_fraction,
        ratio_mean=result.ratio_mean,
        ratio_min=result.ratio_min,
        ratio_max=result.ratio_max,
        explained_variance=critic.explained_variance,
        value_nrmse=critic.value_nrmse,
        return_corr=critic.return_corr,
        return_mean=critic.return_mean,
        return_std=critic.return_std,
        advantage_mean=float(advantages.mean()) if num_decided else None,
        advantage_std=float(advantages.std(unbiased=False)) if num_decided else None,
        decision_share=num_decided / num_valid,
        num_rewards_clipped=None,
        gradient_stats=GradientStats(
            norm_mean=result.grad_norm_mean,
            norm_max=result.grad_norm_max,
            clip_norm=settings.max_grad_norm,
            num_nonfinite=result.num_nonfinite,
        ),
        head_entropies=cast(HeadEntropies, by_head([head.entropy_share for head in result.heads])),
        heads=cast(
            HeadUpdates,
            by_head([_head(head, usable, result) for head, usable in zip(result.heads, num_usable, strict=True)]),
        ),
        lstm=LSTMStats(
            h_rms=memory.h_rms,
            c_rms=memory.c_rms,
            saturated_share=memory.saturated_share,
            dead_share=memory.dead_share,
            num_nonfinite=memory.num_nonfinite,
        ),
        observations=observations,
        learning_rate=learning_rate,
        entropy_coef=settings.entropy_coef,
        clip_ratio=settings.clip_ratio,
        target_kl=settings.target_kl,
        env_steps=num_valid,
    )


def _head(head: HeadResult, num_usable: int, result: UpdateResult) -> HeadStats:
    return HeadStats(
        kl=head.kl,
        clip_fraction=head.clip_fraction,
        grad_norm=head.grad_norm,
        num_usable=num_usable,
        grad_state=_grad_state(head, num_usable, result),
    )


def _grad_state(head: HeadResult, num_usable: int, result: UpdateResult) -> GradState:
    if num_usable == 0:
        return "no_usable_steps"
    if result.num_optimizer_steps == 0:
        return "nonfinite" if result.num_nonfinite else "skipped"
    return "missing" if head.grad_norm is None else "ok"
