"""Data as training sees it: rows in three splits, of which the third stays closed.

Train feeds the host's weights; val (controller-validation) feeds everything that decides; test is opened by the
evaluation code alone, through `Dataset.open_test`, so that one name is enough to see who looked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from esper.leyline import DataDamaged, record


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
class Content:
    """All that a reader found, test rows included. Lives only while a data set is loaded or its test split opened."""

    description: str
    num_classes: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    train: Split
    val: Split
    test: Split
    train_sha256: str
    val_sha256: str
    test_sha256: str

    @property
    def sha256(self) -> str:
        """One digest over the content and the borders of the three splits."""
        return hashlib.sha256(f"{self.train_sha256} {self.val_sha256} {self.test_sha256}".encode()).hexdigest()


@record
class Dataset:
    """Checked data with an open train and val split and a closed test split."""

    name: str
    """The source, such as "digits"."""
    description: str
    """What it is, in words for reports; says so when it is only a part of the official data."""
    place: str
    """Where it was read."""
    train: Split
    val: Split
    num_classes: int
    mean: tuple[float, ...] | None
    """Per channel, in units of the stored values: a host is fed `(inputs - mean) / std`. None: fed as stored."""
    std: tuple[float, ...] | None
    sha256: str
    """Digest of all three splits. Equal for equal content, however it was packed."""
    test_sha256: str
    num_test: int
    reread: Callable[[], Content]
    """Reads the source again. Only `open_test` calls it."""

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


def digest(*arrays: npt.NDArray[Any]) -> str:
    """Sha256 over type, shape and bytes of arrays, in order."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(f"{array.dtype.str} {array.shape} ".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()
