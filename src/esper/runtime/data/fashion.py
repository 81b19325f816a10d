"""Fashion-MNIST from its four IDX files, plain or gzipped. Knows the format, not where users keep the files."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from esper.leyline import DataDamaged
from esper.runtime.data.splits import Content, LabelledImages, digest, image_content

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
FILES: tuple[str, ...] = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
SIDE = 28
NUM_CLASSES = 10
MAX_ROWS = 60_000
VAL_SHARE = 1 / 12
MEAN, STD = 0.286 * 255, 0.353 * 255
KNOWN_SHA256 = "cb1198077cf8c2ce29a83828724a5919154e85873bf336255a0bc5e6fc02a0b0"
"""Of the decoded content. MNIST has the same file names, so names prove nothing."""


def find_file(folder: Path, name: str) -> Path | None:
    """The IDX file of that name in a folder, plain before gzipped."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    return None


def read_fashion(folder: Path) -> Content:
    """Reads and checks the four files; 1 in 12 training images (5,000 of 60,000) becomes val.

    Raises:
        DataDamaged: A file is not what its name and header claim.
    """
    training = _read_pair(folder, TRAIN_IMAGES, TRAIN_LABELS)
    test = _read_pair(folder, TEST_IMAGES, TEST_LABELS)
    found = digest(training.images, training.labels, test.images, test.labels)
    title = "Fashion-MNIST" if found == KNOWN_SHA256 else "other content in the files of Fashion-MNIST"
    return image_content(
        description=f"{title}: {len(training.labels):,} training and {len(test.labels):,} test images",
        training=training,
        test=test,
        val_share=VAL_SHARE,
        key="fashion",
        num_classes=NUM_CLASSES,
        mean=(MEAN,),
        std=(STD,),
    )


def _read_pair(folder: Path, images_name: str, labels_name: str) -> LabelledImages:
    images_path, labels_path = find_file(folder, images_name), find_file(folder, labels_name)
    assert images_path is not None, images_name
    assert labels_path is not None, labels_name
    return LabelledImages(
        place=str(labels_path),
        images=read_idx(images_path, (SIDE, SIDE))[:, None],
        labels=read_idx(labels_path, ()).astype(np.int64),
    )


def read_idx(path: Path, row_shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Reads an IDX file of unsigned bytes whose rows have the given shape.

    The header is checked before anything is read by its word, so a short file that promises terabytes, or a gzip bomb,
    costs no memory.

    Raises:
        DataDamaged: Wrong magic number, dimensions or length, or a damaged gzip stream.
    """
    with open(path, "rb") as raw, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw as stream:
        try:
            return _read_idx(stream, path, row_shape)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataDamaged(f"{path}: damaged gzip stream ({error}); truncated? Get the file again") from error


def _read_idx(stream: IO[bytes] | gzip.GzipFile, path: Path, row_shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    magic = bytes((0, 0, 8, 1 + len(row_shape)))
    header = stream.read(8 + 4 * len(row_shape))
    if header[:4] != magic:
        raise DataDamaged(
            f"{path}: expected an IDX file with magic {magic.hex()}, found {header[:4].hex() or 'nothing'}"
        )
    dims = tuple(int(size) for size in np.frombuffer(header[4 : len(header) // 4 * 4], dtype=">u4"))
    if dims[1:] != row_shape or not 0 < dims[0] <= MAX_ROWS:
        wanted = " x ".join(str(size) for size in (f"1..{MAX_ROWS}", *row_shape))
        raise DataDamaged(f"{path}: expected {wanted} values, header says {' x '.join(map(str, dims)) or 'nothing'}")
    length = int(np.prod(dims))
    payload = stream.read(length + 1)
    if len(payload) != length:
        found = "more" if len(payload) > length else f"{len(payload)}"
        raise DataDamaged(f"{path}: header promises {length} bytes of data, found {found}; truncated or overwritten?")
    return np.frombuffer(payload, dtype=np.uint8).reshape(dims).copy()
