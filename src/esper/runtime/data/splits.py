"""Which row belongs to which split: fixed by the labels and a name, the same on every machine and in every process."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from esper.leyline import derive_seed

Rows = npt.NDArray[np.int64]


def hold_out(labels: Rows, num_held: int, key: str) -> tuple[Rows, Rows]:
    """Splits rows into (kept, held out), both ascending, with every class held out in proportion.

    Each class gives its share rounded down; the rows still missing come from the classes with the largest remainders.

    Args:
        labels: One class per row.
        num_held: How many rows to hold out.
        key: Names the draw. Equal keys and labels give equal rows for ever: only `random.random`, whose sequence
            Python guarantees, takes part.
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
