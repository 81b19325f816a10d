"""Measures a host once, on a sample: the shape of its slots and what each blueprint would cost there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blueprints import BLUEPRINTS
from esper.kasmina.hosts import CHANNEL_AXIS, Host, TransformerBlock
from esper.kasmina.layers import evaluating
from esper.kasmina.slot import gate_params
from esper.leyline import MIXING, BlueprintCard, HostLayout, SlotSpec

MIXED = "mixed"
"""Topology of a network whose slots are of several."""


def slot_specs(host: Host, sample: Tensor, wanted: Iterable[str]) -> tuple[SlotSpec, ...]:
    """Measures the wanted slots with one pass; the result is in execution order."""
    names = list(wanted)
    unknown = [name for name in names if name not in host.slots]
    if unknown:
        raise ValueError(f"unknown slots {unknown}. The host has: {', '.join(host.slots)}")
    at = {index: slot_id for slot_id, index in host.slots.items() if slot_id in names}
    specs = []
    with evaluating(host):
        x = sample
        for index, segment in enumerate(host.segments):
            x = segment(x)
            if index in at:
                channels = x.shape[CHANNEL_AXIS[host.topology]]
                before, after = host.segments[: index + 1], host.segments[index + 1 :]
                specs.append(
                    SlotSpec(
                        slot_id=at[index],
                        segment_idx=index,
                        channels=channels,
                        positions=x[0].numel() // channels,
                        depth_share=index / (len(host.segments) - 1),
                        mixing_before=strongest_mixing(mixing_of(part) for part in before.modules()),
                        mixing_after=strongest_mixing(mixing_of(part) for part in after.modules()),
                    )
                )
    return tuple(specs)


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
    params, macs = blueprint.params(spec.channels), blueprint.macs(spec.channels, spec.positions)
    return BlueprintCard(
        blueprint=key,
        params=params,
        params_ratio=params / max(1, host_params),
        macs=macs,
        macs_ratio=macs / max(1, host_macs),
        mixing=blueprint.mixing,
        nonlinear=blueprint.nonlinear,
        gate_params=gate_params(spec.channels),
        fits=key in offered and blueprint.topology == topology and blueprint.fits(spec),
    )
