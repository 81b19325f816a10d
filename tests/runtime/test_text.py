"""Text becomes windows that predict every byte once and never look across a border."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import DataDamaged, DataNotFound
from esper.runtime.data import text
from esper.runtime.data.text import read_text_file, windows
from esper.runtime.datasets import load_dataset

VERSE = "Es grünt so grün, wenn Spaniens Blüten blühen. ".encode()


@given(st.binary(min_size=2, max_size=300), st.data())
def test_windows_predict_every_byte_once_and_in_order(part: bytes, data: st.DataObject) -> None:
    context = data.draw(st.integers(1, len(part) - 1))
    split = windows(part, context)
    assert split.inputs.dtype == split.targets.dtype == torch.int64
    assert split.inputs.shape == split.targets.shape == ((len(part) - 1) // context, context)
    stream = split.inputs.flatten().tolist()
    assert bytes(stream) == part[: len(stream)]
    assert bytes(split.targets.flatten().tolist()) == part[1 : len(stream) + 1]


def test_splits_are_stretches_of_the_file_in_order(tmp_path: Path) -> None:
    path = tmp_path / "verse.txt"
    path.write_bytes(VERSE * 200)
    content = read_text_file(path, 16)
    first, second = int(len(VERSE) * 200 * 0.98), int(len(VERSE) * 200 * 0.98) + int(len(VERSE) * 200 * 0.01)
    for split, start, stop in (
        (content.train, 0, first),
        (content.val, first, second),
        (content.test, second, len(VERSE) * 200),
    ):
        part = (VERSE * 200)[start:stop]
        assert bytes(split.inputs[0].tolist()) == part[:16]
        assert bytes(split.targets[-1].tolist()) == part[len(split) * 16 - 15 : len(split) * 16 + 1]
        assert len(split) == (len(part) - 1) // 16


def test_no_split_carries_bytes_of_another(tmp_path: Path) -> None:
    """A view of the whole stream would take the test part along wherever train goes."""
    path = tmp_path / "verse.txt"
    path.write_bytes(VERSE * 200)
    dataset = load_dataset("text", context=16, data_dir=path)
    for split, share in ((dataset.train, 0.98), (dataset.val, 0.01)):
        held = split.inputs.untyped_storage().nbytes() // 8
        assert held == int(len(VERSE) * 200 * share)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe" + VERSE * 200, "expected UTF-8 text, found byte 0xff at 0"),
        (VERSE * 100 + b"\xc3", "expected UTF-8 text, found byte 0xc3"),
        (b"", "0 bytes leave 0 for train"),
        (VERSE * 10, "for val; expected at least 17 for one window of 16. Use a longer text"),
        (b"a" * 10_000, "one byte repeated"),
    ],
)
def test_unusable_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(DataDamaged, match=message):
        read_text_file(path, 16)


def test_a_file_too_large_for_memory_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as stream:
        stream.truncate(text.MAX_FILE_BYTES + 1)
    with pytest.raises(DataDamaged, match=r"268,435,457 bytes; .* up to 268,435,456 bytes. Use a part"):
        read_text_file(path, 16)


def test_a_folder_with_one_text_is_enough_and_with_two_is_not(tmp_path: Path) -> None:
    (tmp_path / "verse.txt").write_bytes(VERSE * 200)
    assert load_dataset("text", context=16, data_dir=tmp_path).description.startswith("verse.txt: ")
    (tmp_path / "other.txt").write_bytes(VERSE)
    with pytest.raises(DataNotFound, match=r"Expected one UTF-8 \.txt file"):
        load_dataset("text", context=16, data_dir=tmp_path)


def test_the_documentation_of_python_is_in_80_10_10() -> None:
    dataset = load_dataset("pydoc", context=64)
    sizes = dataset.split_sizes
    total = sum(sizes.values())
    assert sizes["train"] / total == pytest.approx(0.8, abs=0.001)
    assert sizes["val"] / total == pytest.approx(0.1, abs=0.001)
    assert dataset.num_classes == 256
    assert b"assert" in bytes(dataset.train.inputs.flatten().tolist())
