"""What all labelled image sources share: the checks, the train/val border and the way into tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from esper.leyline import DataDamaged, record
from esper.runtime.data.records import Content, Split, digest
from esper.runtime.data.splits import Rows, hold_out


@record
class LabelledImages:
    """Images `[rows, channels, height, width]` uint8 and their labels, as read from `place`."""

    place: str
    images: npt.NDArray[np.uint8]
    labels: Rows

    def take(self, rows: Rows) -> LabelledImages:
        """Some of the rows, in the given order."""
        return LabelledImages(place=self.place, images=self.images[rows], labels=self.labels[rows])


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


def _check_variety(data: LabelledImages, num_classes: int) -> None:
    missing = sorted(set(range(num_classes)) - set(data.labels.tolist()))
    if missing:
        raise DataDamaged(f"{data.place}: expected {num_classes} classes, found no image of class {missing[0]}")
    if data.images.min() == data.images.max():
        raise DataDamaged(f"{data.place}: all pixels have the value {data.images.min()}; expected images")


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
    _check_variety(check_rows(training, num_classes), num_classes)
    _check_variety(check_rows(test, num_classes), num_classes)
    num_val = max(1, round(len(training.labels) * val_share))
    train_rows, val_rows = hold_out(training.labels, num_val, key)
    train, val = training.take(train_rows), training.take(val_rows)
    return Content(
        description=description,
        num_classes=num_classes,
        mean=mean,
        std=std,
        train=_split(train),
        val=_split(val),
        test=_split(test),
        train_sha256=digest(train.images, train.labels),
        val_sha256=digest(val.images, val.labels),
        test_sha256=digest(test.images, test.labels),
    )


def _split(data: LabelledImages) -> Split:
    return Split(inputs=torch.from_numpy(data.images), targets=torch.from_numpy(data.labels))
