"""How a host is optimised, as plain numbers and names. Optimizers, parameter groups and augmentation are tolaria's."""

from __future__ import annotations

import math

from esper.leyline.errors import check_known
from esper.leyline.record import record

OPTIMIZERS: tuple[str, ...] = ("adamw", "sgd")
SCHEDULES: tuple[str, ...] = ("constant", "cosine")
AUGMENTATIONS: tuple[str, ...] = ("crop_flip",)
FINAL_LR_FACTOR = 0.05


@record
class OptimSpec:
    """The optimizer of a host and of the seeds that grow in it."""

    kind: str
    """One of OPTIMIZERS."""
    lr: float
    """Learning rate at the first epoch."""
    weight_decay: float
    """Applies to the host's own parameters only."""
    momentum: float
    """For sgd; adamw takes 0."""
    schedule: str
    """One of SCHEDULES."""

    def __post_init__(self) -> None:
        check_known("optimizer", self.kind, OPTIMIZERS)
        check_known("schedule", self.schedule, SCHEDULES)
        if not 0.0 < self.lr < math.inf:
            raise ValueError(f"lr must be a finite number above 0, got {self.lr}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a finite number of at least 0, got {self.weight_decay}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.kind == "adamw" and self.momentum != 0.0:
            raise ValueError(f"momentum is for sgd; adamw takes 0, got {self.momentum}")


def lr_factor(schedule: str, epoch: int, horizon: int) -> float:
    """Learning rate of an epoch as a share of the first one. A seed counts both from its birth on.

    Args:
        schedule: "constant", or "cosine" from 1 in the first epoch to FINAL_LR_FACTOR in the last.
        epoch: 0-based epoch.
        horizon: Epochs in the episode.
    """
    check_known("schedule", schedule, SCHEDULES)
    if not 0 <= epoch < horizon:
        raise ValueError(f"epoch must be in 0..{horizon - 1} for a horizon of {horizon}, got {epoch}")
    if schedule == "constant" or horizon == 1:
        return 1.0
    fall = 0.5 * (1.0 - math.cos(math.pi * epoch / (horizon - 1)))
    return 1.0 - (1.0 - FINAL_LR_FACTOR) * fall
