"""Numbers that tell a learning agent from a broken one: the critic and the observations. None means not measurable."""

# D features, B rows

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.simic.agent.types import ObservationStats
from esper.simic.agent.value_head import RETURN_STD_FLOOR
from esper.simic.control.normalization import OBSERVATION_LIMIT, RunningMeanStd

OUTLIER = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticHealth:
    """How well the values of a rollout foretold its returns."""

    explained_variance: float | None
    """None where the returns hardly vary: the ratio would be noise."""
    value_nrmse: float
    return_corr: float | None
    return_mean: float
    return_std: float


@torch.no_grad()
def judge_critic(values_B: Tensor, returns_B: Tensor) -> CriticHealth:
    """Compares values with returns, row by row."""
    values_B, returns_B = values_B.double(), returns_B.double()
    error_B = returns_B - values_B
    std = float(returns_B.std(unbiased=False))
    value_std = float(values_B.std(unbiased=False))
    nrmse = float(error_B.square().mean().sqrt()) / max(std, RETURN_STD_FLOOR)
    explained = None if std < RETURN_STD_FLOOR else 1.0 - float(error_B.var(unbiased=False)) / std**2
    corr = None
    if min(std, value_std) > 1e-8:
        covariance = ((returns_B - returns_B.mean()) * (values_B - values_B.mean())).mean()
        corr = float(covariance) / (std * value_std)
    return CriticHealth(
        explained_variance=explained,
        value_nrmse=nrmse,
        return_corr=corr,
        return_mean=float(returns_B.mean()),
        return_std=std,
    )


@torch.no_grad()
def judge_observations(groups: list[tuple[RunningMeanStd, Tensor, Tensor]]) -> ObservationStats:
    """Looks at raw rows under the statistics in force. Each group: statistics, normalised columns, rows `[B, D]`."""
    deviations, drifts, num_nonfinite = [], [], 0
    for stats, columns_D, rows_BD in groups:
        num_nonfinite += int((~torch.isfinite(rows_BD)).sum())
        known = rows_BD[torch.isfinite(rows_BD).all(dim=1)][:, columns_D].double()
        mean, std = stats.mean[columns_D], stats.std[columns_D]
        deviations.append(((known - mean) / std).abs().flatten())
        drifts.append(((known.mean(dim=0) - mean) / std).abs())
    deviation, drift = torch.cat(deviations), torch.cat(drifts)
    return ObservationStats(
        outlier_share=float((deviation > OUTLIER).double().mean()),
        clipped_share=float((deviation > OBSERVATION_LIMIT).double().mean()),
        drift=float(drift.mean()),
        num_nonfinite=num_nonfinite,
    )
