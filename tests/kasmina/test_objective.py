"""The objective of a training seed: bounded, scale-free, falling, and an honest forecast of what blending brings."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.kasmina import get_blueprint
from esper.kasmina.objective import SeedMeter, attach, rms
from esper.kasmina.slot import GateNetwork, delta
from esper.leyline import DEFAULT_LIFECYCLE, OPERATORS, OptimSpec, SeedStage
from tests.growing import (
    ADAMW,
    LENIENT,
    SGD,
    Run,
    bits,
    blind_host,
    draw,
    germinate,
    module_bits,
    start,
    step,
    striped_batches,
)
from tests.kasmina.test_blueprints import slot_of

BLEND_OF = {"add": "linear", "gate": "gated", "multiply": "multiply"}


def blind_run(optim: OptimSpec, blend: str = "linear") -> Run:
    """A host that sees no neighbours, on images of which only neighbours tell the class, and a seed that sees them."""
    run = start("cnn", optim, LENIENT, host=blind_host(), batches=striped_batches())
    run.validation = run.batches[:1]
    germinate(run, "r0c0", "cnn.conv", blend)
    return run


def residual_ratio(run: Run) -> float:
    ratio = run.model.reports()[0].residual_ratio
    assert ratio is not None
    return ratio


# ---- bounded


@pytest.mark.parametrize("optim", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_a_seed_stays_small_however_long_it_trains(optim: OptimSpec) -> None:
    run = blind_run(optim)
    for _ in range(49):
        step(run)
    assert run.model.slot("r0c0").stage is SeedStage.TRAINING
    assert run.model.slot("r0c0").age_epochs == 50
    assert 0.0 < residual_ratio(run) <= 2 * DEFAULT_LIFECYCLE.rho


@pytest.mark.parametrize("optim", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_without_the_penalty_it_would_not(optim: OptimSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = SeedMeter.learn

    def follow(self: SeedMeter, h_rms: Tensor, d: Tensor, g: Tensor, rows: int) -> Tensor:
        learn(self, h_rms, d, g, rows)
        return g

    monkeypatch.setattr(SeedMeter, "learn", follow)
    run = blind_run(optim)
    for _ in range(49):
        step(run)
        if not residual_ratio(run) <= 2 * DEFAULT_LIFECYCLE.rho:
            return
    pytest.fail(f"an unbounded objective left the seed at {residual_ratio(run)}")


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_objective_falls_over_twenty_epochs(operator: str) -> None:
    run = blind_run(ADAMW, BLEND_OF[operator])
    gains = []
    for _ in range(20):
        step(run)
        gains.append(run.model.reports()[0].predicted_gain)
    assert all(gain is not None and math.isfinite(gain) for gain in gains)
    assert gains[-1] > gains[0]
    assert gains[-1] > 1e-3


# ---- the forecast


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("curvature", [0.5, 4.0])
def test_the_forecast_bounds_what_blending_brings_on_a_quadratic_loss(operator: str, curvature: float) -> None:
    generator = draw(21)
    h = torch.randn(32, 8, generator=generator).requires_grad_()
    target = h.detach() * torch.linspace(0.3, 1.7, 8) + 0.3 * torch.randn(32, 8, generator=generator)
    blueprint = get_blueprint("mlp.mlp")
    seed = blueprint.build(slot_of(blueprint, 8, 1), generator)
    gate = GateNetwork(8, "mlp", generator) if operator == "gate" else None
    meter = SeedMeter(rho=0.3, eta_decay=0.9)
    trained = [*seed.parameters(), *(gate.parameters() if gate is not None else ())]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)

    def loss_at(features: Tensor) -> Tensor:
        return 0.5 * curvature * (features - target).square().sum(dim=1).mean()

    gains = []
    for _ in range(80):
        meter.eta = torch.tensor(1.0 / curvature)
        optimizer.zero_grad()
        d = delta(operator, h.detach(), seed(h.detach()), gate)
        loss_at(attach(h, d, meter, 32)).backward()
        gain, _ = meter.finish_epoch()
        assert gain is not None
        with torch.no_grad():
            for alpha in (0.1, 0.5, 1.0):
                change = (loss_at(h + alpha * d) - loss_at(h)).item()
                assert change <= -alpha * gain + 1e-5
        optimizer.step()
        gains.append(gain)
    assert gains[-1] > 0.05 * curvature


def test_the_meter_books_the_documented_quantities() -> None:
    h = torch.randn(10, 6, generator=draw(1)).requires_grad_()
    d = torch.randn(10, 6, generator=draw(2)).requires_grad_()
    g = torch.randn(10, 6, generator=draw(3))
    meter = SeedMeter(rho=0.3, eta_decay=0.75)
    (attach(h, d, meter, 10) * g).sum().backward()
    first = 0.3 * rms(h.detach()) / (10 * rms(g))
    assert meter.eta is not None
    assert meter.eta.item() == pytest.approx(first.item(), rel=1e-6)
    assert d.grad is None
    assert meter.finish_epoch() == (None, None)

    h.grad = None
    (attach(h, d, meter, 10) * 2 * g).sum().backward()
    assert h.grad is not None
    assert d.grad is not None
    assert bits(h.grad) == bits(2 * g)
    assert torch.allclose(d.grad, 2 * g + d / (first * 10), rtol=1e-6)
    gain, ratio = meter.finish_epoch()
    expected = (2 * g * d).sum() + d.square().sum() / (2 * first * 10)
    assert gain == pytest.approx(-expected.item(), rel=1e-5)
    assert ratio == pytest.approx((rms(d) / rms(h)).item(), rel=1e-6)
    assert meter.eta.item() == pytest.approx((0.75 * first + 0.25 * first / 2).item(), rel=1e-6)


def test_the_gradient_of_the_objective_is_that_of_its_formula() -> None:
    h, g = torch.randn(10, 6, generator=draw(1)).requires_grad_(), torch.randn(10, 6, generator=draw(3))
    d = torch.randn(10, 6, generator=draw(2), dtype=torch.float64).requires_grad_()
    ((g * d).sum() + d.square().sum() / (2 * 0.25 * 10)).backward()
    meter = SeedMeter(rho=0.3, eta_decay=0.75)
    meter.eta = torch.tensor(0.25)
    towards = meter.learn(rms(h.detach()), d.detach(), g, 10)
    assert towards.dtype is torch.float32
    assert torch.allclose(towards.double(), d.grad, rtol=1e-6)  # type: ignore[arg-type]


def test_an_epoch_reports_the_mean_of_its_second_half() -> None:
    """Of five batches the last three count, whatever the first two were; eta does not move here."""
    meter = SeedMeter(rho=0.3, eta_decay=1.0)
    meter.eta = torch.tensor(0.25)
    losses, ratios = [], []
    for batch in range(5):
        h, d, g = (torch.randn(4, 3, generator=draw(3 * batch + i)) for i in range(3))
        meter.learn(rms(h), d, g, 4)
        losses.append(((g * d).sum() + d.square().sum() / (2 * 0.25 * 4)).item())
        ratios.append((rms(d) / rms(h)).item())
    gain, ratio = meter.finish_epoch()
    assert gain == pytest.approx(-sum(losses[2:]) / 3, rel=1e-5)
    assert ratio == pytest.approx(sum(ratios[2:]) / 3, rel=1e-5)
    assert meter.finish_epoch() == (None, None)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
@settings(derandomize=True, deadline=None, max_examples=20)
def test_the_size_of_the_best_step_does_not_depend_on_the_scale_of_loss_or_features(
    loss_scale: float, feature_scale: float
) -> None:
    """The minimiser is d = -eta * rows * g, so its size relative to the features must be rho whatever the scales."""
    h = feature_scale * torch.randn(16, 4, generator=draw(5)).requires_grad_()
    g = loss_scale * torch.randn(16, 4, generator=draw(6))
    meter = SeedMeter(rho=0.3, eta_decay=0.9)
    (attach(h, torch.zeros(16, 4).requires_grad_(), meter, 16) * g).sum().backward()
    assert meter.eta is not None
    best = -meter.eta * 16 * g
    assert (rms(best) / rms(h.detach())).item() == pytest.approx(0.3, rel=1e-4)


def test_the_loss_scale_of_mixed_precision_cancels_out() -> None:
    results = []
    for scale in (1.0, 1024.0):
        h = torch.randn(16, 4, generator=draw(5)).requires_grad_()
        d = 0.1 * torch.randn(16, 4, generator=draw(6))
        d.requires_grad_()
        g = torch.randn(16, 4, generator=draw(7))
        meter = SeedMeter(rho=0.3, eta_decay=0.9)
        meter.loss_scale = scale
        for _ in range(2):
            (scale * (attach(h, d, meter, 16) * g).sum()).backward()
        assert meter.eta is not None
        results.append((meter.eta.item(), *meter.finish_epoch()))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_half_precision_features_are_metered_in_full_precision() -> None:
    h = torch.randn(64, 64, generator=draw(1)).bfloat16().requires_grad_()
    d = (0.1 * torch.randn(64, 64, generator=draw(2))).bfloat16().requires_grad_()
    g = torch.randn(64, 64, generator=draw(3)).bfloat16()
    meter = SeedMeter(rho=0.3, eta_decay=0.9)
    meter.eta = torch.tensor(0.5)
    attach(h, d, meter, 64).backward(g)
    gain, _ = meter.finish_epoch()
    exact = (g.double() * d.detach().double()).sum() + d.detach().double().square().sum() / 64
    assert gain == pytest.approx(-exact.item(), abs=1e-5)


# ---- what cannot be measured


def test_a_scaled_half_precision_gradient_does_not_vanish() -> None:
    g = torch.full((8, 8), 2e-4).half()
    meter = SeedMeter(rho=0.3, eta_decay=0.9)
    meter.loss_scale = 65536.0
    attach(torch.ones(8, 8).half().requires_grad_(), torch.zeros(8, 8).half().requires_grad_(), meter, 8).backward(g)
    assert meter.eta is not None
    assert meter.eta.item() == pytest.approx(0.3 / (8 * 2e-4 / 65536), rel=1e-2)


def test_features_or_gradients_of_zero_leave_the_seed_listening() -> None:
    for h, g in ((torch.zeros(4, 3), torch.ones(4, 3)), (torch.ones(4, 3), torch.zeros(4, 3))):
        meter = SeedMeter(rho=0.3, eta_decay=0.9)
        d = torch.zeros(4, 3).requires_grad_()
        for batch in range(2):
            out = attach(h.clone().requires_grad_(), d, meter, 4)
            assert meter.eta is None or meter.eta.isnan()
            out.backward(g)
            assert meter.eta_value() is None
            assert d.grad is None if batch == 0 else bool(d.grad.isnan().all()), "so that optimizers leave the seed out"
        assert meter.finish_epoch() == (None, None)
        attach(torch.ones(4, 3).requires_grad_(), d, meter, 4).backward(torch.ones(4, 3))
        assert meter.eta_value() == pytest.approx(0.3 / 4), "the first usable gradient sets it"


def test_a_listening_seed_learns_nothing_and_shows_no_gradients() -> None:
    run = start("mlp")
    with torch.no_grad():  # the first hidden layer is dead, so its features are zero
        run.model.host.get_parameter("segments.1.0.weight").zero_()
        run.model.host.get_parameter("segments.1.0.bias").fill_(-1.0)
    germinate(run, "r0c1")
    before = module_bits(run.model.slot("r0c1"))
    step(run)
    assert module_bits(run.model.slot("r0c1")) == before
    slot = run.model.report("r0c1")
    assert slot.stage is SeedStage.TRAINING
    assert (slot.gradients_finite, slot.live_fraction, slot.predicted_gain, slot.residual_ratio) == (None,) * 4
    assert run.model.slot("r0c1").facts()["eta"] is None


def test_what_is_read_by_others_is_what_the_meter_would_read() -> None:
    def trained() -> SeedMeter:
        meter = SeedMeter(rho=0.3, eta_decay=0.9)
        for batch in range(5):
            d = (0.1 * torch.randn(8, 4, generator=draw(batch))).requires_grad_()
            h = torch.randn(8, 4, generator=draw(10 + batch)).requires_grad_()
            attach(h, d, meter, 8).backward(torch.randn(8, 4, generator=draw(20 + batch)))
        return meter

    alone, together = trained(), trained()
    assert together.has_unread
    together.take(together.numbers().tolist())
    assert not together.has_unread
    assert together.eta_value() == alone.eta_value() is not None
    assert together.finish_epoch() == alone.finish_epoch()
    assert together.finish_epoch() == (None, None)


def test_one_useless_gradient_does_not_move_the_step_size() -> None:
    meter = SeedMeter(rho=0.3, eta_decay=0.9)
    meter.eta = torch.tensor(0.25)
    for g in (torch.zeros(4, 3), torch.full((4, 3), math.inf), torch.full((4, 3), math.nan)):
        h, d = torch.ones(4, 3).requires_grad_(), torch.ones(4, 3).requires_grad_()
        attach(h, d, meter, 4).backward(g)
        assert meter.eta.item() == 0.25
