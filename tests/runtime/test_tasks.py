"""Every row of the task table holds together, and what users change is checked as a whole."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_files import cifar_batches, fashion_arrays, write_cifar, write_fashion

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.hosts import HostSpec, build_host
from esper.leyline import DataNotFound, derive_seed, lr_factor
from esper.runtime.datasets import SOURCES, find_data
from esper.runtime.tasks import TASKS, check_task, count_host_params, get_task_spec, load_task_data, override

HOST_PARAMS = {
    "digits_mlp": 1_210,
    "digits_limited": 650,
    "digits_saturated": 4_810,
    "digits_blind": 194,
    "digits_conv": 438,
    "pydoc_lm": 27_392,
    "fashion_tiny": 6_274,
    "fashion_blind": 274,
    "cifar_baseline": 6_418,
    "cifar_impaired": 77,
    "cifar_minimal": 164,
    "cifar_scale": 99_922,
    "tinystories": 10_844_160,
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Small stand-ins for the files of every source, with room for one batch of any task."""
    write_fashion(tmp_path / "fashion-mnist", fashion_arrays())
    write_cifar(tmp_path / "cifar-10-batches-py", cifar_batches())
    (tmp_path / "story.txt").write_bytes(b"Once upon a time there was a seed that grew. " * 2_000)
    return tmp_path


def test_the_table_is_complete() -> None:
    assert list(TASKS) == list(HOST_PARAMS)
    assert all(name == spec.name for name, spec in TASKS.items())


@pytest.mark.parametrize("name", TASKS)
def test_every_task_fits_together(name: str) -> None:
    spec = TASKS[name]
    check_task(spec)
    assert count_host_params(spec) == HOST_PARAMS[name]
    assert spec.chance_loss == math.log(spec.num_classes)
    assert spec.lifecycle.embargo == (5 if spec.horizon >= 60 else 3)
    assert not any(get_blueprint(key).control for key in spec.blueprint_keys)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_yields_batches_its_host_can_learn_from(name: str, data_dir: Path) -> None:
    spec = TASKS[name]
    dataset = load_task_data(spec, data_dir)
    host = build_host(spec.host, torch.Generator().manual_seed(derive_seed(0, 0, 0, None, "init")))
    inputs = dataset.train.inputs[:2]
    if dataset.mean is not None and dataset.std is not None:
        mean, std = torch.tensor(dataset.mean)[:, None, None], torch.tensor(dataset.std)[:, None, None]
        inputs = (inputs - mean) / std
    loss = torch.nn.functional.cross_entropy(host(inputs).flatten(0, -2), dataset.train.targets[:2].flatten())
    loss.backward()
    assert math.isfinite(loss.item())
    assert loss.item() < 3 * spec.chance_loss
    assert spec.val_samples is None or len(dataset.val) <= spec.val_samples


@pytest.mark.parametrize("name", [name for name, spec in TASKS.items() if SOURCES[spec.data].variable is None])
def test_tasks_without_files_of_yours_have_their_data(name: str) -> None:
    spec = TASKS[name]
    assert find_data(spec.data).found
    dataset = load_task_data(spec)
    assert len(dataset.train) >= (spec.samples_per_epoch or spec.batch_size)
    assert len(dataset.val) == (spec.val_samples or 349)


@pytest.mark.parametrize("name", [name for name, spec in TASKS.items() if SOURCES[spec.data].variable is not None])
def test_tasks_without_their_data_say_so(name: str) -> None:
    with pytest.raises(DataNotFound, match="Looked in: /"):
        load_task_data(TASKS[name])


def test_val_rows_are_spread_over_the_split_and_test_rows_are_all_there(data_dir: Path) -> None:
    spec = override(get_task_spec("cifar_baseline"), val_samples=5)
    full, part = load_task_data(get_task_spec("cifar_baseline"), data_dir), load_task_data(spec, data_dir)
    assert torch.equal(part.val.inputs, full.val.inputs[::4])
    assert torch.equal(part.val.targets, full.val.targets[::4])
    assert part.sha256 == full.sha256
    assert len(part.open_test()) == len(full.open_test()) == 40


def test_names_ignore_case_and_unknown_ones_list_the_known() -> None:
    assert get_task_spec("CIFAR_Baseline") is TASKS["cifar_baseline"]
    with pytest.raises(
        ValueError, match=r"unknown task 'digit_cnn'\. Known: digits_mlp, digits_limited, .*tinystories"
    ):
        get_task_spec("digit_cnn")


def test_override_reaches_lifecycle_and_optimizer() -> None:
    spec = override(get_task_spec("digits_blind"), horizon=20, param_budget=1_300, lr=3e-3, blueprints=("cnn.conv",))
    assert (spec.horizon, spec.lifecycle.param_budget, spec.optimizer.lr) == (20, 1_300, 3e-3)
    assert spec.blueprint_keys == ("cnn.conv",)
    assert replace(
        spec,
        horizon=40,
        blueprints=None,
        lifecycle=replace(spec.lifecycle, param_budget=None),
        optimizer=replace(spec.optimizer, lr=1e-2),
    ) == get_task_spec("digits_blind")
    assert get_task_spec("digits_blind").horizon == 40


def test_override_can_name_a_control_blueprint_and_another_text() -> None:
    assert override(get_task_spec("digits_blind"), blueprints=("cnn.inert",)).blueprint_keys == ("cnn.inert",)
    assert override(get_task_spec("pydoc_lm"), data="text").data == "text"


BLIND_HOST = TASKS["digits_blind"].host


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("digits_mlp", {"horizont": 3}, r"no field 'horizont'\. Did you mean 'horizon'\?"),
        ("digits_mlp", {"zzz": 3}, r"no field 'zzz'\. Known: augment, batch_size"),
        ("digits_mlp", {"horizon": 0}, "horizon must be at least 1, got 0"),
        ("digits_mlp", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ("digits_mlp", {"val_chunk_rows": 0}, "val_chunk_rows must be at least 1"),
        ("digits_mlp", {"val_samples": 0}, "val_samples must be at least 1"),
        ("digits_mlp", {"samples_per_epoch": 63}, r"samples_per_epoch \(one batch\) must be at least 64, got 63"),
        ("digits_mlp", {"metric": "f1"}, r"unknown metric 'f1'\. Known: accuracy, loss"),
        ("digits_mlp", {"augment": "mixup"}, r"unknown augmentation 'mixup'\. Known: crop_flip"),
        ("digits_mlp", {"slots": ()}, "slots must name at least one"),
        ("digits_mlp", {"slots": ("r0c0", "r0c0")}, "duplicate slot ids"),
        ("digits_mlp", {"slots": ("a",)}, "malformed slot id 'a'"),
        (
            "digits_mlp",
            {"slots": ("r0c0", "r0c7")},
            r"among those of its host, in execution order \(r0c0, r0c1, r2c0, r3c0, r3c1\); got",
        ),
        (
            "digits_blind",
            {"slots": ("r0c1", "r0c0")},
            r"in execution order \(r0c0, r1c0, r2c0, r0c1, .*\); got r0c1, r0c0",
        ),
        ("digits_mlp", {"blueprints": ()}, "blueprints must name at least one"),
        ("digits_mlp", {"blueprints": ("mlp.nothing",)}, "unknown blueprint 'mlp.nothing'"),
        ("digits_mlp", {"blueprints": ("cnn.conv",)}, "'cnn.conv' does not fit a host of topology 'mlp'"),
        ("digits_mlp", {"data": "mnist"}, "unknown data source 'mnist'"),
        ("digits_mlp", {"context": 64}, "context is for text: data source 'digits' with context 64"),
        ("pydoc_lm", {"context": None}, "context is for text: data source 'pydoc' with context None"),
        ("pydoc_lm", {"context": 0}, "context must be at least 1, got 0"),
        ("pydoc_lm", {"context": 65}, r"cannot take rows of \(65,\): 65 tokens do not fit the context of 64"),
        ("pydoc_lm", {"augment": "crop_flip"}, "augment 'crop_flip' is for images"),
        ("pydoc_lm", {"channels_last": True}, "channels_last is for cnn hosts"),
        ("digits_mlp", {"num_classes": 9}, "digits_mlp has 9 classes, its host puts out 10"),
        ("digits_mlp", {"num_classes": 1}, "num_classes must be at least 2"),
        ("fashion_tiny", {"data": "cifar10"}, r"host of fashion_tiny cannot take rows of \(3, 32, 32\)"),
        ("digits_mlp", {"data": "fashion"}, "expected 64 features per row, got 784"),
        (
            "digits_conv",
            {"host": HostSpec(kind="cnn", kwargs={**BLIND_HOST.kwargs, "channels": [4] * 5, "pool": [True] * 5})},
            r"cannot take rows of \(1, 8, 8\)",
        ),
        ("digits_mlp", {"host": HostSpec(kind="tree", kwargs={})}, "unknown host kind 'tree'"),
        ("digits_mlp", {"param_budget": 1_209}, "param_budget 1209 of digits_mlp is below the 1210 parameters"),
        ("digits_mlp", {"embargo": 0}, "embargo must be at least 1"),
        ("digits_mlp", {"lr": -1.0}, "lr must be a finite number above 0"),
    ],
)
def test_changes_that_make_no_sense_are_refused(task: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(get_task_spec(task), **changes)


def test_a_task_checked_by_nobody_is_checked_at_load() -> None:
    spec = replace(get_task_spec("digits_mlp"), slots=("r3c3",))
    with pytest.raises(ValueError, match="in execution order"):
        load_task_data(spec)


def test_batches_larger_than_the_data_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 998 of digits_mlp: only 997 training rows"):
        load_task_data(override(get_task_spec("digits_mlp"), batch_size=998))


@pytest.mark.parametrize("name", TASKS)
def test_tasks_travel_to_other_processes(name: str) -> None:
    assert pickle.loads(pickle.dumps(TASKS[name])) == TASKS[name]


@pytest.mark.parametrize("name", ["digits_mlp", "digits_limited", "digits_saturated"])
def test_digits_hosts_learn_with_the_optimizer_of_their_task(name: str) -> None:
    """A plain loop, far from the bar of any claim: wrong splits, labels or rates would stay near chance."""
    spec = get_task_spec(name)
    data = load_task_data(spec)
    generator = torch.Generator().manual_seed(derive_seed(3, 0, 0, None, "init"))
    host = build_host(spec.host, generator)
    optimizer = torch.optim.AdamW(host.parameters(), lr=spec.optimizer.lr, weight_decay=spec.optimizer.weight_decay)
    for epoch in range(10):
        for group in optimizer.param_groups:
            group["lr"] = spec.optimizer.lr * lr_factor(spec.optimizer.schedule, epoch, 10)
        order = torch.randperm(len(data.train), generator=generator)
        for rows in order.split(spec.batch_size):
            optimizer.zero_grad()
            logits = host(data.train.inputs[rows])
            torch.nn.functional.cross_entropy(logits, data.train.targets[rows]).backward()
            optimizer.step()
    hits = host(data.val.inputs).argmax(1) == data.val.targets
    assert hits.float().mean() > 0.85
