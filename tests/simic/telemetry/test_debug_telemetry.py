"""A closer look at a model: true figures, one read, nothing changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from esper.leyline import THRESHOLDS, LayerGradientStats
from esper.simic.telemetry.debug_telemetry import check_numerical_stability, collect_per_layer_gradients, odd_ratios
from esper.simic.telemetry.emitters import aggregate_layer_gradient_health, compute_grad_norm_surrogate


def model_with(*gradients: list[float] | None) -> nn.Module:
    model = nn.Module()
    for index, values in enumerate(gradients):
        size = 3 if values is None else len(values)
        parameter = nn.Parameter(torch.arange(size, dtype=torch.float32))
        parameter.grad = None if values is None else torch.tensor(values)
        model.register_parameter(f"p{index}", parameter)
    return model


def test_figures_of_a_layer() -> None:
    (layer,) = collect_per_layer_gradients(model_with([0.0, 3.0, -4.0, 20.0]))
    assert (layer.name, layer.num_elements) == ("p0", 4)
    assert layer.norm == pytest.approx(math.sqrt(425.0))
    assert layer.mean == pytest.approx(4.75)
    assert layer.std == pytest.approx(torch.tensor([0.0, 3.0, -4.0, 20.0]).std(unbiased=False).item())
    assert (layer.max_abs, layer.zero_share, layer.large_share) == (20.0, 0.25, 0.25)
    assert (layer.num_nan, layer.num_inf) == (0, 0)


def test_what_is_not_finite_is_counted_and_does_not_spoil_the_rest() -> None:
    (layer,) = collect_per_layer_gradients(model_with([math.nan, math.inf, -math.inf, 3.0, 4.0]))
    assert (layer.num_nan, layer.num_inf, layer.norm, layer.max_abs) == (1, 2, 5.0, 4.0)
    assert layer.zero_share == 0.0, "what is no number is no zero"
    (lost,) = collect_per_layer_gradients(model_with([math.nan]))
    assert (lost.norm, lost.mean, lost.num_nan) == (0.0, 0.0, 1)


def test_layers_without_gradients_are_absent() -> None:
    assert collect_per_layer_gradients(model_with(None)) == []
    assert [layer.name for layer in collect_per_layer_gradients(model_with(None, [1.0]))] == ["p1"]


def test_the_norm_is_that_of_all_gradients() -> None:
    assert compute_grad_norm_surrogate(model_with([3.0], None, [4.0])) == pytest.approx(5.0)
    assert compute_grad_norm_surrogate(model_with(None)) is None


def test_looking_changes_nothing() -> None:
    model = model_with([1.0, 2.0], None)
    before = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    collect_per_layer_gradients(model)
    check_numerical_stability(model)
    compute_grad_norm_surrogate(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before[name][0])
        assert p.grad is before[name][1]


def layer(name: str, norm: float, zero: float = 0.0, large: float = 0.0, nan: int = 0) -> LayerGradientStats:
    return LayerGradientStats(
        name=name,
        num_elements=10,
        norm=norm,
        mean=0.0,
        std=0.0,
        max_abs=0.0,
        zero_share=zero,
        large_share=large,
        num_nan=nan,
        num_inf=0,
    )


def test_layers_in_one_line() -> None:
    assert aggregate_layer_gradient_health([]) is None
    calm, big = layer("calm", 1.0, zero=0.9, large=0.1), layer("big", 9.0)
    health = aggregate_layer_gradient_health([calm, big])
    assert health is not None
    assert (health.num_layers, health.num_dead, health.num_exploding, health.num_nonfinite) == (2, 0, 0, 0)
    assert (health.min_norm, health.max_norm, health.worst_layer) == (1.0, 9.0, "big")
    dead, exploding, broken = layer("d", 0.0, zero=0.91), layer("e", 2.0, large=0.11), layer("n", 0.5, nan=1)
    health = aggregate_layer_gradient_health([calm, big, dead, exploding])
    assert health is not None
    assert (health.num_dead, health.num_exploding, health.worst_layer) == (1, 1, "e")
    health = aggregate_layer_gradient_health([big, exploding, broken])
    assert health is not None
    assert (health.num_nonfinite, health.worst_layer) == (1, "n")


def test_stability() -> None:
    model = model_with([1.0, -7.0], None, [math.inf])
    with torch.no_grad():
        model.p1[0] = math.nan
    found = check_numerical_stability(model)
    assert (found.num_tensors, found.num_nonfinite_weights, found.num_nonfinite_gradients) == (3, 1, 1)
    assert (found.max_abs_weight, found.max_abs_gradient) == (2.0, 7.0)
    assert found.nonfinite_tensors == ("p1", "p2")
    assert check_numerical_stability(model_with(None)).max_abs_gradient is None
    assert check_numerical_stability(nn.Module()).max_abs_weight is None


def test_odd_ratios_come_strangest_first() -> None:
    low, high = THRESHOLDS["ratio_min"].warn, THRESHOLDS["ratio_max"].warn
    assert low is not None
    assert high is not None
    given = [1.0, 1.5 * high, 1.1 * low, 0.1 * low, high, low, torch.inf, torch.nan, 0.5 * low]
    found = odd_ratios(torch.tensor(given, dtype=torch.float64))
    assert math.isnan(found[0])
    assert math.isinf(found[1])
    assert found[2:] == pytest.approx([0.1 * low, 0.5 * low, 1.5 * high])
    assert odd_ratios(torch.tensor([0.9, 1.1])) == []
