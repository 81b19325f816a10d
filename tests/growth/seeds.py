"""Growing networks over the zoo, brought into a stage by hand, and the training step of a user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.network import AttachedNetwork
from esper.growth.optimizers import UserOptimizers
from esper.growth.sites import call_model, find_sites
from esper.kasmina import EpochMeasurement, begin_epoch, end_epoch
from esper.leyline import DEFAULT_LIFECYCLE, Attribution, LifecycleConfig, SeedStage
from tests.growth.zoo import Animal

EAGER = replace(
    DEFAULT_LIFECYCLE, harm_tolerance=1e9, min_live_fraction=0.0, max_residual_ratio=1e9, min_contribution=-1e9
)
"""Gates that only ask for the right stage, because these tests decide when a seed moves."""
BLUEPRINTS = {"cnn": "cnn.conv", "transformer": "transformer.conv_causal", "mlp": "mlp.mlp_small"}

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@dataclass
class World:
    """A model with slots, and the optimizer that trains it."""

    animal: Animal
    model: nn.Module
    optimizer: torch.optim.Optimizer
    network: AttachedNetwork
    bridge: UserOptimizers

    def plant(self, *slot_ids: str, blend: str = "linear_fast") -> None:
        for position, slot_id in enumerate(slot_ids or self.network.layout.slot_ids):
            kind = self.network.slot(slot_id).topology
            self.network.germinate(slot_id, BLUEPRINTS[kind], blend, rng_seed=position)
        begin_epoch(self.network)

    def end_epoch(self) -> None:
        blended = [slot.spec.slot_id for slot in self.network.all_slots() if slot.stage.is_blended]
        worth = {slot_id: Attribution(contribution_pp=2.0, solo_pp=None, interaction_pp=None) for slot_id in blended}
        end_epoch(
            self.network,
            EpochMeasurement(train_loss=1.0, val_loss=1.0, attributions=worth, gradients=self.bridge.finish_epoch()),
        )

    def blend(self) -> None:
        """From TRAINING to alpha 1/3."""
        self.end_epoch()
        for slot in self.network.all_slots():
            if slot.stage is SeedStage.TRAINING:
                self.network.advance(slot.spec.slot_id)
        begin_epoch(self.network)

    def keep(self) -> None:
        """From alpha 1/3 to FOSSILIZED."""
        for _ in range(3):
            self.end_epoch()
            begin_epoch(self.network)
        for slot in self.network.all_slots():
            if slot.stage is SeedStage.HOLDING:
                self.network.fossilize(slot.spec.slot_id)

    def shake(self, size: float = 0.3) -> None:
        """Gives every seed something to say."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for slot in self.network.all_slots():
                if slot.seed is not None:
                    slot.seed.gamma.copy_(torch.randn(slot.seed.gamma.shape, generator=generator) * size)


def attach(
    animal: Animal,
    make_optimizer: MakeOptimizer = adamw,
    *,
    model: nn.Module | None = None,
    lifecycle: LifecycleConfig = EAGER,
    schedulers: Callable[[torch.optim.Optimizer], list[Any]] = lambda optimizer: [],
    scaler: torch.amp.GradScaler | None = None,
) -> World:
    """Slots at the sites that the finder chooses."""
    model = animal.model() if model is None else model
    sample = animal.batches(1)[0]
    optimizer = make_optimizer([param for param in model.parameters() if param.requires_grad])
    network = AttachedNetwork(model, sample, find_sites(model, sample), call_model, lifecycle)
    bridge = UserOptimizers(network, [optimizer], schedulers(optimizer), scaler)
    network.bind(bridge)
    return World(animal, model, optimizer, network, bridge)


@dataclass(frozen=True)
class Habits:
    """How a user trains."""

    make_optimizer: MakeOptimizer = adamw
    clip: bool = True
    accumulate: int = 1
    scaler: Callable[[], torch.amp.GradScaler] | None = None
    unscale: bool = True
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Callable[[nn.Module], object] = lambda model: None
    change: Callable[[Any], Any] = lambda batch: batch


PLAIN = Habits()


def train(
    animal: Animal,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    habits: Habits = PLAIN,
    scaler: torch.amp.GradScaler | None = None,
    steps: int = 4,
) -> Iterator[float]:
    """A training loop that knows nothing of seeds. Yields the losses."""
    torch.manual_seed(3)
    model.train()
    batches = iter(animal.batches(steps * habits.accumulate))
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(habits.accumulate):
            batch = habits.change(next(batches))
            with habits.autocast():
                loss: Tensor = animal.loss(call_model(model, batch), batch) / habits.accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            yield loss.item()
        if scaler is not None and habits.unscale:
            scaler.unscale_(optimizer)
        if habits.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
