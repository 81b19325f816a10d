"""Flat passes give the bits that modules give, and every module that is more than its `forward` is still called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina import BLUEPRINTS, MorphogeneticModel, begin_epoch, wrap_sequential
from esper.kasmina.flat import _KINDS, _calls, _chain, flat_stations
from tests.growing import LENIENT, Run, bits, draw, loss_of, make_batches, module_bits, start
from tests.kasmina.test_blueprints import features, slot_of
from tests.kasmina.test_coalitions import NETWORKS, blended_ids, grown, stages

ROWS = torch.randn(6, 8, 5, 5, generator=draw(1))
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(8, 3), ROWS[:, :, 0, 0]),
    "linear without bias": (lambda: nn.Linear(8, 3, bias=False), ROWS[:, :, 0, 0]),
    "conv": (lambda: nn.Conv2d(8, 4, 3, padding=1, stride=2, groups=2), ROWS),
    "conv by name": (lambda: nn.Conv2d(8, 4, 3, padding="same", dilation=2), ROWS),
    "reflecting conv": (lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"), ROWS),
    "batch norm": (lambda: nn.BatchNorm2d(8), ROWS),
    "batch norm with a mean over all": (lambda: nn.BatchNorm2d(8, momentum=None), ROWS),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(8, track_running_stats=False), ROWS),
    "batch norm without weights": (lambda: nn.BatchNorm2d(8, affine=False, eps=0.1, momentum=0.5), ROWS),
    "group norm": (lambda: nn.GroupNorm(2, 8, eps=0.1), ROWS),
    "layer norm": (lambda: nn.LayerNorm(5, eps=0.1), ROWS),
    "relu": (lambda: nn.ReLU(), ROWS),
    "relu in place": (lambda: nn.ReLU(inplace=True), ROWS),
    "gelu": (lambda: nn.GELU(approximate="tanh"), ROWS),
    "max pool": (lambda: nn.MaxPool2d(2, stride=1, padding=1, ceil_mode=True), ROWS),
    "unknown": (lambda: nn.Softplus(beta=2.0), ROWS),
    "sequence": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Sequential(nn.BatchNorm2d(8), nn.Tanh())), ROWS),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_calls_agree_to_the_bit(name: str, training: bool) -> None:
    make, rows = LAYERS[name]
    results = []
    for flat in (False, True):
        torch.manual_seed(3)
        layer = make().train(training)
        run = _chain(_calls(layer)) if flat else layer
        x = rows.clone().requires_grad_()
        for _ in range(2):
            out = run(x * 1.0)
            out.square().sum().backward()
        assert x.grad is not None
        results.append((bits(out), bits(x.grad), module_bits(layer), [bits(p.grad) for p in layer.parameters()]))  # type: ignore[arg-type]
    assert results[0] == results[1]


def test_every_kind_that_is_known_is_tested() -> None:
    tested = {type(part) for make, _ in LAYERS.values() for part in make().modules()}
    assert {kind for kind in _KINDS if kind.__module__.startswith("torch")} <= tested


# ---- whole models


@pytest.mark.parametrize("topology", NETWORKS)
@given(stages, st.integers(0, 10**6))
@settings(derandomize=True, deadline=None, max_examples=10)
def test_coalitions_are_the_same_to_the_bit(topology: str, stages: list[str], rng_seed: int) -> None:
    run = grown(topology, stages, rng_seed)
    everyone = frozenset(blended_ids(run.model))
    coalitions = [everyone, *({everyone - {slot_id} for slot_id in everyone})]
    x, flat = run.validation[0][0], flat_stations(run.model)
    for out, expected in zip(
        run.model.forward_coalitions(x, coalitions, flat), run.model.forward_coalitions(x, coalitions), strict=True
    ):
        assert bits(out) == bits(expected)
    with torch.no_grad():
        assert bits(run.model(x, flat)) == bits(run.model(x))


@pytest.mark.parametrize("topology", NETWORKS)
@given(stages, st.integers(0, 10**6))
@settings(derandomize=True, deadline=None, max_examples=10)
def test_training_is_the_same_to_the_bit(topology: str, stages: list[str], rng_seed: int) -> None:
    results = []
    for flat in (False, True):
        run = grown(topology, stages, rng_seed)
        run.model.train()
        stations = flat_stations(run.model) if flat else None
        for x, y in run.batches[:3]:
            run.optimizer.zero_grad()
            loss_of(run.model(x, stations), y).backward()
            run.optimizer.step()
        meters = [slot.meter.finish_epoch() for slot in run.model.all_slots() if slot.meter is not None]
        results.append((module_bits(run.model), run.optimizer.finish_epoch(), meters))
    assert results[0] == results[1]


@pytest.mark.parametrize("blueprint", BLUEPRINTS)
def test_every_blueprint_is_the_same_to_the_bit(blueprint: str) -> None:
    row = BLUEPRINTS[blueprint]
    slot = slot_of(row, 8, 5)
    seed = row.build(slot, draw(1))
    nn.init.normal_(seed.gamma, generator=draw(2))
    _, x = features(row, slot, False, draw(3))
    assert bits(_chain(_calls(seed))(x)) == bits(seed(x))


# ---- what must not be left out


def with_seeds(blueprint: str = "cnn.conv") -> Run:
    run = start("cnn")
    run.model.germinate(run.slot_ids[0], blueprint, "gated", rng_seed=1)
    begin_epoch(run.model)
    run.model.train()
    return run


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_are_called_wherever_they_are(kind: str) -> None:
    calls = []
    for flat in (False, True):
        run, seen = with_seeds(), []
        for name, part in run.model.named_modules():
            if not isinstance(part, nn.ModuleDict | nn.ModuleList):
                getattr(part, f"register_{kind}")(lambda *_, name=name, seen=seen: seen.append(name))
        for x, y in run.batches[:2]:  # a seed only listens to the first
            loss_of(run.model(x, flat_stations(run.model) if flat else None), y).backward()
        calls.append(seen)
    assert calls[0] == calls[1]
    assert len(set(calls[0])) > 10


def test_one_hook_leaves_the_rest_flat() -> None:
    run = with_seeds()
    seen = []
    linear = next(part for part in run.model.modules() if isinstance(part, nn.Linear))
    linear.register_forward_hook(lambda *_: seen.append("hook"))
    x = run.batches[0][0]
    run.model(x, flat_stations(run.model))
    assert seen == ["hook"]
    assert not any(station.segment in run.model.host.segments for station in flat_stations(run.model)[:1])


def test_global_hooks_see_every_module() -> None:
    run = with_seeds()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        run.model(run.batches[0][0], flat_stations(run.model))
    finally:
        handle.remove()
    assert set(run.model.host.modules()) - {run.model.host, run.model.host.segments} <= set(seen)


def test_a_forward_of_its_own_is_called() -> None:
    run = with_seeds()
    linear = next(part for part in run.model.modules() if isinstance(part, nn.Linear))
    linear.forward = lambda x: torch.zeros(len(x), 4)  # type: ignore[method-assign]
    assert not run.model(run.batches[0][0], flat_stations(run.model)).any()


class Doubling(nn.Linear):
    """Of a kind that is not known, however much it looks like one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_modules_of_other_kinds_are_called_as_they_are() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Doubling(8, 4))
    x = make_batches("mlp")[0][0]
    expected = bits(net(x))
    model = MorphogeneticModel(wrap_sequential(net, slots={"r0c0": 1}, topology="mlp", sample=x), x, LENIENT)
    assert bits(model(x, flat_stations(model))) == expected
