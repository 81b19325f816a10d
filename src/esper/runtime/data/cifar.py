"""CIFAR-10 from its Python batches: a folder, or the tar.gz as published. A smaller part in the same layout will do.

The archive is read in memory and never unpacked, so no path inside it can reach the file system.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

import numpy as np

from esper.leyline import DataDamaged
from esper.runtime.data.pickles import PickledArray, read_plain_dict
from esper.runtime.data.splits import Content, LabelledImages, check_rows, image_content

FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"
TRAIN_FILES: tuple[str, ...] = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
FILES: tuple[str, ...] = (*TRAIN_FILES, TEST_FILE)
BYSTANDERS: tuple[str, ...] = ("batches.meta", "readme.html")
NUM_CLASSES = 10
SHAPE = (3, 32, 32)
OFFICIAL_SIZES = (50_000, 10_000)
VAL_SHARE = 0.1
MEAN = (0.4914 * 255, 0.4822 * 255, 0.4465 * 255)
STD = (0.2470 * 255, 0.2435 * 255, 0.2616 * 255)
MAX_FILE_BYTES = 40_000_000
MAX_ARCHIVE_BYTES = 250_000_000


def read_cifar(place: Path) -> Content:
    """Reads and checks the batches; 1 in 10 training images becomes val.

    Raises:
        DataDamaged: An archive, a batch or its labels are not what they claim to be.
    """
    if place.is_file():
        files = _read_archive(place)
    else:
        for name in FILES:
            _check_size(str(place / name), (place / name).stat().st_size)
        files = {name: (place / name).read_bytes() for name in FILES}
    batches = [_read_batch(files[name], f"{place}: {name}") for name in TRAIN_FILES]
    training = LabelledImages(
        place=str(place),
        images=np.concatenate([batch.images for batch in batches]),
        labels=np.concatenate([batch.labels for batch in batches]),
    )
    test = _read_batch(files[TEST_FILE], f"{place}: {TEST_FILE}")
    sizes = (len(training.labels), len(test.labels))
    title = "CIFAR-10" if sizes == OFFICIAL_SIZES else "CIFAR-10 subset"
    return image_content(
        description=f"{title}: {sizes[0]:,} training and {sizes[1]:,} test images",
        training=training,
        test=test,
        val_share=VAL_SHARE,
        key="cifar10",
        num_classes=NUM_CLASSES,
        mean=MEAN,
        std=STD,
    )


def _read_batch(data: bytes, place: str) -> LabelledImages:
    batch = read_plain_dict(data, place)
    pixels, labels = batch.get("data"), batch.get("labels")
    if not isinstance(pixels, PickledArray):
        raise DataDamaged(f"{place}: expected an array under 'data', found {type(pixels).__name__}")
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataDamaged(f"{place}: expected a list of whole numbers under 'labels', found something else")
    try:
        rows = pixels.to_bytes_array()
    except ValueError as error:
        raise DataDamaged(f"{place}: {error}") from error
    if rows.ndim != 2 or rows.shape[1] != np.prod(SHAPE) or not len(rows):
        raise DataDamaged(f"{place}: expected images of {np.prod(SHAPE)} bytes, found an array {rows.shape}")
    images = LabelledImages(place=place, images=rows.reshape(-1, *SHAPE), labels=np.array(labels, dtype=np.int64))
    return check_rows(images, NUM_CLASSES)


def _check_size(place: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise DataDamaged(f"{place}: {size:,} bytes; expected at most {MAX_FILE_BYTES:,} in a CIFAR-10 file")


class _Bounded:
    """Hands out at most so many unpacked bytes, because a header can promise what no memory can hold."""

    def __init__(self, stream: gzip.GzipFile, place: Path) -> None:
        self._stream = stream
        self._place = place
        self._left = MAX_ARCHIVE_BYTES

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise DataDamaged(f"{self._place}: unpacks to more than {MAX_ARCHIVE_BYTES:,} bytes; not CIFAR-10")
        return chunk


def _read_archive(path: Path) -> Mapping[str, bytes]:
    files: dict[str, bytes] = {}
    try:
        with (
            gzip.open(path, "rb") as stream,
            # in stream mode tarfile calls nothing but read
            tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream, path)), mode="r|") as archive,
        ):
            for member in archive:
                if member.isdir() and member.name == FOLDER:
                    continue
                name = _check_member(member, path)
                if name in files:
                    raise DataDamaged(f"{path}: holds {name} twice")
                content = archive.extractfile(member)
                assert content is not None, name
                files[name] = content.read()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataDamaged(f"{path}: damaged archive ({error}); truncated? Get it again") from error
    missing = [name for name in FILES if name not in files]
    if missing:
        raise DataDamaged(f"{path}: expected {', '.join(FILES)} in {FOLDER}/; missing {', '.join(missing)}")
    return files


def _check_member(member: tarfile.TarInfo, path: Path) -> str:
    folder, _, name = member.name.partition("/")
    if folder != FOLDER or name not in FILES + BYSTANDERS:
        raise DataDamaged(f"{path}: unexpected member {member.name!r}; expected only files of {FOLDER}/")
    if not member.isreg():
        raise DataDamaged(f"{path}: member {member.name!r} is not a regular file (a link?)")
    _check_size(f"{path}: {member.name}", member.size)
    return name
