"""Rows on their way to workers, and their order: one permutation per (run seed, episode, epoch) for all envs.

The key has no env and there is no cursor, so envs see equal batches whatever process they live in, two controllers run
on equal keys are paired, and a resumed run needs only the episode and the epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, SupportsIndex, cast

import numpy as np
import torch
from torch import Tensor

from esper.leyline import AUGMENTATIONS, DataNotFound, check_known, derive_seed, record

INLINE_BYTES = 8_000_000
"""Tensors that are smaller than this together travel inside the message that starts a worker."""


@record
class Batch:
    """One minibatch: fresh tensors, never views of the data set."""

    index: int
    inputs: Tensor
    targets: Tensor


def crop_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Random shift by up to `padding` pixels and random left-right flip, one draw per image."""
    rows, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a strided view: nothing is copied until it is indexed
    shifts = torch.randint(0, 2 * padding + 1, (2, rows), generator=generator).to(images.device)
    cropped = windows[torch.arange(rows, device=images.device), :, shifts[0], shifts[1]]
    flips = (torch.rand(rows, generator=generator) < 0.5).to(images.device)
    return torch.where(flips[:, None, None, None], cropped.flip(3), cropped)


_AUGMENT = dict(zip(AUGMENTATIONS, (crop_flip,), strict=True))


class SharedBatchIterator:
    """Batches of in-memory tensors for all envs of a worker.

    Args:
        inputs: Rows of any type; bytes become floats.
        targets: One entry per row.
        batch_size: Rows per batch.
        run_seed: Keys the order and the augmentation.
        samples_per_epoch: Rows of the permutation to use in one epoch; all if None.
        mean: Per-channel mean to subtract, in units of the stored values; None to feed rows as stored.
        std: Per-channel deviation to divide by; goes with `mean`.
        augment: One of AUGMENTATIONS, or None.
        channels_last: Memory format of image batches.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int,
        run_seed: int,
        samples_per_epoch: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augment: str | None = None,
        channels_last: bool = False,
    ) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets")
        if not 1 <= batch_size <= len(inputs):
            raise ValueError(f"batch_size must be in 1..{len(inputs)} (the rows there are), got {batch_size}")
        if samples_per_epoch is not None and not batch_size <= samples_per_epoch <= len(inputs):
            raise ValueError(
                f"samples_per_epoch must be in {batch_size}..{len(inputs)} (one batch to all rows), "
                f"got {samples_per_epoch}"
            )
        if augment is not None:
            check_known("augmentation", augment, AUGMENTATIONS)
        if (mean is None) != (std is None):
            raise ValueError("mean and std go together; give both or neither")
        self.inputs = inputs
        self.targets = targets
        self.batch_size = batch_size
        self.run_seed = run_seed
        self.samples_per_epoch = len(inputs) if samples_per_epoch is None else samples_per_epoch
        self.mean = None if mean is None else torch.tensor(mean)[:, None, None]
        self.std = None if std is None else torch.tensor(std)[:, None, None]
        self.augment = augment
        self.channels_last = channels_last

    def keyed(self, run_seed: int) -> SharedBatchIterator:
        """The same rows in the order of another run."""
        other = copy(self)
        other.run_seed = run_seed
        return other

    def on(self, device: torch.device) -> SharedBatchIterator:
        """The same batches with the rows resident on a device. The order is still drawn on the CPU."""
        other = copy(self)
        other.inputs, other.targets = self.inputs.to(device), self.targets.to(device)
        other.mean = None if self.mean is None else self.mean.to(device)
        other.std = None if self.std is None else self.std.to(device)
        return other

    def epoch(self, episode: int, epoch: int) -> Iterator[Batch]:
        """Shuffled training batches of equal size; a short last one is left out."""
        generator = torch.Generator().manual_seed(derive_seed(self.run_seed, None, episode, epoch, "order"))
        order = torch.randperm(len(self.inputs), generator=generator).to(self.inputs.device)
        augment_rng = torch.Generator().manual_seed(derive_seed(self.run_seed, None, episode, epoch, "augment"))
        for index in range(self.samples_per_epoch // self.batch_size):
            rows = order[index * self.batch_size : (index + 1) * self.batch_size]
            yield self._batch(index, rows, augment_rng)

    def in_order(self, limit: int | None = None) -> Iterator[Batch]:
        """Every row (or the first `limit`) once, unshuffled and unaugmented, the short last batch included."""
        stop = len(self.inputs) if limit is None else min(limit, len(self.inputs))
        device = self.inputs.device
        for index, start in enumerate(range(0, stop, self.batch_size)):
            yield self._batch(index, torch.arange(start, min(start + self.batch_size, stop), device=device), None)

    def _batch(self, index: int, rows: Tensor, augment_rng: torch.Generator | None) -> Batch:
        inputs = self.inputs.index_select(0, rows)
        if inputs.dtype == torch.uint8:
            inputs = inputs.float()
        if self.mean is not None and self.std is not None:
            inputs = inputs.sub(self.mean).div_(self.std)
        if augment_rng is not None and self.augment is not None:
            inputs = _AUGMENT[self.augment](inputs, augment_rng)
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return Batch(index=index, inputs=inputs, targets=self.targets.index_select(0, rows))


# ---- travelling to other processes


@record
class StoredTensor:
    """One tensor as plain data. Exactly one of `content` and `file` is given."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | None
    """Where it came in memory that several workers map, a view of it, to which nobody may write."""
    file: str | None

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # A transport that can carry buffers beside a message gives the receiver a view; to others this is bytes.
        rebuild, (cls, values) = cast(tuple[Any, Any], self.__reduce__())
        return rebuild, (cls, tuple(PickleBuffer(value) if isinstance(value, bytes) else value for value in values))

    def open(self) -> Tensor:
        """The tensor; a mapped file is private, so writing to it changes nothing for others.

        Raises:
            DataNotFound: The file is gone.
        """
        dtype = getattr(torch, self.dtype)
        if isinstance(self.content, bytes):
            return torch.frombuffer(bytearray(self.content), dtype=dtype).reshape(self.shape)
        if self.content is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it must not be written to
                return torch.from_numpy(np.frombuffer(self.content, np.uint8)).view(dtype).reshape(self.shape)
        assert self.file is not None
        if not Path(self.file).is_file():
            raise DataNotFound(
                f"the run's copy of its data is gone: {self.file}. It must stay as long as the run; start the run again"
            )
        size = torch.Size(self.shape).numel()
        return torch.from_file(self.file, shared=False, size=size, dtype=dtype).reshape(self.shape)


def store_tensors(tensors: Mapping[str, Tensor], folder: Path | None) -> dict[str, StoredTensor]:
    """Makes tensors ready to travel: small ones inside a message, large ones as files in `folder` that all map.

    A mapped file is read once by the system and shared by everyone, and needs no shared-memory limit. Without a
    folder, all tensors travel inside the message.
    """
    inline = folder is None or sum(tensor.nbytes for tensor in tensors.values()) < INLINE_BYTES
    stored = {}
    for name, tensor in tensors.items():
        array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        file = None
        if folder is not None and not inline:
            folder.mkdir(parents=True, exist_ok=True)
            file = str((folder / f"{name}.bin").absolute())
            array.tofile(file)
        stored[name] = StoredTensor(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            content=array.tobytes() if file is None else None,
            file=file,
        )
    return stored
