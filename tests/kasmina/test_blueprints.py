"""Every row of the registry: born as an identity, alive by the second step, able to learn, and as costly as it says."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import BLUEPRINTS, Blueprint, blueprints_for, get_blueprint
from esper.kasmina.model import slot_topology
from esper.kasmina.slot import GateNetwork, delta, gate_params
from esper.leyline import MIXING, OPERATORS, SlotSpec, SpanSource
from tests.growing import TOPOLOGIES, bits, draw

GROWING = {key: row for key, row in BLUEPRINTS.items() if not row.control}
every_blueprint = pytest.mark.parametrize("blueprint", BLUEPRINTS.values(), ids=BLUEPRINTS)
every_growing_blueprint = pytest.mark.parametrize("blueprint", GROWING.values(), ids=GROWING)
sizes = given(st.integers(1, 64), st.integers(1, 8), st.booleans(), st.integers(0, 10**6))
few = settings(derandomize=True, deadline=None, max_examples=8)

DOCUMENTED = {
    "mlp.norm": lambda c: 3 * c,
    "mlp.lora": lambda c: 2 * c * max(2, c // 8) + c,
    "mlp.mlp_small": lambda c: 2 * c * max(4, c // 2) + max(4, c // 2) + c,
    "mlp.mlp": lambda c: 4 * c * c + 3 * c,
    "mlp.mlp_wide": lambda c: 8 * c * c + 5 * c,
    "mlp.glu": lambda c: 3 * c * c + 3 * c,
    "cnn.norm": lambda c: 3 * c,
    "cnn.se": lambda c: 2 * c * max(4, c // 4) + max(4, c // 4) + 2 * c,
    "cnn.pointwise": lambda c: c * c + 3 * c,
    "cnn.depthwise": lambda c: c * c + 12 * c,
    "cnn.dilated": lambda c: c * c + 12 * c,
    "cnn.bottleneck": lambda c: 2 * c * max(4, c // 4) + 9 * max(4, c // 4) ** 2 + 4 * max(4, c // 4) + c,
    "cnn.conv": lambda c: 9 * c * c + 3 * c,
    "cnn.conv_deep": lambda c: 18 * c * c + 5 * c,
    "transformer.norm": lambda c: 3 * c,
    "transformer.lora": lambda c: 19 * c,
    "transformer.lora_large": lambda c: 67 * c,
    "transformer.conv_causal": lambda c: 8 * c,
    "transformer.attention": lambda c: 4 * c * c + 3 * c,
    "transformer.mlp_small": lambda c: 4 * c * c + 5 * c,
    "transformer.mlp": lambda c: 8 * c * c + 7 * c,
}


def positions_of(topology: str, size: int) -> int:
    return {"mlp": 1, "cnn": size * size, "transformer": size}[topology]


def slot_of(blueprint: Blueprint, channels: int, size: int) -> SlotSpec:
    """A slot for the blueprint. Spans of images end in logits, or in images of half or the same size."""
    positions = positions_of(blueprint.topology, size)
    slot = SlotSpec(
        slot_id="r0c0",
        segment_idx=0,
        channels=channels,
        positions=positions,
        depth_share=0.5,
        mixing_before=None,
        mixing_after=None,
    )
    if not blueprint.span:
        return slot
    stride = 1 if blueprint.topology == "mlp" else (None, 1, 2)[channels % 3]
    source_positions = positions * (stride or 1) ** 2
    if blueprint.key.startswith("cnn.span_net"):  # to the logits, and what its last layer sees was pooled twice
        stride, source_positions = None, 16 * positions
    source = SpanSource(
        segment_idx=-1, depth_share=0.0, channels=1 + channels // 2, positions=source_positions, stride=stride
    )
    return replace(slot, source=source, positions=1 if stride is None else positions)


def shape_of(blueprint: Blueprint, channels: int, positions: int) -> tuple[int, ...]:
    side = math.isqrt(positions)
    return {"mlp": (6, channels), "cnn": (6, channels, side, side), "transformer": (6, positions, channels)}[
        blueprint.topology
    ]


def features(
    blueprint: Blueprint, slot: SlotSpec, rectified: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What a seed in the slot adds to, and what it reads."""
    shape = shape_of(blueprint, slot.channels, slot.positions)
    if slot.source is not None and slot.source.stride is None:
        shape = (6, slot.channels)
    x = torch.randn(shape, generator=generator)
    x = x.relu() if rectified else x
    if slot.source is None:
        return x, x
    read = torch.randn(shape_of(blueprint, slot.source.channels, slot.source.positions), generator=generator)
    return x, read.relu() if rectified else read


def target_topology(slot: SlotSpec, blueprint: Blueprint) -> str:
    return slot_topology(slot, blueprint.topology)


def fitting(blueprint: Blueprint, channels: int, size: int) -> bool:
    return blueprint.fits_in(slot_of(blueprint, channels, size))


def test_the_registry_starts_with_the_documented_rows_in_order() -> None:
    assert list(BLUEPRINTS)[: len(DOCUMENTED)] == list(DOCUMENTED)
    assert all(not BLUEPRINTS[key].control for key in DOCUMENTED)


@every_blueprint
def test_a_row_describes_itself(blueprint: Blueprint) -> None:
    assert blueprint.key.split(".")[0] == blueprint.topology
    assert blueprint.topology in TOPOLOGIES
    assert blueprint.mixing in MIXING


def test_controls_are_offered_only_on_request() -> None:
    offered = [key for topology in TOPOLOGIES for key in blueprints_for(topology)]
    assert sorted(offered) == sorted(GROWING)


def test_an_unknown_blueprint_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown blueprint 'cnn\.magic'\. Known: mlp\.norm, "):
        get_blueprint("cnn.magic")


@every_blueprint
@sizes
@few
def test_birth_is_an_exact_identity_at_the_stated_cost(
    blueprint: Blueprint, channels: int, size: int, rectified: bool, rng_seed: int
) -> None:
    assume(fitting(blueprint, channels, size))
    generator = draw(rng_seed)
    slot = slot_of(blueprint, channels, size)
    seed = blueprint.build(slot, generator).eval()
    x, read = features(blueprint, slot, rectified, generator)
    with torch.no_grad():
        for operator in OPERATORS:
            gate = GateNetwork(channels, target_topology(slot, blueprint), generator) if operator == "gate" else None
            d = delta(operator, x, seed(read), gate)
            assert d.shape == x.shape
            assert bits(x + d) == bits(x)
            if gate is not None:
                assert sum(p.numel() for p in gate.parameters()) == gate_params(channels)
    assert sum(p.numel() for p in seed.parameters()) == blueprint.params_in(slot)
    if blueprint.key in DOCUMENTED:
        assert blueprint.params_in(slot) == DOCUMENTED[blueprint.key](channels)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # fused attention is not counted on CPU
        seed(read)
    macs = blueprint.macs_in(slot)
    assert counter.get_total_flops() == 2 * macs * len(x)


@every_growing_blueprint
@pytest.mark.parametrize("operator", OPERATORS)
@sizes
@few
def test_every_tensor_is_alive_by_the_second_step(
    blueprint: Blueprint, operator: str, channels: int, size: int, rectified: bool, rng_seed: int
) -> None:
    assume(fitting(blueprint, channels, size))
    generator = draw(rng_seed)
    slot = slot_of(blueprint, channels, size)
    seed = blueprint.build(slot, generator)
    gate = GateNetwork(channels, target_topology(slot, blueprint), generator) if operator == "gate" else None
    x, read = features(blueprint, slot, rectified, generator)
    target = torch.randn(x.shape, generator=generator)
    parameters = [*seed.parameters(), *(gate.parameters() if gate is not None else ())]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (x + delta(operator, x, seed(read), gate) - target).square().mean().backward()
        optimizer.step()
    dead = [i for i, p in enumerate(parameters) if p.grad is None or not p.grad.norm() > 1e-12]
    assert not dead


@every_growing_blueprint
@sizes
@settings(derandomize=True, deadline=None, max_examples=4)
def test_a_seed_learns_when_trained_alone(
    blueprint: Blueprint, channels: int, size: int, rectified: bool, rng_seed: int
) -> None:
    assume(fitting(blueprint, channels, size))
    generator = draw(rng_seed)
    slot = slot_of(blueprint, channels, size)
    seed = blueprint.build(slot, generator)
    x, read = features(blueprint, slot, rectified, generator)
    target = torch.randn(x.shape, generator=generator)
    optimizer = torch.optim.AdamW(seed.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (x + seed(read) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.999 * losses[0]


def test_a_step_of_gamma_counts_for_several() -> None:
    """Fifty steps of a hundredth are half a unit of gamma, and five times the weight of a plain layer."""
    blueprint = get_blueprint("mlp.mlp")
    seed = blueprint.build(slot_of(blueprint, 4, 1), draw(1))
    optimizer, x = torch.optim.AdamW([seed.gamma], lr=0.01, weight_decay=0.0), torch.ones(2, 4)
    for _ in range(50):
        optimizer.zero_grad()
        (-(seed(x) / seed.body(x).detach()).sum()).backward()
        optimizer.step()
    assert torch.allclose(seed(x), 5 * seed.body(x), rtol=1e-3)


@every_blueprint
def test_the_same_generator_gives_the_same_seed_and_no_global_draw(blueprint: Blueprint) -> None:
    before = torch.get_rng_state()
    first, second, other = (blueprint.build(slot_of(blueprint, 8, 4), draw(rng_seed)) for rng_seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    values = [b"".join(bits(p) for p in seed.parameters()) for seed in (first, second, other)]
    assert values[0] == values[1]
    assert (values[0] != values[2]) == (blueprint.key.split(".")[1] != "norm")


@every_blueprint
def test_no_norm_sees_fewer_than_four_values_of_a_row(blueprint: Blueprint) -> None:
    for channels, size in itertools.product(range(1, 9), (1, 2, 3, 4)):
        if blueprint.key == "transformer.attention" and channels % 4:
            assert not fitting(blueprint, channels, size)
            continue
        enough = True
        slot = slot_of(blueprint, channels, size)
        positions = slot.positions if slot.source is None else slot.source.positions
        if blueprint.key in ("cnn.conv_down", "cnn.span_deep"):
            positions //= 4
        if blueprint.key.startswith("cnn.span_net"):
            positions //= 16
        for part in blueprint.build(slot, draw(0)).modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                enough &= positions >= 4
            if isinstance(part, torch.nn.GroupNorm):
                enough &= part.num_channels // part.num_groups * size * size >= 4
            if isinstance(part, torch.nn.LayerNorm):
                enough &= part.normalized_shape[0] >= 4
        assert fitting(blueprint, channels, size) == enough


# ---- controls

CONTROLS = {key: row for key, row in BLUEPRINTS.items() if row.control}


@pytest.mark.parametrize("blueprint", CONTROLS.values(), ids=CONTROLS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_control_receives_gradient_changes_nothing_and_hides_from_the_host(
    blueprint: Blueprint, operator: str
) -> None:
    generator = draw(3)
    slot = slot_of(blueprint, 8, 4)
    seed = blueprint.build(slot, generator)
    gate = GateNetwork(8, blueprint.topology, generator) if operator == "gate" else None
    x = features(blueprint, slot, False, generator)[0].requires_grad_()
    target = torch.randn(x.shape, generator=generator)
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    before = b"".join(bits(p) for p in seed.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        x.grad = None
        out = x + delta(operator, x, seed(x), gate)
        assert bits(out) == bits(x)
        (out - target).square().mean().backward()
        optimizer.step()
    plain = x.detach().clone().requires_grad_()
    (plain - target).square().mean().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert bits(x.grad) == bits(plain.grad)
    assert all(p.grad is not None and p.grad.norm() > 1e-12 for p in seed.parameters())
    assert b"".join(bits(p) for p in seed.parameters()) != before
