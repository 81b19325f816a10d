"""Running statistics for observations, returns and rewards. When to freeze or refresh them is the caller's decision.

Both classes use Welford's merge: the first batch counts in full, so statistics are right from the first round on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Variance added before the square root: a feature that was constant so far must not explode when it first moves.
VARIANCE_FLOOR = 1e-6
OBSERVATION_LIMIT = 10.0
REWARD_LIMIT = 10.0
# Rewards are made so that a host's whole span is worth 1. Where they are typically smaller than this, little is at
# stake; dividing by less would magnify small costs, and a policy that learned to avoid them could not unlearn it.
MIN_REWARD_SCALE = 0.2


RewardT = TypeVar("RewardT", float, Tensor)


class RunningMeanStd(nn.Module):
    """Mean and variance per column over all rows seen. Buffers, so they move and save with the network they serve.

    Storage is written in place: views stay valid, and nothing born in inference mode enters a later graph.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: int | tuple[int, ...], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64, device=device))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64, device=device))
        self.register_state_dict_post_hook(_copy_statistics)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, rows_BD: Tensor) -> None:
        """Merges a batch of rows. An empty batch changes nothing."""
        num_rows = rows_BD.shape[0]
        if num_rows == 0:
            return
        rows_BD = rows_BD.to(torch.float64)
        batch_mean_D = rows_BD.mean(dim=0)
        batch_m2_D = (rows_BD - batch_mean_D).square().sum(dim=0)
        total = self.count + num_rows
        delta_D = batch_mean_D - self.mean
        m2_D = self.var * self.count + batch_m2_D + delta_D.square() * self.count * num_rows / total
        self.mean.copy_(self.mean + delta_D * num_rows / total)
        self.var.copy_(m2_D / total)
        self.count.copy_(total)

    @property
    def std(self) -> Tensor:
        """Standard deviation per column, never zero."""
        return torch.sqrt(self.var + VARIANCE_FLOOR)

    def forward(self, rows: Tensor) -> Tensor:
        """Centres and scales rows of any leading shape, limited to ten deviations. Keeps the dtype of the input."""
        scaled = (rows - self.mean.to(rows.dtype)) / self.std.to(rows.dtype)
        return scaled.clamp(-OBSERVATION_LIMIT, OBSERVATION_LIMIT)


def _copy_statistics(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """A state dict must not change when the live statistics do."""
    for name, tensor in module.named_buffers(recurse=False):
        state[prefix + name] = tensor.detach().clone()


class RewardNormalizer:
    """Divides rewards by their running root mean square and subtracts nothing, so signs and telescoping sums survive.

    A reward is 0 where nothing happened; centring would pay for it. The scale moves only when samples are added:
    a caller that adds them once per round has one scale for the whole round.
    """

    __slots__ = ("clip", "count", "m2", "mean", "num_clipped")

    def __init__(self, clip: float = REWARD_LIMIT) -> None:
        self.clip = clip
        """Limit of a normalized reward, in units of the scale."""
        self.mean = 0.0
        self.m2 = 0.0
        self.count = 0
        self.num_clipped = 0
        """Rewards that met the limit since construction; a healthy run has none."""

    def update(self, rewards: Iterable[float]) -> None:
        """Adds samples in the order given.

        Raises:
            ValueError: One would leave no usable scale, because it is not finite or its square is not. None was added.
        """
        mean, m2, count = self.mean, self.m2, self.count
        for reward in rewards:
            count += 1
            delta = reward - mean
            mean += delta / count
            m2 += delta * (reward - mean)
            if not math.isfinite(m2 + mean * mean):
                raise ValueError(
                    f"expected rewards whose squares are finite, got {reward}; mend the reward that is paid"
                )
        self.mean, self.m2, self.count = mean, m2, count

    @property
    def scale(self) -> float:
        """Root mean square of the samples, or the least scale; 1.0 while there is nothing to measure."""
        if self.count == 0:
            return 1.0
        return max(MIN_REWARD_SCALE, math.sqrt(self.m2 / self.count + self.mean * self.mean))

    def normalize_only(self, reward: RewardT) -> RewardT:
        """One reward or a tensor of them in units of the present scale, limited to `clip` of them.

        Raises:
            ValueError: A single one is not finite; limited, it would look like the best or worst reward there is.
        """
        if isinstance(reward, Tensor):
            scaled = reward.div(self.scale)
            self.num_clipped += int((scaled.abs() > self.clip).sum())
            return scaled.clamp(-self.clip, self.clip)
        if not math.isfinite(reward):
            raise ValueError(f"expected a finite reward, got {reward}; mend the reward that is paid")
        ratio = reward / self.scale
        if abs(ratio) <= self.clip:
            return ratio
        self.num_clipped += 1
        return math.copysign(self.clip, ratio)

    def update_and_normalize(self, reward: RewardT, samples: Iterable[float] | None = None) -> RewardT:
        """Adds the samples, by default the rewards themselves, then normalizes with the scale that includes them."""
        self.update(torch.as_tensor(reward, dtype=torch.float64).flatten().tolist() if samples is None else samples)
        return self.normalize_only(reward)

    def state_dict(self) -> dict[str, float]:
        """Mean, m2 and count."""
        return {"mean": self.mean, "m2": self.m2, "count": self.count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continues from saved statistics.

        Raises:
            ValueError: Keys are not mean, m2 and count, or a value is impossible.
        """
        if set(state) != {"mean", "m2", "count"}:
            raise ValueError(f"RewardNormalizer: expected keys mean, m2, count, got {', '.join(sorted(state))}")
        mean, m2, count = float(state["mean"]), float(state["m2"]), int(state["count"])
        if not (math.isfinite(mean) and math.isfinite(m2) and m2 >= 0.0 and count >= 0):
            raise ValueError(f"RewardNormalizer: expected finite mean, m2 >= 0 and count >= 0, got {dict(state)}")
        self.mean, self.m2, self.count = mean, m2, count
