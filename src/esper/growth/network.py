"""Any model as a growing network: slots hang on its submodules, the model stays the user's own object.

Its type, its attributes, its forward pass and, while nothing grows, the keys of its state_dict are as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.sites import Forward, Sites
from esper.growth.slot import SiteSlot, extend_output
from esper.growth.structure import first_rows, num_rows, pick, tensors
from esper.growth.tracing import SLOT, Call, trace
from esper.kasmina import GrowingNetwork, blueprints_for
from esper.kasmina.layers import evaluating
from esper.kasmina.layout import count_macs, make_layout, mixing_of, strongest_mixing
from esper.kasmina.network import SeedOptimizer
from esper.kasmina.slot import SeedSlot
from esper.leyline import LifecycleConfig, SeedStage

SAMPLE_ROWS = 2


def _mixing_around(name: str, calls: Sequence[Call]) -> tuple[str, str]:
    """Strongest mixing of positions by what runs before a submodule's output is ready, and by what runs after it."""
    end = next(call.end for call in calls if call.name == name)
    before = strongest_mixing(mixing_of(call.module) for call in calls if call.end <= end)
    return before, strongest_mixing(mixing_of(call.module) for call in calls if call.start > end)


class AttachedNetwork(GrowingNetwork):
    """A model with a slot at each chosen site.

    Args:
        model: The user's model; it gets one hook and one child module per site.
        sample: A batch; two rows of it are kept to probe new seeds.
        sites: Where to attach slots.
        forward: Runs the model on a batch.
        lifecycle: Limits of growth.
        blueprints: What may be planted; None for all of each site's kind.
        nats_per_loss: Unit of the user's loss.

    Raises:
        ValueError: The model does not give the same output with empty slots. It is as it was before.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        sites: Sites,
        forward: Forward,
        lifecycle: LifecycleConfig,
        *,
        blueprints: Sequence[str] | None = None,
        nats_per_loss: float = 1.0,
    ) -> None:
        self.model = model
        self.sample = first_rows(sample, SAMPLE_ROWS)
        self.sites = sites
        self.lifecycle = lifecycle
        self.topology_version = 0
        self.train_loss = self.val_loss = None
        self._optimizer: SeedOptimizer | None = None
        self._forward = forward
        self._host = dict(model.named_parameters())
        with evaluating(model):
            calls = trace(model, self.run_sample)
        specs = [
            site.slot_spec(f"r0c{position}", *_mixing_around(site.name, calls))
            for position, site in enumerate(sites.chosen)
        ]
        kinds = [site.kind for site in sites.chosen]
        offered = [key for kind in dict.fromkeys(kinds) for key in blueprints_for(kind)]
        macs = count_macs(model, self.run_sample) // num_rows(self.sample)
        self.layout = make_layout(
            specs,
            kinds,
            offered if blueprints is None else blueprints,
            host_params=sum(param.numel() for param in self._host.values()),
            host_macs=macs,
        )
        pairs = zip(sites.chosen, specs, strict=True)
        self._slots = {spec.slot_id: SiteSlot(site, spec, lifecycle, nats_per_loss) for site, spec in pairs}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._attach()

    def _attach(self) -> None:
        with evaluating(self.model):
            before = self.run_sample()
        try:
            for slot in self._slots.values():
                module = self.model.get_submodule(slot.site.name)
                slot.train(module.training)
                module.add_module(SLOT, slot)
                self._handles.append(module.register_forward_hook(extend_output))
            with evaluating(self.model):
                after = self.run_sample()
            if not same_outputs(before, after):
                raise ValueError(
                    f"{type(self.model).__name__} does not give the same output twice in eval mode, so nothing can be "
                    "measured on it; take out what is random there"
                )
        except BaseException as error:
            self.detach()
            if isinstance(error, RuntimeError):
                raise ValueError(str(error)) from error
            raise

    def detach(self) -> None:
        """Takes every slot away that holds no kept seed; a site with a kept seed stays extended by it."""
        for slot, handle in zip(self._slots.values(), self._handles, strict=False):
            if slot.stage is not SeedStage.FOSSILIZED:
                handle.remove()
        for slot in self._slots.values():
            module = self.model.get_submodule(slot.site.name)
            if slot.stage is not SeedStage.FOSSILIZED and module._modules.get(SLOT) is slot:
                del module._modules[SLOT]

    # ---- structure

    def slot(self, slot_id: str) -> SiteSlot:
        """Looks a slot up; ValueError with the known ids if there is none."""
        self.layout.slot_position(slot_id)
        return self._slots[slot_id]

    def all_slots(self) -> tuple[SiteSlot, ...]:
        """The slots in execution order."""
        return tuple(self._slots.values())

    def host_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of the user's model by name, tied ones once."""
        return self._host

    def slot_parameters(self, slot_id: str) -> dict[str, nn.Parameter]:
        """Every parameter of a slot's seed and gate, by its name in the model."""
        slot = self.slot(slot_id)
        return {f"{slot.site.name}.{SLOT}.{name}": param for name, param in slot.named_parameters()}

    def bind(self, optimizer: SeedOptimizer) -> None:
        """From now on, seeds enter and leave this optimizer."""
        self._optimizer = optimizer

    # ---- passes

    def run_sample(self) -> Any:
        """The model's output for the rows that were kept."""
        return self._forward(self.model, self.sample)

    def sample_features(self, slot: SeedSlot) -> tuple[Tensor, Tensor]:
        """The features of the sample that the slot reads, in the precision of the site's parameters."""
        assert isinstance(slot, SiteSlot)
        module = self.model.get_submodule(slot.site.name)
        seen: list[Tensor] = []
        handle = module.register_forward_hook(
            lambda _module, _args, output: seen.append(pick(output, slot.site.path).clone()), prepend=True
        )
        try:
            with evaluating(self.model):
                self.run_sample()
        finally:
            handle.remove()
        params = [p for p in (*module.parameters(), *self.model.parameters()) if p.is_floating_point()]
        features = slot.site.canonical(seen[0]).contiguous()
        features = features.to(params[0].dtype) if params else features
        return features, features

    @contextmanager
    def coalition(self, slot_ids: frozenset[str]) -> Iterator[None]:
        """Switches the blended seeds of all other slots off for the block."""
        try:
            for slot_id, slot in self._slots.items():
                slot.enabled = slot_id in slot_ids
            yield
        finally:
            for slot in self._slots.values():
                slot.enabled = True


def same_outputs(left: Any, right: Any) -> bool:
    """True if two outputs hold the same numbers; one that is not a number is the same as another."""
    pairs = list(zip(tensors(left), tensors(right), strict=False))
    return bool(pairs) and all(
        a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all()) for (_, a), (_, b) in pairs
    )
