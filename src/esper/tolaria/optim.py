"""One optimizer for a network that changes while it trains: one parameter group for the host, one per seed.

Groups come and go; whoever stays keeps its state to the bit. Gradients are clipped per group, so a seed cannot use up
the host's budget, and the norms that clipping needs are all the gradient evidence the gates ever get.

G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor, nn

from esper.leyline import GradientEvidence, OptimSpec
from esper.tolaria.runtime import LossScaler

HOST = "host"
LIVE_NORM = 1e-12
VANISHING_NORM = 1e-7
EXPLODING_FACTOR = 10.0
BETAS, EPS = (0.9, 0.999), 1e-8
"""Of AdamW: torch's own."""
STATE_ENTRIES = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
NO_GRADIENTS = GradientEvidence(finite=None, live_fraction=None, norm_per_weight=None, health=None)


class GrowingOptimizer:
    """AdamW or SGD over named parameter groups, by torch's fused kernels.

    Args:
        spec: Kind, rates and schedule.
        groups: Group name -> parameter name -> parameter; the group "host" must be there. Weight decay applies to it
            alone.
        clip_norm: Largest gradient norm of each group.

    Attributes:
        groups: Group name -> parameter name -> parameter, in the order they were added.
        state: What the kernels remember of each parameter that has had a gradient.
        lr: The present learning rate of groups that have none of their own.
        num_skipped: By group, how many of its updates were left out; counted when an epoch is finished.
    """

    def __init__(self, spec: OptimSpec, groups: Mapping[str, Mapping[str, nn.Parameter]], clip_norm: float) -> None:
        if HOST not in groups:
            raise ValueError(f"groups need a {HOST!r} entry, got: {', '.join(groups)}")
        self.spec = spec
        self.clip_norm = clip_norm
        self.lr = spec.lr
        self._own_rates: dict[str, float] = {}
        self.groups: dict[str, dict[str, nn.Parameter]] = {}
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.num_skipped: dict[str, int] = {}
        self._norms: dict[str, Tensor] = {}
        self._skipped: dict[str, Tensor] = {}
        self._clip_factors: dict[str, Tensor] = {}
        self._values: dict[str, tuple[list[float], int]] | None = None
        for name, params in groups.items():
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
        self.groups[name] = dict(params)

    def remove_group(self, name: str) -> None:
        """Forgets a group and all state of its parameters; a name it does not know is already forgotten."""
        if name not in self.groups:
            return
        if name == HOST:
            raise ValueError("the host group stays for the life of the optimizer")
        for param in self.groups.pop(name).values():
            self.state.pop(param, None)
        for book in (self._norms, self._skipped, self._clip_factors, self.num_skipped):
            book.pop(name, None)

    def holds(self, params: Iterable[nn.Parameter]) -> bool:
        """True if every one of these parameters is trained."""
        held = set(map(id, self.parameters()))
        return all(id(p) in held for p in params)

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in group order."""
        return [p for group in self.groups.values() for p in group.values()]

    # ---- training

    def set_lr_factor(self, factor: float, own_factors: Mapping[str, float] = MappingProxyType({})) -> None:
        """Scales the learning rate of every group, those to come included; groups may have a factor of their own."""
        self.lr = self.spec.lr * factor
        self._own_rates = {name: self.spec.lr * own for name, own in own_factors.items()}

    def rates(self, name: str) -> tuple[float, float]:
        """(learning rate, weight decay) of a group now."""
        return self._own_rates.get(name, self.lr), self.spec.weight_decay if name == HOST else 0.0

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for group in self.groups.values():
            for param in group.values():
                param.grad = None

    @torch.no_grad()
    def step(self, scaler: LossScaler | None = None) -> None:
        """Clips and updates each group. A seed whose gradient is not finite is left out and counted.

        Args:
            scaler: Scaled the loss before backward; with it a host whose gradient is not finite is left out too.
        """
        every: dict[str, list[Tensor]] = {
            name: [p for p in group.values() if p.grad is not None] for name, group in self.groups.items()
        }
        trained = {name: params for name, params in every.items() if params}
        if not trained:
            return
        together = [p.grad for params in trained.values() for p in params if p.grad is not None]
        if scaler is not None:
            torch._foreach_div_(together, scaler.scale)
        norms = iter(torch._foreach_norm(together))
        self._values = None
        self._norms |= {name: torch.stack([next(norms) for _ in params]) for name, params in trained.items()}
        totals_G = torch.stack(torch._foreach_norm([self._norms[name] for name in trained]))
        factors_G = torch.clamp(self.clip_norm / (totals_G + 1e-6), max=1.0)
        self._clip_factors |= zip(trained, factors_G.unbind(), strict=True)
        torch._foreach_mul_(together, [self._clip_factors[name] for name, params in trained.items() for _ in params])
        # Flags on the device: the update of a broken seed must not happen at all, and to ask here whether it is broken
        # would make every batch wait for the device.
        counts_G = (totals_G < torch.inf).float()
        flags = zip(trained.items(), counts_G.unbind(), (1 - counts_G).unbind(), strict=True)
        for (name, params), count, skip in flags:
            if name != HOST or scaler is not None:
                self._skipped[name] = self._skipped[name] + skip if name in self._skipped else skip
                self._update(params, *self.rates(name), count, skip)
            else:
                self._update(params, *self.rates(name), 1, None)
            if scaler is not None and name == HOST:
                scaler.update(skip)

    def _update(
        self, params: list[Tensor], lr: float, weight_decay: float, count: Tensor | int, skip: Tensor | None
    ) -> None:
        """One call of a fused kernel, which does nothing at all where `skip` is 1 and `count` 0."""
        grads = [param.grad for param in params if param.grad is not None]
        for param in params:
            if param not in self.state:
                self.state[param] = self._fresh_state(param)
        states = [self.state[param] for param in params]
        if self.spec.kind == "adamw":
            steps = [state["step"] for state in states]
            # a list: torch would read a single tensor as a number
            torch._foreach_add_(steps, count if isinstance(count, int) else [count] * len(steps))
            torch._fused_adamw_(
                params,
                grads,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=lr,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=weight_decay,
                eps=EPS,
                amsgrad=False,
                maximize=False,
                found_inf=skip,
            )
        else:
            torch._fused_sgd_(
                params,
                grads,
                [state["momentum_buffer"] for state in states] if self.spec.momentum else [],
                weight_decay=weight_decay,
                momentum=self.spec.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                found_inf=skip,
            )

    def _fresh_state(self, param: Tensor) -> dict[str, Tensor]:
        if self.spec.kind == "adamw":
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            return {"step": step, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        return {"momentum_buffer": torch.zeros_like(param)} if self.spec.momentum else {}

    def clip_factors(self) -> dict[nn.Parameter, Tensor]:
        """What clipping multiplied each gradient of the last step by: divide by it for the gradient as it was."""
        return {param: self._clip_factors[name] for name in self._clip_factors for param in self.groups[name].values()}

    def note_epoch(self, name: str, norms: Tensor, num_skipped: int) -> None:
        """Takes what somebody else saw who trained a group for an epoch: norms in the last batch, updates left out."""
        self._norms[name] = norms
        self._clip_factors.pop(name, None)
        if name != HOST:
            self._skipped[name] = torch.tensor(float(num_skipped))
        self._values = None

    # ---- what was seen, as numbers

    @property
    def has_unread(self) -> bool:
        """True if gradients were seen that nobody has read of."""
        return bool(self._norms) and self._values is None

    def numbers(self) -> Tensor:
        """By group: the norms of its gradients in the last batch, and how many updates were left out in this epoch."""
        parts = []
        for name, norms in self._norms.items():
            parts += [norms, self._skipped[name][None]] if name in self._skipped else [norms]
        return torch.cat(parts).double()

    def take(self, values: Sequence[float]) -> None:
        """Takes what `numbers` returned, read by somebody who had more to read."""
        rest = iter(values)
        self._values = {}
        for name, norms in self._norms.items():
            found = list(islice(rest, len(norms)))
            self._values[name] = (found, int(next(rest)) if name in self._skipped else 0)

    def finish_epoch(self) -> dict[str, GradientEvidence]:
        """What was seen of each group since the last call, and starts anew."""
        if self.has_unread:
            self.take(self.numbers().tolist())  # sync: where no engine has read it with all else
        seen = {name: self._evidence(name) for name in self.groups}
        self._norms.clear()
        self._skipped.clear()
        self._values = None
        return seen

    def _evidence(self, name: str) -> GradientEvidence:
        if self._values is None or name not in self._values:
            return NO_GRADIENTS
        norms, num_skipped = self._values[name]
        if num_skipped:
            self.num_skipped[name] = self.num_skipped.get(name, 0) + num_skipped
        return gradient_evidence(
            norms,
            num_tensors=len(self.groups[name]),
            num_weights=sum(p.numel() for p in self.groups[name].values()),
            clip_norm=self.clip_norm,
            finite=num_skipped == 0,
        )

    # ---- state

    def named_state(self) -> dict[str, Tensor]:
        """State tensors by "<parameter>.<entry>"; parameters without state yet have none."""
        return {
            f"{name}.{key}": value
            for group in self.groups.values()
            for name, param in group.items()
            for key, value in self.state.get(param, {}).items()
        }

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the state of exactly the current parameters.

        Raises:
            ValueError: A tensor belongs to no parameter here or has another shape, or the state is that of another kind
                of optimizer. Nothing has changed.
        """
        params = {name: param for group in self.groups.values() for name, param in group.items()}
        fresh: dict[Tensor, dict[str, Tensor]] = {}
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
        self.state = fresh


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
