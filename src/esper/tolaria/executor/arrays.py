"""What compiled code is given: arrays in named tuples, which numba passes on at no cost. Knows no network."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Rows(NamedTuple):
    """Batches as compiled code reads them: [batch, value, row], rows padded with zeros."""

    inputs: Floats
    targets: NDArray[np.int64]
    counts: NDArray[np.int64]
    """Rows of each batch that are no padding."""


class Memory(NamedTuple):
    """What operations read and write; flat."""

    A: Floats
    """Activations."""
    G: Floats
    """Their gradients."""
    p: Floats
    """Parameters."""
    dp: Floats
    """Their gradients."""
    stats: Floats
    """Running statistics."""
    saved: Floats
    """Scalars that forward keeps for backward."""
    frame: Floats
    """Scratch of convolutions and the loss."""
    scalars: Floats
    """Given at run time: alphas."""


class Optimizer(NamedTuple):
    """The state of an optimizer, and where it belongs."""

    kind: int
    hyper: NDArray[np.float64]
    """AdamW: beta1, beta2, epsilon. SGD: momentum."""
    first: Floats
    second: Floats
    """Moments, laid out as the parameters."""
    steps: Floats
    """Updates of each tensor."""
    tensors: NDArray[np.int64]
    """(start, stop) of each tensor in the parameters."""
    groups: NDArray[np.int64]
    """(first, last + 1) tensor of each group; group 0 is the host."""
    norms: Floats
    """Gradient norm of each tensor in the last batch that had one."""
    seen: NDArray[np.int64]
    """(batches with gradient, batches left out) of each group since somebody cleared it."""


class Learning(NamedTuple):
    """How a network is updated; no rates: it is not."""

    rates: NDArray[np.float64]
    """(learning rate, weight decay) of each group."""
    clip_norm: float


class Meters(NamedTuple):
    """Training seeds of one network."""

    eta: Floats
    """Step size of each; below zero before its first batch, NaN while there was no gradient to get one from. Moves."""
    group: NDArray[np.int64]
    """By group of the optimizer: its meter, or -1."""
    rho: float
    decay: float
    readings: Floats
    """[batch, meter, (objective, residual ratio)]; as it was where the seed only listened. Filled."""


NO_LEARNING = Learning(rates=np.zeros((0, 2)), clip_norm=0.0)
