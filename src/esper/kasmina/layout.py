"""Measures a host once, on a sample: the shape of its slots and what each blueprint would cost there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blueprints import BLUEPRINTS
from esper.kasmina.hosts import CHANNEL_AXIS, INPUT, Host, TransformerBlock
from esper.kasmina.layers import evaluating
from esper.kasmina.slot import gate_params
from esper.leyline import MIXING, BlueprintCard, HostLayout, SlotSpec, SpanSource

MIXED = "mixed"
"""Topology of a network whose slots are of several."""


def slot_specs(host: Host, sample: Tensor, wanted: Iterable[str]) -> tuple[SlotSpec, ...]:
    """Measures the wanted slots with one pass; the result is in execution order."""
    names = list(wanted)
    unknown = [name for name in names if name not in host.places]
    if unknown:
        raise ValueError(f"unknown slots {unknown}. The host has: {', '.join(host.places)}")
    shapes = {INPUT: sample.shape[1:]}
    with evaluating(host):
        x = sample
        for index, segment in enumerate(host.segments):
            x = segment(x)
            shapes[index] = x.shape[1:]
    return tuple(_spec(host, slot_id, shapes) for slot_id in host.places if slot_id in names)


def _spec(host: Host, slot_id: str, shapes: Mapping[int, Sequence[int]]) -> SlotSpec:
    source, target = host.places[slot_id]
    channels, positions = _size(shapes[target], host.topology)
    before, after = host.segments[: target + 1], host.segments[target + 1 :]
    span = None
    if slot_id in host.spans:
        channels_read, positions_read = _size(shapes[source], host.topology)
        span = SpanSource(
            segment_idx=source,
            depth_share=max(0, source) / (len(host.segments) - 1),
            channels=channels_read,
            positions=positions_read,
            stride=_stride(shapes[source], shapes[target]),
        )
    return SlotSpec(
        slot_id=slot_id,
        segment_idx=target,
        channels=channels,
        positions=positions,
        depth_share=target / (len(host.segments) - 1),
        mixing_before=strongest_mixing(mixing_of(part) for part in before.modules()),
        mixing_after=strongest_mixing(mixing_of(part) for part in after.modules()),
        source=span,
    )


def _size(shape: Sequence[int], topology: str) -> tuple[int, int]:
    """(channels, positions) of features; `shape` is without rows."""
    channels = shape[-1 if len(shape) == 1 else CHANNEL_AXIS[topology] % (len(shape) + 1) - 1]
    return channels, math.prod(shape) // channels


def _stride(source: Sequence[int], target: Sequence[int]) -> int | None:
    """How a span comes from the size of one image to that of another; see `SpanSource`."""
    if len(source) == len(target) == 1:
        return 1
    if len(target) == 1:
        return None
    stride = max(1, source[1] // target[1])
    divides = all(size // stride == out for size, out in zip(source[1:], target[1:], strict=True))
    return stride if divides else 0


def mixing_of(layer: nn.Module) -> str:
    """How a layer by itself lets one position see others. Pools do not count: they choose, they weigh nothing."""
    if "attention" in type(layer).__name__.lower() or isinstance(layer, (TransformerBlock, nn.RNNBase)):
        return "global"
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and max(layer.kernel_size) > 1:
        return "local"
    return "none"


def strongest_mixing(kinds: Iterable[str]) -> str:
    """The kind of MIXING that sees farthest; "none" for no layers."""
    return max(kinds, key=MIXING.index, default="none")


def host_layout(host: Host, sample: Tensor, specs: tuple[SlotSpec, ...], offered: Sequence[str]) -> HostLayout:
    """What controllers may know of a host: its size, its slots, and a card for every blueprint in every slot."""
    macs = count_macs(host, lambda: host(sample)) // sample.shape[0]
    params = sum(p.numel() for p in host.parameters())
    return make_layout(specs, [host.topology] * len(specs), offered, host_params=params, host_macs=macs)


def count_macs(network: nn.Module, run: Callable[[], object]) -> int:
    """Multiply-accumulates of one pass in eval mode, over all its rows."""
    counter = FlopCounterMode(display=False)
    # The counter misses fused attention on some devices; the plain kind it counts everywhere.
    with evaluating(network), sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter.get_total_flops() // 2


def make_layout(
    specs: Sequence[SlotSpec], kinds: Sequence[str], offered: Sequence[str], *, host_params: int, host_macs: int
) -> HostLayout:
    """The layout of a network whose slots are of these topologies, one for each; they need not be the same.

    Args:
        specs: The slots in execution order.
        kinds: Topology of each slot.
        offered: Blueprints that may be planted.
        host_params: Parameters of the network without seeds.
        host_macs: Multiply-accumulates of one row.
    """
    return HostLayout(
        topology=kinds[0] if len(set(kinds)) == 1 else MIXED,
        host_params=host_params,
        host_macs=host_macs,
        slots=tuple(specs),
        blueprints=tuple(BLUEPRINTS),
        cards=tuple(
            tuple(_card(key, spec, kind, host_params, host_macs, offered) for key in BLUEPRINTS)
            for spec, kind in zip(specs, kinds, strict=True)
        ),
    )


def _card(
    key: str, spec: SlotSpec, topology: str, host_params: int, host_macs: int, offered: Sequence[str]
) -> BlueprintCard:
    blueprint = BLUEPRINTS[key]
    # What a span would cost where there is none cannot be said.
    meets = blueprint.span == (spec.source is not None)
    params, macs = (blueprint.params_in(spec), blueprint.macs_in(spec)) if meets else (0, 0)
    return BlueprintCard(
        blueprint=key,
        params=params,
        params_ratio=params / max(1, host_params),
        macs=macs,
        macs_ratio=macs / max(1, host_macs),
        mixing=blueprint.mixing,
        nonlinear=blueprint.nonlinear,
        gate_params=gate_params(spec.channels),
        fits=key in offered and blueprint.topology == topology and blueprint.fits_in(spec),
    )
