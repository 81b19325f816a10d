"""Hosts: the fold over segments, slots in execution order, exact sizes, and clear answers to wrong input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from esper.kasmina import (
    BLUEPRINTS,
    CNNHost,
    Host,
    HostSpec,
    MLPHost,
    MorphogeneticModel,
    TransformerHost,
    build_host,
    resolve_target_slot,
)
from esper.kasmina.layers import evaluating, generator_for, group_norm, norm_groups, seeded
from esper.leyline import SlotConfig
from tests.growing import TOPOLOGIES, bits, draw, loss_of, make_batches, module_bits, start, tiny_host

PYDOC = {"vocab": 256, "dim": 32, "heads": 4, "layers": 2, "ff": 2, "context": 64}


def cnn_spec(
    channels: list[int], kernel: int | list[int] = 3, in_channels: int = 1, pool: list[bool] | None = None
) -> HostSpec:
    kwargs = {
        "in_channels": in_channels,
        "channels": channels,
        "kernel": kernel,
        "pool": [False] * len(channels) if pool is None else pool,
        "classes": 10,
    }
    return HostSpec(kind="cnn", kwargs=kwargs)


# ---- structure


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_fold_over_segments_is_the_forward_pass(topology: str) -> None:
    host, x = tiny_host(topology).eval(), make_batches(topology)[0][0]
    model = MorphogeneticModel(host, x).eval()
    with torch.no_grad():
        folded = x
        for segment in host.segments:
            folded = segment(folded)
        assert bits(folded) == bits(host(x))
        assert bits(folded) == bits(model(x))


def test_execution_order_is_the_order_of_actions() -> None:
    pool = [column in (9, 10) for column in range(12)]
    host = build_host(cnn_spec([2] * 12, kernel=1, pool=pool), draw(0))
    model = MorphogeneticModel(host, torch.rand(2, 1, 4, 4, generator=draw(1)))
    ids = model.layout.slot_ids
    assert ids == (*(f"r0c{i}" for i in range(10)), "r1c9", "r0c10", "r1c10", "r0c11")
    segments = [model.slot(slot_id).spec.segment_idx for slot_id in ids]
    assert segments == sorted(segments)
    assert [report.slot_id for report in model.reports()] == list(ids)
    for index, slot_id in enumerate(ids):
        assert resolve_target_slot(index, enabled_slots=ids, slot_config=SlotConfig(slot_ids=ids)) == (slot_id, index)


def test_target_slots_are_resolved_among_the_enabled_ones() -> None:
    config = SlotConfig(slot_ids=start("mlp").model.layout.slot_ids)
    assert resolve_target_slot(2, enabled_slots=["r0c0", "r0c2"], slot_config=config) == ("r0c2", 1)
    with pytest.raises(ValueError, match=r"r0c1 \(index 1\) is not enabled. Enabled: r0c0"):
        resolve_target_slot(1, enabled_slots=["r0c0"], slot_config=config)
    for outside in (-1, 3):
        with pytest.raises(ValueError, match=r"outside 0\.\.2 \(r0c0, r0c1, r0c2\)"):
            resolve_target_slot(outside, enabled_slots=config.slot_ids, slot_config=config)


@pytest.mark.parametrize(
    ("spec", "params", "slots"),
    [
        (
            HostSpec(kind="mlp", kwargs={"inputs": 64, "hidden": [16], "classes": 10, "input_slot": True}),
            1210,
            ["r0c0", "r0c1"],
        ),
        (cnn_spec([8, 8], kernel=1, pool=[True, False]), 194, ["r0c0", "r1c0", "r0c1"]),
        (cnn_spec([4, 8], pool=[True, False]), 438, ["r0c0", "r1c0", "r0c1"]),
        (cnn_spec([8, 16, 32]), 6274, ["r0c0", "r0c1", "r0c2"]),
        (cnn_spec([4, 8], kernel=[1, 3]), 406, ["r0c0", "r0c1"]),
        (HostSpec(kind="transformer", kwargs=PYDOC), 27392, ["r0c0", "r0c1"]),
    ],
    ids=["digits_mlp", "digits_blind", "digits_conv", "fashion_tiny", "mixed_kernels", "pydoc_lm"],
)
def test_hosts_of_the_task_table_have_their_sizes_and_slots(spec: HostSpec, params: int, slots: list[str]) -> None:
    host = build_host(spec, draw(0))
    assert sum(p.numel() for p in host.parameters()) == params
    assert list(host.slots) == slots
    assert host.spec == spec


def test_kernels_are_one_for_all_blocks_or_one_for_each() -> None:
    with pytest.raises(ValueError, match="2 blocks, 3 sizes"):
        build_host(cnn_spec([4, 8], kernel=[1, 3, 3]), draw(0))
    with pytest.raises(ValueError, match=r"kernel must be odd, got \[1, 2\]"):
        build_host(cnn_spec([4, 8], kernel=[1, 2]), draw(0))


@pytest.mark.parametrize(
    ("spec", "before", "after"),
    [
        (cnn_spec([4, 4, 4], kernel=1), ["none"] * 3, ["none"] * 3),
        (cnn_spec([4, 4, 4], kernel=3), ["local"] * 3, ["local", "local", "none"]),
        (cnn_spec([4, 4, 4], kernel=[1, 3, 1]), ["none", "local", "local"], ["local", "none", "none"]),
        (HostSpec(kind="transformer", kwargs=PYDOC), ["global"] * 2, ["global", "none"]),
    ],
    ids=["blind", "sighted", "mixed", "transformer"],
)
def test_slots_say_whether_the_host_mixes_positions_before_and_after_them(
    spec: HostSpec, before: list[str], after: list[str]
) -> None:
    sample = torch.zeros(2, 64, dtype=torch.long) if spec.kind == "transformer" else torch.zeros(2, 1, 8, 8)
    layout = MorphogeneticModel(build_host(spec, draw(0)), sample).layout
    assert [slot.mixing_before for slot in layout.slots] == before
    assert [slot.mixing_after for slot in layout.slots] == after


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_weights_come_from_the_generator_alone(topology: str) -> None:
    before = torch.get_rng_state()
    first, second, other = tiny_host(topology, 1), tiny_host(topology, 1), tiny_host(topology, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert module_bits(first) == module_bits(second)
    assert module_bits(first) != module_bits(other)


def test_a_host_is_rebuilt_from_its_description() -> None:
    for topology in TOPOLOGIES:
        host = tiny_host(topology)
        again = build_host(host.spec, draw(1))
        assert module_bits(again) == module_bits(host)
        assert again.slots == host.slots


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (HostSpec(kind="rnn", kwargs={}), "unknown host kind 'rnn'. Known: mlp, cnn, transformer"),
        (HostSpec(kind="mlp", kwargs={"inputs": 3}), "host 'mlp'"),
        (cnn_spec([8, 8], pool=[True]), "2 blocks, 1 entries"),
        (cnn_spec([]), "pool needs one entry per block"),
        (cnn_spec([8], kernel=2), "kernel must be odd, got 2"),
        (HostSpec(kind="transformer", kwargs=PYDOC | {"heads": 5}), "dim=32, heads=5"),
    ],
)
def test_bad_descriptions_are_refused(spec: HostSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_host(spec, draw(0))


# ---- measured layout


def test_slot_shapes_and_host_costs_are_measured_exactly() -> None:
    mlp = start("mlp").model.layout
    assert [(s.channels, s.positions) for s in mlp.slots] == [(6, 1), (8, 1), (8, 1)]
    assert mlp.host_macs == 6 * 8 + 8 * 8 + 8 * 4
    cnn = start("cnn").model.layout
    assert [(s.channels, s.positions) for s in cnn.slots] == [(8, 36), (8, 9), (8, 9)]
    assert cnn.host_macs == 8 * 36 + 64 * 9 + 32
    assert [s.depth_share for s in cnn.slots] == [0.0, 1 / 3, 2 / 3]
    lm = start("transformer").model.layout
    assert [(s.channels, s.positions) for s in lm.slots] == [(8, 6)] * 3
    block = (4 * 64 + 2 * 8 * 6 + 2 * 2 * 64) * 6
    assert lm.host_macs == 3 * block + 8 * 11 * 6


def test_cards_cover_all_blueprints_and_fit_their_own_topology_only() -> None:
    layout = start("cnn", blueprints=["cnn.conv", "cnn.inert", "mlp.glu"]).model.layout
    assert layout.blueprints == tuple(BLUEPRINTS)
    for slot_id in layout.slot_ids:
        fitting = {key for key in BLUEPRINTS if layout.card(slot_id, key).fits}
        assert fitting == {"cnn.conv", "cnn.inert"}
    card = layout.card("r1c0", "cnn.conv")
    assert (card.params, card.macs, card.gate_params) == (600, 9 * 64 * 9, 8 * 4 + 2 * 4 + 1)
    assert card.params_ratio == 600 / layout.host_params
    assert card.macs_ratio == card.macs / layout.host_macs


def test_only_the_wanted_slots_are_offered_in_execution_order() -> None:
    x = make_batches("cnn")[0][0]
    model = MorphogeneticModel(tiny_host("cnn"), x, slots=["r0c1", "r0c0"])
    assert model.layout.slot_ids == ("r0c0", "r0c1")
    with pytest.raises(ValueError, match=r"unknown slots \['r5c5'\]. The host has: r0c0, r1c0, r2c0, r0c1"):
        MorphogeneticModel(tiny_host("cnn"), x, slots=["r5c5"])


def test_a_sample_of_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="two rows, got 1"):
        MorphogeneticModel(tiny_host("mlp"), torch.zeros(1, 6))


# ---- the transformer


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    host = TransformerHost(**PYDOC, generator=draw(4))
    tokens = torch.randint(0, 256, (8, 65), generator=draw(5))
    with torch.no_grad():
        loss = loss_of(host(tokens[:, :-1]), tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(256), rel=0.01)


def test_tied_weights_are_counted_and_trained_once() -> None:
    run = start("transformer")
    names = list(run.model.host_parameters())
    assert sum(name.endswith("token") for name in names) == 1
    assert len(names) == len({id(p) for p in run.model.parameters()})
    assert run.model.param_counts().host == sum(p.numel() for p in run.model.host_parameters().values())


def test_later_tokens_do_not_change_earlier_outputs() -> None:
    host = tiny_host("transformer").eval()
    x = make_batches("transformer")[0][0]
    changed = x.clone()
    changed[:, 4:] = (changed[:, 4:] + 3) % 11
    with torch.no_grad():
        assert bits(host(x)[:, :4]) == bits(host(changed)[:, :4])
        assert bits(host(x)[:, 4:]) != bits(host(changed)[:, 4:])


# ---- wrong input


@pytest.mark.parametrize(
    ("topology", "x", "message"),
    [
        ("mlp", torch.zeros(3, 7), r"expected 6 features per row, got 7"),
        ("mlp", torch.zeros(6), r"expected rows of 6 features, got \(6,\)"),
        ("cnn", torch.zeros(3, 2, 6, 6), r"expected images \[rows, 1, height, width\], got \(3, 2, 6, 6\)"),
        ("cnn", torch.zeros(3, 6, 6), r"expected images"),
        ("transformer", torch.zeros(3, 6), r"expected integer tokens \[rows, time\], got torch.float32"),
        ("transformer", torch.zeros(3, dtype=torch.long), r"expected integer tokens"),
        ("transformer", torch.zeros(3, 7, dtype=torch.long), r"7 tokens do not fit the context of 6"),
        ("transformer", torch.full((3, 6), 11), r"tokens must be in 0\.\.10, got 11\.\.11"),
        ("transformer", torch.full((3, 6), -1), r"tokens must be in 0\.\.10, got -1\.\.-1"),
    ],
)
def test_wrong_input_is_named_at_the_host(topology: str, x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_host(topology)(x)


@pytest.mark.parametrize(("topology", "shape"), [("mlp", (3, 6)), ("cnn", (3, 1, 6, 6))])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_a_wrong_type_names_both_types(topology: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)(byte|unsigned char|double).*float"):
        tiny_host(topology)(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"r0c0": 2}, r"slots after segments 0\.\.1"),
        ({"r0c0": -1}, r"slots after segments 0\.\.1"),
        ({"r0c0": 1, "r1c0": 1}, "r0c0 and r1c0 both follow segment 1"),
        ({"left": 0}, "malformed slot id 'left'"),
    ],
)
def test_bad_slots_are_refused(slots: dict[str, int], message: str) -> None:
    layers: list[nn.Module] = [nn.Identity(), nn.Identity(), nn.Identity()]
    with pytest.raises(ValueError, match=message):
        Host("mlp", layers, slots, HostSpec(kind="user", kwargs={}))
    with pytest.raises(ValueError, match=r"unknown topology 'graph'\. Known: mlp, cnn, transformer"):
        Host("graph", layers, {}, HostSpec(kind="user", kwargs={}))


# ---- layers


def test_evaluating_gives_every_part_its_own_mode_back() -> None:
    host = tiny_host("cnn").train()
    frozen = host.segments[0]
    frozen.eval()
    with evaluating(host):
        assert not any(part.training for part in host.modules())
        assert not torch.is_grad_enabled()
    assert not any(part.training for part in frozen.modules())
    assert host.training
    assert host.segments[2].training


def test_seeded_blocks_draw_alike_and_leave_the_global_state() -> None:
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded(11):
            draws.append(torch.rand(3))
    with pytest.raises(ValueError, match="expected 6 features"), seeded(12):
        tiny_host("mlp")(torch.rand(2, 9))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(before, torch.get_rng_state())


def test_norm_groups_divide_the_channels() -> None:
    for channels in range(1, 130):
        assert channels % norm_groups(channels) == 0
        assert 1 <= norm_groups(channels) <= max(1, channels // 8)
    assert (norm_groups(8), norm_groups(16), norm_groups(20), norm_groups(64)) == (1, 2, 2, 8)
    assert group_norm(16).num_groups == 2


def test_layers_start_like_torch_starts_them() -> None:
    wide = MLPHost(inputs=400, hidden=[300], classes=4, input_slot=False, generator=generator_for(1))
    layer = wide.segments[1][0]
    bound = 1 / math.sqrt(400)
    assert layer.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    conv = CNNHost(
        in_channels=16, channels=[64], kernel=3, pool=[False], classes=2, generator=generator_for(1)
    ).segments[0][1]
    assert conv.bias is None
    assert conv.weight.abs().max().item() == pytest.approx(1 / math.sqrt(16 * 9), rel=0.01)
