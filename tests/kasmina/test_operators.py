"""Operators keep the features at weight 1, so layers before a slot keep their gradient, and never look ahead."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina import MorphogeneticModel, begin_epoch, blueprints_for
from esper.kasmina.slot import GateNetwork, delta
from esper.leyline import BLENDS, OPERATORS, Cause, SeedStage
from tests.growing import TOPOLOGIES, Run, bits, draw, loss_of, randomise_seed, start

BLEND_OF = {"add": "linear", "gate": "gated", "multiply": "multiply"}
few = settings(derandomize=True, deadline=None, max_examples=25)


def blended(topology: str, operator: str, alpha: float, blueprint: str | None = None, slot: int = 1) -> Run:
    """A run whose second slot holds a seed with arbitrary weights at a given alpha."""
    run = start(topology)
    slot_id = run.slot_ids[slot]
    key = {"mlp": "mlp.glu", "cnn": "cnn.conv", "transformer": "transformer.mlp_small"}[topology]
    run.model.germinate(slot_id, blueprint or key, BLEND_OF[operator], rng_seed=1)
    begin_epoch(run.model)
    place = run.model.slot(slot_id)
    place.transition(SeedStage.BLENDING, Cause.POLICY)
    place.alpha = alpha
    randomise_seed(run, slot_id)
    return run


def features_of(model: MorphogeneticModel) -> torch.Tensor:
    slot = model.all_slots()[1]
    shape = {"mlp": (4, 8), "cnn": (4, 8, 3, 3), "transformer": (4, 6, 8)}[slot.topology]
    return torch.randn(shape, generator=draw(8))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_alpha_scales_what_is_added_to_the_features(topology: str, operator: str) -> None:
    run = blended(topology, operator, 0.0)
    slot, h = run.model.all_slots()[1], features_of(run.model)
    with torch.no_grad():
        d = slot.delta(h)
        assert d.abs().max() > 1e-3
        assert torch.equal(slot(h), h)
        slot.alpha = 0.3
        assert torch.equal(slot(h), h + 0.3 * d)
        slot.alpha = 1.0
        assert torch.equal(slot(h), h + d)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_layers_before_a_blended_seed_keep_their_gradient(topology: str, operator: str, alpha: float) -> None:
    run = blended(topology, operator, alpha)
    x, y = run.batches[0]
    run.model.train()
    loss_of(run.model(x), y).backward()
    before = [p for segment in run.model.host.segments[:1] for p in segment.parameters()]
    before = before or list(run.model.host.segments[1].parameters())
    assert all(p.grad is not None and p.grad.norm() > 1e-6 for p in before)
    seed = run.model.slot_parameters(run.slot_ids[1]).values()
    moved = [p.grad is not None and p.grad.norm().item() > 0 for p in seed]
    assert all(moved) if alpha > 0 else not any(moved)


@given(st.integers(1, 64), st.floats(-1e4, 1e4), st.integers(0, 1000))
@few
def test_multiply_scales_features_by_half_to_one_and_a_half(channels: int, scale: float, rng_seed: int) -> None:
    generator = draw(rng_seed)
    x = torch.randn(5, channels, generator=generator)
    residual = scale * torch.randn(5, channels, generator=generator)
    for alpha in (0.3, 1.0):
        factor = (x + alpha * delta("multiply", x, residual, None)) / x
        assert factor.min() >= 0.5 - 1e-5
        assert factor.max() <= 1.5 + 1e-5


@pytest.mark.parametrize(("topology", "shape"), [("mlp", (3, 1)), ("cnn", (3, 1, 1, 1)), ("transformer", (3, 5, 1))])
def test_a_gate_opens_per_row_or_per_token(topology: str, shape: tuple[int, ...]) -> None:
    x = torch.randn({"mlp": (3, 8), "cnn": (3, 8, 2, 2), "transformer": (3, 5, 8)}[topology], generator=draw(1))
    gate = GateNetwork(8, topology, draw(2))
    with torch.no_grad():
        opening = gate(x)
        assert opening.shape == shape
        assert 0.0 < opening.min() < opening.max() < 1.0
        if topology == "transformer":
            changed = x.clone()
            changed[:, 3:] += 1.0
            assert bits(gate(changed)[:, :3]) == bits(opening[:, :3])
        other = x.clone()
        other[1:] += 1.0
        assert bits(gate(other)[:1]) == bits(opening[:1])


def test_every_operator_is_used_by_a_blend() -> None:
    assert {blend.operator for blend in BLENDS.values()} == set(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("blueprint", blueprints_for("transformer"))
def test_no_seed_looks_ahead_in_time(blueprint: str, operator: str) -> None:
    run = blended("transformer", operator, 0.7, blueprint)
    run.model.eval()
    x = run.batches[0][0]
    with torch.no_grad():
        out = run.model(x)
        for time in range(1, x.shape[1]):
            changed = x.clone()
            changed[:, time:] = (changed[:, time:] + 5) % 11
            other = run.model(changed)
            assert bits(other[:, :time]) == bits(out[:, :time])
            assert bits(other[:, time:]) != bits(out[:, time:])
