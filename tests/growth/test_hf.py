"""Growing inside Hugging Face's Trainer: its accumulation, clipping, schedules and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
datasets = pytest.importorskip("datasets", reason="needs the hf extra")

from esper.growth import load_grown  # noqa: E402
from esper.hf import GrowCallback  # noqa: E402
from tests.growth.seeds import EAGER  # noqa: E402
from tests.growth.zoo import TIME, VOCABULARY, gpt2  # noqa: E402

EPOCHS = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    return gpt2()


def rows(count: int) -> Any:
    tokens = torch.randint(VOCABULARY, (count, TIME), generator=torch.Generator().manual_seed(1))
    return datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})


class Stop(Exception):
    pass


class StopAt(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.step is not None and state.global_step >= self.step:
            raise Stop


def fit(
    folder: Path,
    *,
    stop: int | None = None,
    resume: Path | None = None,
    save: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[nn.Module, GrowCallback]:
    network = model()
    options = {"save_strategy": "no", **(save or {})}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    trainer = transformers.Trainer(
        network, args, train_dataset=rows(32), eval_dataset=rows(8), callbacks=[StopAt(stop)]
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    grow = GrowCallback(budget=None, val=trainer.get_eval_dataloader(), controller="schedule", lifecycle=EAGER, **more)
    trainer.add_callback(grow)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return network, grow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, GrowCallback]:
    return fit(tmp_path_factory.mktemp("whole"))


def test_a_language_model_grows_while_the_trainer_trains_it(whole: Any) -> None:
    network, grow = whole
    (seed,) = grow.result.kept
    assert seed.site == "transformer.h.0"
    assert seed.blueprint.startswith("transformer.")
    assert grow.result.scale.name == "loss per token (nats)"
    assert grow.result.metric < grow.result.untrained.metric
    assert all(entry.train_loss is not None for entry in grow.result.history)
    fresh = load_grown(model(), network.state_dict())
    tokens = torch.randint(VOCABULARY, (2, TIME))
    with torch.no_grad():
        assert torch.equal(fresh.eval()(tokens).logits, network.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("save", "stop"),
    [({"save_strategy": "steps", "save_steps": 5}, 12), ({"save_strategy": "epoch"}, 14)],
    ids=["in_the_middle", "epoch_end"],
)
def test_a_resumed_run_gives_the_bits_of_one_that_was_not_stopped(
    save: dict[str, Any], stop: int, whole: Any, tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        fit(tmp_path, stop=stop, save=save)
    newest = max(tmp_path.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    network, grow = fit(tmp_path, resume=newest, save=save)
    expected = whole[0].state_dict()
    assert network.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in network.state_dict().items())
    assert [entry.metric for entry in grow.result.history] == [entry.metric for entry in whole[1].result.history]
    assert grow.result.moves == whole[1].result.moves


def test_a_saved_model_says_what_has_grown(whole: Any, tmp_path: Path) -> None:
    network, _ = whole
    network.save_pretrained(tmp_path)
    fresh = load_grown(model(), tmp_path).eval()
    tokens = torch.randint(VOCABULARY, (2, TIME))
    with torch.no_grad():
        assert torch.equal(fresh(tokens).logits, network.eval()(tokens).logits)


def test_a_checkpoint_without_its_grower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        fit(tmp_path, stop=6, save={"save_strategy": "steps", "save_steps": 5})
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    (checkpoint / "esper_grower.pt").rename(tmp_path / "away.pt")
    with pytest.raises(ValueError, match=r"goes on at step 5, but there is no .*esper_grower.pt; give GrowCallback"):
        fit(tmp_path, resume=checkpoint)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "away.pt").rename(tmp_path / "elsewhere" / "esper_grower.pt")
    _, grow = fit(tmp_path, resume=checkpoint, resume_from=tmp_path / "elsewhere")
    assert len(grow.result.history) == EPOCHS


def test_older_weights_at_the_end_are_refused(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        fit(tmp_path, save=best)
