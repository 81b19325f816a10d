"""Seeds switched off one by one: the bits of separate passes for less work."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth.coalitions import CoalitionPasses
from esper.growth.network import same_outputs
from esper.growth.sites import call_model
from esper.growth.structure import map_tensors, tensors
from tests.growth.seeds import World, attach, train
from tests.growth.test_sites import fingerprint
from tests.growth.zoo import ZOO, Animal


def blended(name: str | Animal) -> World:
    world = attach(ZOO[name] if isinstance(name, str) else name)
    world.plant()
    list(train(world.animal, world.model, world.optimizer, steps=3))
    world.blend()
    world.shake()
    world.model.eval()
    return world


def every_coalition(world: World) -> list[frozenset[str]]:
    slots = world.network.layout.slot_ids
    return [frozenset(part) for size in range(len(slots) + 1) for part in combinations(slots, size)]


def copied(output: Any) -> Any:
    return map_tensors(output, lambda tensor: tensor.detach().clone())


@pytest.mark.parametrize("name", ZOO)
def test_sharing_gives_the_bits_of_separate_passes(name: str) -> None:
    world = blended(name)
    before = fingerprint(world.model)
    passes, reference = CoalitionPasses(world.network), CoalitionPasses(world.network)
    coalitions = every_coalition(world)
    for batch in world.animal.batches(2):

        def run(batch: Any = batch) -> Any:
            return copied(call_model(world.model, batch))

        shared = passes.outputs(run, coalitions)
        with torch.no_grad():
            separate = reference.separate(run, coalitions)
        assert all(map(same_outputs, shared, separate))
        distinct = {
            tuple(round(t.double().sum().item(), 9) for _, t in tensors(o) if t.is_floating_point()) for o in shared
        }
        assert len(distinct) == len(coalitions), "every seed makes a difference"
    assert passes.fell_back is None
    assert fingerprint(world.model) == before


class Counter:
    """Counts the passes through each submodule."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, int] = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.forward = self._counting(name, module.forward)  # type: ignore[method-assign]

    def _counting(self, name: str, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return forward(*args, **kwargs)

        return call


def test_what_comes_before_the_first_switched_seed_runs_once() -> None:
    world = blended("resnet")
    passes = CoalitionPasses(world.network)
    slots = world.network.layout.slot_ids
    leave_one_out = [frozenset(slots), *(frozenset(slots) - {slot} for slot in slots)]
    batches = world.animal.batches(2)
    passes.outputs(lambda: call_model(world.model, batches[0]), leave_one_out)
    counter = Counter(world.model)
    passes.outputs(lambda: call_model(world.model, batches[1]), leave_one_out)
    assert passes.fell_back is None
    assert (counter.calls["conv1"], counter.calls["layer1.0.conv2"]) == (1, 1)
    assert counter.calls["layer2.0.conv2"] == 2, "with and without the first seed"
    assert counter.calls["layer3.0.conv2"] == 3
    assert counter.calls["fc"] == 4


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)


class Overwriting(Layers):
    """Overwrites in place what its submodules gave."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.mul_(2.0)
        h = self.second(h).relu_()
        h = self.third(h)
        h += 1.0
        return self.last(h)


def test_outputs_that_are_overwritten_in_place_are_kept_as_copies() -> None:
    world = blended(Animal(Overwriting, ZOO["mlp"].batch, (), ZOO["mlp"].loss))
    passes = CoalitionPasses(world.network)
    coalitions = every_coalition(world)
    assert len(coalitions) == 8
    for batch in world.animal.batches(3):

        def run(batch: Any = batch) -> Any:
            return call_model(world.model, batch)

        with torch.no_grad():
            separate = passes.separate(run, coalitions)
        assert all(map(same_outputs, passes.outputs(run, coalitions), separate))
    assert passes.fell_back is None


class DataDependent(Layers):
    """Takes another way through its layers when the data says so."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.third(self.second(h)) if x.mean() < 10.0 else self.second(self.third(h))
        return self.last(h)


def test_another_order_of_calls_means_separate_passes() -> None:
    world = blended(Animal(DataDependent, ZOO["mlp"].batch, (), ZOO["mlp"].loss))
    passes = CoalitionPasses(world.network)
    coalitions = every_coalition(world)
    x = torch.randn(4, 6)
    passes.outputs(lambda: world.model(x), coalitions)
    assert passes.fell_back is None
    far = x + 20.0
    shared = passes.outputs(lambda: world.model(far), coalitions)
    with torch.no_grad():
        separate = passes.separate(lambda: world.model(far), coalitions)
    assert all(map(same_outputs, shared, separate))
    assert passes.fell_back is not None
    assert "order" in passes.fell_back
    assert not any("forward" in module.__dict__ for module in world.model.modules())


class SideEffect(nn.Module):
    """Hands something on that is not its output: what a replay cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Remembering(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x))
        self.first.num_passes += 1
        return self.last(h) + float(self.first.num_passes)


class Remembering(nn.Linear):
    num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes = 0
        return super().forward(x)


def test_sharing_that_does_not_give_the_same_bits_is_given_up() -> None:
    world = blended(Animal(SideEffect, ZOO["mlp"].batch, (), ZOO["mlp"].loss))
    passes = CoalitionPasses(world.network)
    coalitions = every_coalition(world)
    x = torch.randn(4, 6)
    shared = passes.outputs(lambda: world.model(x), coalitions)
    assert passes.fell_back is not None
    assert "bits" in passes.fell_back
    with torch.no_grad():
        assert all(map(same_outputs, shared, passes.separate(lambda: world.model(x), coalitions)))


def test_a_failing_pass_leaves_the_model_as_it_was() -> None:
    world = blended("resnet")
    passes = CoalitionPasses(world.network)
    batch = world.animal.batches(1)[0]
    coalitions = every_coalition(world)
    passes.outputs(lambda: call_model(world.model, batch), coalitions)
    before = fingerprint(world.model)
    with pytest.raises(RuntimeError):
        passes.outputs(lambda: world.model(torch.randn(4, 5, 8, 8)), coalitions)
    assert fingerprint(world.model) == before
    assert all(slot.enabled for slot in world.network.all_slots())
