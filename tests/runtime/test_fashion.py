"""The IDX reader takes the four files plain or gzipped and refuses whatever is not what it claims to be."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import fashion_arrays, idx_bytes, write_fashion

from esper.leyline import DataDamaged, DataNotFound
from esper.runtime.data import fashion
from esper.runtime.data.fashion import TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, read_fashion, read_idx
from esper.runtime.datasets import find_data, load_dataset


def test_pixels_and_labels_arrive_unchanged(tmp_path: Path) -> None:
    arrays = fashion_arrays()
    content = read_fashion(write_fashion(tmp_path, arrays))
    assert [len(split) for split in (content.train, content.val, content.test)] == [220, 20, 50]
    assert content.train.inputs.dtype == torch.uint8
    assert torch.equal(content.test.inputs[:, 0], torch.from_numpy(arrays[fashion.TEST_IMAGES]))
    assert torch.equal(content.test.targets, torch.from_numpy(arrays[TEST_LABELS]).long())
    assert torch.bincount(content.val.targets).tolist() == [2] * 10
    merged = torch.cat([content.train.inputs, content.val.inputs]).flatten(1).tolist()
    assert sorted(merged) == sorted(arrays[TRAIN_IMAGES].reshape(240, -1).tolist())


def test_gzipped_files_are_the_same_data(tmp_path: Path) -> None:
    plain = read_fashion(write_fashion(tmp_path / "plain", fashion_arrays()))
    zipped = read_fashion(write_fashion(tmp_path / "zipped", fashion_arrays(), zipped=True))
    assert plain.sha256 == zipped.sha256


def test_other_content_does_not_pass_for_fashion_mnist(tmp_path: Path) -> None:
    description = read_fashion(write_fashion(tmp_path, fashion_arrays())).description
    assert description == "other content in the files of Fashion-MNIST: 240 training and 50 test images"


def spoil_label(arrays: dict[str, np.ndarray]) -> None:
    arrays[TRAIN_LABELS][81] = 10


def drop_label(arrays: dict[str, np.ndarray]) -> None:
    arrays[TRAIN_LABELS] = arrays[TRAIN_LABELS][:-3]


def drop_class(arrays: dict[str, np.ndarray]) -> None:
    arrays[TEST_LABELS][arrays[TEST_LABELS] == 7] = 8


def flatten_images(arrays: dict[str, np.ndarray]) -> None:
    arrays[TRAIN_IMAGES][:] = 9


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_label, r"train-labels.*: label 10 at row 81; expected 10 classes \(0\.\.9\)"),
        (drop_label, "train-labels.*: 237 labels for 240 images"),
        (drop_class, "t10k-labels.*: expected 10 classes, found no image of class 7"),
        (flatten_images, "all pixels have the value 9"),
    ],
)
def test_data_nothing_could_learn_from_is_refused(tmp_path: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    arrays = fashion_arrays()
    spoil(arrays)
    with pytest.raises(DataDamaged, match=message):
        read_fashion(write_fashion(tmp_path, arrays))


GOOD = idx_bytes(np.arange(4 * 28 * 28, dtype=np.uint8).reshape(4, 28, 28))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected an IDX file with magic 00000803, found nothing"),
        (b"\x00\x00\x08\x01" + GOOD[4:], "magic 00000803, found 00000801"),
        (b"\x00\x00\x09\x03" + GOOD[4:], "magic 00000803, found 00000903"),
        (GOOD[:9], "header says 4$"),
        (GOOD[:4] + struct.pack(">3I", 4, 28, 27) + GOOD[16:], r"1\.\.60000 x 28 x 28 values, .* 4 x 28 x 27"),
        (GOOD[:4] + struct.pack(">3I", 0, 28, 28), "header says 0 x 28 x 28"),
        (GOOD[:4] + struct.pack(">3I", 2**32 - 1, 28, 28) + GOOD[16:], "header says 4294967295 x 28 x 28"),
        (GOOD[:-1], "header promises 3136 bytes of data, found 3135; truncated"),
        (GOOD + b"\0", "header promises 3136 bytes of data, found more"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("zipped", [False, True])
def test_a_wrong_idx_file_is_refused(tmp_path: Path, content: bytes, message: str, zipped: bool) -> None:
    path = tmp_path / ("images.gz" if zipped else "images")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataDamaged, match=message):
        read_idx(path, (28, 28))


@pytest.mark.parametrize(
    "damage",
    [lambda all: all[:-6], lambda all: all[:40], lambda all: b"no gzip at all", lambda all: all[:30] + b"\xff" * 40],
    ids=["tail lost", "half lost", "not gzip", "bits flipped"],
)  # fmt: skip
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(GOOD)))
    with pytest.raises(DataDamaged, match=r"images\.gz: damaged gzip stream"):
        read_idx(path, (28, 28))


def test_a_missing_file_names_every_place_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "given", fashion_arrays())
    (tmp_path / "given" / TEST_LABELS).unlink()
    monkeypatch.setenv("ESPER_FASHION_MNIST", str(tmp_path / "named"))
    with pytest.raises(DataNotFound) as caught:
        load_dataset("fashion", data_dir=tmp_path / "given")
    for part in (str(tmp_path / "given"), str(tmp_path / "named"), TEST_LABELS, "dataset-fashion-mnist", "--data-dir"):
        assert part in str(caught.value)


def test_real_fashion_mnist(real_data: None) -> None:
    if not find_data("fashion").found:
        pytest.skip("Fashion-MNIST is not on this machine")
    dataset = load_dataset("fashion")
    if not dataset.description.startswith("Fashion-MNIST:"):
        pytest.skip(f"the data found is not Fashion-MNIST: {dataset.place}")
    assert dataset.split_sizes == {"train": 55_000, "val": 5_000, "test": 10_000}
    assert torch.bincount(dataset.val.targets).tolist() == [500] * 10
    assert dataset.mean is not None
    assert dataset.std is not None
    pixels = dataset.train.inputs.float()
    assert pixels.mean().item() == pytest.approx(dataset.mean[0], rel=0.01)
    assert pixels.std().item() == pytest.approx(dataset.std[0], rel=0.01)
