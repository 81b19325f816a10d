"""The growing optimizer: plain torch inside, one group per owner, clipped apart, and honest about what it saw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.leyline import GradientEvidence, OptimSpec
from esper.tolaria.optim import GrowingOptimizer
from tests.growing import ADAMW, OPTIMIZERS, SGD, bits, draw

Group = dict[str, nn.Parameter]
both = pytest.mark.parametrize("spec", OPTIMIZERS.values(), ids=OPTIMIZERS)


def group(name: str, *sizes: int, rng_seed: int = 1) -> Group:
    generator = draw(rng_seed)
    return {f"{name}.{i}": nn.Parameter(torch.randn(size, generator=generator)) for i, size in enumerate(sizes)}


def give_gradients(params: Group, rng_seed: int, scale: float = 1.0) -> None:
    generator = draw(rng_seed)
    for parameter in params.values():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def values(params: Group) -> list[bytes]:
    return [bits(p) for p in params.values()]


def state_bits(optimizer: GrowingOptimizer) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in optimizer.named_state().items()}


def plain(spec: OptimSpec, params: Group, decay: float) -> torch.optim.Optimizer:
    if spec.kind == "adamw":
        return torch.optim.AdamW(params.values(), lr=spec.lr, weight_decay=decay, fused=True)
    return torch.optim.SGD(params.values(), lr=spec.lr, weight_decay=decay, momentum=spec.momentum, fused=True)


# ---- updates


@both
def test_each_group_is_updated_as_torch_would_alone(spec: OptimSpec) -> None:
    host, seed = group("host", 5, 3), group("seed", 4, rng_seed=2)
    host_alone, seed_alone = group("host", 5, 3), group("seed", 4, rng_seed=2)
    optimizer = GrowingOptimizer(spec, {"host": host}, clip_norm=math.inf)
    inner_host, inner_seed = plain(spec, host_alone, spec.weight_decay), plain(spec, seed_alone, 0.0)
    for batch in range(6):
        if batch == 2:
            optimizer.add_group("r0c0", seed)
        for params in (host, host_alone):
            give_gradients(params, batch)
        for params in (seed, seed_alone):
            give_gradients(params, 100 + batch)
        optimizer.step()
        inner_host.step()
        if batch >= 2:
            inner_seed.step()
    assert values(host) == values(host_alone)
    assert values(seed) == values(seed_alone)


def test_weight_decay_is_for_the_host_alone() -> None:
    spec = replace(SGD, weight_decay=0.5, momentum=0.0)
    host, seed = group("host", 3), group("seed", 3)
    before = seed["seed.0"].detach().clone()
    optimizer = GrowingOptimizer(spec, {"host": host, "r0c0": seed}, clip_norm=1.0)
    for params in (host, seed):
        params[next(iter(params))].grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(seed["seed.0"], before)
    assert torch.allclose(host["host.0"], before * (1 - spec.lr * 0.5))


@both
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_a_seed_cannot_use_up_the_clip_budget_of_the_host(
    spec: OptimSpec, host_scale: float, seed_scale: float
) -> None:
    results = []
    for with_seed in (False, True):
        host, seed = group("host", 6, 2), group("seed", 5)
        groups = {"host": host, "r0c0": seed} if with_seed else {"host": host}
        optimizer = GrowingOptimizer(spec, groups, clip_norm=1.0)
        for batch in range(2):
            give_gradients(host, batch, host_scale)
            give_gradients(seed, batch, seed_scale)
            optimizer.step()
        norm = torch.linalg.vector_norm(torch.cat([p.grad for p in host.values() if p.grad is not None]))
        assert norm <= 1.0 + 1e-4
        results.append(values(host))
    assert results[0] == results[1]


def test_gradients_within_the_limit_are_left_alone() -> None:
    host = group("host", 4)
    give_gradients(host, 1, scale=0.1)
    before = bits(host["host.0"].grad)  # type: ignore[arg-type]
    GrowingOptimizer(ADAMW, {"host": host}, clip_norm=1.0).step()
    assert bits(host["host.0"].grad) == before  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@both
def test_a_broken_seed_is_left_out_and_counted(spec: OptimSpec, broken: float) -> None:
    host, good, bad = group("host", 3), group("good", 3), group("bad", 3, 2)
    optimizer = GrowingOptimizer(spec, {"host": host, "r0c0": good, "r0c1": bad}, clip_norm=1.0)
    for params in (host, good, bad):
        give_gradients(params, 1)
    optimizer.step()
    before, state = values(bad), {n: b for n, b in state_bits(optimizer).items() if n.startswith("bad")}
    others = values(host), values(good)
    for params in (host, good, bad):
        give_gradients(params, 2)
    bad["bad.1"].grad = torch.tensor([0.0, broken])
    optimizer.step()
    assert values(bad) == before
    assert {n: b for n, b in state_bits(optimizer).items() if n.startswith("bad")} == state
    assert values(host) != others[0]
    assert values(good) != others[1]
    assert all(bool(p.isfinite().all()) for p in (*host.values(), *good.values()))
    for params in (host, good, bad):
        give_gradients(params, 3)
    optimizer.step()
    assert values(bad) != before, "it goes on with the next finite gradient"
    evidence = optimizer.finish_epoch()
    assert optimizer.num_skipped == {"r0c1": 1}
    assert (evidence["r0c1"].finite, evidence["r0c0"].finite, evidence["host"].finite) == (False, True, True)
    optimizer.remove_group("r0c1")
    assert optimizer.num_skipped == {}


def test_a_broken_host_is_not_hidden_from_the_governor() -> None:
    host = group("host", 3)
    optimizer = GrowingOptimizer(ADAMW, {"host": host}, clip_norm=1.0)
    host["host.0"].grad = torch.tensor([0.0, math.nan, 1.0])
    optimizer.step()
    assert bool(host["host.0"].isnan().any())
    assert optimizer.finish_epoch()["host"].finite is False


def test_the_learning_rate_factor_reaches_groups_to_come() -> None:
    host, seed = group("host", 3), group("seed", 3)
    optimizer = GrowingOptimizer(replace(SGD, momentum=0.0, weight_decay=0.0), {"host": host}, clip_norm=math.inf)
    optimizer.set_lr_factor(0.25)
    optimizer.add_group("r0c0", seed)
    for params in (host, seed):
        before = params[next(iter(params))].detach().clone()
        give_gradients(params, 1)
        optimizer.step()
        after = params[next(iter(params))]
        assert torch.allclose(before - after, 0.25 * SGD.lr * after.grad)  # type: ignore[operator]
        optimizer.zero_grad()
        assert after.grad is None


def test_a_group_may_have_a_learning_rate_of_its_own_for_as_long_as_it_is_named() -> None:
    optimizer = GrowingOptimizer(SGD, {"host": group("host", 3), "r0c0": group("seed", 3)}, clip_norm=1.0)
    optimizer.set_lr_factor(0.25, {"r0c0": 0.75})
    assert [optimizer.rates(name)[0] for name in ("host", "r0c0", "r0c1")] == [
        share * SGD.lr for share in (0.25, 0.75, 0.25)
    ]
    optimizer.set_lr_factor(0.125)
    assert optimizer.rates("r0c0")[0] == 0.125 * SGD.lr


def test_a_step_without_any_gradient_does_nothing() -> None:
    host = group("host", 3)
    before = values(host)
    optimizer = GrowingOptimizer(ADAMW, {"host": host}, clip_norm=1.0)
    optimizer.step()
    assert values(host) == before
    assert optimizer.finish_epoch()["host"].finite is None


# ---- groups


@both
def test_groups_come_and_go_and_the_others_do_not_notice(spec: OptimSpec) -> None:
    groups = {"host": group("host", 3), "r0c0": group("a", 2), "r0c1": group("b", 4)}
    optimizer = GrowingOptimizer(spec, groups, clip_norm=1.0)
    for params in groups.values():
        give_gradients(params, 1)
    optimizer.step()
    before = state_bits(optimizer)
    optimizer.add_group("r0c2", group("c", 5))
    assert state_bits(optimizer) == before
    optimizer.remove_group("r0c0")
    optimizer.remove_group("r0c0")  # already forgotten
    assert state_bits(optimizer) == {n: b for n, b in before.items() if not n.startswith("a.")}
    assert tuple(optimizer.groups) == ("host", "r0c1", "r0c2")
    assert [len(g) for g in optimizer.groups.values()] == [1, 1, 1]
    assert optimizer.groups["r0c1"]["b.0"] is groups["r0c1"]["b.0"]
    assert not optimizer.holds(groups["r0c0"].values())
    assert optimizer.holds([*groups["host"].values(), *groups["r0c1"].values()])
    assert optimizer.holds([])


def test_what_cannot_be_a_group_is_refused_whole() -> None:
    host = group("host", 3)
    with pytest.raises(ValueError, match="need a 'host' entry, got: r0c0"):
        GrowingOptimizer(ADAMW, {"r0c0": host}, clip_norm=1.0)
    optimizer = GrowingOptimizer(ADAMW, {"host": host, "r0c0": group("a", 2)}, clip_norm=1.0)
    fresh = group("new", 2)
    for name, params, message in (
        ("r0c0", fresh, "'r0c0' exists already"),
        ("r0c1", fresh | host, "in the optimizer already: host.0"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_group(name, params)
        assert tuple(optimizer.groups) == ("host", "r0c0")
        assert len(optimizer.parameters()) == 2
    with pytest.raises(ValueError, match="the host group stays"):
        optimizer.remove_group("host")


# ---- evidence


def evidence_of(*gradients: Tensor | None, clip_norm: float = 1.0) -> GradientEvidence:
    params = group("host", *(2 for _ in gradients))
    optimizer = GrowingOptimizer(ADAMW, {"host": group("x", 1), "r0c0": params}, clip_norm=clip_norm)
    for parameter, gradient in zip(params.values(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer.step()
    return optimizer.finish_epoch()["r0c0"]


def test_evidence_is_what_the_last_batch_showed() -> None:
    some = torch.tensor([3.0, 4.0])
    seen = evidence_of(some, torch.zeros(2), None, torch.tensor([0.0, 1e-13]))
    assert seen.finite is True
    assert seen.live_fraction == 0.25
    assert seen.norm_per_weight == pytest.approx(5.0 / math.sqrt(8))
    assert evidence_of(some).live_fraction == 1.0


def test_no_gradient_is_no_evidence() -> None:
    nothing = GradientEvidence(finite=None, live_fraction=None, norm_per_weight=None, health=None)
    assert evidence_of(None, None) == nothing
    optimizer = GrowingOptimizer(ADAMW, {"host": group("host", 2)}, clip_norm=1.0)
    give_gradients({"x": optimizer.parameters()[0]}, 1)
    optimizer.step()
    assert optimizer.finish_epoch()["host"].finite is True
    assert optimizer.finish_epoch()["host"] == nothing


def test_health_falls_with_vanishing_and_exploding_tensors() -> None:
    fine, tiny, huge = torch.ones(2), torch.full((2,), 1e-8), torch.full((2,), 20.0)
    assert evidence_of(fine, fine).health == 1.0
    assert evidence_of(fine, tiny).health == pytest.approx(0.75)
    assert evidence_of(fine, None).health == pytest.approx(0.75)
    assert evidence_of(fine, huge).health == pytest.approx(0.6)
    assert evidence_of(fine, huge, clip_norm=100.0).health == 1.0
    assert evidence_of(huge, huge).health == pytest.approx(0.2)
    assert evidence_of(fine, torch.tensor([0.0, math.nan])).health == 0.0


# ---- state by name


@both
def test_state_moves_to_another_optimizer_by_name(spec: OptimSpec) -> None:
    def build(order: tuple[str, ...]) -> tuple[GrowingOptimizer, dict[str, Group]]:
        groups = {"host": group("host", 3, 4), "r0c0": group("a", 2), "r0c1": group("b", 5)}
        return GrowingOptimizer(spec, {name: groups[name] for name in order}, clip_norm=1.0), groups

    first, ours = build(("host", "r0c0", "r0c1"))
    for batch in range(3):
        for name, params in ours.items():
            if name != "r0c1":  # a group without state yet
                give_gradients(params, batch)
        first.step()
    second, theirs = build(("host", "r0c1", "r0c0"))
    for name, params in theirs.items():
        for key, parameter in params.items():
            parameter.data.copy_(ours[name][key])
    second.load_named_state(first.named_state())
    assert state_bits(second) == state_bits(first)
    assert not any(name.startswith("b.") for name in first.named_state())
    for params in (*ours.values(), *theirs.values()):
        give_gradients(params, 9)
    first.step()
    second.step()
    assert [values(ours[name]) for name in ours] == [values(theirs[name]) for name in ours]
    state = first.named_state()
    loaded = next(iter(second.named_state().values()))
    assert all(loaded.data_ptr() != tensor.data_ptr() for tensor in state.values())


@both
def test_loading_replaces_all_state(spec: OptimSpec) -> None:
    optimizer = trained(spec)
    assert optimizer.named_state()
    optimizer.load_named_state({})
    assert optimizer.named_state() == {}


def trained(spec: OptimSpec) -> GrowingOptimizer:
    host = group("host", 3)
    optimizer = GrowingOptimizer(spec, {"host": host}, clip_norm=1.0)
    give_gradients(host, 1)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"gone.0.exp_avg": torch.zeros(3)}, "'gone.0.exp_avg' belongs to no parameter"),
        (lambda s: s | {"host.0.exp_avg": torch.zeros(4)}, r"shape \(4,\), its parameter \(3,\)"),
        (lambda s: {n: t for n, t in s.items() if not n.endswith("step")}, "host.0.*step"),
        (lambda s: {n: t for n, t in s.items() if not n.endswith("exp_avg_sq")}, "host.0.*exp_avg_sq"),
        (lambda s: trained(SGD).named_state(), "host.0.*momentum_buffer"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(change: object, message: str) -> None:
    optimizer = trained(ADAMW)
    before = state_bits(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_named_state(change(optimizer.named_state()))  # type: ignore[operator]
    assert state_bits(optimizer) == before


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_gradients_can_be_reported_as_they_were_before_clipping(scale: float) -> None:
    host, seed = group("host", 5, 3), group("seed", 4, rng_seed=2)
    optimizer = GrowingOptimizer(SGD, {"host": host, "r0c0": seed}, clip_norm=1.0)
    give_gradients(host, 1, scale)
    give_gradients(seed, 2)
    before = {p: p.grad.clone() for p in (*host.values(), *seed.values()) if p.grad is not None}
    optimizer.step()
    factors = optimizer.clip_factors()
    assert factors.keys() == before.keys()
    for param, grad in before.items():
        assert param.grad is not None
        assert torch.allclose(param.grad / factors[param], grad, rtol=1e-5)
    assert bool(factors[host["host.0"]] < 1.0) == (scale > 1.0)
