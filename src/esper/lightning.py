"""Growing a model inside a Lightning trainer.

    trainer = lightning.Trainer(max_epochs=20, callbacks=[esper.lightning.GrowCallback(budget=20_000)])
    trainer.fit(module, train_loader, val_loader)

Needs the extra `lightning`.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from esper.growth.callbacks import GrowingCallback, let_seeds_wait


class GrowCallback(GrowingCallback, Callback):  # type: ignore[misc]
    """Grows the module that is trained. One epoch of the trainer is one epoch of growth.

    Validation data is the trainer's unless `val` or `evaluate` is given. By default the module is called with the
    inputs of a batch, and its loss follows from the targets; `forward` and `loss` say otherwise. Checkpoints of the
    trainer hold everything: `trainer.fit(..., ckpt_path=...)` goes on to the bit, in the middle of an epoch too if the
    loader can. To load a grown module for inference, use `esper.load_grown(module, path)`.

    Attributes:
        result: The `GrowthResult`, once training is over.
    """

    def __init__(self, *, budget: int | None, **options: Any) -> None:
        super().__init__(budget=budget, **options)
        self._saved: dict[str, Any] | None = None
        self._loss_sum, self._num_batches = 0.0, 0
        self._hook: Any = None

    # ---- checkpoints

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before a checkpoint is read: the module is bare, and its seeds come later."""
        if stage == "fit":
            self._hook = let_seeds_wait(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """After everything."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of growth."""
        if self.grower is None:
            return {}
        return {
            "grower": self.grower.state_dict(),
            "loss_sum": self._loss_sum,
            "num_batches": self._num_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps it until the module and its optimizers are there."""
        self._saved = state_dict

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The state of optimizers and schedulers is that with seeds: it comes back with them."""
        if checkpoint.get("callbacks", {}).get(self.state_key):
            checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []

    # ---- training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is in place: growth begins, or goes on."""
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            raise ValueError("growing needs to know how long it has; give the trainer max_epochs")
        if trainer.world_size > 1:
            raise ValueError(f"growing in {trainer.world_size} processes is not supported; train with devices=1")
        saved = self._saved
        self.begin(
            pl_module,
            trainer.train_dataloader,
            trainer.val_dataloaders,
            trainer.optimizers,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            epochs=trainer.max_epochs,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            state=None if saved is None else saved["grower"],
        )
        if saved is not None:
            self._loss_sum, self._num_batches = saved["loss_sum"], saved["num_batches"]
            self._saved = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The controller decides."""
        assert self.grower is not None
        if self.grower.in_epoch and self._num_batches:
            self._end_epoch()  # of an epoch that was saved after its last batch and before its end
        if not self.grower.in_epoch:
            self.grower.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Adds the loss up."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._loss_sum += float(loss)
            self._num_batches += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Seeds are switched off one by one, and the epoch is booked."""
        entry = self._end_epoch()
        pl_module.log("grown_params", float(entry.params))

    def _end_epoch(self) -> Any:
        assert self.grower is not None
        loss = self._loss_sum / self._num_batches if self._num_batches else None
        self._loss_sum, self._num_batches = 0.0, 0
        return self.grower.end_epoch(train_loss=loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """What was not kept is taken out."""
        self.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The module is left without seeds that were not kept."""
        self.abandon()
