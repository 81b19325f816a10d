"""Loading: what is searched, what is refused, and that the test split stays closed."""

from __future__ import annotations

import ast
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_files import cifar_batches, fashion_arrays, write_cifar, write_fashion

import esper
from esper.leyline import DataDamaged, DataNotFound
from esper.runtime.data.splits import Content, Dataset
from esper.runtime.datasets import SOURCES, find_data, get_source, load_dataset


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder with every source that Esper does not bring along."""
    write_fashion(tmp_path / "fashion-mnist", fashion_arrays())
    write_cifar(tmp_path / "cifar-10-batches-py", cifar_batches())
    (tmp_path / "story.txt").write_bytes(b"Once upon a time there was a seed. " * 200)
    return tmp_path


def load(name: str, data_dir: Path) -> Dataset:
    return load_dataset(name, context=16 if SOURCES[name].is_text else None, data_dir=data_dir)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_yields_rows_that_fit_its_description(name: str, data_dir: Path) -> None:
    dataset = load(name, data_dir)
    row_shape = SOURCES[name].row_shape or (16,)
    for split in (dataset.train, dataset.val, dataset.open_test()):
        assert split.inputs.shape == (len(split), *row_shape)
        assert len(split.targets) == len(split) > 0
        assert split.targets.min() >= 0
        assert split.targets.max() < dataset.num_classes
    assert dataset.split_sizes == {
        "train": len(dataset.train), "val": len(dataset.val), "test": len(dataset.open_test())
    }  # fmt: skip
    assert Path(dataset.place).exists()


@pytest.mark.parametrize("name", SOURCES)
def test_normalisation_is_in_units_of_the_stored_values(name: str, data_dir: Path) -> None:
    dataset = load(name, data_dir)
    if dataset.train.inputs.dtype != torch.uint8:
        assert dataset.mean is None
        assert dataset.std is None
        return
    assert dataset.mean is not None
    assert dataset.std is not None
    assert len(dataset.mean) == len(dataset.std) == dataset.train.inputs.shape[1]
    assert all(30 < value < 150 for value in (*dataset.mean, *dataset.std))


@pytest.mark.parametrize("name", SOURCES)
def test_no_test_tensor_outlives_loading(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    read = SOURCES[name].read

    def spy(*args: object) -> Content:
        content = read(*args)
        seen.extend(weakref.ref(tensor) for tensor in (content.test.inputs, content.test.targets))
        return content

    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], read=spy))
    dataset = load(name, data_dir)
    gc.collect()
    assert len(seen) == 2
    assert [ref() for ref in seen] == [None, None]
    assert len(dataset.open_test()) == dataset.num_test


def test_only_evaluation_opens_the_test_split() -> None:
    allowed = {"runtime/data/splits.py", "runtime/datasets.py", "evidence/evaluation.py"}
    root = Path(esper.__file__).parent
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("open_test", "reread")
    }
    assert users <= allowed


def test_a_test_split_that_changed_meanwhile_is_refused(data_dir: Path) -> None:
    dataset = load("cifar10", data_dir)
    batches = cifar_batches()
    batches["test_batch"]["data"][0, 0] ^= 1
    write_cifar(data_dir / "cifar-10-batches-py", batches)
    with pytest.raises(DataDamaged, match="the test split has changed since it was loaded"):
        dataset.open_test()


@pytest.mark.parametrize("name", SOURCES)
def test_a_data_set_travels_to_other_processes(name: str, data_dir: Path) -> None:
    dataset = load(name, data_dir)
    copy: Dataset = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(copy.train.inputs, dataset.train.inputs)
    assert torch.equal(copy.open_test().targets, dataset.open_test().targets)


def test_sha256_notices_any_change_and_nothing_else(data_dir: Path) -> None:
    before = load("cifar10", data_dir)
    assert load("cifar10", data_dir).sha256 == before.sha256
    for name, test_changes in (("data_batch_1", False), ("test_batch", True)):
        batches = cifar_batches()
        batches[name]["data"][3, 5] ^= 1
        write_cifar(data_dir / "cifar-10-batches-py", batches)
        after = load("cifar10", data_dir)
        assert after.sha256 != before.sha256
        assert (after.test_sha256 != before.test_sha256) == test_changes


def test_other_processes_get_the_same_splits() -> None:
    program = (
        "import json; from esper.runtime.datasets import load_dataset as load; "
        "print(json.dumps([load('digits').sha256, load('pydoc', context=64).sha256]))"
    )
    source = str(Path(esper.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout) == [load_dataset("digits").sha256, load_dataset("pydoc", context=64).sha256]


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.variable])
def test_the_search_goes_from_argument_to_variable_to_usual_places(
    name: str, data_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert not find_data(name).found
    assert find_data(name).searched
    (elsewhere / "data").symlink_to(data_dir)
    usual = find_data(name).place
    assert usual is not None
    assert usual.is_relative_to(elsewhere)
    variable = SOURCES[name].variable
    assert variable is not None
    (elsewhere / "named").symlink_to(data_dir)
    monkeypatch.setenv(variable, str(elsewhere / "named"))
    named = find_data(name).place
    assert named is not None
    assert named.is_relative_to(elsewhere / "named")
    given = find_data(name, data_dir).place
    assert given is not None
    assert given.is_relative_to(data_dir)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.variable])
def test_missing_data_says_where_it_looked_and_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataNotFound) as caught:
        load(name, tmp_path)
    source = SOURCES[name]
    message = str(caught.value)
    for part in (source.title, str(tmp_path), source.expected, source.remedy, str(source.variable)):
        assert part in message


def test_missing_documentation_of_python_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.runtime.datasets.find_spec", lambda name: None)
    with pytest.raises(DataNotFound, match="install the complete standard library"):
        load_dataset("pydoc", context=64)


def test_unknown_sources_and_misplaced_contexts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown data source 'mnist'\. Known: digits, pydoc"):
        get_source("mnist")
    with pytest.raises(ValueError, match="'digits' takes no context, got 64"):
        load_dataset("digits", context=64)
    for context in (None, 0):
        with pytest.raises(ValueError, match=f"'pydoc' takes a context of at least 1 byte, got {context}"):
            load_dataset("pydoc", context=context)
