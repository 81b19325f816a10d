"""Tensors on their way to other processes: small ones inside a message, large ones as files that all map.

A mapped file is read once by the system and shared by everyone, needs no shared-memory limit and leaves nothing behind
when a process is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import DataNotFound, record

INLINE_BYTES = 8_000_000
"""Tensors that are smaller than this together travel inside the message."""


@record
class StoredTensor:
    """One tensor as plain data. Exactly one of `content` and `file` is given."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | None
    file: str | None

    def open(self) -> Tensor:
        """The tensor; a mapped file is private, so writing to it changes nothing for others.

        Raises:
            DataNotFound: The file is gone.
        """
        dtype = getattr(torch, self.dtype)
        if self.content is not None:
            return torch.frombuffer(bytearray(self.content), dtype=dtype).reshape(self.shape)
        assert self.file is not None
        if not Path(self.file).is_file():
            raise DataNotFound(
                f"the run's copy of its data is gone: {self.file}. It must stay as long as the run; start the run again"
            )
        size = torch.Size(self.shape).numel()
        return torch.from_file(self.file, shared=False, size=size, dtype=dtype).reshape(self.shape)


def store(tensors: Mapping[str, Tensor], folder: Path | None) -> dict[str, StoredTensor]:
    """Makes tensors ready to travel.

    Args:
        tensors: By name.
        folder: Where large ones are written; None sends all of them inside the message.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    inline = folder is None or total < INLINE_BYTES
    return {name: _stored(name, tensor, None if inline else folder) for name, tensor in tensors.items()}


def _stored(name: str, tensor: Tensor, folder: Path | None) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    if folder is None:
        return StoredTensor(dtype=dtype, shape=tuple(tensor.shape), content=array.tobytes(), file=None)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.bin"
    array.tofile(path)
    return StoredTensor(dtype=dtype, shape=tuple(tensor.shape), content=None, file=str(path.absolute()))
