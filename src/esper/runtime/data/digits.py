"""The bundled digits: 1,797 handwritten digits of 8x8 pixels, with the rows of each split stored beside them."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from esper.leyline import DataDamaged
from esper.runtime.data.splits import Content, LabelledImages, Split, digest, make_content

FILE = "digits.npz"
ARRAYS = ("images", "labels", "train", "val", "test")
SIDE = 8
NUM_CLASSES = 10
TOP = 16
"""Pixels count the dark dots of a 4x4 block."""
SHA256 = "a4abc460f2e717a59ab68f89a0b13bed3223bd54ba6b31a1ecc0db8f6c46e36f"


def read_digits(path: Path) -> Content:
    """Reads the bundled file; pixels become float32 in 0..1.

    Raises:
        DataDamaged: The installed file is not the one Esper came with.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ARRAYS}
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise DataDamaged(f"{path}: expected the arrays {', '.join(ARRAYS)}: {error}. Install Esper again") from error
    found = digest(*arrays.values())
    if found != SHA256:
        raise DataDamaged(f"{path}: sha256 {found}, expected {SHA256}. Install Esper again")
    digits = LabelledImages(place=str(path), images=arrays["images"][:, None], labels=arrays["labels"].astype(np.int64))
    parts = {name: digits.take(arrays[name].astype(np.int64)) for name in ("train", "val", "test")}
    return make_content(
        f"handwritten digits (UCI optdigits): {len(digits.labels):,} images of {SIDE}x{SIDE}",
        NUM_CLASSES,
        {
            name: Split(inputs=torch.from_numpy(part.images).float() / TOP, targets=torch.from_numpy(part.labels))
            for name, part in parts.items()
        },
        {name: digest(part.images, part.labels) for name, part in parts.items()},
    )
