"""How a seed learns behind its host without touching it.

In TRAINING the slot's output is the host's own feature tensor. The gradient g that arrives there is handed to the host
unchanged and, besides, to the seed's output d. A seed that only followed g would grow without limit, because g never
reacts to d; so its loss per row is

    <g, d> + |d|^2 / (2 * eta)

whose minimum is a gradient-boosting step of bounded size. Minus this loss forecasts what blending brings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class SeedMeter:
    """Measurements of one TRAINING seed. Values stay 0-dim tensors until the epoch ends, so nothing waits for a device.

    Attributes:
        eta: Step size of the objective, or None before the first usable gradient; until then the seed only listens.
        loss_scale: Factor by which the loss was scaled before backward (mixed precision); 1.0 otherwise.
    """

    def __init__(self, rho: float, eta_decay: float) -> None:
        self.rho = rho
        self.eta_decay = eta_decay
        self.eta: Tensor | None = None
        self.loss_scale: float | Tensor = 1.0
        self._losses: list[Tensor] = []
        self._ratios: list[Tensor] = []

    def listen(self, h_rms: Tensor, g: Tensor, rows: int) -> None:
        """Takes the first gradient, to set eta; the seed is not trained on this batch."""
        eta = self._measured_eta(h_rms, g.float() / self.loss_scale, rows)
        if bool(torch.isfinite(eta) & (eta > 0)):  # sync: once per seed, because nothing can start without eta
            self.eta = eta

    def read(self, h_rms: Tensor, d: Tensor, g: Tensor, rows: int) -> None:
        """Books one trained batch. Runs inside backward, before the update, so the loss is an honest forecast."""
        assert self.eta is not None
        g = g.float() / self.loss_scale
        self._losses.append((g * d).sum() + self.penalty(d, rows))
        self._ratios.append(rms(d) / h_rms)
        fresh = self._measured_eta(h_rms, g, rows)
        usable = torch.isfinite(fresh) & (fresh > 0)
        smoothed = self.eta_decay * self.eta + (1 - self.eta_decay) * fresh
        self.eta = torch.where(usable, smoothed, self.eta)

    def penalty(self, d: Tensor, rows: int) -> Tensor:
        """The quadratic part of the objective, in float32; the linear part is the gradient itself."""
        assert self.eta is not None
        return d.float().square().sum() / (2 * self.eta * rows)

    def finish_epoch(self) -> tuple[float | None, float | None]:
        """Returns (predicted gain, residual ratio) over the second half of the epoch's batches, and starts anew."""
        gain, ratio = None, None
        if self._losses:
            half = len(self._losses) // 2
            means = torch.stack([torch.stack(self._losses[half:]).mean(), torch.stack(self._ratios[half:]).mean()])
            loss, ratio = means.tolist()  # sync: once per epoch and training seed, read by the gate
            gain = -loss
        self._losses.clear()
        self._ratios.clear()
        return gain, ratio

    def _measured_eta(self, h_rms: Tensor, g: Tensor, rows: int) -> Tensor:
        return self.rho * h_rms / (rows * rms(g))


def rms(x: Tensor) -> Tensor:
    """Root mean square over all elements, in float32."""
    return x.float().square().mean().sqrt()


class _Attach(torch.autograd.Function):
    """Forward: h as it is. Backward: the gradient, bit for bit, to h and to d."""

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
        meter.read(h_rms, d, g, ctx.rows)
        return g, g, None, None


def attach(h: Tensor, d: Tensor, meter: SeedMeter, rows: int) -> Tensor:
    """Returns h, bit-equal, and lets the gradient that reaches it train d as well.

    Args:
        h: The host's features.
        d: The seed's delta, computed from a detached h.
        meter: Takes the measurements of this batch.
        rows: Terms of the loss mean: samples, or tokens of a language model.
    """
    out: Tensor = _Attach.apply(h, d, meter, rows)  # type: ignore[no-untyped-call]
    return out
