"""A model's passes as flat lists of calls: the same kernels on the same tensors, without going through modules.

In a small network, finding out what a module is to do takes longer than the kernel that does it. Every call here is the
one that the module's own `forward` would make, so results are the same to the bit. A module that carries hooks or is of
a kind that is not known here is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from esper.kasmina.blueprints import Residual
from esper.kasmina.model import Call, MorphogeneticModel, Station
from esper.kasmina.slot import SeedSlot, delta, mix
from esper.leyline import SeedStage

OWN = "esper.kasmina."
"""Home of modules whose call is their `forward` and nothing else."""


def flat_stations(model: MorphogeneticModel) -> list[Station]:
    """The way through the model as it is now, in its present mode. Valid until anything but training changes it."""
    if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return model.stations()
    flat = []
    for station, (segment, slot) in zip(model.stations(), model.places(), strict=True):
        station = station._replace(segment=None if segment is None else _chain(_calls(segment)))
        if slot is None or station.extend is None or _is_hooked(slot):
            flat.append(station)
        else:
            flat.append(_with_seed(station, slot))
    return flat


def _with_seed(station: Station, slot: SeedSlot) -> Station:
    if slot.seed is None:
        return station._replace(slot_id=None, extend=None, blended=None)
    assert slot.blend is not None
    own_delta = partial(_delta, slot.blend.operator, _chain(_calls(slot.seed)), slot.gate)
    if slot.stage.is_blended:
        blended = partial(_blended, own_delta, slot.alpha)
        return station._replace(extend=blended, blended=blended)
    trains = slot.stage is SeedStage.TRAINING and slot.training
    return station._replace(extend=partial(slot.train_behind, run=own_delta) if trains else None)


def _delta(operator: str, seed: Call, gate: Any, h: Tensor, source: Tensor | None = None) -> Tensor:
    return delta(operator, h, seed(h if source is None else source), gate)


def _blended(own_delta: Call, alpha: float, h: Tensor, *source: Tensor) -> Tensor:
    return mix(h, own_delta(h, *source), alpha)


def _chain(calls: list[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]

    def run(x: Tensor) -> Tensor:
        for call in calls:
            x = call(x)
        return x

    return run


def _calls(module: nn.Module) -> list[Call]:
    """What the module does, call by call."""
    make = _KINDS.get(type(module))
    if _is_hooked(module):
        return [module]
    if make is not None:
        return make(module)
    return [module.forward] if type(module).__module__.startswith(OWN) else [module]


def _is_hooked(module: nn.Module) -> bool:
    """True if more happens in a call than `forward` of its class."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or module._compiled_call_impl is not None


# ---- the kinds of modules that hosts and seeds are made of


def _sequential(module: nn.Sequential) -> list[Call]:
    return [call for part in module for call in _calls(part)]


def _residual(module: Residual) -> list[Call]:
    return [*_calls(module.body), module.scaled]


def _linear(module: nn.Linear) -> list[Call]:
    weight, bias = module.weight, module.bias
    return [lambda x: F.linear(x, weight, bias)]


def _conv2d(module: nn.Conv2d) -> list[Call]:
    if module.padding_mode != "zeros":
        return [module]
    options: Any = (module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)
    return [lambda x: F.conv2d(x, *options)]


def _batch_norm(module: nn.BatchNorm2d) -> list[Call]:
    mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or var is None or count is None or module.momentum is None:
        return [module]
    options = (mean, var, module.weight, module.bias, module.training, module.momentum, module.eps)
    if not module.training:
        return [lambda x: F.batch_norm(x, *options)]

    def train(x: Tensor) -> Tensor:
        count.add_(1)
        return F.batch_norm(x, *options)

    return [train]


def _group_norm(module: nn.GroupNorm) -> list[Call]:
    options = (module.num_groups, module.weight, module.bias, module.eps)
    return [lambda x: F.group_norm(x, *options)]


def _layer_norm(module: nn.LayerNorm) -> list[Call]:
    options = (module.normalized_shape, module.weight, module.bias, module.eps)
    return [lambda x: F.layer_norm(x, *options)]


def _relu(module: nn.ReLU) -> list[Call]:
    return [module] if module.inplace else [torch.relu]


def _gelu(module: nn.GELU) -> list[Call]:
    return [partial(F.gelu, approximate=module.approximate)]


def _max_pool2d(module: nn.MaxPool2d) -> list[Call]:
    if module.return_indices:
        return [module]
    options = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    return [lambda x: torch.max_pool2d(x, *options)]


_KINDS: dict[type[nn.Module], Callable[[Any], list[Call]]] = {
    nn.Sequential: _sequential,
    Residual: _residual,
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.ReLU: _relu,
    nn.GELU: _gelu,
    nn.MaxPool2d: _max_pool2d,
}
