"""Germination happens whole or not at all, draws from its own generator only, and refuses what it cannot do by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper.kasmina.network as network_module
from esper.kasmina import BLUEPRINTS, Blueprint, MorphogeneticModel, SeedSlot, begin_epoch
from esper.leyline import BLENDS, Cause, GerminationError, IllegalOperation, SeedStage
from esper.tolaria.optim import GrowingOptimizer
from tests.growing import (
    ADAMW,
    LENIENT,
    TOPOLOGIES,
    Run,
    assert_optimizer_matches,
    germinate,
    grow_to,
    make_batches,
    module_bits,
    run_bits,
    start,
    step,
    tiny_host,
)

SLOT = "r0c1"


def whole_state(run: Run) -> tuple[Any, ...]:
    """Everything a failed germination must leave as it was."""
    model = run.model
    return (
        dict(run_bits(run)),
        [slot.facts() for slot in model.all_slots()],
        [(id(slot.seed), id(slot.meter)) for slot in model.all_slots()],
        [(name, part.training) for name, part in model.named_modules()],
        model.topology_version,
        tuple(run.optimizer.groups),
        [id(p) for p in run.optimizer.parameters()],
        len(run.optimizer.state),
    )


def grown_run() -> Run:
    run = start("mlp")
    grow_to(run, "r0c0", "HOLDING")
    run.model.slot(SLOT).num_germinations = 3  # as if seeds had lived here before
    return run


class Widens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1)


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class Explodes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0.0


def with_body(body: Callable[[int, torch.Generator], nn.Module]) -> Blueprint:
    return replace(BLUEPRINTS["mlp.glu"], body=body)


def broken_build(channels: int, generator: torch.Generator) -> nn.Module:
    raise RuntimeError("no such layer")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (broken_build, "no such layer"),
        (lambda c, g: Widens(), "size of tensor|shape"),
        (lambda c, g: Doubles(), r"features are torch.float32 .* the seed gives torch.float64"),
        (lambda c, g: Explodes(), "does not start as an identity"),
        (lambda c, g: nn.Identity(), r"has 8 parameters, its card says 216"),
    ],
    ids=["build", "shape", "dtype", "not finite", "parameters"],
)
def test_a_bad_module_leaves_everything_as_it_was(
    body: Callable[[int, torch.Generator], nn.Module], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = grown_run()
    before = whole_state(run)
    monkeypatch.setitem(BLUEPRINTS, "mlp.glu", with_body(body))
    with pytest.raises(GerminationError, match=f"slot {SLOT}, blueprint mlp.glu: .*({cause})"):
        run.model.germinate(SLOT, "mlp.glu", "gated", rng_seed=1)
    assert whole_state(run) == before
    monkeypatch.undo()
    assert run.model.germinate(SLOT, "mlp.glu", "gated", rng_seed=1).seed_id == f"{SLOT}.4"
    assert_optimizer_matches(run)


def test_a_seed_that_is_no_identity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = grown_run()
    before = whole_state(run)
    build = Blueprint.build

    def awake(self: Blueprint, channels: int, generator: torch.Generator) -> nn.Module:
        seed = build(self, channels, generator)
        nn.init.constant_(seed.gamma, 1e-6)
        return seed

    monkeypatch.setattr(Blueprint, "build", awake)
    with pytest.raises(GerminationError, match="does not start as an identity"):
        run.model.germinate(SLOT, "mlp.glu", "linear", rng_seed=1)
    assert whole_state(run) == before


def _fail(*args: object, **kwargs: object) -> None:
    raise OSError("injected")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (network_module, "build_seed"),
        (MorphogeneticModel, "sample_features"),
        (network_module, "_probe"),
        (SeedSlot, "plant"),
        (SeedSlot, "transition"),
        (MorphogeneticModel, "adopt_group"),
        (GrowingOptimizer, "add_group"),
        (GrowingOptimizer, "parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_a_fault_at_any_stage_leaves_everything_as_it_was(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = grown_run()
    before = whole_state(run)
    monkeypatch.setattr(owner, name, _fail)
    with pytest.raises(GerminationError, match="injected") as caught:
        run.model.germinate(SLOT, "mlp.glu", "gated", rng_seed=1)
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    assert whole_state(run) == before
    germinate(run, SLOT)
    assert_optimizer_matches(run)


@pytest.mark.parametrize(
    ("slot", "blueprint", "blend", "message"),
    [
        ("r7c0", "mlp.glu", "linear", r"unknown slot 'r7c0'\. Known: r0c0, r0c1, r0c2"),
        (SLOT, "mlp.magic", "linear", r"unknown blueprint 'mlp\.magic'\. Known: mlp\.norm"),
        (SLOT, "mlp.glu", "fade", r"unknown blend 'fade'\. Known: linear_fast"),
    ],
)
def test_unknown_names_are_listed_before_any_change(slot: str, blueprint: str, blend: str, message: str) -> None:
    run = grown_run()
    before = whole_state(run)
    with pytest.raises(ValueError, match=message):
        run.model.germinate(slot, blueprint, blend, rng_seed=1)
    assert whole_state(run) == before


@pytest.mark.parametrize(
    ("slot", "blueprint", "reason"),
    [
        (SLOT, "cnn.conv", "fits"),
        (SLOT, "transformer.attention", "fits"),
        (SLOT, "mlp.inert", "fits"),  # a control that this model does not offer
        ("r0c0", "mlp.glu", "stage"),
    ],
)
def test_what_the_gate_refuses_is_illegal(slot: str, blueprint: str, reason: str) -> None:
    run = grown_run()
    before = whole_state(run)
    with pytest.raises(IllegalOperation, match=f"slot {slot}: gate G0 refuses: {reason}"):
        run.model.germinate(slot, blueprint, "linear", rng_seed=1)
    assert whole_state(run) == before


def test_limits_on_live_seeds_and_parameters_hold() -> None:
    run = start("mlp", lifecycle=replace(LENIENT, max_live=1))
    germinate(run, "r0c0")
    with pytest.raises(IllegalOperation, match=r"live_seeds \(got 1, limit 0\)"):
        germinate(run, "r0c1")
    host = start("mlp").model.param_counts().host
    card = start("mlp").model.layout.card("r0c1", "mlp.glu")
    for blend in ("gated", "linear"):
        added = card.added_params(BLENDS[blend].operator)
        exact = start("mlp", lifecycle=replace(LENIENT, param_budget=host + added))
        germinate(exact, "r0c1", "mlp.glu", blend)
        assert exact.model.param_counts().total == host + added
        tight = start("mlp", lifecycle=replace(LENIENT, param_budget=host + added - 1))
        with pytest.raises(IllegalOperation, match="params_after"):
            germinate(tight, "r0c1", "mlp.glu", blend)


def test_a_model_without_an_optimizer_cannot_grow() -> None:
    model = MorphogeneticModel(tiny_host("mlp"), make_batches("mlp")[0][0])
    with pytest.raises(RuntimeError, match=r"model\.bind\(optimizer\)"):
        model.germinate(SLOT, "mlp.glu", "linear", rng_seed=1)
    assert model.slot(SLOT).stage is SeedStage.DORMANT
    other = GrowingOptimizer(ADAMW, {"host": dict(tiny_host("mlp").named_parameters())}, 1.0)
    with pytest.raises(ValueError, match=r"parameter_groups\(\)"):
        model.bind(other)


# ---- determinism


@pytest.mark.parametrize("blend", ["linear", "gated"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_seed_depends_on_its_key_alone(topology: str, blend: str) -> None:
    made = []
    for key, noise in ((1, 0), (1, 1), (2, 0)):
        run = start(topology)
        if noise:
            step(run)  # the host has moved on, other seeds live elsewhere
            germinate(run, run.slot_ids[0])
        state = torch.get_rng_state()
        run.model.germinate(run.slot_ids[1], _blueprint(topology), blend, rng_seed=key)
        assert torch.equal(state, torch.get_rng_state())
        made.append(module_bits(run.model.slot(run.slot_ids[1])))
    assert made[0] == made[1]
    assert made[0] != made[2]


def _blueprint(topology: str) -> str:
    return {"mlp": "mlp.glu", "cnn": "cnn.conv", "transformer": "transformer.attention"}[topology]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_germination_moves_no_buffer_and_no_mode(topology: str) -> None:
    run = start(topology)
    grow_to(run, run.slot_ids[0], "BLENDING")
    run.model.train()
    run.model.host.segments[0].eval()
    before = module_bits(run.model.host)
    modes = [part.training for part in run.model.host.modules()]
    run.model.germinate(run.slot_ids[2], _blueprint(topology), "linear", rng_seed=1)
    assert module_bits(run.model.host) == before
    assert [part.training for part in run.model.host.modules()] == modes


def test_the_whole_model_follows_its_type() -> None:
    run = start("mlp")
    run.model.double()
    x = run.batches[0][0].double()
    run.model.germinate(SLOT, "mlp.glu", "gated", rng_seed=1)
    begin_epoch(run.model)
    assert {p.dtype for p in run.model.parameters()} == {torch.float64}
    assert run.model.train()(x).dtype == torch.float64


# ---- counting


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_counts_are_those_of_the_cards(topology: str, blend: str) -> None:
    run = start(topology)
    slot_id = run.slot_ids[1]
    card = run.model.layout.card(slot_id, _blueprint(topology))
    expected = card.added_params(BLENDS[blend].operator)
    move = run.model.germinate(slot_id, _blueprint(topology), blend, rng_seed=1)
    counts = run.model.param_counts()
    assert move.params == run.model.slot(slot_id).num_params() == expected
    assert (counts.committed, counts.total) == (counts.host, counts.host + expected)
    assert sum(p.numel() for p in run.model.slot_parameters(slot_id).values()) == expected
    run.model.slot(slot_id).requires_grad_(False)
    assert run.model.param_counts() == counts
    assert run.model.prune(slot_id, Cause.AUTO).params == expected
    assert run.model.param_counts().total == counts.host


def test_a_fossil_is_committed() -> None:
    run = start("cnn")
    grow_to(run, "r0c0", "FOSSILIZED")
    counts = run.model.param_counts()
    assert (counts.committed, counts.total) == (counts.total, counts.host + 600)
