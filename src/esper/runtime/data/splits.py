"""Data as training sees it: rows in three splits, of which the third stays closed.

Train feeds the host's weights; val (controller-validation) feeds everything that decides; test is opened by the
evaluation code alone, through `Dataset.open_test`, so that one name is enough to see who looked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper.leyline import DataDamaged, derive_seed, record

Rows = npt.NDArray[np.int64]


@record
class Split:
    """Rows of one split, in fixed order.

    Images are `[rows, channels, height, width]` with one int64 label per row. Text is `[rows, context]` int64 tokens,
    and the targets are the same stream one token on.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]


@record
class OpenContent:
    """What is known of a source while its test rows stay closed."""

    description: str
    """What it is, in words for reports; says so when it is only a part of the official data."""
    num_classes: int
    mean: tuple[float, ...] | None
    """Per channel, in units of the stored values: a host is fed `(inputs - mean) / std`. None: fed as stored."""
    std: tuple[float, ...] | None
    train: Split
    val: Split
    sha256: str
    """Digest over the content and the borders of the three splits. Equal for equal content, however it was packed."""
    test_sha256: str


@record
class Content(OpenContent):
    """All that a reader found. Lives only while a data set is loaded or its test split opened."""

    test: Split


@record
class Dataset(OpenContent):
    """Checked data with an open train and val split and a closed test split."""

    name: str
    """The source, such as "digits"."""
    place: str
    """Where it was read."""
    num_test: int
    reread: Callable[[], Content]
    """Reads the source again. Only `open_test` calls it."""

    @classmethod
    def load(cls, name: str, place: str, read: Callable[[], Content]) -> Dataset:
        """Reads a source and lets go of its test rows."""
        content = read()
        known = {field.name: getattr(content, field.name) for field in fields(OpenContent)}
        return cls(**known, name=name, place=place, num_test=len(content.test), reread=read)

    @property
    def split_sizes(self) -> dict[str, int]:
        """Rows per split, for manifests."""
        return {"train": len(self.train), "val": len(self.val), "test": self.num_test}

    def open_test(self) -> Split:
        """Reads the test split. For evaluation only: whatever decides during training must never call this.

        Raises:
            DataDamaged: The source is no longer what it was when this data set was loaded.
        """
        content = self.reread()
        if content.test_sha256 != self.test_sha256:
            raise DataDamaged(
                f"{self.place}: the test split has changed since it was loaded (sha256 {content.test_sha256}, "
                f"expected {self.test_sha256}). Restore the data, or start a new run with the new data"
            )
        return content.test


def make_content(
    description: str,
    num_classes: int,
    splits: Mapping[str, Split],
    hashes: Mapping[str, str],
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Content:
    """Content of the splits "train", "val" and "test" and their digests."""
    sha256 = hashlib.sha256(f"{hashes['train']} {hashes['val']} {hashes['test']}".encode()).hexdigest()
    return Content(
        description=description,
        num_classes=num_classes,
        mean=mean,
        std=std,
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
        sha256=sha256,
        test_sha256=hashes["test"],
    )


def digest(*arrays: npt.NDArray[Any]) -> str:
    """Sha256 over type, shape and bytes of arrays, in order."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(f"{array.dtype.str} {array.shape} ".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


# ---- which row belongs to which split


def hold_out(labels: Rows, num_held: int, key: str) -> tuple[Rows, Rows]:
    """Splits rows into (kept, held out), both ascending, with every class held out in proportion.

    Each class gives its share rounded down; the rows still missing come from the classes with the largest remainders.

    Args:
        labels: One class per row.
        num_held: How many rows to hold out.
        key: Names the draw. Equal keys and labels give equal rows on every machine for ever: only `random.random`,
            whose sequence Python guarantees, takes part.
    """
    if not 0 < num_held < len(labels):
        raise ValueError(f"cannot hold out {num_held} of {len(labels)} rows; expected 1..{len(labels) - 1}")
    rng = random.Random(derive_seed(0, None, None, None, f"split:{key}"))
    order = np.array([rng.random() for _ in range(len(labels))])
    held = np.zeros(len(labels), dtype=bool)
    for label, quota in _quotas(labels, num_held).items():
        rows = np.flatnonzero(labels == label)
        held[rows[np.argsort(order[rows], kind="stable")[:quota]]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _quotas(labels: Rows, num_held: int) -> dict[int, int]:
    classes, counts = np.unique(labels, return_counts=True)
    shares = counts * num_held
    quotas = shares // len(labels)
    largest_remainder = np.argsort(-(shares % len(labels)), kind="stable")
    quotas[largest_remainder[: num_held - int(quotas.sum())]] += 1
    return {int(label): int(quota) for label, quota in zip(classes, quotas, strict=True)}


def spread(num_rows: int, num_wanted: int) -> Rows:
    """Indices of `num_wanted` rows spread evenly over `num_rows`; all of them if there are no more."""
    if num_wanted >= num_rows:
        return np.arange(num_rows)
    return np.arange(num_wanted) * num_rows // num_wanted


# ---- labelled images


@record
class LabelledImages:
    """Images `[rows, channels, height, width]` uint8 and their labels, as read from `place`."""

    place: str
    images: npt.NDArray[np.uint8]
    labels: Rows

    def take(self, rows: Rows) -> LabelledImages:
        """Some of the rows, in the given order."""
        return LabelledImages(place=self.place, images=self.images[rows], labels=self.labels[rows])

    def split(self) -> Split:
        """As tensors; pixels stay bytes."""
        return Split(inputs=torch.from_numpy(self.images), targets=torch.from_numpy(self.labels))


def check_rows(data: LabelledImages, num_classes: int) -> LabelledImages:
    """Returns the data unchanged.

    Raises:
        DataDamaged: There are more or fewer labels than images, or a label is out of range.
    """
    images, labels = data.images, data.labels
    if len(images) != len(labels):
        raise DataDamaged(f"{data.place}: {len(labels)} labels for {len(images)} images; truncated?")
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataDamaged(
            f"{data.place}: label {labels[wrong[0]]} at row {wrong[0]}; expected {num_classes} classes "
            f"(0..{num_classes - 1})"
        )
    return data


def image_content(
    *,
    description: str,
    training: LabelledImages,
    test: LabelledImages,
    val_share: float,
    key: str,
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Content:
    """Checks both parts, holds val out of the training part by class, and keeps pixels as uint8."""
    for data in (training, test):
        check_rows(data, num_classes)
        if missing := sorted(set(range(num_classes)) - set(data.labels.tolist())):
            raise DataDamaged(f"{data.place}: expected {num_classes} classes, found no image of class {missing[0]}")
        if data.images.min() == data.images.max():
            raise DataDamaged(f"{data.place}: all pixels have the value {data.images.min()}; expected images")
    num_val = max(1, round(len(training.labels) * val_share))
    train_rows, val_rows = hold_out(training.labels, num_val, key)
    parts = {"train": training.take(train_rows), "val": training.take(val_rows), "test": test}
    return make_content(
        description,
        num_classes,
        {name: part.split() for name, part in parts.items()},
        {name: digest(part.images, part.labels) for name, part in parts.items()},
        mean,
        std,
    )
