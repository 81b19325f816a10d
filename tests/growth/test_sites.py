"""Where models can grow: found by what they compute, and left as they were."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth.sites import Site, find_sites
from tests.growth.zoo import CLASSES, ROWS, ZOO, Animal, BasicBlock, Recurrent, ResNet


def fingerprint(model: nn.Module) -> str:
    """Over weights, buffers, modes, flags, hooks and children."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    for name, module in model.named_modules():
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in module.__dict__)
        digest.update(f"{name} {type(module)} {module.training} {hooks}".encode())
    for name, param in model.named_parameters():
        digest.update(f"{name} {param.requires_grad} {param.grad is None}".encode())
    return digest.hexdigest()


@pytest.mark.parametrize("name", ZOO)
def test_blocks_are_chosen_and_the_model_is_left_as_it_was(name: str) -> None:
    animal: Animal = ZOO[name]
    model = animal.model()
    before, random_state = fingerprint(model), torch.get_rng_state()
    found = find_sites(model, animal.batches(1)[0])
    assert tuple(site.name for site in found.chosen) == animal.sites
    assert all(site.is_cut for site in found.chosen)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_frozen_model_has_the_same_sites() -> None:
    model = ZOO["resnet"].model().requires_grad_(False)
    found = find_sites(model, ZOO["resnet"].batches(1)[0])
    assert tuple(site.name for site in found.chosen) == ZOO["resnet"].sites
    assert not any(param.requires_grad for param in model.parameters())


def test_nothing_grows_in_a_branch_that_a_skip_leads_around() -> None:
    """An nn.Identity hands the stem's own tensor on; a seed after it would sit in the skip alone."""
    found = find_sites(ResNet(), torch.randn(4, 3, 8, 8))
    sites = {site.name: site for site in (*found.chosen, *found.others)}
    assert not sites["layer1.0.skip"].is_cut
    assert not sites["layer2.0.conv2"].is_cut
    assert sites["bn1"].is_cut


class Transposing(nn.Module):
    """Features whose channels are where the layer before them put them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 7, 3, padding=1)
        self.relu = nn.ReLU()
        self.mix = nn.Linear(9, 9)
        self.last = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(self.relu(self.conv(x)))).mean(1)


def test_channels_are_where_the_layer_put_them() -> None:
    found = find_sites(Transposing(), torch.randn(4, 4, 9))
    sites = {site.name: site for site in (*found.chosen, *found.others)}
    assert (sites["conv"].axes, sites["conv"].channels, sites["conv"].positions) == ((0, 2, 1), 7, 9)
    assert sites["relu"].axes == (0, 2, 1), "of the layer before it"
    assert (sites["mix"].axes, sites["mix"].channels) == ((0, 1, 2), 9)
    time_first = find_sites(Recurrent(batch_first=False), torch.randint(9, (ROWS, 5)))
    assert {site.name: site.axes for site in time_first.chosen}["gru"] == (1, 0, 2)


def test_axes_go_there_and_back() -> None:
    site = find_sites(Transposing(), torch.randn(4, 4, 9), names=["conv"]).chosen[0]
    features = torch.randn(2, 7, 9)
    assert site.canonical(features).shape == (2, 9, 7)
    assert torch.equal(site.original(site.canonical(features)), features)


def test_sites_are_chosen_by_name_and_pattern() -> None:
    model = ResNet(blocks=2)
    sample = torch.randn(4, 3, 8, 8)
    assert _names(find_sites(model, sample, names=["layer3.1", "layer1.*"])) == ["layer1.0", "layer1.1", "layer3.1"]


def _names(found: Any) -> list[str]:
    return [site.name for site in found.chosen]


def test_another_name_for_the_same_tensor_leads_to_its_site() -> None:
    animal = ZOO["bert"]
    found = find_sites(animal.model(), animal.batches(1)[0], names=["bert.encoder.layer.1.output"])
    assert _names(found) == ["bert.encoder.layer.1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer9.0", r"calls no submodule 'layer9.0'.*Possible: conv1"),
        ("layer1", "a container; name its last part"),
        ("layer1.0.relu", "called 2 times"),
        ("fc", "holds the last layer"),
    ],
)
def test_a_name_that_is_no_site_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_sites(ResNet(), torch.randn(4, 3, 8, 8), names=[name])


class Restless(nn.Module):
    """Skips a layer in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        h = self.first(x)
        return self.last(self.second(h) if self.passes % 2 else h)


def test_a_model_that_changes_its_order_of_calls_is_refused() -> None:
    model = Restless()
    before = fingerprint(model)
    with pytest.raises(ValueError, match="same submodules in the same order"):
        find_sites(model, torch.randn(4, 6))
    assert fingerprint(model) == before


def test_a_model_without_a_site_is_refused_with_reasons() -> None:
    with pytest.raises(ValueError, match=r"no place to grow in Linear \(it has no submodules\)"):
        find_sites(nn.Linear(4, 2), torch.randn(4, 4))
    with pytest.raises(ValueError, match="0: 2 channels"):
        find_sites(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"0: features of shape \[4, 8, 2, 2, 2\] are no rows, sequences or images"):
        find_sites(nn.Sequential(nn.Conv3d(1, 8, 1), nn.Conv3d(8, 8, 2)), torch.randn(4, 1, 2, 2, 2))
    with pytest.raises(ValueError, match="at least two rows, got 1"):
        find_sites(ResNet(), torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match="k must be at least 1"):
        find_sites(ResNet(), torch.randn(4, 3, 8, 8), k=0)


def test_a_failing_pass_leaves_no_hooks_behind() -> None:
    model = ResNet()
    before = fingerprint(model)
    with pytest.raises(RuntimeError):
        find_sites(model, torch.randn(4, 5, 8, 8))
    assert fingerprint(model) == before


def test_the_table_says_what_would_be_used() -> None:
    text = str(find_sites(ResNet(), torch.randn(4, 3, 8, 8)))
    marked = [line.split()[1] for line in text.splitlines() if line.startswith("* layer")]
    assert marked == ["layer1.0", "layer2.0", "layer3.0"]
    assert "behind a shortcut" in text


def test_a_block_is_a_site_of_its_own_kind() -> None:
    model = nn.Sequential(BasicBlock(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8), nn.Linear(8, 2))
    found = find_sites(model, torch.randn(4, 4, 8, 8))
    kinds: dict[str, Site] = {site.name: site for site in (*found.chosen, *found.others)}
    assert (kinds["0"].kind, kinds["3"].kind) == ("cnn", "mlp")
