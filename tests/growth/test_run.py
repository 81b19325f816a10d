"""`esper.grow`: five lines, any data, files that say what happened, and no run that is lost."""

from __future__ import annotations

import csv
import importlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growth.comparison import ALONE, AT_ONCE, GROWN, WIDER, _width_for
from esper.growth.exporting import export_grown, load_grown
from esper.growth.sites import call_model
from esper.growth.training import GrowthRun
from esper.leyline import ModelFileError, SeedStage
from esper.runtime.datasets import load_dataset
from tests.growth.seeds import attach, train
from tests.growth.test_sites import fingerprint
from tests.growth.zoo import ZOO

EPOCHS = 8


def make_net(width: float = 1.0) -> nn.Module:
    """Sees single pixels only, so that a convolution that grows in it pays."""
    channels = round(6 * width)
    return nn.Sequential(
        nn.Conv2d(1, channels, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10)
    )


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make_net()


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    found = load_dataset("digits")
    return (found.train.inputs[:480], found.train.targets[:480]), (found.val.inputs, found.val.targets)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def grow(digits: Any, model: nn.Module | None = None, **options: Any) -> esper.GrowthResult:
    options = {"budget": 3_000, "epochs": EPOCHS, "optimizer": adamw, "verbose": False, "sites": ["1"], **options}
    return esper.grow(net() if model is None else model, *digits, **options)


@pytest.fixture(scope="module")
def grown(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[esper.GrowthResult, Path]:
    folder = tmp_path_factory.mktemp("grown")
    return grow(digits, receipts=True, compare=True, wider=make_net, out=folder), folder


# ---- what it does


def test_a_blind_network_learns_to_see(grown: Any) -> None:
    result, _ = grown
    (seed,) = result.kept
    assert (seed.site, seed.blueprint, seed.planted, seed.kept) == ("1", "cnn.conv", 0, 4)
    assert result.metric > 80.0
    assert seed.worth is not None
    assert seed.worth > 20.0


def test_the_same_arguments_give_the_same_bits(digits: Any, grown: Any) -> None:
    model, state = net(), torch.get_rng_state()
    again = grow(digits, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), grown[0].model.parameters(), strict=True))
    other = grow(digits, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(again.model.parameters(), other.model.parameters(), strict=True))


def test_data_may_come_in_any_form(digits: Any, grown: Any) -> None:
    (x, y), (val_x, val_y) = digits
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(val_x, val_y), batch_size=256)
    result = esper.grow(
        net(), dataset, loader, budget=3_000, epochs=EPOCHS, optimizer=adamw, sites=["1"], verbose=False
    )
    assert result.metric > 80.0
    assert len(result.kept) == 1


def test_an_optimizer_and_a_scheduler_of_the_users_own_are_used(digits: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    result = grow(digits, model, optimizer=optimizer, scheduler=scheduler)
    assert result.history[0].learning_rate == 0.3
    assert result.history[-1].learning_rate < 0.3
    assert result.seeds


def test_other_metrics_and_losses_are_used(digits: Any) -> None:
    def worst_class(output: Tensor, target: Tensor) -> float:
        hits = output.argmax(1) == target
        return min(float(hits[target == label].float().mean()) for label in range(10))

    def smooth(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, label_smoothing=0.1)

    result = grow(digits, metric=worst_class, loss=smooth)
    assert 0.2 < result.metric <= 1.0
    assert (result.scale.best, result.scale.name) == (1.0, "metric")


def test_a_scale_of_the_users_own_says_what_a_metric_means(digits: Any) -> None:
    def score(output: Tensor, target: Tensor) -> float:
        return -float(nn.functional.cross_entropy(output, target))

    with pytest.raises(ValueError, match=r"cannot tell what a perfect metric would be.*scale=esper.MetricScale"):
        grow(digits, metric=score)
    scale = esper.MetricScale(name="log-likelihood", guess=-2.3, best=0.0, guess_loss=2.3)
    result = grow(digits, metric=score, scale=scale, controller="wait_only", epochs=5)
    assert result.scale == scale
    assert "log-likelihood, validation: -" in result.table()


def test_the_policy_that_comes_with_esper_decides(digits: Any, recwarn: pytest.WarningsRecorder) -> None:
    result = grow(digits, controller="pretrained")
    assert not [str(one.message) for one in recwarn if "outside what it knows" in str(one.message)]
    assert result.params <= 3_000
    again = grow(digits, controller="pretrained")
    assert result.metric == again.metric


def test_test_data_has_the_final_word(digits: Any) -> None:
    _, (val_x, val_y) = digits
    options = {"controller": "wait_only", "epochs": 5}
    other = val_x[:50], (val_y[:50] + 1) % 10  # wrong labels, so that the score can come from nowhere else
    result = grow(digits, test=other, compare=True, **options)
    assert result.test is not None
    with torch.no_grad():
        hits = result.model.eval()(other[0]).argmax(1) == other[1]
    assert result.test.metric == 100.0 * float(hits.double().mean())
    assert result.metric == grow(digits, **options).metric, "it decides nothing"
    assert f"accuracy (%), test: {result.test.metric:.4g}" in result.table()
    found = result.comparison
    assert found is not None
    assert (found.split, found.rows, found.arm(GROWN).metrics) == ("test", 50, (result.test.metric,))
    with pytest.raises(ValueError, match="the test data is empty"):
        grow(digits, test=[])


def test_import_esper_loads_no_torch_and_has_its_names() -> None:
    code = (
        "import sys, esper\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'grow', 'Grower', 'find_sites', 'GrowthResult'} <= set(dir(esper))\n"
        "assert callable(esper.grow) and 'torch' in sys.modules\n"
        "assert esper.sklearn.GrowingClassifier\n"
        "import esper.growth\n"
        "assert callable(esper.grow), 'the name of the function is not that of a module'\n"
        "try:\n    esper.shrink\nexcept AttributeError as error:\n    assert 'shrink' in str(error)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    importlib.import_module("esper.growth")
    assert callable(esper.grow)


@pytest.mark.parametrize("epochs", [5, 6])
def test_even_the_shortest_run_grows(epochs: int, digits: Any) -> None:
    assert [seed.planted for seed in grow(digits, epochs=epochs).seeds] == [0]


# ---- files


def test_a_folder_holds_the_network_its_history_a_picture_and_a_report(grown: Any, digits: Any) -> None:
    result, folder = grown
    assert sorted(file.name for file in folder.iterdir()) == [
        "growth.png",
        "history.csv",
        "model.safetensors",
        "network.pt2",
        "report.html",
    ]
    x = digits[1][0]
    with torch.no_grad():
        expected = result.model.eval()(x)
        assert torch.equal(load_grown(net(seed=3), folder / "model.safetensors").eval()(x), expected)
    lines = list(csv.DictReader((folder / "history.csv").open()))
    assert [float(line["metric"]) for line in lines] == [entry.metric for entry in result.history]
    page = (folder / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    for words in ("1 of 1 seeds kept", "cnn.conv", "left alone", "Should this model be grown?", "data:image/svg"):
        assert words in page, words
    assert (folder / "growth.png").stat().st_size > 10_000


def test_an_exported_network_runs_without_esper(grown: Any, digits: Any, tmp_path: Path) -> None:
    result, folder = grown
    x = digits[1][0][:7]
    with torch.no_grad():
        torch.save({"x": x, "out": result.model.eval()(x)}, tmp_path / "expected.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['esper'] = None\n"
        f"expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        f"network = torch.export.load({str(folder / 'network.pt2')!r}).module()\n"
        "assert torch.equal(network(expected['x']), expected['out'])\n"
        "assert network(expected['x'][:3]).shape == (3, 10), 'rows are free'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".ckpt"])
def test_weights_of_any_kind_grow_a_fresh_model_again(suffix: str, grown: Any, digits: Any, tmp_path: Path) -> None:
    result, _ = grown
    file = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        result.export(file)
    else:
        state = result.model.state_dict()
        torch.save(state if suffix == ".pt" else {"state_dict": state, "epoch": 3}, file)
    x = digits[1][0][:5]
    with torch.no_grad():
        assert torch.equal(load_grown(net(seed=3), file).eval()(x), result.model.eval()(x))


WRONG_FACTS = [torch.tensor(list(text), dtype=torch.uint8) for text in (b"{}", b"[1]", b'{"site": 3}', b"[" * 9_000)]


def test_weights_that_do_not_fit_are_refused_and_change_nothing(grown: Any, tmp_path: Path) -> None:
    result, _ = grown
    state = result.model.state_dict()
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    key = next(key for key in state if key.endswith("gamma"))
    facts = next(key for key in state if key.endswith("facts"))
    os.mkfifo(tmp_path / "model.safetensors")
    cases: list[tuple[nn.Module, Any, str]] = [
        (nn.Sequential(nn.Linear(4, 4)), state, "has grown after '1', which Sequential does not have"),
        (make_net(2.0), state, "do not fit Sequential"),
        (net(), {k: v for k, v in state.items() if k != "0.weight"}, "missing"),
        (net(), {**state, "more": torch.zeros(1)}, "unknown"),
        (net(), {k: v for k, v in state.items() if k != key}, "gamma"),
        *((net(), {**state, facts: wrong}, "not described as it should be|its facts are") for wrong in WRONG_FACTS),
        (result.model, state, "has grown already"),
        (net(), tmp_path / "broken.safetensors", "damaged or not a safetensors file"),
        (net(), tmp_path / "broken.pt", "no weights that can be read safely"),
        (net(), tmp_path, "model.safetensors is not a file"),
    ]
    for model, weights, message in cases:
        before = fingerprint(model)
        with pytest.raises(ModelFileError, match=message):
            load_grown(model, weights)
        assert fingerprint(model) == before
    with pytest.raises(FileNotFoundError):
        load_grown(net(), tmp_path / "nowhere.pt")


def test_grown_models_of_every_kind_run_without_esper(tmp_path: Path) -> None:
    """With a kept seed at every site, loaded by a process that has only torch."""
    kinds = [name for name in ZOO if name != "gru_time_first"]
    for name in kinds:
        animal = ZOO[name]
        world = attach(animal)
        world.plant()
        list(train(animal, world.model, world.optimizer, steps=2))
        world.blend()
        world.keep()
        world.shake()
        batch = animal.batches(2)[1]
        names = ["input_ids", "attention_mask", "pixel_values"]
        inputs = [batch[key] for key in names if key in batch] if isinstance(batch, dict) else list(batch[:-1])
        assert {slot.stage for slot in world.network.all_slots()} == {SeedStage.FOSSILIZED}
        export_grown(world.model, batch, tmp_path / f"{name}.pt2")
        with torch.no_grad():
            output = call_model(world.model.eval(), batch)
        expected = output.logits if hasattr(output, "logits") else output
        torch.save({"inputs": inputs, "out": expected}, tmp_path / f"{name}.pt")
        assert name != "gpt2" or world.model.config.use_cache is True, "the user's setting"
    code = (
        "import pathlib, sys, torch\n"
        "sys.modules['esper'] = sys.modules['transformers'] = None\n"
        f"for file in sorted(pathlib.Path({str(tmp_path)!r}).glob('*.pt2')):\n"
        "    expected = torch.load(file.with_suffix('.pt'))\n"
        "    network = torch.export.load(file).module()\n"
        "    assert torch.equal(network(*expected['inputs']), expected['out']), file.name\n"
        "    print(file.stem)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == sorted(kinds)


def test_an_unknown_format_is_refused(grown: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected .pt2, .onnx or .safetensors"):
        grown[0].export(tmp_path / "network.xyz")


def test_what_cannot_be_exported_is_said_and_the_rest_is_written(digits: Any, tmp_path: Path) -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_net()

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > -1e9:  # a decision that no exported program can take
                return self.inner(x)
            return self.inner(-x)

    result = grow(digits, Stubborn(), sites=["inner.1"], out=tmp_path, controller="wait_only", epochs=5)
    assert not (tmp_path / "network.pt2").exists()
    assert (tmp_path / "report.html").exists()
    assert any("no network.pt2" in line for line in result.write(tmp_path))


# ---- receipts and comparison


def test_a_receipt_is_the_difference_to_a_twin_without_the_seed(grown: Any, digits: Any) -> None:
    result, _ = grown
    (receipt,) = result.receipts
    alone = grow(digits, controller="wait_only")
    assert receipt.without_seed == alone.metric, "the twin of the only seed is the model left alone"
    assert receipt.with_seed == result.history[-1].metric
    assert receipt.gain == receipt.with_seed - receipt.without_seed > 10.0
    assert receipt.epochs == EPOCHS


def test_receipts_change_nothing_in_the_run(grown: Any, digits: Any) -> None:
    with_receipts, without = grown[0].model.state_dict(), grow(digits).model.state_dict()
    assert with_receipts.keys() == without.keys()
    assert all(torch.equal(with_receipts[key], without[key]) for key in without)


def test_a_receipt_may_be_limited(digits: Any) -> None:
    result = grow(digits, receipts=5)
    (receipt,) = result.receipts
    assert receipt.epochs == 5
    assert receipt.with_seed == result.history[4].metric


def test_the_comparison_trains_rivals_on_the_same_batches(grown: Any, digits: Any) -> None:
    result, _ = grown
    found = result.comparison
    assert [arm.name for arm in found.arms] == [GROWN, ALONE, AT_ONCE, WIDER]
    assert found.arm(GROWN).metrics == (result.metric,)
    assert found.arm(ALONE).metrics == (grow(digits, controller="wait_only").metric,)
    sizes = {arm.name: arm.params[0] for arm in found.arms}
    assert sizes[AT_ONCE] == sizes[GROWN] == result.params
    assert sizes[GROWN] <= sizes[WIDER] < 1.2 * sizes[GROWN]
    assert f"not smaller than the grown one ({sizes[WIDER] / sizes[GROWN] - 1:+.1%})" in str(found)
    assert sizes[ALONE] == result.host_params
    costs = {arm.name: arm.training_macs[0] for arm in found.arms}
    assert costs[ALONE] < costs[GROWN] <= costs[AT_ONCE]
    assert "Growing pays here" in found.verdict()


@pytest.mark.parametrize(
    ("grown_metric", "words"),
    [
        (49.0, "Grown it is 1 accuracy (%) worse than left alone: the difference is within noise"),
        (51.0, "Grown it is 1 accuracy (%) better than left alone: the difference is within noise"),
        (80.0, "Growing pays here: 30 accuracy (%) better than left alone"),
        (20.0, "Do not grow this model: left alone it is better by 30 accuracy (%)"),
    ],
)
def test_a_verdict_says_which_way_it_went(grown: Any, grown_metric: float, words: str) -> None:
    found = grown[0].comparison
    arms = {GROWN: grown_metric, ALONE: 50.0}
    made = tuple(replace(found.arm(name), metrics=(metric,)) for name, metric in arms.items())
    assert replace(found, arms=made).verdict().startswith(words)


def test_comparing_needs_an_optimizer_that_can_be_made_again(digits: Any) -> None:
    model = net()
    before = fingerprint(model)
    with pytest.raises(ValueError, match="pass optimizer as a function"):
        grow(digits, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), compare=True)
    assert fingerprint(model) == before


@pytest.mark.parametrize("params", [983, 1_000, 1_700, 2_600])
def test_a_wider_model_is_never_smaller_than_the_grown_one(params: int) -> None:
    """Widths are whole channels, so that sizes may not meet; no rival is left weak for it, or is the original."""
    sizes = [sum(p.numel() for p in make_net(channels / 6).parameters()) for channels in range(6, 32)]
    made = sum(p.numel() for p in _width_for(make_net, params)().parameters())
    assert sizes[0] < made == min(size for size in sizes if size >= params)


def test_models_that_get_no_wider_are_refused_before_anything_is_trained(digits: Any) -> None:
    with pytest.raises(ValueError, match="wider= must give larger models for larger factors, got 982 parameters"):
        grow(digits, compare=True, wider=lambda factor: make_net())


# ---- runs that stop


class Stop(KeyboardInterrupt):
    pass


def stop_in_epoch(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    plain = GrowthRun._train

    def train(self: GrowthRun, number: int) -> Any:
        if number == epoch:
            raise Stop
        return plain(self, number)

    monkeypatch.setattr(GrowthRun, "_train", train)


@pytest.mark.parametrize("epoch", [1, 3, 6])
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    epoch: int, grown: Any, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    with monkeypatch.context() as patch:
        stop_in_epoch(patch, epoch)
        with pytest.raises(Stop):
            grow(digits, model, out=tmp_path, receipts=True)
    kept = [name for name, _ in model.named_modules() if name.endswith("esper_slot")]
    assert kept == (["1.esper_slot"] if epoch == 6 else []), "only what was kept is left in the model"
    with pytest.raises(ValueError, match="holds an unfinished run; pass resume=True"):
        grow(digits, out=tmp_path)
    result = grow(digits, net(seed=7), out=tmp_path, resume=True, receipts=True)
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), grown[0].model.parameters(), strict=True))
    assert result.receipts == grown[0].receipts
    assert [entry.metric for entry in result.history] == [entry.metric for entry in grown[0].history]
    assert not (tmp_path / "checkpoint.pt").exists()


def test_there_must_be_something_to_resume(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no unfinished run"):
        grow(digits, out=tmp_path, resume=True)
    for content in (
        b"nothing",
        saved({}),
        saved([]),
        saved({"grower": {"facts": 1}}),
        saved({"grower": {"books": "x"}}),
    ):
        (tmp_path / "checkpoint.pt").write_bytes(content)
        with pytest.raises(ModelFileError, match=r"checkpoint.pt(: this is not| is damaged, or not of)"):
            grow(digits, out=tmp_path, resume=True)


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_not_resumed_from(kind: str, digits: Any, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        (tmp_path / "elsewhere").write_bytes(saved({}))
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((OSError, ValueError), match="holds no unfinished run" if kind == "pipe" else "is a link"):
        grow(digits, out=tmp_path, resume=True)


def test_links_in_a_folder_of_others_are_not_written_through(grown: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra `plots`")
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.write_text("precious")
    theirs.mkdir()
    names = ("model.safetensors", "history.csv", "network.pt2", "growth.png", "report.html")
    for name in names:
        (theirs / name).symlink_to(mine)
    assert not [line for line in grown[0].write(theirs) if ": no " in line]
    assert mine.read_text() == "precious"
    assert all((theirs / name).is_file() and not (theirs / name).is_symlink() for name in names)


# ---- what cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 10}, "budget=10 leaves no room"),
        ({"epochs": 2}, "epochs=2 is less than the shortest life of a seed"),
        ({"metric": lambda output, target: float("nan")}, "metric is nan"),
        ({"sites": ["9"]}, "cannot grow after '9'"),
        ({"optimizer": lambda params: 3}, "optimizer must be one, or a function"),
        ({"optimizer": lambda params: torch.optim.LBFGS(params)}, "LBFGS cannot take parameters later"),
        (
            {"optimizer": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2])},
            "pass a second optimizer",
        ),
        ({"optimizer": "adam"}, "optimizer must be one, or a function"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"budget": "20k"}, "budget must be a whole number"),
        ({"epochs": 8.0}, "epochs must be a whole number"),
        ({"sites": []}, "sites names no submodule"),
        ({"loss": lambda output, target: output}, "loss must return one number"),
        ({"resume": True}, "give the folder with out="),
        ({"receipts": -1}, "receipts must be True, False or the most epochs"),
        ({"loss": "mse"}, "loss must be a function, got 'mse'"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used here"),
        ({"wider": make_net}, "give both, or leave it out"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_leaves_the_model_alone(
    options: dict[str, Any], message: str, digits: Any
) -> None:
    model = net()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message) as caught:
        grow(digits, model, **options)
    assert "\n" not in str(caught.value)
    assert fingerprint(model) == before


def test_labels_without_an_output_are_refused(digits: Any) -> None:
    (x, y), val = digits
    with pytest.raises(ValueError, match="labels must be below the 10 classes that the model predicts, got 12"):
        grow(((x, y), (val[0], val[1] + 3)))


@pytest.mark.parametrize("val", [None, [], (torch.zeros(0, 1, 8, 8), torch.zeros(0).long())])
def test_validation_data_is_needed(val: Any, digits: Any) -> None:
    model = net()
    before = fingerprint(model)
    with pytest.raises(ValueError, match="validation data"):
        esper.grow(model, digits[0], val, budget=None, epochs=8)
    assert fingerprint(model) == before
