"""The PPO update: passes over one rollout in minibatches of whole env sequences, and what they measured.

Each head has its own clipped ratio, averaged over the steps on which it had a choice, and all heads weigh the same: a
head that is seldom used learns as fast as one that is used on every step. Steps without a choice cost the policy
nothing; every valid step trains the value.
"""

# T steps, N envs, B = T x N rows, H heads, D features, W width

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from esper.leyline import GradState, HeadUpdate, LSTMHealth, ObservationHealth
from esper.simic.agent.advantages import Experience, InputsT
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.policy import RETURN_STD_FLOOR, RecurrentPolicy
from esper.simic.agent.sampling import Exploration, choose
from esper.simic.agent.types import GradientStats, HeadEntropies, PPOUpdateMetrics
from esper.simic.control.normalization import OBSERVATION_LIMIT, RunningMeanStd

SATURATED = 0.99
DEAD_STD = 1e-4
OUTLIER = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """The hyper-parameters of one update: the constant ones, and the scheduled ones as they stand."""

    config: PPOConfig
    learning_rate: float
    entropy_coef: float
    exploration: Exploration
    imitate: bool = False
    """True where actions are a teacher's: their likelihood is raised, and no ratio limits how far."""

    @classmethod
    def at(
        cls, config: PPOConfig, env_steps: int, exploration: Exploration, *, imitate: bool = False
    ) -> UpdateSettings:
        """The settings after so many env steps."""
        return cls(
            config=config,
            learning_rate=config.learning_rate_at(env_steps),
            entropy_coef=config.entropy_coef_at(env_steps),
            exploration=exploration,
            imitate=imitate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses of a minibatch and the detached evidence beside them."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    total: Tensor
    joint_log_ratio_B: Tensor
    """Of the whole action, on rows where anything was decided; none where a teacher decided."""
    head_sums_4H: Tensor
    """Per head, summed over usable rows: entropy share, k3 KL, clipped, rows."""
    memory_TNW: Tensor
    """Outputs of the LSTM."""
    cells_1NW: Tensor
    """Its cells at the end of the sequences."""

    @property
    def approx_kl(self) -> Tensor:
        """Mean k3 estimate of the joint KL from the rollout's policy; 0 where nothing was decided."""
        return k3(self.joint_log_ratio_B).mean() if self.joint_log_ratio_B.numel() else torch.zeros(())


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The metrics of an update, and what a debugger wants beside them."""

    metrics: PPOUpdateMetrics
    ratios_B: Tensor
    """Joint probability ratios of all rows, minibatch after minibatch."""
    clip_factor: float
    """What gradient clipping multiplied the gradients by that the parameters hold now."""


def run_epochs(
    policy: RecurrentPolicy,
    optimizer: torch.optim.Optimizer,
    experience: Experience[InputsT],
    settings: UpdateSettings,
    generator: torch.Generator,
) -> UpdateResult:
    """Passes over the rollout until done, or until the joint KL exceeds `target_kl`.

    The metrics leave `observations` and `num_rewards_clipped` to the caller.
    """
    config, kl_stopped = settings.config, False
    tally = _Tally()
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
    for envs in _minibatches(experience.rollout.valid_TN.shape[1], config, generator):
        losses = compute_losses(policy, experience, envs, settings)
        tally.look(losses)
        if kl_stopped := bool(losses.approx_kl > config.target_kl):  # sync: decides whether to go on
            break
        optimizer.zero_grad()
        losses.total.backward()  # type: ignore[no-untyped-call]
        norm = get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
        if not bool(torch.isfinite(norm) & torch.isfinite(losses.total)):  # sync: nothing bad may reach a weight
            tally.num_nonfinite += 1
            tally.last_norm = None
            continue
        tally.step(losses, norm, policy.head_parameters().values())
        clip_grads_with_norm_(policy.parameters(), config.max_grad_norm, norm)
        optimizer.step()
    ratios_B = torch.cat(tally.log_ratios).exp()
    clip_factor = 1.0
    if tally.last_norm is not None:
        clip_factor = min(1.0, config.max_grad_norm / (float(tally.last_norm) + 1e-6))
    metrics = _metrics(tally, ratios_B, experience, settings, tuple(policy.head_parameters()))
    metrics["kl_stopped"] = kl_stopped
    return UpdateResult(metrics=metrics, ratios_B=ratios_B, clip_factor=clip_factor)


def _minibatches(num_envs: int, config: PPOConfig, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(config.ppo_epochs):
        yield from env_minibatches(num_envs, config.minibatches, generator)


def env_minibatches(num_envs: int, num_minibatches: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Splits the envs into groups, each env in exactly one. Time is never split: a sequence is learned from whole."""
    order = torch.randperm(num_envs, generator=generator)
    yield from order.tensor_split(min(num_minibatches, num_envs))


# ---- losses


def compute_losses(
    policy: RecurrentPolicy, experience: Experience[InputsT], envs: Tensor, settings: UpdateSettings
) -> Losses:
    """The losses of the sequences of some envs."""
    rollout, config = experience.rollout, settings.config
    parts = rollout.inputs.parts(envs)
    forwards = [policy(inputs) for _, inputs in parts]
    choices = [
        choose(
            forward.logits_fn,
            forward.masks,
            settings.exploration,
            actions_BH=rollout.actions_TNH[:, members].flatten(0, 1),
        )
        for forward, (members, _) in zip(forwards, parts, strict=True)
    ]

    def rows(tensor_TN: Tensor) -> Tensor:
        return torch.cat([tensor_TN[:, members].flatten(0, 1) for members, _ in parts])

    usable_BH = rows(experience.usable_TNH)
    log_probs_BH = torch.cat([choice.log_probs_BH for choice in choices])
    log_ratio_BH = torch.where(usable_BH, log_probs_BH - rows(rollout.log_probs_TNH), 0.0)

    weights_BH = _head_weights(experience.usable_TNH, usable_BH, len(envs))
    advantages_BH = rows(experience.advantages_TNH)
    ratio_BH = log_ratio_BH.exp()
    clipped_BH = ratio_BH.clamp(1.0 - config.clip_ratio, 1.0 + config.clip_ratio)
    gained_BH = torch.minimum(ratio_BH * advantages_BH, clipped_BH * advantages_BH)
    policy_loss = -(weights_BH * (log_probs_BH if settings.imitate else gained_BH)).sum()
    entropy_loss = (weights_BH * torch.cat([choice.prior_gaps_BH for choice in choices])).sum()
    valid_B = rows(rollout.valid_TN)
    targets_B = policy.value.normalize(rows(experience.returns_TN))
    error_B = torch.where(valid_B, torch.cat([forward.values_B for forward in forwards]) - targets_B, 0.0)
    value_loss = error_B.square().sum() / valid_B.sum().clamp(min=1)
    entropies_BH = torch.cat([choice.entropies_BH for choice in choices])
    return Losses(
        policy=policy_loss,
        value=value_loss,
        entropy=entropy_loss,
        total=policy_loss + config.value_coef * value_loss + settings.entropy_coef * entropy_loss,
        joint_log_ratio_B=log_ratio_BH.detach().sum(dim=1)[usable_BH.any(dim=1) & (not settings.imitate)],
        head_sums_4H=_head_sums(entropies_BH, log_ratio_BH.detach(), usable_BH, config.clip_ratio),
        memory_TNW=torch.cat([forward.memory_TNW for forward in forwards], dim=1),
        cells_1NW=torch.cat([forward.state[1] for forward in forwards], dim=1),
    )


def k3(log_ratio: Tensor) -> Tensor:
    """KL estimate r - 1 - ln r: never negative, and exact to second order."""
    return torch.expm1(log_ratio) - log_ratio


def _head_weights(rollout_usable_TNH: Tensor, usable_BH: Tensor, num_envs: int) -> Tensor:
    """Weight of every (row, head): 1 / usable rows of the head, as a mean over the heads in use.

    Rows are counted over the rollout, in proportion to this minibatch, so that one that holds a single usable step of
    a head does not give that step the weight of many.
    """
    rows_H = rollout_usable_TNH.sum(dim=(0, 1)) * (num_envs / rollout_usable_TNH.shape[1])
    in_use = (rows_H > 0).sum().clamp(min=1)
    return usable_BH / (rows_H.clamp(min=1.0) * in_use)


@torch.no_grad()
def _head_sums(entropies_BH: Tensor, log_ratio_BH: Tensor, usable_BH: Tensor, clip_ratio: float) -> Tensor:
    clipped_BH = (log_ratio_BH.exp() - 1.0).abs() > clip_ratio
    rows_4BH = torch.stack([entropies_BH, k3(log_ratio_BH), clipped_BH.float(), torch.ones_like(log_ratio_BH)])
    return torch.where(usable_BH, rows_4BH, 0.0).sum(dim=1)


# ---- metrics


class _Tally:
    """Collects detached tensors while the passes run; they are read once at the end."""

    def __init__(self) -> None:
        self.num_nonfinite = 0
        self.last_norm: Tensor | None = None
        """Of the gradients that the parameters hold, before clipping; None if they were not clipped."""
        self.log_ratios: list[Tensor] = []
        self.head_sums: list[Tensor] = []
        self.steps: list[Tensor] = []
        """Per step: policy, value, entropy and total loss, gradient norm, gradient norm of each head."""
        self.last: Losses | None = None

    def look(self, losses: Losses) -> None:
        self.last = losses
        self.log_ratios.append(losses.joint_log_ratio_B)
        self.head_sums.append(losses.head_sums_4H)

    def step(self, losses: Losses, norm: Tensor, head_parameters: Iterable[list[nn.Parameter]]) -> None:
        grads = [[p.grad for p in own if p.grad is not None] for own in head_parameters]
        self.last_norm = norm
        head_norms = [get_total_norm(own) if own else torch.tensor(torch.nan) for own in grads]
        self.steps.append(
            torch.stack([losses.policy, losses.value, losses.entropy, losses.total, norm, *head_norms]).detach()
        )


def skipped_metrics(reason: str, settings: UpdateSettings, heads: Iterable[str]) -> PPOUpdateMetrics:
    """An update that did not happen: nothing was measured."""
    nothing = HeadUpdate(kl=None, clip_fraction=None, grad_norm=None, num_usable=0, grad_state="skipped")
    known = {
        "performed": False,
        "skip_reason": reason,
        "num_optimizer_steps": 0,
        "kl_stopped": False,
        "gradient_stats": GradientStats(
            grad_norm=None, max_grad=None, min_grad=None, clip_norm=settings.config.max_grad_norm, num_nonfinite=0
        ),
        "head_entropies": dict.fromkeys(heads),
        "heads": dict.fromkeys(heads, nothing),
        "learning_rate": settings.learning_rate,
        "entropy_coef": settings.entropy_coef,
        "clip_ratio": settings.config.clip_ratio,
        "target_kl": settings.config.target_kl,
        "env_steps": 0,
    }
    return cast(PPOUpdateMetrics, dict.fromkeys(PPOUpdateMetrics.__annotations__) | known)


def _metrics(
    tally: _Tally,
    ratios_B: Tensor,
    experience: Experience[InputsT],
    settings: UpdateSettings,
    heads: tuple[str, ...],
) -> PPOUpdateMetrics:
    """What an update measured. If every gradient was non-finite it still took no step."""
    assert tally.last is not None, "an update looks at one minibatch at least"
    valid_TN, decided_TN = experience.rollout.valid_TN, experience.decided_TN
    num_valid, num_decided = int(valid_TN.sum()), int(decided_TN.sum())
    metrics = skipped_metrics("no finite minibatch", settings, heads)
    metrics["env_steps"] = num_valid
    metrics["decision_share"] = num_decided / num_valid
    metrics["gradient_stats"]["num_nonfinite"] = tally.num_nonfinite
    metrics["lstm"] = _lstm_health(tally.last)
    norms: list[float | None] = [None] * len(heads)
    if tally.steps:
        steps = torch.stack(tally.steps)
        policy, value, entropy, total, grad_norm, *norms = steps.nanmean(dim=0).tolist()
        metrics["performed"], metrics["skip_reason"] = True, None
        metrics["num_optimizer_steps"] = len(steps)
        metrics["policy_loss"], metrics["value_loss"] = policy, value
        metrics["entropy_loss"], metrics["total_loss"] = entropy, total
        metrics["gradient_stats"]["grad_norm"] = grad_norm
        metrics["gradient_stats"]["max_grad"] = float(steps[:, 4].max())
        metrics["gradient_stats"]["min_grad"] = float(steps[:, 4].min())
    if ratios_B.numel():
        clip_ratio = settings.config.clip_ratio
        metrics["approx_kl"] = float(tally.last.approx_kl)
        metrics["clip_fraction"] = float(((ratios_B - 1.0).abs() > clip_ratio).float().mean())
        metrics["ratio_mean"] = float(ratios_B.mean())
        metrics["ratio_min"], metrics["ratio_max"] = float(ratios_B.min()), float(ratios_B.max())
    if num_decided:
        advantages_B = experience.raw_advantages_TN[decided_TN].double()
        metrics["advantage_mean"] = float(advantages_B.mean())
        metrics["advantage_std"] = float(advantages_B.std(unbiased=False))
    _judge_critic(metrics, experience.rollout.values_TN[valid_TN], experience.returns_TN[valid_TN])
    _judge_heads(metrics, tally, norms, experience.usable_TNH.sum(dim=(0, 1)).tolist(), heads)
    return metrics


@torch.no_grad()
def _judge_critic(metrics: PPOUpdateMetrics, values_B: Tensor, returns_B: Tensor) -> None:
    values_B, returns_B = values_B.double(), returns_B.double()
    error_B = returns_B - values_B
    std, value_std = float(returns_B.std(unbiased=False)), float(values_B.std(unbiased=False))
    metrics["return_mean"], metrics["return_std"] = float(returns_B.mean()), std
    metrics["value_nrmse"] = float(error_B.square().mean().sqrt()) / max(std, RETURN_STD_FLOOR)
    if std >= RETURN_STD_FLOOR:
        metrics["explained_variance"] = 1.0 - float(error_B.var(unbiased=False)) / std**2
    if min(std, value_std) > 1e-8:
        covariance = ((returns_B - returns_B.mean()) * (values_B - values_B.mean())).mean()
        metrics["return_corr"] = float(covariance) / (std * value_std)


def _judge_heads(
    metrics: PPOUpdateMetrics, tally: _Tally, norms: list[float | None], usable: list[int], names: tuple[str, ...]
) -> None:
    entropies, heads = {}, {}
    sums_4H = torch.stack(tally.head_sums).sum(dim=0).tolist()
    for name, entropy, kl, clipped, rows, norm, num_usable in zip(names, *sums_4H, norms, usable, strict=True):
        # NaN stands for a head that no gradient reached: steps are taken on finite gradients only.
        grad_norm = norm if rows and norm is not None and not math.isnan(norm) else None
        state: GradState = "missing" if grad_norm is None else "ok"
        if num_usable == 0:
            state = "no_usable_steps"
        elif not tally.steps:
            state = "nonfinite" if tally.num_nonfinite else "skipped"
        entropies[name] = entropy / rows if rows else None
        heads[name] = HeadUpdate(
            kl=kl / rows if rows else None,
            clip_fraction=clipped / rows if rows else None,
            grad_norm=grad_norm,
            num_usable=num_usable,
            grad_state=state,
        )
    metrics["head_entropies"], metrics["heads"] = cast(HeadEntropies, entropies), heads


@torch.no_grad()
def _lstm_health(losses: Losses) -> LSTMHealth:
    h_TNW, c_1NW = losses.memory_TNW.detach(), losses.cells_1NW.detach()
    return LSTMHealth(
        h_rms=float(h_TNW.square().mean().sqrt()),
        c_rms=float(c_1NW.square().mean().sqrt()),
        saturated_share=float((h_TNW.abs() > SATURATED).float().mean()),
        dead_share=float((h_TNW.std(dim=(0, 1), unbiased=False) < DEAD_STD).float().mean()),
        num_nonfinite=int((~torch.isfinite(h_TNW)).sum() + (~torch.isfinite(c_1NW)).sum()),
    )


@torch.no_grad()
def observation_health(groups: Iterable[tuple[RunningMeanStd, Tensor, Tensor]]) -> ObservationHealth:
    """Raw rows under the statistics in force. Each group: statistics, which columns they normalise, rows `[B, D]`."""
    deviations, drifts, num_nonfinite = [], [], 0
    for stats, columns_D, rows_BD in groups:
        num_nonfinite += int((~torch.isfinite(rows_BD)).sum())
        known = rows_BD[torch.isfinite(rows_BD).all(dim=1)][:, columns_D].double()
        mean, std = stats.mean[columns_D], stats.std[columns_D]
        deviations.append(((known - mean) / std).abs().flatten())
        drifts.append(((known.mean(dim=0) - mean) / std).abs())
    deviation, drift = torch.cat(deviations), torch.cat(drifts)
    return ObservationHealth(
        outlier_share=float((deviation > OUTLIER).double().mean()),
        clipped_share=float((deviation > OBSERVATION_LIMIT).double().mean()),
        drift=float(drift.mean()),
        num_nonfinite=num_nonfinite,
    )
