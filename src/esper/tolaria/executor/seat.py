"""The memory of one network: parameters, running statistics and optimizer state, each flat. Torch's tensors are views.

So gates, reports, snapshots, rollbacks and export see the truth without a copy, and torch may train the network in
between. Whoever gives the network new tensors (a new seed, a restored state) unseats it: ask `fits` before every use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline import OptimSpec
from esper.tolaria.executor import ops as o
from esper.tolaria.executor.arrays import Optimizer
from esper.tolaria.executor.trace import AddressRange, Unsupported
from esper.tolaria.optim import BETAS, EPS, GrowingOptimizer

Norm = nn.modules.batchnorm._BatchNorm


class Seat:
    """Moves a network into flat memory.

    Args:
        groups: Group name -> parameter name -> parameter, the host first. Their order is the order in memory.
        norms: All batch norms of the network.
        optimizer: Holds the state of the parameters, or none yet.
        parts: Modules that come and go with the network's topology: while they are these, so are all tensors.

    Raises:
        Unsupported: A tensor cannot live in flat memory. Nothing has moved.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, nn.Parameter]],
        norms: Sequence[Norm],
        optimizer: GrowingOptimizer,
        parts: Sequence[nn.Module | None] = (),
    ) -> None:
        self.names = tuple(groups)
        self._parts = list(parts)
        self._optimizer = optimizer
        self._params = [param for group in groups.values() for param in group.values()]
        self._norms = list(norms)
        kind, hyper, self._moment_names = _read_spec(optimizer.spec)
        _check_tensors(self._params, self._norms)
        ends = np.cumsum([0, *(_room(param.numel()) for param in self._params)])
        self.shape = (*ends[1:].tolist(), sum(norm.num_features for norm in self._norms))
        """Equal for networks whose tensors lie in the same places."""
        counts = np.cumsum([0, *(len(group) for group in groups.values())])
        self._flat = torch.zeros(int(ends[-1]))
        self._moments = [torch.zeros(int(ends[-1])) for _ in self._moment_names or ("unused",)]
        self._steps = torch.zeros(len(self._params))
        self._stats = torch.zeros(max(16, sum(2 * norm.num_features for norm in self._norms)))
        self.params, self.stats = self._flat.numpy(), self._stats.numpy()
        self.state = Optimizer(
            kind=kind,
            hyper=hyper,
            first=self._moments[0].numpy(),
            second=self._moments[-1].numpy(),
            steps=self._steps.numpy(),
            tensors=_spans(ends),  # gaps behind tensors hold zeros
            groups=_spans(counts),
            norms=np.zeros(len(self._params), np.float32),
            seen=np.zeros((len(groups), 2), np.int64),
        )
        self._move_in()

    def _move_in(self) -> None:
        state = self._optimizer.state
        self._views: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
        with torch.no_grad():
            for index, param in enumerate(self._params):
                start = int(self.state.tensors[index, 0])
                entries = self._entries(index, param)
                if entries.keys() <= state.get(param, {}).keys():
                    for name, view in entries.items():
                        view.copy_(state[param][name])
                    state[param] = entries
                place = self._flat[start : start + param.numel()].view(param.shape)
                place.copy_(param)
                param.data = place
                self._views.append((param, entries))
            start = 0
            for norm in self._norms:
                for name in ("running_mean", "running_var"):
                    buffer = getattr(norm, name)
                    place = self._stats[start : start + norm.num_features]
                    place.copy_(buffer)
                    buffer.data = place
                    start += norm.num_features
        self._addresses = [tensor.data_ptr() for tensor in self._buffers()]

    def _entries(self, index: int, param: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's state of a parameter as views."""
        start = int(self.state.tensors[index, 0])
        entries = {
            name: flat[start : start + param.numel()].view(param.shape)
            for name, flat in zip(self._moment_names, self._moments, strict=False)
        }
        return {"step": self._steps[index], **entries} if self.state.kind == o.ADAMW else entries

    def _buffers(self) -> list[Tensor]:
        norms = [getattr(norm, name) for norm in self._norms for name in ("running_mean", "running_var")]
        return [*self._params, *norms]

    def fits(self, parts: Sequence[nn.Module | None] = ()) -> bool:
        """True if the network still has these parts and its tensors still live here, with their optimizer state."""
        if len(parts) != len(self._parts) or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            return False
        if [tensor.data_ptr() for tensor in self._buffers()] != self._addresses:
            return False
        state = self._optimizer.state
        for index, (param, entries) in enumerate(self._views):
            known = state.get(param)
            if known is None:
                if entries and self.state.steps[index] != 0:
                    return False
            elif known is not entries:
                return False
        return True

    def memory(self) -> tuple[AddressRange, AddressRange]:
        """(parameters, statistics), for tracing."""
        return AddressRange(self._flat), AddressRange(self._stats)

    def publish(self) -> None:
        """Shows the optimizer the state of parameters that were updated here for the first time."""
        state = self._optimizer.state
        for index, (param, entries) in enumerate(self._views):
            if entries and self.state.steps[index] > 0 and param not in state:
                state[param] = entries

    def count_batches(self, num_batches: int) -> None:
        """Tells all batch norms how many batches they have seen."""
        for norm in self._norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += num_batches

    def show_gradients(self, flat: Tensor) -> None:
        """Gives the parameters their part of gradients laid out as they are; a group without any gets none."""
        for group, (first, last) in enumerate(self.state.groups.tolist()):
            for param, start in zip(self._params[first:last], self.state.tensors[first:last, 0].tolist(), strict=True):
                grad = flat[start : start + param.numel()].view(param.shape)
                param.grad = grad if self.state.seen[group, 0] else None


def _spans(ends: np.ndarray) -> np.ndarray:
    """(start, stop) between each end and the next."""
    return np.stack([ends[:-1], ends[1:]], 1).astype(np.int64)


def _room(size: int) -> int:
    return -(-size // o.LANES) * o.LANES


def _read_spec(spec: OptimSpec) -> tuple[int, np.ndarray, tuple[str, ...]]:
    """(kind, numbers of its formula, names of its moments)."""
    if spec.kind == "adamw":
        return o.ADAMW, np.array([*BETAS, EPS]), ("exp_avg", "exp_avg_sq")
    assert spec.kind == "sgd", spec.kind
    return o.SGD, np.array([spec.momentum, 0.0, 0.0]), ("momentum_buffer",) if spec.momentum else ()


def _check_tensors(params: Sequence[nn.Parameter], norms: Sequence[Norm]) -> None:
    for param in params:
        if param.dtype is not torch.float32 or param.device.type != "cpu" or not param.requires_grad:
            raise Unsupported(f"a parameter of type {param.dtype} on {param.device}, or one that is frozen")
    for norm in norms:
        if norm.momentum is None or norm.running_mean is None:
            raise Unsupported("a batch norm without running statistics of its own momentum")
