"""Users' training loops with a grower in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from esper.growth import Grower, Validation
from esper.growth.sites import call_model
from tests.growth.seeds import EAGER
from tests.growth.zoo import Animal

EPOCHS = 8


def make_grower(animal: Animal, *, model: nn.Module | None = None, scheduled: bool = True, **options: Any) -> Grower:
    """A grower over a fresh model; its default schedule keeps a seed after five epochs."""
    model = animal.model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS) if scheduled else None
    sample, *rest = animal.batches(3)
    options = {"epochs": EPOCHS, "controller": "schedule", "lifecycle": EAGER, "scheduler": scheduler, **options}
    evaluate = options.pop("evaluate", None) or Validation(model, rest, loss=options.pop("loss", None))
    return Grower(model, sample, optimizer, evaluate, **options)


def train_epoch(
    animal: Animal, grower: Grower, epoch: int, on_batch: Callable[[int], None] = lambda number: None, start: int = 0
) -> float:
    """One epoch of a user's loop. Draws follow from the epoch, and from the batch where it is begun anew."""
    model, (optimizer,) = grower.model, grower.optimizers.optimizers
    model.train()
    losses = []
    for number, batch in enumerate(animal.batches(4)[1:]):
        if number < start:
            continue
        torch.manual_seed(1000 * epoch + number)
        optimizer.zero_grad()
        loss = animal.loss(call_model(model, batch), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        on_batch(number)
    for scheduler in grower.optimizers.schedulers:
        scheduler.step()
    return sum(losses) / len(losses)


def run(animal: Animal, grower: Grower) -> Grower:
    """All epochs that are left."""
    for epoch in grower:
        grower.end_epoch(train_loss=train_epoch(animal, grower, epoch))
    return grower
