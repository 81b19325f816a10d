"""Growing a model inside Hugging Face's Trainer.

    trainer = transformers.Trainer(model, args, train_dataset=train, eval_dataset=val)
    trainer.add_callback(esper.hf.GrowCallback(budget=200_000, val=trainer.get_eval_dataloader()))
    trainer.train()

Needs the extra `hf`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from esper.growth.callbacks import GrowingCallback, let_seeds_wait
from esper.leyline.files import write_atomic

STATE_FILE = "esper_grower.pt"
"""File in a checkpoint of the trainer that holds the grower."""


class GrowCallback(GrowingCallback, TrainerCallback):  # type: ignore[misc]
    """Grows the model that is trained. One epoch of the trainer is one epoch of growth.

    Checkpoints of the trainer hold everything: `trainer.train(resume_from_checkpoint=...)` goes on to the bit, in the
    middle of an epoch too. To load a grown model for inference, make the bare one and use
    `esper.load_grown(model, folder)`.

    Args:
        budget: Most parameters the model and its seeds may have together; None for no limit.
        resume_from: The checkpoint that the trainer resumes from, if it is not in the trainer's own output folder.
        **options: Those of `esper.growth.callbacks.GrowingCallback`, of which `val` is needed.

    Attributes:
        result: The `GrowthResult`, once training is over.
    """

    def __init__(self, *, budget: int | None, resume_from: str | Path | None = None, **options: Any) -> None:
        super().__init__(budget=budget, **options)
        self._resume_from = None if resume_from is None else Path(resume_from)
        self._hooks: list[RemovableHandle] = []

    # ---- checkpoints

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Before a checkpoint is read: the model is bare, and its seeds come later."""
        self._hooks.append(let_seeds_wait(model))

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Adds the grower to a checkpoint."""
        if self.grower is not None:
            buffer = io.BytesIO()
            torch.save(self.grower.state_dict(), buffer)
            write_atomic(_checkpoint(args, state) / STATE_FILE, buffer.getvalue())

    def _saved(self, args: Any, state: Any) -> Any:
        """The grower of the checkpoint that training goes on from; None where it begins."""
        if not state.global_step:
            return None
        file = (self._resume_from or _checkpoint(args, state)) / STATE_FILE
        if not file.is_file():
            raise ValueError(
                f"training goes on at step {state.global_step}, but there is no {file}; give GrowCallback resume_from= "
                "with the checkpoint's folder"
            )
        return torch.load(file, map_location="cpu", weights_only=True)

    # ---- training

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        **more: Any,
    ) -> None:
        """Everything is in place: growth begins, or goes on."""
        if args.world_size > 1:
            raise ValueError(f"growing in {args.world_size} processes is not supported; train in one")
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end would put older weights into the grown model; set it to False and use the last"
            )
        if not self._hooks:  # added after the trainer was made
            self._hooks.append(let_seeds_wait(model))
        grower = self.begin(
            model,
            train_dataloader,
            eval_dataloader,
            [optimizer],
            [] if lr_scheduler is None else [lr_scheduler],
            epochs=int(state.num_train_epochs),
            scaler=getattr(optimizer, "scaler", None),
            state=self._saved(args, state),
        )
        grower.optimizers.hide_seeds()  # the trainer reads its own file of the optimizer before seeds come back

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The controller decides."""
        assert self.grower is not None
        if not self.grower.in_epoch:
            self.grower.begin_epoch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Seeds are switched off one by one, and the epoch is booked."""
        assert self.grower is not None
        self.grower.end_epoch(train_loss=_last_loss(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """What was not kept is taken out."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _last_loss(state: Any) -> float | None:
    """The training loss that the trainer logged last in this epoch; None if it logged none."""
    begun = state.epoch - 1.0
    found = [entry["loss"] for entry in state.log_history if "loss" in entry and entry["epoch"] > begun]
    return float(found[-1]) if found else None
