"""Epochs in torch, batch by batch: every batch is gathered once and then seen by all envs, each on its own stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch

from esper.tolaria.batches import Batch
from esper.tolaria.engine import Batches, EnvT
from esper.tolaria.runtime import CUDATimer


@dataclass(slots=True, kw_only=True, eq=False)
class TorchExecutor(Generic[EnvT]):
    """Runs any env, by what is done to one batch."""

    train_batch: Callable[[EnvT, Batch], None]
    eval_batch: Callable[[EnvT, Batch], None]

    def supports(self, env: EnvT) -> bool:
        """Every env can run in torch."""
        return True

    def train(self, envs: Sequence[EnvT], batches: Batches) -> None:
        """One update of every env per batch."""
        for by_device in batches:
            for env in envs:
                self._run(env, env.placement.train_timer, self.train_batch, by_device)

    def validate(self, envs: Sequence[EnvT], batches: Batches) -> None:
        """Every env over all batches."""
        for by_device in batches:
            for env in envs:
                self._run(env, env.placement.val_timer, self.eval_batch, by_device)

    def _run(
        self,
        env: EnvT,
        timer: CUDATimer,
        work: Callable[[EnvT, Batch], None],
        by_device: Mapping[torch.device, Batch],
    ) -> None:
        batch = by_device[env.placement.device]
        env.placement.receive((batch.inputs, batch.targets))
        with env.placement.running(), timer:
            work(env, batch)
