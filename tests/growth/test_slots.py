"""Slots on other people's models: nothing changes while they are empty or their seeds train, and blending is exact."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper.growth import Grower
from esper.growth.network import AttachedNetwork, same_outputs
from esper.growth.sites import call_model, find_sites
from esper.growth.slot import SiteSlot
from esper.kasmina import MorphogeneticModel, wrap_sequential
from esper.leyline import DEFAULT_LIFECYCLE, SeedStage
from esper.tamiyo.masks import masks
from tests.growth.seeds import Habits, World, attach, train
from tests.growth.test_sites import fingerprint
from tests.growth.zoo import ROWS, ZOO, Animal, BasicBlock, Chain, ResNet


def host_bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
        if "esper_slot" not in name
    }


# ---- empty slots


@pytest.mark.parametrize("name", ZOO)
def test_empty_slots_change_nothing(name: str) -> None:
    animal = ZOO[name]
    plain, model = animal.model(), animal.model()
    world = attach(animal, model=model)
    batch = animal.batches(1)[0]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(model) is type(plain)
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        assert same_outputs(call_model(model.eval(), batch), call_model(plain.eval(), batch))
    before = fingerprint(animal.model().eval())
    world.bridge.close()
    world.network.detach()
    assert fingerprint(model) == before


def test_a_module_that_runs_over_its_children_is_refused_and_left_alone() -> None:
    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children():
                x = child(x)
            return x

    model = nn.Sequential(Runs(), nn.Linear(8, 2))
    before = fingerprint(model)
    sample = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"0 runs over its child modules.*name one of its children"):
        AttachedNetwork(model, sample, find_sites(model, sample, names=["0"]), call_model, DEFAULT_LIFECYCLE)
    assert fingerprint(model) == before


def test_a_model_that_is_random_in_eval_mode_is_refused() -> None:
    class Noisy(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(())

    model = Noisy(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    sample = torch.randn(4, 6)
    with pytest.raises(ValueError, match="same output twice"):
        AttachedNetwork(model, sample, find_sites(model, sample), call_model, DEFAULT_LIFECYCLE)


def test_a_chain_looks_to_controllers_as_the_bundled_kind_does() -> None:
    torch.manual_seed(0)
    chain = Chain()
    x = torch.randn(ROWS, 3, 8, 8)
    found = find_sites(chain, x, names=["1", "2"])
    attached = AttachedNetwork(chain, x, found, call_model, DEFAULT_LIFECYCLE)
    host = wrap_sequential(copy.deepcopy(chain), {"r0c0": 1, "r0c1": 2}, "cnn", x)
    model = MorphogeneticModel(host, x)
    assert attached.layout == model.layout
    assert attached.reports() == model.reports()


def test_what_is_allowed_in_a_chain_is_what_the_bundled_kind_allows() -> None:
    torch.manual_seed(0)
    chain, x = Chain(), torch.randn(ROWS, 3, 8, 8)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    grower = Grower(chain, x, optimizer, lambda model: (0.5, 1.0), epochs=8, sites=["1", "2"], budget=900)
    host = wrap_sequential(copy.deepcopy(chain), {"r0c0": 1, "r0c1": 2}, "cnn", x)
    model, lifecycle = MorphogeneticModel(host, x, grower.network.lifecycle), grower.network.lifecycle
    (report,), (allowed,) = grower._state.reports, grower._state.post_action_masks
    bundled = replace(report, slots=model.reports(), total_params=model.param_counts().total)
    assert allowed == masks(bundled, model.layout, lifecycle)
    assert 0 < sum(map(sum, allowed.blueprint_by_slot)) < sum(map(len, allowed.blueprint_by_slot)), "the budget bites"


# ---- training behind the host


class Checkpointed(BasicBlock):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(x)
        out = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return out


def _checkpoint(model: nn.Module, reentrant: bool) -> None:
    for module in model.modules():
        if isinstance(module, BasicBlock):
            module.__class__ = Checkpointed
            module.reentrant = reentrant


def _inside_checkpoint(model: nn.Module) -> None:
    """The site's module is called inside a checkpointed function, not around one."""
    assert isinstance(model, ResNet)
    for stage in (model.layer1, model.layer2, model.layer3):
        plain = stage.forward

        def wrapped(x: Tensor, plain: Any = plain) -> Any:
            grad = torch.is_grad_enabled()
            return checkpoint(plain, x, use_reentrant=False) if grad and model.training else plain(x)

        stage.forward = wrapped


def _channels_last(batch: Any) -> Any:
    return (batch[0].contiguous(memory_format=torch.channels_last), batch[1])


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0)


def _bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


HABITS: dict[str, Habits] = {
    "clipping": Habits(),
    "no_clipping": Habits(clip=False),
    "sgd_foreach": Habits(make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)),
    "fused": Habits(make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "accumulation": Habits(accumulate=3),
    "bf16": Habits(autocast=_bf16),
    "scaled": Habits(scaler=_scaler, autocast=_bf16),
    "scaled_fused": Habits(
        scaler=_scaler, unscale=False, clip=False, make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)
    ),
    "checkpoint": Habits(prepare=lambda model: _checkpoint(model, reentrant=False)),
    "reentrant": Habits(prepare=lambda model: _checkpoint(model, reentrant=True)),
    "inside_checkpoint": Habits(prepare=_inside_checkpoint),
    "channels_last": Habits(prepare=lambda model: model.to(memory_format=torch.channels_last), change=_channels_last),
}
CASES = [(name, "clipping") for name in ZOO] + [("resnet", habit) for habit in HABITS if habit != "clipping"]
CASES += [("gpt2", "accumulation"), ("gpt2", "bf16"), ("mlp", "scaled")]


@pytest.mark.parametrize(("name", "habit"), CASES)
def test_training_seeds_leave_every_bit_of_the_host_alone(name: str, habit: str) -> None:
    animal, habits = ZOO[name], HABITS[habit]
    plain = animal.model()
    habits.prepare(plain)
    scaler = None if habits.scaler is None else habits.scaler()
    plain_losses = list(train(animal, plain, habits.make_optimizer(list(plain.parameters())), habits, scaler))

    model = animal.model()
    habits.prepare(model)
    scaler = None if habits.scaler is None else habits.scaler()
    world = attach(animal, habits.make_optimizer, model=model, scaler=scaler)
    world.plant()
    losses = list(train(animal, model, world.optimizer, habits, scaler))

    assert losses == plain_losses
    assert host_bits(model) == host_bits(plain)
    for slot in world.network.all_slots():
        assert slot.seed is not None
        assert slot.seed.gamma.abs().sum() > 0, "the seed has learned"
        assert slot.num_missed <= 1
        assert all(param.grad is None for param in slot.parameters())
    world.end_epoch()
    for report in world.network.reports():
        assert report.gradients_finite is True
        assert report.predicted_gain is not None


@pytest.mark.parametrize("parts", [1, 3])
def test_what_a_seed_has_learned_is_forecast_as_the_gain_of_a_step(parts: int) -> None:
    """For one and the same batch again and again, however it is cut into parts."""
    world = attach(ZOO["mlp"], lambda params: torch.optim.SGD(params, lr=0.02))
    for param in world.network.host_parameters().values():
        param.requires_grad_(False)
    world.plant("r0c2")
    rows = world.animal.batches(1)[0]
    world.model.train()
    for module in world.model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    gains = []
    for _ in range(2):
        for _ in range(30):
            for part in range(parts):
                share = tuple(tensor[part::parts] for tensor in rows)
                (world.animal.loss(call_model(world.model, share), share) / parts).backward()
            world.optimizer.step()
        world.end_epoch()
        gains.append(world.network.report("r0c2").predicted_gain)
    assert 0.0 < gains[0] < gains[1]
    with torch.no_grad():
        before = world.animal.loss(call_model(world.model, rows), rows)
        slot = world.network.slot("r0c2")
        slot.stage, slot.alpha = SeedStage.BLENDING, 1.0
        brought = float(before - world.animal.loss(call_model(world.model, rows), rows))
    assert 0.3 * brought < gains[1] < 1.5 * brought, "the forecast is in the unit of the loss of a whole step"


def test_a_seed_learns_the_same_whatever_the_scale_of_the_loss() -> None:
    """Seeds of a scaled run are those of a plain one: scaling is undone before they learn."""
    states = []
    for habit in (
        Habits(clip=False),
        Habits(clip=False, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)),
    ):
        scaler = None if habit.scaler is None else habit.scaler()
        world = attach(ZOO["mlp"], scaler=scaler)
        world.plant()
        list(train(world.animal, world.model, world.optimizer, habit, scaler))
        states.append(
            torch.cat([p.detach().reshape(-1) for slot in world.network.all_slots() for p in slot.parameters()])
        )
    assert torch.equal(*states), "a power of two loses nothing"


def test_a_fused_kernel_that_divides_by_the_scale_gets_scaled_gradients() -> None:
    states = []
    for scale in (None, 1024.0):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        world = attach(ZOO["mlp"], lambda p: torch.optim.SGD(p, lr=0.1, fused=True), scaler=scaler)
        world.plant()
        habits = Habits(clip=False, unscale=False)
        list(train(world.animal, world.model, world.optimizer, habits, scaler))
        states.append(
            torch.cat([p.detach().reshape(-1) for slot in world.network.all_slots() for p in slot.parameters()])
        )
    assert torch.equal(*states)


def test_a_step_that_is_skipped_teaches_nothing() -> None:
    """A scaler skips a step whose gradients overflow; what seeds heard in it must not enter the next one."""
    learned = []
    for skip in (False, True):
        world = attach(ZOO["mlp"])
        world.plant()
        torch.manual_seed(0)
        world.model.train()
        for number, batch in enumerate(world.animal.batches(4)):
            world.optimizer.zero_grad()
            if number == 2:
                if not skip:
                    continue
                state = torch.get_rng_state()
            world.animal.loss(call_model(world.model, batch), batch).backward()
            if number == 2:
                torch.set_rng_state(state)
            else:
                world.optimizer.step()
        learned.append(torch.cat([p.detach().reshape(-1) for s in world.network.all_slots() for p in s.parameters()]))
    assert torch.equal(*learned)


def test_a_frozen_host_grows_too() -> None:
    animal = ZOO["resnet"]
    model = animal.model()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("fc"))
    world = attach(animal, model=model)
    before = host_bits(model)
    world.plant()
    list(train(animal, model, world.optimizer))
    assert {key for key, bits in host_bits(model).items() if bits != before[key] and "running" not in key} <= {
        "fc.weight",
        "fc.bias",
        *(key for key in before if key.endswith("num_batches_tracked")),
    }
    assert all(slot.seed.gamma.abs().sum() > 0 for slot in world.network.all_slots())


def test_features_that_are_overwritten_are_noticed_and_copied_from_then_on() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu_())

    animal = Animal(Overwrites, ZOO["mlp"].batch, ("first",), ZOO["mlp"].loss)
    plain = animal.model()
    plain_losses = list(train(animal, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)))
    world = attach(animal)
    world.plant()
    assert list(train(animal, world.model, world.optimizer)) == plain_losses
    (slot,) = world.network.all_slots()
    assert (slot.num_missed, slot.copies_features) == (1, True)
    assert slot.seed.gamma.abs().sum() > 0


def test_evaluation_and_passes_without_gradients_do_not_teach() -> None:
    world = attach(ZOO["mlp"])
    world.plant()
    batch = world.animal.batches(1)[0]
    world.model.train()
    with torch.no_grad():
        call_model(world.model, batch)
    world.model.eval()
    world.animal.loss(call_model(world.model, batch), batch).backward()
    assert all(slot.take_gradients() is None for slot in world.network.all_slots())


# ---- blending


@pytest.mark.parametrize("name", ZOO)
def test_a_newborn_seed_is_an_identity_at_any_strength(name: str) -> None:
    animal = ZOO[name]
    world = attach(animal)
    batch = animal.batches(1)[0]
    world.model.eval()
    with torch.no_grad():
        before = call_model(world.model, batch)
        world.plant()
        for slot in world.network.all_slots():
            slot.stage, slot.alpha = SeedStage.BLENDING, 1.0
        assert same_outputs(call_model(world.model, batch), before)
        world.shake()
        assert not same_outputs(call_model(world.model, batch), before)


@pytest.mark.parametrize("name", ZOO)
def test_blended_seeds_train_with_the_host(name: str) -> None:
    world = attach(ZOO[name])
    world.plant()
    list(train(world.animal, world.model, world.optimizer, steps=3))
    world.blend()
    before = [slot.seed.gamma.detach().clone() for slot in world.network.all_slots()]
    list(train(world.animal, world.model, world.optimizer, steps=2))
    for slot, gamma in zip(world.network.all_slots(), before, strict=True):
        assert not torch.equal(slot.seed.gamma, gamma)
    world.keep()
    assert [slot.stage for slot in world.network.all_slots()] == [SeedStage.FOSSILIZED] * len(before)


@pytest.mark.parametrize("habit", ["bf16", "channels_last", "accumulation"])
def test_blended_seeds_train_under_the_users_habits(habit: str) -> None:
    animal, habits = ZOO["resnet"], HABITS[habit]
    model = animal.model()
    habits.prepare(model)
    world = attach(animal, model=model)
    world.plant()
    list(train(animal, model, world.optimizer, habits, steps=2))
    world.blend()
    assert all(torch.isfinite(torch.tensor(list(train(animal, model, world.optimizer, habits, steps=2)))))


def test_a_copy_of_a_model_grows_apart_from_it() -> None:
    world = attach(ZOO["resnet"])
    world.plant()
    list(train(world.animal, world.model, world.optimizer, steps=2))
    world.blend()
    world.shake()
    world.model.eval()
    copied = copy.deepcopy(world.model)
    file = io.BytesIO()
    torch.save(world.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    batch = world.animal.batches(1)[0]
    with torch.no_grad():
        expected = call_model(world.model, batch)
        for other in (copied, loaded):
            slot = other.get_submodule("layer1.0.esper_slot")
            assert isinstance(slot, SiteSlot)
            assert slot is not world.network.slot("r0c0")
            assert same_outputs(call_model(other, batch), expected)
            slot.enabled = False
            assert not same_outputs(call_model(other, batch), expected)
            assert same_outputs(call_model(world.model, batch), expected)


def test_the_seeds_of_a_model_in_half_precision_are_in_half_precision() -> None:
    animal = ZOO["mlp"]
    model = animal.model().bfloat16()
    halved = Animal(animal.build, lambda g: tuple(t.bfloat16() for t in animal.batch(g)), animal.sites, animal.loss)
    world = attach(halved, model=model)
    world.plant()
    assert all(p.dtype is torch.bfloat16 for slot in world.network.all_slots() for p in slot.parameters())
    list(train(halved, model, world.optimizer, steps=3))
    assert all(slot.seed.gamma.abs().sum() > 0 for slot in world.network.all_slots())


def test_growing_draws_nothing_from_the_global_generator() -> None:
    world = attach(ZOO["gpt2"])
    state = torch.get_rng_state()
    world.plant()
    world.model.eval()
    call_model(world.model, world.animal.batches(1)[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fault_while_planting_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    world: World = attach(ZOO["resnet"])
    before, groups = fingerprint(world.model), [len(g["params"]) for g in world.optimizer.param_groups]
    monkeypatch.setattr(type(world.bridge), "add_group", lambda *args: (_ for _ in ()).throw(OSError("injected")))
    with pytest.raises(RuntimeError, match="injected"):
        world.network.germinate("r0c0", "cnn.conv", "linear", rng_seed=0)
    assert fingerprint(world.model) == before
    assert [len(g["params"]) for g in world.optimizer.param_groups] == groups
