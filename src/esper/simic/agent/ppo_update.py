"""The PPO update: several passes over one round in minibatches of whole env sequences. Tensors in, numbers out.

Knows no buffer, no head names and nothing about where rewards come from.
"""

# T steps, N envs, B = T x N rows, H heads, W width

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from esper.simic.agent.experience import Experience, InputsT
from esper.simic.agent.losses import Losses, UpdateSettings, compute_losses
from esper.simic.agent.policy import ForwardPass, RecurrentPolicy

SATURATED = 0.99
DEAD_STD = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """One head over the whole update; None where it had no usable step, or no gradient reached it."""

    entropy_share: float | None
    kl: float | None
    clip_fraction: float | None
    grad_norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """The LSTM in the last forward pass."""

    h_rms: float
    c_rms: float
    saturated_share: float
    dead_share: float
    num_nonfinite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an update did. Losses and norms are means over the minibatches stepped on; None if there were none."""

    num_optimizer_steps: int
    num_nonfinite: int
    kl_stopped: bool
    policy_loss: float | None
    value_loss: float | None
    entropy_loss: float | None
    total_loss: float | None
    approx_kl: float | None
    """Of the last minibatch looked at: how far the policy came in this round."""
    clip_fraction: float | None
    ratio_mean: float | None
    ratio_min: float | None
    ratio_max: float | None
    grad_norm_mean: float | None
    grad_norm_max: float | None
    heads: tuple[HeadResult, ...]
    memory: MemoryResult
    ratios_B: Tensor
    """Joint ratios of all rows looked at."""
    grad_left: float
    """Which share of the gradients that lie there now clipping left."""


def run_epochs(
    policy: RecurrentPolicy[InputsT],
    optimizer: torch.optim.Optimizer,
    experience: Experience[InputsT],
    settings: UpdateSettings,
    generator: torch.Generator,
) -> UpdateResult:
    """Passes over the round until done, or until the joint KL says that the policy has moved far enough."""
    tally = _Tally(clip_ratio=settings.clip_ratio, max_grad_norm=settings.max_grad_norm)
    num_envs = experience.valid_TN.shape[1]
    for _ in range(settings.epochs):
        for envs in env_minibatches(num_envs, settings.minibatches, generator):
            losses = compute_losses(policy, experience, envs, settings)
            tally.look(losses)
            if bool(losses.approx_kl > settings.target_kl):  # sync: decides whether to go on
                return tally.result(kl_stopped=True)
            optimizer.zero_grad()
            losses.total.backward()  # type: ignore[no-untyped-call]
            norm = get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
            if not bool(torch.isfinite(norm) & torch.isfinite(losses.total)):  # sync: nothing bad may reach a weight
                tally.num_nonfinite += 1
                tally.last_norm = None
                continue
            tally.step(losses, norm, policy.head_parameters())
            clip_grads_with_norm_(policy.parameters(), settings.max_grad_norm, norm)
            optimizer.step()
    return tally.result(kl_stopped=False)


def env_minibatches(num_envs: int, num_minibatches: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Splits the envs into groups, each env in exactly one. Time is never split: a sequence is learned from whole."""
    order = torch.randperm(num_envs, generator=generator)
    yield from order.tensor_split(min(num_minibatches, num_envs))


class _Tally:
    """Collects detached tensors while the passes run and reads them once at the end."""

    def __init__(self, *, clip_ratio: float, max_grad_norm: float) -> None:
        self.num_nonfinite = 0
        self.last_norm: Tensor | None = None
        """Of the gradients that lie there, before clipping; None if they were not clipped."""
        self._clip_ratio = clip_ratio
        self._max_grad_norm = max_grad_norm
        self._log_ratios: list[Tensor] = []
        self._head_sums: list[Tensor] = []
        self._steps: list[Tensor] = []
        self._last: Losses | None = None

    def look(self, losses: Losses) -> None:
        self._last = losses
        self._log_ratios.append(losses.joint_log_ratio_B)
        self._head_sums.append(losses.head_sums_4H)

    def step(self, losses: Losses, norm: Tensor, head_parameters: tuple[list[nn.Parameter], ...]) -> None:
        grads = [[p.grad for p in own if p.grad is not None] for own in head_parameters]
        self.last_norm = norm
        head_norms = [get_total_norm(own) if own else torch.tensor(torch.nan) for own in grads]
        self._steps.append(
            torch.stack([losses.policy, losses.value, losses.entropy, losses.total, norm, *head_norms]).detach()
        )

    def result(self, *, kl_stopped: bool) -> UpdateResult:
        assert self._last is not None, "an update looks at one minibatch at least"
        ratios_B = torch.cat(self._log_ratios).exp()
        decided = ratios_B.numel() > 0
        steps = torch.stack(self._steps) if self._steps else None
        means: list[float | None] = steps.nanmean(dim=0).tolist() if steps is not None else [None] * 5
        return UpdateResult(
            num_optimizer_steps=len(self._steps),
            num_nonfinite=self.num_nonfinite,
            kl_stopped=kl_stopped,
            policy_loss=means[0],
            value_loss=means[1],
            entropy_loss=means[2],
            total_loss=means[3],
            approx_kl=float(self._last.approx_kl) if decided else None,
            clip_fraction=float(((ratios_B - 1.0).abs() > self._clip_ratio).float().mean()) if decided else None,
            ratio_mean=float(ratios_B.mean()) if decided else None,
            ratio_min=float(ratios_B.min()) if decided else None,
            ratio_max=float(ratios_B.max()) if decided else None,
            grad_norm_mean=means[4],
            grad_norm_max=None if steps is None else float(steps[:, 4].max()),
            heads=self._heads(means[5:]),
            memory=_describe_memory(self._last.forward),
            ratios_B=ratios_B,
            grad_left=1.0 if self.last_norm is None else min(1.0, self._max_grad_norm / (float(self.last_norm) + 1e-6)),
        )

    def _heads(self, grad_norms: list[float | None]) -> tuple[HeadResult, ...]:
        sums_4H = torch.stack(self._head_sums).sum(dim=0).tolist()
        norms = grad_norms or [None] * len(sums_4H[0])
        heads = []
        for entropy, kl, clipped, rows, norm in zip(*sums_4H, norms, strict=True):
            if rows:
                # NaN stands for a head that no gradient reached: steps are taken on finite gradients only.
                reached = None if norm is None or math.isnan(norm) else norm
                heads.append(
                    HeadResult(
                        entropy_share=entropy / rows, kl=kl / rows, clip_fraction=clipped / rows, grad_norm=reached
                    )
                )
            else:
                heads.append(HeadResult(entropy_share=None, kl=None, clip_fraction=None, grad_norm=None))
        return tuple(heads)


@torch.no_grad()
def _describe_memory(forward: ForwardPass) -> MemoryResult:
    h_TNW, c_1NW = forward.memory_TNW, forward.state[1]
    return MemoryResult(
        h_rms=float(h_TNW.square().mean().sqrt()),
        c_rms=float(c_1NW.square().mean().sqrt()),
        saturated_share=float((h_TNW.abs() > SATURATED).float().mean()),
        dead_share=float((h_TNW.std(dim=(0, 1), unbiased=False) < DEAD_STD).float().mean()),
        num_nonfinite=int((~torch.isfinite(h_TNW)).sum() + (~torch.isfinite(c_1NW)).sum()),
    )
