"""Reads the one kind of pickle Esper accepts: dictionaries of plain values and byte arrays, as in CIFAR-10 batches.

A pickle names the functions it wants called. Here every name maps to an inert stand-in that only takes notes, and a
name that is not on the list ends the reading, so a file made by somebody else runs no code, numpy's included.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from esper.leyline import DataDamaged

MAX_PROTOCOL = b"\x04"


class PickledArray:
    """What a pickle says about a numpy array; `to_bytes_array` believes it only after checking."""

    __slots__ = ("dtype", "fortran", "raw", "shape")

    def __init__(self) -> None:
        self.shape: Any = None
        self.dtype: Any = None
        self.fortran: Any = None
        self.raw: Any = None

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.fortran, self.raw = state

    def to_bytes_array(self) -> npt.NDArray[np.uint8]:
        """The array, if it consists of unsigned bytes and its shape fits its data.

        Raises:
            ValueError: It does not.
        """
        name = self.dtype.name if isinstance(self.dtype, _PickledDtype) else self.dtype
        if name not in ("u1", "uint8"):
            raise ValueError(f"expected an array of uint8, found {name!r}")
        raw = self.raw.encode("latin1") if isinstance(self.raw, str) else self.raw
        sizes: tuple[int, ...] = self.shape if isinstance(self.shape, tuple) else ()
        plain = all(type(size) is int and size >= 0 for size in sizes)
        if not plain or not isinstance(raw, bytes | bytearray) or math.prod(sizes) != len(raw):
            raise ValueError(f"expected the data of an array of shape {self.shape!r}, found something else")
        flat = np.frombuffer(raw, dtype=np.uint8)
        return (flat.reshape(sizes, order="F") if self.fortran else flat.reshape(sizes)).copy()


class _PickledDtype:
    __slots__ = ("name",)

    def __init__(self, name: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: meaningless for single bytes."""


class _Reconstruct:
    """Stands for numpy's array constructor, which is followed by the array's state."""

    __slots__ = ()

    def __call__(self, *_: Any) -> PickledArray:
        return PickledArray()


class _Dtype:
    __slots__ = ()

    def __call__(self, name: Any, *_: Any) -> _PickledDtype:
        return _PickledDtype(name)


class _Encode:
    """Stands for the way protocol 2 writes bytes: text that is to be encoded as latin1."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise ValueError(f"expected latin1, found {encoding!r}")
        return text.encode("latin1")


# Instances without a dictionary: a pickle can call them but cannot change them.
_STAND_INS: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _Dtype(),
    ("_codecs", "encode"): _Encode(),
}


class _PlainUnpickler(pickle._Unpickler):
    """Takes no more memory than the file has bytes.

    It is Python's own unpickler rather than the faster one in C, which fills gigabytes for one forged memo index. The
    one opcode that allocates by its word, for the byte arrays of protocol 5, is taken out.
    """

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a data file has no use for")
        return _STAND_INS[module, name]


# What the unpickler raises over bytes that are no pickle.
_MALFORMED = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


def read_plain_dict(data: bytes, place: str) -> dict[str, Any]:
    """Reads a pickled dictionary with text keys; arrays arrive as `PickledArray`.

    Raises:
        DataDamaged: The bytes are no such pickle, or the pickle asks for anything but array reconstruction.
    """
    if data[:1] == pickle.PROTO and data[1:2] > MAX_PROTOCOL:
        raise DataDamaged(f"{place}: written with pickle protocol {data[1]}; expected 2 to 4, as published batches are")
    try:
        found = _PlainUnpickler(io.BytesIO(data), encoding="latin1").load()
    except _MALFORMED as error:
        raise DataDamaged(f"{place}: refused; expected a dictionary of arrays and lists: {error}") from error
    if not isinstance(found, dict):
        raise DataDamaged(f"{place}: expected a dictionary, found {type(found).__name__}")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
