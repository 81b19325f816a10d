"""One optimizer for a network that changes while it trains: one parameter group for the host, one per seed.

Groups come and go; whoever stays keeps its state to the bit. Gradients are clipped per group, so a seed cannot use up
the host's budget, and the norms that clipping needs are all the gradient evidence the gates ever get.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline import GradientEvidence, OptimSpec

HOST = "host"
LIVE_NORM = 1e-12
VANISHING_NORM = 1e-7
EXPLODING_FACTOR = 10.0
STATE_ENTRIES = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
NO_GRADIENTS = GradientEvidence(finite=None, live_fraction=None, norm_per_weight=None, health=None)


class GrowingOptimizer:
    """AdamW or SGD over named parameter groups.

    Args:
        spec: Kind, rates and schedule.
        groups: Group name -> parameter name -> parameter; the group "host" must be there. Weight decay applies to it
            alone.
        clip_norm: Largest gradient norm of each group.
    """

    def __init__(self, spec: OptimSpec, groups: Mapping[str, Mapping[str, nn.Parameter]], clip_norm: float) -> None:
        if HOST not in groups:
            raise ValueError(f"groups need a {HOST!r} entry, got: {', '.join(groups)}")
        self.spec = spec
        self.clip_norm = clip_norm
        self.num_skipped: dict[str, int] = {}
        self.groups = {HOST: dict(groups[HOST])}
        """Group name -> parameter name -> parameter, in the order they were added."""
        self._finite: dict[str, bool] = {}
        self._norms: dict[str, Tensor] = {}
        self._clip_factors: dict[str, Tensor] = {}
        self._lr_factor = 1.0
        host = {"params": list(groups[HOST].values()), "weight_decay": spec.weight_decay}
        self.inner: torch.optim.Optimizer
        if spec.kind == "adamw":
            self.inner = torch.optim.AdamW([host], lr=spec.lr, fused=True)
        else:
            self.inner = torch.optim.SGD([host], lr=spec.lr, momentum=spec.momentum, fused=True)
        for name, params in groups.items():
            if name != HOST:
                self.add_group(name, params)

    # ---- groups

    def add_group(self, name: str, params: Mapping[str, nn.Parameter]) -> None:
        """Starts to train these parameters, with fresh state.

        Raises:
            ValueError: The name is taken or a parameter is held already. Nothing has changed.
        """
        if name in self.groups:
            raise ValueError(f"parameter group {name!r} exists already")
        held = set(map(id, self.parameters()))
        twice = [key for key, p in params.items() if id(p) in held]
        if twice:
            raise ValueError(f"parameters are in the optimizer already: {', '.join(twice)}")
        lr = self.spec.lr * self._lr_factor
        self.inner.add_param_group({"params": list(params.values()), "weight_decay": 0.0, "lr": lr})
        self.groups[name] = dict(params)

    def remove_group(self, name: str) -> None:
        """Forgets a group and all state of its parameters; a name it does not know is already forgotten."""
        if name not in self.groups:
            return
        if name == HOST:
            raise ValueError("the host group stays for the life of the optimizer")
        del self.inner.param_groups[list(self.groups).index(name)]
        for param in self.groups.pop(name).values():
            self.inner.state.pop(param, None)
        for book in (self._finite, self._norms, self._clip_factors, self.num_skipped):
            book.pop(name, None)

    def holds(self, params: Iterable[nn.Parameter]) -> bool:
        """True if every one of these parameters is trained."""
        held = set(map(id, self.parameters()))
        return all(id(p) in held for p in params)

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in group order."""
        return [p for group in self.groups.values() for p in group.values()]

    # ---- training

    def set_lr_factor(self, factor: float) -> None:
        """Scales the learning rate of every group, those to come included."""
        self._lr_factor = factor
        for group in self.inner.param_groups:
            group["lr"] = self.spec.lr * factor

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.inner.zero_grad()

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Clips and updates each group. A seed whose gradient is not finite is left out and counted.

        Args:
            scaler: Scaled the loss before backward; unscales here, before clipping, and may skip the update.
        """
        if scaler is not None:
            scaler.unscale_(self.inner)
        present = {name: [p.grad for p in group.values() if p.grad is not None] for name, group in self.groups.items()}
        gradients = [grad for grads in present.values() for grad in grads]
        norms = iter(torch._foreach_norm(gradients) if gradients else ())
        for name, grads in present.items():
            if grads:
                self._clip(name, grads, torch.stack([next(norms) for _ in grads]))
        if scaler is None:
            self.inner.step()
        else:
            scaler.step(self.inner)
            scaler.update()

    def _clip(self, name: str, grads: list[Tensor], norms: Tensor) -> None:
        total = torch.linalg.vector_norm(norms)
        self._norms[name] = norms
        if name != HOST:
            # sync: the update of a broken seed must not happen at all; zero gradients would still move its weights
            finite = math.isfinite(total.item())
            self._finite[name] = self._finite.get(name, True) and finite
            if not finite:
                self.num_skipped[name] = self.num_skipped.get(name, 0) + 1
                for param in self.groups[name].values():
                    param.grad = None
                return
        self._clip_factors[name] = torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)
        torch._foreach_mul_(grads, self._clip_factors[name])

    def clip_factors(self) -> dict[nn.Parameter, Tensor]:
        """What clipping multiplied each gradient of the last step by: divide by it for the gradient as it was."""
        return {param: self._clip_factors[name] for name in self._clip_factors for param in self.groups[name].values()}

    def finish_epoch(self) -> dict[str, GradientEvidence]:
        """What was seen of each group since the last call, and starts anew."""
        seen = {name: self._evidence(name) for name in self.groups}
        self._finite.clear()
        self._norms.clear()
        return seen

    def _evidence(self, name: str) -> GradientEvidence:
        if name not in self._norms:
            return NO_GRADIENTS
        norms = self._norms[name].double().tolist()  # sync: once per group and epoch, read by gates and reports
        weights = sum(p.numel() for p in self.groups[name].values())
        return gradient_evidence(
            norms,
            num_tensors=len(self.groups[name]),
            num_weights=weights,
            clip_norm=self.clip_norm,
            finite=self._finite.get(name, True),
        )

    # ---- state

    def named_state(self) -> dict[str, Tensor]:
        """State tensors by "<parameter>.<entry>"; parameters without state yet have none."""
        return {
            f"{name}.{key}": value
            for group in self.groups.values()
            for name, param in group.items()
            for key, value in self.inner.state.get(param, {}).items()
            if isinstance(value, Tensor)
        }

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the state of exactly the current parameters.

        Raises:
            ValueError: A tensor belongs to no parameter here or has another shape, or the state is that of another kind
                of optimizer. Nothing has changed.
        """
        params = {name: param for group in self.groups.values() for name, param in group.items()}
        fresh: dict[Tensor, dict[str, Any]] = {}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition(".")
            if name not in params:
                raise ValueError(f"optimizer state {full_name!r} belongs to no parameter of this model")
            if value.dim() and value.shape != params[name].shape:
                raise ValueError(
                    f"optimizer state {full_name!r} has shape {tuple(value.shape)}, "
                    f"its parameter {tuple(params[name].shape)}"
                )
            if value.dim():  # in the memory order of its parameter: fused kernels walk both without looking at strides
                taken = torch.empty_like(params[name], dtype=value.dtype, requires_grad=False).copy_(value)
            else:
                taken = value.to(params[name].device, copy=True)
            fresh.setdefault(params[name], {})[key] = taken
        for name, param in params.items():
            if param in fresh and set(fresh[param]) != STATE_ENTRIES[self.spec.kind]:
                raise ValueError(
                    f"optimizer state of {name!r} has {', '.join(sorted(fresh[param]))}; "
                    f"{self.spec.kind} needs {', '.join(sorted(STATE_ENTRIES[self.spec.kind]))}"
                )
        self.inner.state.clear()
        self.inner.state.update(fresh)


def gradient_evidence(
    norms: Sequence[float], *, num_tensors: int, num_weights: int, clip_norm: float, finite: bool
) -> GradientEvidence:
    """What the gradient norms of one parameter group say.

    Args:
        norms: Of the tensors that had a gradient in the last batch.
        num_tensors: Of the group; those without a gradient count as vanishing.
        num_weights: Of the group.
        clip_norm: Largest gradient norm of the group.
        finite: False if an earlier batch of the epoch had a gradient that is not a number.
    """
    finite = finite and all(map(math.isfinite, norms))
    total = math.sqrt(sum(norm * norm for norm in norms))
    vanishing = num_tensors - sum(norm >= VANISHING_NORM for norm in norms)
    exploding = sum(norm > EXPLODING_FACTOR * clip_norm for norm in norms)
    health = min(1.0, max(0.0, 1.0 - 0.5 * vanishing / num_tensors - 0.8 * exploding / num_tensors))
    return GradientEvidence(
        finite=finite,
        live_fraction=sum(norm > LIVE_NORM for norm in norms) / num_tensors,
        norm_per_weight=total / math.sqrt(num_weights) if finite else None,
        health=health if finite else 0.0,
    )
