"""A state-value head whose targets are normalised returns, and whose predictions survive a change of that scale."""

# B rows, W width

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.simic.agent.policy import linear
from esper.simic.control.normalization import RunningMeanStd

# In scaled reward units. Returns that vary less are not worth magnifying, nor fit to judge a critic by.
RETURN_STD_FLOOR = 0.1


class ValueHead(nn.Module):
    """MLP with one output in normalised units. Never sees an action: a baseline that does starves the policy."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(linear(width, hidden), nn.SiLU())
        self.out = linear(hidden, 1)
        self.returns = RunningMeanStd(1)

    def forward(self, features: Tensor) -> Tensor:
        """Normalised value of rows `[..., W]`, shape `[...]`."""
        normalized: Tensor = self.out(self.body(features))[..., 0]
        return normalized

    def denormalize(self, values: Tensor) -> Tensor:
        """Normalised values in units of reward."""
        mean, scale = self._scale()
        return values * scale + mean

    def normalize(self, returns: Tensor) -> Tensor:
        """Returns in the units this head predicts."""
        mean, scale = self._scale()
        return (returns - mean) / scale

    @torch.no_grad()
    def rescale(self, returns_B: Tensor) -> None:
        """Takes new returns into the statistics and changes the output layer so that predictions stay as they were.

        The very first predictions mean nothing. Keeping them would blow the output up by however much smaller than 1
        the first returns spread, and the critic's error would drown the policy in the shared gradient for many rounds.
        """
        untrained = self.returns.count.item() == 0
        old_mean, old_scale = self._scale()
        self.returns.update(returns_B[:, None])
        if untrained:
            return
        new_mean, new_scale = self._scale()
        self.out.weight.mul_(old_scale / new_scale)
        self.out.bias.mul_(old_scale / new_scale).add_((old_mean - new_mean) / new_scale)

    def _scale(self) -> tuple[Tensor, Tensor]:
        return self.returns.mean.float(), self.returns.var.sqrt().clamp(min=RETURN_STD_FLOOR).float()
