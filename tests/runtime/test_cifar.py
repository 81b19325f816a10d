"""The CIFAR-10 reader: folder or archive, the whole or a part, and no way for a file to do harm."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import cifar_batches, write_cifar

from esper.leyline import DataDamaged, DataNotFound
from esper.runtime.data import cifar
from esper.runtime.data.cifar import FOLDER, read_cifar
from esper.runtime.datasets import find_data, load_dataset


def pack(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return path


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def good_members(batches: dict[str, Any]) -> list[tuple[tarfile.TarInfo, bytes]]:
    folder = member(FOLDER, type=tarfile.DIRTYPE)
    files = [member(f"{FOLDER}/{name}", pickle.dumps(batch, protocol=2)) for name, batch in batches.items()]
    return [folder, *files, member(f"{FOLDER}/readme.html", b"<html>"), member(f"{FOLDER}/batches.meta", b"x")]


def test_pixels_and_labels_arrive_unchanged(tmp_path: Path) -> None:
    batches = cifar_batches()
    content = read_cifar(write_cifar(tmp_path, batches))
    assert [len(split) for split in (content.train, content.val, content.test)] == [180, 20, 40]
    assert content.train.inputs.shape[1:] == (3, 32, 32)
    assert content.train.inputs.dtype == torch.uint8
    assert torch.equal(content.test.inputs.flatten(1), torch.from_numpy(batches["test_batch"]["data"]))
    assert content.test.targets.tolist() == batches["test_batch"]["labels"]
    assert torch.bincount(content.val.targets).tolist() == [2] * 10
    written = np.concatenate([batches[name]["data"] for name in cifar.TRAIN_FILES]).tolist()
    assert sorted(torch.cat([content.train.inputs, content.val.inputs]).flatten(1).tolist()) == sorted(written)


def test_a_part_is_called_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_cifar(tmp_path, cifar_batches())
    assert read_cifar(place).description == "CIFAR-10 subset: 200 training and 40 test images"
    monkeypatch.setattr(cifar, "OFFICIAL_SIZES", (200, 40))
    assert read_cifar(place).description == "CIFAR-10: 200 training and 40 test images"


def test_folder_and_archive_are_the_same_data(tmp_path: Path) -> None:
    batches = cifar_batches()
    folder = read_cifar(write_cifar(tmp_path / "folder", batches, protocol=4))
    archive = read_cifar(pack(tmp_path / "packed.tar.gz", good_members(batches)))
    assert folder.sha256 == archive.sha256


@pytest.mark.parametrize("place", ["", FOLDER, "packed.tar.gz", "above"])
def test_the_data_is_found_at_or_below_the_given_place(tmp_path: Path, place: str) -> None:
    batches = cifar_batches()
    write_cifar(tmp_path / FOLDER, batches)
    pack(tmp_path / "packed.tar.gz", good_members(batches))
    (tmp_path / "above").mkdir()
    pack(tmp_path / "above" / cifar.ARCHIVE, good_members(batches))
    assert load_dataset("cifar10", data_dir=tmp_path / place).split_sizes["test"] == 40


def test_missing_data_names_every_place_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = cifar_batches()
    del batches["data_batch_3"]
    write_cifar(tmp_path / "given", batches)
    monkeypatch.setenv("ESPER_CIFAR10", str(tmp_path / "named"))
    with pytest.raises(DataNotFound) as caught:
        load_dataset("cifar10", data_dir=tmp_path / "given")
    for part in (str(tmp_path / "given"), str(tmp_path / "named"), FOLDER, "https://", "ESPER_CIFAR10"):
        assert part in str(caught.value)


class Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def labels_out_of_range(batch: dict[str, Any]) -> None:
    batch["labels"][7] = 10


def labels_too_few(batch: dict[str, Any]) -> None:
    batch["labels"].pop()


def labels_not_numbers(batch: dict[str, Any]) -> None:
    batch["labels"][2] = True


def labels_huge(batch: dict[str, Any]) -> None:
    batch["labels"][2] = 2**70


def labels_missing(batch: dict[str, Any]) -> None:
    del batch["labels"]


def pixels_missing(batch: dict[str, Any]) -> None:
    del batch["data"]


def pixels_as_floats(batch: dict[str, Any]) -> None:
    batch["data"] = batch["data"].astype(np.float32)


def pixels_grey(batch: dict[str, Any]) -> None:
    batch["data"] = batch["data"][:, :1024]


def pixels_square(batch: dict[str, Any]) -> None:
    batch["data"] = batch["data"].reshape(-1, 3, 32, 32)


def rows_none(batch: dict[str, Any]) -> None:
    batch["data"], batch["labels"] = batch["data"][:0], []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (labels_out_of_range, r"label 10 at row 7; expected 10 classes \(0\.\.9\)"),
        (labels_too_few, "39 labels for 40 images"),
        (labels_not_numbers, "expected a list of whole numbers under 'labels'"),
        (labels_huge, "expected a list of whole numbers under 'labels'"),
        (labels_missing, "expected a list of whole numbers under 'labels', found something else"),
        (pixels_missing, "expected an array under 'data', found NoneType"),
        (pixels_as_floats, "expected an array of uint8, found 'f4'"),
        (pixels_grey, r"expected images of 3072 bytes, found an array \(40, 1024\)"),
        (pixels_square, "expected images of 3072 bytes"),
        (rows_none, "expected images of 3072 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["data_batch_2", "test_batch"])
def test_a_wrong_batch_is_refused(
    tmp_path: Path, name: str, spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    batches = cifar_batches()
    spoil(batches[name])
    with pytest.raises(DataDamaged, match=f"{name}: {message}"):
        read_cifar(write_cifar(tmp_path, batches, protocol=4))


def test_constant_images_are_refused(tmp_path: Path) -> None:
    batches = cifar_batches()
    batches["test_batch"]["data"][:] = 3
    with pytest.raises(DataDamaged, match="all pixels have the value 3"):
        read_cifar(write_cifar(tmp_path, batches))


@pytest.mark.parametrize("packed", [False, True])
def test_a_malicious_batch_runs_no_code(tmp_path: Path, packed: bool) -> None:
    batches: dict[str, Any] = cifar_batches()
    batches["data_batch_2"]["labels"] = Attack(tmp_path / "owned")
    if packed:
        place = pack(tmp_path / "packed.tar.gz", good_members(batches))
    else:
        place = write_cifar(tmp_path / "folder", batches)
    with pytest.raises(DataDamaged, match=r"data_batch_2: refused.*mkdir"):
        read_cifar(place)
    assert not (tmp_path / "owned").exists()


def test_a_truncated_batch_is_refused(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, cifar_batches())
    whole = (place / "data_batch_4").read_bytes()
    (place / "data_batch_4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataDamaged, match="data_batch_4: refused"):
        read_cifar(place)


def test_an_oversized_batch_is_refused_unread(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, cifar_batches())
    with (place / "data_batch_5").open("wb") as stream:
        stream.truncate(cifar.MAX_FILE_BYTES + 1)
    with pytest.raises(DataDamaged, match=r"data_batch_5: 40,000,001 bytes; expected at most 40,000,000"):
        read_cifar(place)


BAD_MEMBERS = {
    "parent path": (member("../escape", b"x"), r"unexpected member '\.\./escape'"),
    "parent path inside": (member(f"{FOLDER}/../../escape", b"x"), "unexpected member"),
    "absolute path": (member("/etc/escape", b"x"), "unexpected member '/etc/escape'"),
    "absolute batch": (member(f"/{FOLDER}/data_batch_1", b"x"), "unexpected member"),
    "stranger": (member(f"{FOLDER}/extra", b"x"), "unexpected member"),
    "symbolic link": (
        member(f"{FOLDER}/data_batch_1", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "not a regular file",
    ),
    "hard link": (
        member(f"{FOLDER}/data_batch_1", type=tarfile.LNKTYPE, linkname=f"{FOLDER}/test_batch"),
        "not a regular file",
    ),
    "device": (member(f"{FOLDER}/data_batch_1", type=tarfile.CHRTYPE), "not a regular file"),
    "folder in place of a file": (member(f"{FOLDER}/data_batch_1", type=tarfile.DIRTYPE), "not a regular file"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
@pytest.mark.parametrize("first", [True, False])
def test_an_archive_with_a_foreign_member_is_refused(tmp_path: Path, case: str, first: bool) -> None:
    bad, message = BAD_MEMBERS[case]
    members = good_members(cifar_batches())
    members = [bad, *members] if first else [*members, bad]
    inside = tmp_path / "deep" / "down"
    inside.mkdir(parents=True)
    path = pack(inside / "packed.tar.gz", members)
    with pytest.raises(DataDamaged, match=message):
        read_cifar(path)
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == ["packed.tar.gz"]


def test_a_member_may_not_come_twice(tmp_path: Path) -> None:
    members = good_members(cifar_batches())
    with pytest.raises(DataDamaged, match="holds test_batch twice"):
        read_cifar(pack(tmp_path / "packed.tar.gz", [*members, members[6]]))


def test_an_oversized_member_is_refused_unread(tmp_path: Path) -> None:
    members = [member(f"{FOLDER}/data_batch_1", bytes(cifar.MAX_FILE_BYTES + 1))]
    with pytest.raises(DataDamaged, match="data_batch_1: 40,000,001 bytes; expected at most"):
        read_cifar(pack(tmp_path / "packed.tar.gz", members))


def test_an_archive_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "MAX_ARCHIVE_BYTES", 500_000)
    with pytest.raises(DataDamaged, match="unpacks to more than 500,000 bytes"):
        read_cifar(pack(tmp_path / "packed.tar.gz", good_members(cifar_batches())))


def test_a_huge_extended_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tar headers may carry text of any length, which a reader would hold in memory."""
    monkeypatch.setattr(cifar, "MAX_ARCHIVE_BYTES", 500_000)
    bad, content = member(f"{FOLDER}/data_batch_1", b"x", pax_headers={"comment": "a" * 2_000_000})
    with pytest.raises(DataDamaged, match="unpacks to more than 500,000 bytes"):
        read_cifar(pack(tmp_path / "packed.tar.gz", [(bad, content)]))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_archive_is_refused(tmp_path: Path, share: float) -> None:
    path = pack(tmp_path / "packed.tar.gz", good_members(cifar_batches()))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataDamaged, match="damaged archive"):
        read_cifar(path)


def test_an_incomplete_archive_is_refused(tmp_path: Path) -> None:
    batches = cifar_batches()
    del batches["data_batch_2"]
    with pytest.raises(DataDamaged, match="missing data_batch_2"):
        read_cifar(pack(tmp_path / "packed.tar.gz", good_members(batches)))


def test_real_cifar10(real_data: None) -> None:
    if not find_data("cifar10").found:
        pytest.skip("CIFAR-10 is not on this machine")
    dataset = load_dataset("cifar10")
    sizes = dataset.split_sizes
    assert ("subset" in dataset.description) == (sizes != {"train": 45_000, "val": 5_000, "test": 10_000})
    assert dataset.mean is not None
    for channel, mean in enumerate(dataset.mean):
        assert dataset.train.inputs[:, channel].float().mean().item() == pytest.approx(mean, rel=0.02)
    assert torch.bincount(dataset.open_test().targets, minlength=10).min() > 0
