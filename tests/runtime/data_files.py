"""Writers of small but complete data files, so that every reader is tested where no real data is."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

from esper.runtime.data import cifar, fashion


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def fashion_arrays(train: int = 240, test: int = 50) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        fashion.TRAIN_IMAGES: rng.integers(0, 256, (train, 28, 28), dtype=np.uint8),
        fashion.TRAIN_LABELS: (np.arange(train) % 10).astype(np.uint8),
        fashion.TEST_IMAGES: rng.integers(0, 256, (test, 28, 28), dtype=np.uint8),
        fashion.TEST_LABELS: (np.arange(test) % 10).astype(np.uint8),
    }


def write_fashion(folder: Path, arrays: dict[str, np.ndarray], *, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
    return folder


def cifar_batches(rows: int = 40) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(7)
    return {
        name: {
            "batch_label": name,
            "labels": [row % 10 for row in range(rows)],
            "data": rng.integers(0, 256, (rows, 3072), dtype=np.uint8),
            "filenames": [f"{row}.png" for row in range(rows)],
        }
        for name in cifar.FILES
    }


def write_cifar(folder: Path, batches: dict[str, dict[str, Any]], protocol: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in batches.items():
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    return folder
