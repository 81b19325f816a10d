"""The bundled digits: exact counts, fixed splits, and a clear refusal of any other file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline import DataDamaged
from esper.runtime.data.digits import read_digits
from esper.runtime.datasets import find_data, load_dataset


def bundled() -> Path:
    place = find_data("digits").place
    assert place is not None
    return place


def test_counts_shapes_and_range() -> None:
    content = read_digits(bundled())
    assert [len(split) for split in (content.train, content.val, content.test)] == [997, 349, 451]
    for split in (content.train, content.val, content.test):
        assert split.inputs.shape[1:] == (1, 8, 8)
        assert split.inputs.dtype == torch.float32
        assert split.targets.dtype == torch.int64
        assert (split.inputs * 16).frac().eq(0).all()
        assert split.inputs.min() >= 0.0
        assert split.inputs.max() == 1.0


def test_every_image_is_in_exactly_one_split() -> None:
    with np.load(bundled()) as stored:
        rows = np.concatenate([stored[name] for name in ("train", "val", "test")])
    assert sorted(rows) == list(range(1797))


def test_splits_have_every_class_in_proportion() -> None:
    content = read_digits(bundled())
    counts = [torch.bincount(split.targets, minlength=10) for split in (content.train, content.val, content.test)]
    total = sum(counts)
    for split, size in zip(counts, (997, 349, 451), strict=True):
        assert (split - total * size / 1797).abs().max() < 2


def test_the_content_is_the_one_all_results_refer_to() -> None:
    dataset = load_dataset("digits")
    assert dataset.sha256 == "ce5e3610dbb217d219fad03757fc157d88f2819639bbc0de39232a6c9cf760a1"
    assert dataset.test_sha256 == "7ce77b5a09e96db50ff77091d6e63c765179159f334af0eea30900dfcf8a634a"


@pytest.mark.parametrize("array", ["images", "labels", "train", "val", "test"])
def test_a_changed_value_is_refused(tmp_path: Path, array: str) -> None:
    with np.load(bundled()) as stored:
        arrays = {name: stored[name].copy() for name in stored.files}
    arrays[array].flat[3] ^= 1
    np.savez_compressed(tmp_path / "digits.npz", **arrays)
    with pytest.raises(DataDamaged, match=r"expected a4abc460.*Install Esper again"):
        read_digits(tmp_path / "digits.npz")


@pytest.mark.parametrize("length", [0, 10, 20_000])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "digits.npz").write_bytes(bundled().read_bytes()[:length])
    with pytest.raises(DataDamaged, match=r"digits\.npz: expected the arrays"):
        read_digits(tmp_path / "digits.npz")
