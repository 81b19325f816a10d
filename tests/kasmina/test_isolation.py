"""A TRAINING seed leaves its host alone, to the bit: outputs, gradients, weights, buffers and optimizer state."""

from __future__ import annotations

import math

import pytest
import torch

from esper.kasmina import begin_epoch
from esper.leyline import IllegalOperation, LifecycleOp, SeedStage, gate_prune
from tests.growing import (
    OPTIMIZERS,
    TOPOLOGIES,
    Run,
    bits,
    draw,
    germinate,
    loss_of,
    module_bits,
    optimizer_bits,
    randomise_seed,
    start,
    step,
    train_batch,
    train_epoch,
)

BLENDS = ("linear", "gated", "multiply")


def host_bits(run: Run) -> dict[str, bytes]:
    return module_bits(run.model.host) | optimizer_bits(run.optimizer, "host.")


def with_training_seeds(topology: str, optim: str, *slots: int, blend: str = "linear") -> Run:
    """A fresh run with seeds in TRAINING whose weights are arbitrary and whose eta is set."""
    run = start(topology, OPTIMIZERS[optim])
    for position in slots:
        slot_id = run.slot_ids[position]
        blueprint = {"mlp": "mlp.glu", "cnn": "cnn.conv", "transformer": "transformer.attention"}[topology]
        run.model.germinate(slot_id, blueprint, blend, rng_seed=position)
        randomise_seed(run, slot_id, rng_seed=position)
    begin_epoch(run.model)
    for position in slots:
        slot = run.model.slot(run.slot_ids[position])
        assert slot.stage is SeedStage.TRAINING
        assert slot.meter is not None
        slot.meter.eta = torch.tensor(0.7)
    run.model.train()
    return run


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_host_and_its_optimizer_state_are_bit_equal_after_five_epochs(topology: str, optim: str) -> None:
    alone, grown = start(topology, OPTIMIZERS[optim]), start(topology, OPTIMIZERS[optim])
    germinate(grown, grown.slot_ids[0], blend="gated")  # the input features, for the mlp
    step(alone)
    germinate(grown, grown.slot_ids[1], blend="multiply")
    step(alone)
    for _ in range(3):
        step(grown)
        step(alone)
    assert [slot.stage for slot in grown.model.all_slots()][:2] == [SeedStage.TRAINING] * 2
    assert host_bits(grown) == host_bits(alone)
    for slot_id in grown.slot_ids[:2]:
        assert any(p.abs().sum() > 0 for n, p in grown.model.slot_parameters(slot_id).items() if n.endswith("gamma"))


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_output_and_host_gradients_are_bit_equal(topology: str, blend: str) -> None:
    alone, grown = start(topology), with_training_seeds(topology, "adamw", 0, 1, 2, blend=blend)
    x, y = alone.batches[0]
    alone.model.train()
    outputs = []
    for run in (alone, grown):
        out = run.model(x)
        loss_of(out, y).backward()
        outputs.append(bits(out))
    assert outputs[0] == outputs[1]
    for name, parameter in alone.model.host.named_parameters():
        other = grown.model.host.get_parameter(name)
        assert parameter.grad is not None
        assert other.grad is not None
        assert bits(parameter.grad) == bits(other.grad), name


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_broken_seed_does_not_reach_the_host(topology: str, broken: float, blend: str) -> None:
    alone, grown = start(topology), with_training_seeds(topology, "adamw", 0, 1, blend=blend)
    alone.model.train()
    slot_id = grown.slot_ids[1]
    with torch.no_grad():
        for parameter in grown.model.slot_parameters(slot_id).values():
            parameter.fill_(broken)
    before = {name: bits(p) for name, p in grown.model.slot_parameters(slot_id).items()}
    for batch in grown.batches:
        assert train_batch(alone, batch) == train_batch(grown, batch)
    assert host_bits(alone) == host_bits(grown)
    assert {name: bits(p) for name, p in grown.model.slot_parameters(slot_id).items()} == before
    evidence = grown.optimizer.finish_epoch()
    assert grown.optimizer.num_skipped == {slot_id: len(grown.batches)}
    assert evidence[slot_id].finite is False
    assert evidence[grown.slot_ids[0]].finite is True


def test_a_broken_seed_cannot_blend_but_can_be_pruned() -> None:
    run = start("mlp")
    germinate(run, "r0c1")
    with torch.no_grad():
        run.model.slot("r0c1").get_parameter("seed.gamma").fill_(math.nan)
    step(run)
    with pytest.raises(IllegalOperation, match="gradients_finite"):
        run.model.advance("r0c1")
    assert gate_prune(run.model.report("r0c1"), run.model.lifecycle).passed
    assert step(run, LifecycleOp.PRUNE, "r0c1")[0].target is SeedStage.PRUNED
    assert math.isfinite(train_epoch(run)[0])


@pytest.mark.parametrize("blend", BLENDS)
def test_negative_zeros_in_the_features_stay_negative(blend: str) -> None:
    run = with_training_seeds("mlp", "adamw", 0, blend=blend)
    x = torch.randn(8, 6, generator=draw(9))
    x[:, :3] = -0.0
    out = run.model.slot("r0c0")(x)
    assert out.requires_grad
    assert bits(out) == bits(x)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_training_seed_is_not_run_outside_training_passes(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_training_seeds(topology, "adamw", 1)
    x = run.batches[0][0]
    alone = start(topology)

    def explode(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the seed was run")

    monkeypatch.setattr(run.model.slot(run.slot_ids[1]).seed, "forward", explode)
    with torch.no_grad():
        run.model(x)  # training mode without gradients
        run.model.eval()
        alone.model.eval()
        alone.model.load_state_dict({name: t for name, t in run.model.state_dict().items() if name.startswith("host.")})
        assert bits(run.model(x)) == bits(alone.model(x))
    run.model(x)
    assert len(run.model.forward_coalitions(x, [frozenset()])) == 1


def test_a_pass_that_nobody_trains_on_leaves_nothing_behind() -> None:
    run, other = (with_training_seeds("cnn", "adamw", 0, 2) for _ in range(2))
    x = run.batches[0][0]
    for part in (*run.model.modules(), *other.model.modules()):
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eval()  # running statistics are not what is asked here
    run.model(x)
    with torch.no_grad():
        run.model(x)
    for batch in run.batches:
        assert train_batch(run, batch) == train_batch(other, batch)
    assert module_bits(run.model) == module_bits(other.model)
    for slot, twin in zip(run.model.all_slots(), other.model.all_slots(), strict=True):
        if slot.meter is not None and twin.meter is not None:
            assert slot.meter.finish_epoch() == twin.meter.finish_epoch() != (None, None)


def weight_bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(weight) for name, weight in module.named_parameters()}


def test_the_first_batch_only_listens() -> None:
    run = start("cnn")
    run.model.germinate("r0c0", "cnn.conv", "linear", rng_seed=1)
    begin_epoch(run.model)
    run.model.train()
    before = weight_bits(run.model.slot("r0c0"))
    train_batch(run, run.batches[0])
    meter = run.model.slot("r0c0").meter
    assert meter is not None
    assert meter.eta is not None
    assert weight_bits(run.model.slot("r0c0")) == before
    assert run.optimizer.finish_epoch()["r0c0"].finite is None
    train_batch(run, run.batches[1])
    assert weight_bits(run.model.slot("r0c0")) != before
