"""How a seed learns behind its host without touching it.

In TRAINING the slot's output is the host's own feature tensor. The gradient g that arrives there is handed to the host
unchanged and, besides, to the seed's output d. A seed that only followed g would grow without limit, because g never
reacts to d; so its loss per row is

    <g, d> + |d|^2 / (2 * eta)

whose minimum is a gradient-boosting step of bounded size. Minus this loss forecasts what blending brings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class SeedMeter:
    """Measurements of one TRAINING seed. Values stay 0-dim tensors until somebody reads them all at once.

    Attributes:
        eta: Step size of the objective. None before the first batch, on which a seed only listens; NaN as long as no
            gradient was usable. A NaN here makes the gradient of the whole seed NaN, so optimizers leave it out.
        loss_scale: Factor by which the loss was scaled before backward (mixed precision); None if it was not.
    """

    def __init__(self, rho: float, eta_decay: float) -> None:
        self.rho = rho
        self.eta_decay = eta_decay
        self.eta: Tensor | None = None
        self.loss_scale: float | Tensor | None = None
        self._losses: list[Tensor] = []
        self._ratios: list[Tensor] = []
        self._values: Sequence[float] | None = None

    def listen(self, h_rms: Tensor, g: Tensor, rows: int) -> None:
        """Takes the first gradient, to set eta; the seed is not trained on this batch."""
        eta = self._measured_eta(h_rms, self._unscaled(g), rows)
        self.eta = torch.where(_usable(eta), eta, torch.nan)
        self._values = None

    def learn(self, h_rms: Tensor, d: Tensor, g: Tensor, rows: int) -> Tensor:
        """Returns the gradient of the objective for d, in float32, and books the batch.

        Runs inside backward, before the update, so the loss is an honest forecast.
        """
        assert self.eta is not None
        d, g = d.float(), self._unscaled(g)
        squares, step = d.square().sum(), self.eta * rows
        self._losses.append((g * d).sum() + squares / (2 * step))
        self._ratios.append((squares / d.numel()).sqrt() / h_rms)
        towards = g + d * step.reciprocal()
        fresh = self._measured_eta(h_rms, g, rows)
        smoothed = self.eta_decay * self.eta + (1 - self.eta_decay) * fresh
        taken = torch.where(self.eta.isnan(), fresh, smoothed)
        self.eta = torch.where(_usable(fresh), taken, self.eta)
        self._values = None
        return towards if self.loss_scale is None else towards * self.loss_scale

    def note_epoch(self, eta: float, losses: Tensor, ratios: Tensor) -> None:
        """Takes an epoch that somebody else trained: eta at its end, and what `learn` books of each batch."""
        self.eta = torch.tensor(eta, dtype=torch.float32)
        self._losses.extend(losses.unbind())
        self._ratios.extend(ratios.unbind())
        self._values = None

    # ---- what was measured, as numbers

    @property
    def has_unread(self) -> bool:
        """True if there are measurements that nobody has read."""
        return self.eta is not None and self._values is None

    def numbers(self) -> Tensor:
        """Eta, and the loss and the residual ratio over the second half of the epoch's batches if there were any."""
        assert self.eta is not None
        half = len(self._losses) // 2
        means = [torch.stack(batches[half:]).mean() for batches in (self._losses, self._ratios) if batches]
        return torch.stack([self.eta, *means]).double()

    def take(self, values: Sequence[float]) -> None:
        """Takes what `numbers` returned, read by somebody who had more to read."""
        self._values = values

    def _read(self) -> Sequence[float]:
        if self._values is None:
            self._values = self.numbers().tolist()  # sync: where no engine has read it with all else
        return self._values

    @property
    def only_listened(self) -> bool:
        """True if no batch brought a gradient from which the seed could learn: it has been left out of every update."""
        return self.eta is not None and self.eta_value() is None

    def eta_value(self) -> float | None:
        """Eta as a number; None if there is none yet."""
        eta = math.nan if self.eta is None else self._read()[0]
        return None if math.isnan(eta) else eta

    def finish_epoch(self) -> tuple[float | None, float | None]:
        """Returns (predicted gain, residual ratio) over the second half of the epoch's batches, and starts anew."""
        gain, ratio = None, None
        if self._losses and self.eta_value() is not None:
            _, loss, ratio = self._read()
            gain = -loss
        self._losses.clear()
        self._ratios.clear()
        return gain, ratio

    def _unscaled(self, g: Tensor) -> Tensor:
        return g.float() if self.loss_scale is None else g.float() / self.loss_scale

    def _measured_eta(self, h_rms: Tensor, g: Tensor, rows: int) -> Tensor:
        return self.rho * h_rms / (rows * rms(g))


def _usable(eta: Tensor) -> Tensor:
    return (eta > 0) & (eta < torch.inf)


def rms(x: Tensor) -> Tensor:
    """Root mean square over all elements, in float32."""
    return x.float().square().mean().sqrt()


class _Attach(torch.autograd.Function):
    """Forward: h as it is. Backward: the gradient, bit for bit, to h, and that of the seed's objective to d."""

    @staticmethod
    def forward(ctx: FunctionCtx, h: Tensor, d: Tensor, meter: SeedMeter, rows: int) -> Tensor:
        ctx.save_for_backward(rms(h), d)
        ctx.meter = meter  # type: ignore[attr-defined]
        ctx.rows = rows  # type: ignore[attr-defined]
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        h_rms, d = ctx.saved_tensors
        meter: SeedMeter = ctx.meter
        if meter.eta is None:
            meter.listen(h_rms, g, ctx.rows)
            return g, None, None, None
        return g, meter.learn(h_rms, d, g, ctx.rows), None, None


def attach(h: Tensor, d: Tensor, meter: SeedMeter, rows: int) -> Tensor:
    """Returns h, bit-equal, and lets the gradient that reaches it train d by the objective above.

    Args:
        h: The host's features.
        d: The seed's delta, computed from a detached h.
        meter: Takes the measurements of this batch.
        rows: Terms of the loss mean: samples, or tokens of a language model.
    """
    out: Tensor = _Attach.apply(h, d, meter, rows)  # type: ignore[no-untyped-call]
    return out
