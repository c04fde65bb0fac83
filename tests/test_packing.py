"""Arrays and plain values as bytes: what comes back, and what is refused because it would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse.core.packing import check_plain, pack, packed_state, unpack, unpacked_state
from horovod_sparse.core.state import empty_state


def test_arrays_of_all_names_come_back() -> None:
    names = ("w/w", "w/w.npy", "w/w.npy.npy", "file/", "json/", "ü/w")
    arrays = {name: np.array([number]) for number, name in enumerate(names)}
    assert unpack(pack(arrays, {})) == (arrays, {})


@pytest.mark.parametrize("part", [slice(0), slice(-40), slice(150), slice(2, 9), slice(10, None)])
def test_damaged_bytes_are_refused(part: slice) -> None:
    packed = packed_state({**empty_state(), "residuals": {"w": np.arange(50.0)}})
    assert unpacked_state(packed)["residuals"]["w"][49] == 49.0
    with pytest.raises(ValueError, match=r"cannot be read .*damaged"):
        unpacked_state(packed[part] + b"x" * 50)


def test_numbers_of_numpys_come_back_as_pythons() -> None:
    values = {"count": np.int64(5), "nested": [np.float32(0.5), np.bool_(True)]}
    for name, value in values.items():
        check_plain(name, value)
    assert unpack(pack({}, values)) == ({}, {"count": 5, "nested": [0.5, True]})


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("home", Path("a"), "PosixPath"),
        ("nested", [{"a": {1}}], "list: Object of type set"),
        ("rows", np.ones(2), "ndarray"),
    ],
)
def test_a_value_that_could_not_be_read_again_is_refused(name: str, value: Any, found: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name} must be a value that JSON can express or have variables, got {found}"
    ):
        check_plain(name, value)
