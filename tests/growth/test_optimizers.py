"""Seeds in the user's optimizers and schedulers: in with the settings around them, out without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from esper.growth.optimizers import UserOptimizers
from esper.growth.sites import call_model
from esper.leyline import SeedStage
from tests.growth.seeds import adamw, attach, train
from tests.growth.test_slots import host_bits
from tests.growth.zoo import ZOO

MLP = ZOO["mlp"]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "adamw": adamw,
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "two_groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 1e-3}, {"params": p[2:]}], lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "named": lambda p: torch.optim.AdamW([(f"p{i}", x) for i, x in enumerate(p)], lr=1e-2),
}


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def assert_same_state(left: Any, right: Any) -> None:
    """Equal to the bit, tensors included."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same_state(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same_state(a, b)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize("scheduled", [False, True], ids=["joined", "own_group"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_pruned_seed_leaves_no_trace_in_the_optimizer(name: str, scheduled: bool) -> None:
    make = OPTIMIZERS[name]
    plain = MLP.model()
    plain_optimizer = make(list(plain.parameters()))
    if scheduled:
        lrs.ConstantLR(plain_optimizer, factor=1.0)
    list(train(MLP, plain, plain_optimizer, steps=5))

    schedulers = (lambda o: [lrs.ConstantLR(o, factor=1.0)]) if scheduled else (lambda o: [])
    world = attach(MLP, make, schedulers=schedulers)
    groups = len(world.optimizer.param_groups)
    world.plant("r0c1")
    assert len(world.optimizer.param_groups) == groups + scheduled
    before = world.network.slot("r0c1").seed.gamma.detach().clone()
    list(train(MLP, world.model, world.optimizer, steps=5))
    assert not torch.equal(world.network.slot("r0c1").seed.gamma, before), "it was trained"
    world.end_epoch()
    world.network.prune("r0c1")
    assert host_bits(world.model) == host_bits(plain)
    assert_same_state(state_of(world.optimizer), state_of(plain_optimizer))


def test_a_seed_gets_the_settings_of_the_parameters_around_it() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "betas": (0.5, 0.6)}], lr=0.1
        )

    joined = attach(MLP, make)
    joined.plant("r0c1")
    seed = joined.network.slot("r0c1").seed
    assert any(p is seed.gamma for p in joined.optimizer.param_groups[1]["params"])

    own = attach(MLP, make, schedulers=lambda o: [lrs.ConstantLR(o, factor=1.0)])
    own.plant("r0c1")
    group = own.optimizer.param_groups[2]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.5, 0.6), 0.0)
    assert own.optimizer.param_groups[1]["weight_decay"] > 0.0


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: lrs.StepLR(o, 2),
    "multistep": lambda o: lrs.MultiStepLR(o, [1, 3]),
    "linear": lambda o: lrs.LinearLR(o),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lrs.PolynomialLR(o, 6),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 6),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lrs.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=False),
    "one_cycle": lambda o: lrs.OneCycleLR(o, 1e-2, total_steps=8),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, min_lr=1e-5),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.CosineAnnealingLR(o, 6)], [2]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)]),
}


def _advance(scheduler: Any) -> None:
    scheduler.step(1.0) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_carry_seeds_along_and_forget_them(name: str) -> None:
    plain = attach(MLP, schedulers=lambda o: [SCHEDULERS[name](o)])
    grown = attach(MLP, schedulers=lambda o: [SCHEDULERS[name](o)])
    for epoch in range(6):
        if epoch == 1:
            grown.plant("r0c0")
        if epoch == 2:
            grown.plant("r0c2")
        for world in (plain, grown):
            world.optimizer.step()
            _advance(world.bridge.schedulers[0])
        host, *seeds = (group["lr"] for group in grown.optimizer.param_groups)
        assert [host] == [group["lr"] for group in plain.optimizer.param_groups]
        assert seeds == [host] * len(seeds)
        assert len(seeds) == {0: 0, 1: 1}.get(epoch, 2 if epoch < 4 else 1)
        if epoch == 3:
            grown.end_epoch()
            grown.network.prune("r0c0")
    grown.end_epoch()
    grown.network.prune("r0c2")
    states = [dict(world.bridge.schedulers[0].state_dict()) for world in (plain, grown)]
    for state in states:
        state.pop("lr_lambdas", None)
        state.pop("_scale_fn_custom", None)
    assert_same_state(states[1], states[0])
    assert_same_state(state_of(grown.optimizer)["param_groups"], state_of(plain.optimizer)["param_groups"])


def test_two_optimizers_share_a_seed_by_what_they_can_train() -> None:
    model = MLP.model()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon, other = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)
    world = attach(MLP, model=model)
    world.bridge.close()
    bridge = UserOptimizers(world.network, [muon, other])
    world.network.bind(bridge)
    world.plant("r0c1")
    seed = world.network.slot("r0c1").seed
    held = {id(p) for group in other.param_groups for p in group["params"]}
    assert id(seed.gamma) in held
    assert {p.dim() for group in muon.param_groups for p in group["params"]} == {2}
    before = [p.detach().clone() for p in seed.parameters()]
    model.train()
    for batch in MLP.batches(4):
        for optimizer in (muon, other):
            optimizer.zero_grad()
        MLP.loss(call_model(model, batch), batch).backward()
        muon.step()
        other.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, seed.parameters(), strict=True)), "both train their part"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: [torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])], "pass a second optimizer"),
        (lambda model: [torch.optim.LBFGS(model.parameters())], "LBFGS cannot take parameters later"),
        (lambda model: [torch.optim.SGD(MLP.model().parameters())], "holds none of the model's parameters"),
        (lambda model: [], "an optimizer is needed"),
    ],
)
def test_an_optimizer_that_cannot_take_seeds_is_refused(make: Any, message: str) -> None:
    world = attach(MLP)
    world.bridge.close()
    with pytest.raises(ValueError, match=message):
        UserOptimizers(world.network, make(world.model))


def test_a_closure_that_runs_backward_inside_the_step_trains_seeds() -> None:
    """Without care for closures seeds would silently never train in Lightning."""
    worlds = [attach(MLP), attach(MLP)]
    for closure, world in zip((False, True), worlds, strict=True):
        world.plant()
        torch.manual_seed(0)
        world.model.train()
        for batch in MLP.batches(4):

            def forward_backward(world: Any = world, batch: Any = batch) -> Any:
                world.optimizer.zero_grad()
                loss = MLP.loss(call_model(world.model, batch), batch)
                loss.backward()
                return loss

            if closure:
                assert world.optimizer.step(closure=forward_backward).item() > 0.0
            else:
                forward_backward()
                world.optimizer.step()
    states = [world.model.state_dict() for world in worlds]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_seed_whose_gradient_is_not_a_number_is_left_out_and_reported() -> None:
    world = attach(MLP)
    world.plant()
    slot = world.network.slot("r0c0")
    list(train(MLP, world.model, world.optimizer, steps=2))
    with torch.no_grad():
        slot.seed.body[0].weight[0, 0] = torch.nan
    before = slot.seed.gamma.detach().clone()
    losses = list(train(MLP, world.model, world.optimizer, steps=2))
    assert all(loss == loss for loss in losses), "the host does not see it"
    assert torch.equal(slot.seed.gamma, before)
    world.end_epoch()
    assert world.network.report("r0c0").gradients_finite is False
    assert world.network.report("r0c1").gradients_finite is True


def test_evidence_covers_the_host_and_every_seed() -> None:
    world = attach(MLP)
    world.plant("r0c0", "r0c1")
    list(train(MLP, world.model, world.optimizer, steps=4))
    evidence = world.bridge.finish_epoch()
    assert set(evidence) == {"host", "r0c0", "r0c1"}
    assert all(found.live_fraction is not None and found.live_fraction > 0.5 for found in evidence.values())
    assert world.bridge.finish_epoch()["host"].finite is None, "nothing was measured since"
    assert world.network.slot("r0c0").stage is SeedStage.TRAINING
