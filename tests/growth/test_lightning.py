"""Growing inside a Lightning trainer: closures, checkpoints at any moment, and bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="needs the lightning extra")

from esper.growth import load_grown  # noqa: E402
from esper.lightning import GrowCallback  # noqa: E402
from tests.growth.seeds import EAGER  # noqa: E402
from tests.growth.zoo import SkipMLP  # noqa: E402

EPOCHS = 7

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = SkipMLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


class StatefulBatches:
    """A loader that knows where it is, without which Lightning cannot go on in the middle of an epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position, self.start = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.position, self.start = self.start, 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator)
    y = x.square().sum(1, keepdim=True)
    return StatefulBatches(list(DataLoader(TensorDataset(x, y), 12))), DataLoader(TensorDataset(x[:24], y[:24]), 12)


class SeedBatches(lightning.Callback):  # type: ignore[misc]
    """Dropout of a batch follows from its number, so that a resumed run draws as the whole one did."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(trainer.global_step)


class Stop(Exception):
    pass


class StopAt(lightning.Callback):  # type: ignore[misc]
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.step is not None and trainer.global_step >= self.step:
            raise Stop


def make_trainer(*callbacks: Any, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def fit(
    folder: Path,
    *,
    stop: int | None = None,
    resume: Path | None = None,
    with_val: bool = True,
    save: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Module, GrowCallback]:
    module = Module()
    train, val = data()
    grow = GrowCallback(
        budget=None, controller="schedule", lifecycle=EAGER, **({} if with_val else {"val": val}), **options
    )
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, **(save or {}))
    trainer = make_trainer(SeedBatches(), StopAt(stop), grow, checkpoints, gradient_clip_val=1.0)
    trainer.fit(module, train, val if with_val else None, ckpt_path=resume, weights_only=False)
    return module, grow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Module, GrowCallback]:
    return fit(tmp_path_factory.mktemp("whole"), save={"every_n_train_steps": 5})


def test_a_module_grows_while_lightning_trains_it(whole: Any) -> None:
    module, grow = whole
    (seed,) = grow.result.kept
    assert seed.site == "net.blocks.0"
    assert seed.kept == 4
    assert len(grow.result.history) == EPOCHS
    assert all(entry.train_loss is not None for entry in grow.result.history)
    fresh = load_grown(Module(), module.state_dict())
    x = torch.randn(3, 6)
    assert torch.equal(fresh.eval()(x), module.eval()(x))


@pytest.mark.parametrize(
    ("save", "with_val", "stop"),
    [
        ({"every_n_train_steps": 5}, True, 12),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, True, 14),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, True, 14),
        ({"every_n_epochs": 1}, False, 18),
    ],
    ids=["in_the_middle", "epoch_end", "validation_end", "without_validation"],
)
def test_a_resumed_fit_gives_the_bits_of_one_that_was_not_stopped(
    save: dict[str, Any], with_val: bool, stop: int, whole: Any, tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        fit(tmp_path, stop=stop, save=save, with_val=with_val)
    newest = max(tmp_path.glob("*.ckpt"), key=lambda file: int(file.stem.split("step=")[1]))
    module, grow = fit(tmp_path, resume=newest, save=save, with_val=with_val)
    expected = whole[0].state_dict()
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in module.state_dict().items())
    assert [entry.metric for entry in grow.result.history] == [entry.metric for entry in whole[1].result.history]
    assert grow.result.moves == whole[1].result.moves


def test_a_checkpoint_of_a_growing_module_says_what_has_grown(tmp_path: Path, whole: Any) -> None:
    fit(tmp_path, save={"every_n_epochs": EPOCHS, "save_on_train_epoch_end": True})
    (file,) = tmp_path.glob("*.ckpt")
    state = torch.load(file, weights_only=False)["state_dict"]
    with pytest.raises(RuntimeError, match="esper_slot"):
        Module().load_state_dict(state)
    module = load_grown(Module(), state).eval()
    x = torch.randn(3, 6)
    assert torch.equal(module(x), whole[0].eval()(x))


def test_a_fit_that_fails_leaves_no_live_seed(tmp_path: Path) -> None:
    module = Module()
    train, val = data()
    grow = GrowCallback(budget=None, controller="schedule", lifecycle=EAGER)
    trainer = make_trainer(StopAt(6), grow, enable_checkpointing=False)
    with pytest.raises(Stop):
        trainer.fit(module, train, val)
    assert list(module.state_dict()) == list(Module().state_dict())


def test_what_cannot_work_is_said_before_training() -> None:
    train, val = data()
    trainer = make_trainer(GrowCallback(budget=9), enable_checkpointing=False)
    with pytest.raises(ValueError, match="leaves no room"):
        trainer.fit(Module(), train, val)


def test_the_loss_of_a_module_may_be_any(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.smooth_l1_loss(output, target)

    _, grow = fit(
        tmp_path, loss=loss, metric=lambda output, target: float((output - target).abs().mean()), higher_is_better=False
    )
    assert not grow.result.scale.higher_is_better
