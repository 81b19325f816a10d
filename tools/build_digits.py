"""Builds src/esper/runtime/data/digits.npz from the copy in scikit-learn, which only this script needs.

    python tools/build_digits.py

Test rows are held out first and val rows from the rest, both by class. The result is the same on every machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from esper.runtime.data import digits as reader
from esper.runtime.data.splits import digest, hold_out

NUM_VAL, NUM_TEST = 349, 451
TARGET = Path(reader.__file__).with_name(reader.FILE)


def main() -> None:
    """Writes the file and prints the digest that the reader expects."""
    source = load_digits()
    labels = source.target.astype(np.int64)
    rest, test = hold_out(labels, NUM_TEST, "digits:test")
    train, val = hold_out(labels[rest], NUM_VAL, "digits:val")
    arrays = {
        "images": source.images.astype(np.uint8),
        "labels": labels.astype(np.uint8),
        "train": rest[train].astype(np.uint16),
        "val": rest[val].astype(np.uint16),
        "test": test.astype(np.uint16),
    }
    np.savez_compressed(TARGET, **arrays)
    found = digest(*arrays.values())
    print(f"{TARGET}: sha256 of the content {found}")  # noqa: T201
    if found != reader.SHA256:
        print("the reader expects another digest: update SHA256 in digits.py")  # noqa: T201


if __name__ == "__main__":
    main()
