"""Reading a pickle made by somebody else runs no code, whatever the pickle says."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import DataDamaged
from esper.runtime.data.pickles import PickledArray, read_plain_dict

ARRAY = np.arange(24, dtype=np.uint8).reshape(4, 6)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("array", [ARRAY, np.asfortranarray(ARRAY)], ids=["rows", "columns"])
def test_byte_arrays_arrive_unchanged(protocol: int, array: np.ndarray) -> None:
    found = read_plain_dict(pickle.dumps({"data": array, "labels": [1, 2]}, protocol=protocol), "batch")
    assert found["labels"] == [1, 2]
    assert np.array_equal(found["data"].to_bytes_array(), array)


def test_pickles_of_python_2_are_read() -> None:
    """The layout of the published batches: byte strings for keys and for the data."""
    written = (
        b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x03K\x08eU\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05"
        b"cnumpy\nndarray\nq\x06K\x00\x85q\x07U\x01bq\x08\x87q\tRq\n(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x0bU\x02u1q"
        b"\x0cK\x00K\x01\x87Rq\r(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x06\x00\x00\x00"
        b"\x00\x01\x7f\x80\xfe\xfftbu."
    )
    found = read_plain_dict(written, "batch")
    assert found["labels"] == [3, 8]
    assert found["data"].to_bytes_array().tolist() == [[0, 1, 127], [128, 254, 255]]


class Attack:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (os.system, ("echo owned > {canary}",)),
        (eval, ("open({canary!r}, 'w').write('owned')",)),
        (exec, ("open({canary!r}, 'w').write('owned')",)),
        (open, ("{canary}", "w")),
        (subprocess.check_call, (["touch", "{canary}"],)),
        (np.save, ("{canary}.npy", 1)),
        (getattr, (os, "system")),
    ],
    ids=["os.system", "eval", "exec", "open", "subprocess", "numpy.save", "getattr"],
)
def test_a_planted_call_is_refused_and_not_made(tmp_path: Path, function: Any, args: Any, protocol: int) -> None:
    canary = tmp_path / "canary"
    args = tuple(arg.format(canary=str(canary)) if isinstance(arg, str) else arg for arg in args)
    if function is getattr:
        written = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R."
    else:
        written = pickle.dumps({"data": ARRAY, "labels": [Attack(function, *args)]}, protocol=protocol)
    with pytest.raises(DataDamaged, match=r"batch: refused; .* asks for .*, which a data file has no use for"):
        read_plain_dict(written, "batch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", [b"numpy\nlib.npyio.os.system\n", b"numpy\nload\n", b"_codecs\ndecode\n", b"os\nsystem\n"]
)
def test_only_the_listed_names_are_found(name: bytes) -> None:
    with pytest.raises(DataDamaged, match="has no use for"):
        read_plain_dict(b"\x80\x02c" + name + b".", "batch")


@pytest.mark.parametrize(
    "target", [b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"]
)
@pytest.mark.parametrize("state", [b"}X\x01\x00\x00\x00xK\x01s", b"N}X\x08\x00\x00\x00__call__K\x01s\x86"])
def test_a_pickle_cannot_change_the_reader(target: bytes, state: bytes) -> None:
    with pytest.raises(DataDamaged):
        read_plain_dict(b"\x80\x02" + target + state + b"b.", "batch")
    test_byte_arrays_arrive_unchanged(2, ARRAY)


def test_a_newer_protocol_is_refused_by_name() -> None:
    with pytest.raises(DataDamaged, match="protocol 5; expected 2 to 4"):
        read_plain_dict(pickle.dumps({"data": ARRAY}, protocol=5), "batch")


@pytest.mark.parametrize(
    "forged",
    [
        b"}r\x00\x00\x00\x10.",  # memo index 2**28
        b"\x96\x00\x00\x00\x40\x00\x00\x00\x00x.",  # byte array of 1 GB
        b"\x8e\x00\x00\x00\x40\x00\x00\x00\x00x.",  # bytes of 1 GB
        b"\x8b\x00\x00\x00\x40x.",  # whole number of 1 GB
    ],
)
def test_a_forged_size_costs_no_memory(forged: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(DataDamaged):
            read_plain_dict(b"\x80\x02" + forged, "batch")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), dtype=np.float32), "expected an array of uint8, found 'f4'"),
        (np.zeros((2, 3), dtype=np.int8), "expected an array of uint8, found 'i1'"),
        (np.array([[], {}], dtype=object), "expected an array of uint8, found 'O8'"),
    ],
)
def test_arrays_of_other_types_are_refused(array: np.ndarray, message: str) -> None:
    found = read_plain_dict(pickle.dumps({"data": array}, protocol=2), "batch")["data"]
    assert isinstance(found, PickledArray)
    with pytest.raises(ValueError, match=message):
        found.to_bytes_array()


@pytest.mark.parametrize("shape", [(2, 4), (7,), (-2, -3), (2, 3.0), [2, 3], None, (True, 6), (10**12, 10**12)])
def test_a_shape_that_does_not_fit_its_data_is_refused(shape: Any) -> None:
    array = PickledArray()
    array.__setstate__((1, shape, "u1", False, b"sixsix"))
    with pytest.raises(ValueError, match="expected the data of an array of shape"):
        array.to_bytes_array()


@pytest.mark.parametrize("written", [b"", b"hello", b"\x80\x02]."], ids=["empty", "text", "a list"])
def test_what_is_no_dictionary_is_refused(written: bytes) -> None:
    with pytest.raises(DataDamaged, match=r"batch: (refused; )?expected a dictionary"):
        read_plain_dict(written, "batch")


WHOLE = pickle.dumps({"data": ARRAY, "labels": list(range(9)), "name": "x"}, protocol=2)


@settings(max_examples=300)
@given(st.data())
def test_damage_anywhere_ends_in_a_clear_error_or_in_plain_values(data: st.DataObject) -> None:
    written = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    stop = data.draw(st.integers(0, len(written)))
    try:
        found = read_plain_dict(bytes(written[: stop or None]), "batch")
    except DataDamaged:
        return
    array = found.get("data")
    if isinstance(array, PickledArray):
        try:
            assert array.to_bytes_array().dtype == np.uint8
        except ValueError:
            return


def test_the_attacks_are_real() -> None:
    """An ordinary reader makes the call that ours refuses."""
    seen = io.StringIO()
    written = pickle.dumps(Attack(print, "called"), protocol=4)
    stdout, sys.stdout = sys.stdout, seen
    try:
        pickle.loads(written)
    finally:
        sys.stdout = stdout
    assert seen.getvalue() == "called\n"
    with pytest.raises(DataDamaged):
        read_plain_dict(written, "batch")
