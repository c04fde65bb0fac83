"""Arrays and plain values as one byte string: a NumPy archive with JSON in it. Reading it runs no code. No framework."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.core.state import ARRAYS


def pack(arrays: Mapping[str, NDArray[Any]], plain: Mapping[str, Any]) -> bytes:
    """Return arrays of numbers, by names that contain a slash, and values that JSON can express as one byte string."""
    file = io.BytesIO()
    entries: dict[str, Any] = {"json": np.array(json.dumps(plain, default=_number)), **arrays}
    np.savez(file, **entries)
    return file.getvalue()


def check_plain(name: str, value: object) -> None:
    """Raise ValueError unless JSON can express the value of an object without variables."""
    try:
        json.dumps(value, default=_number)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a value that JSON can express or have variables, got {type(value).__name__}: {error}; convert it, "
            "such as with str(...) or .tolist()"
        ) from error


def _number(value: object) -> Any:
    """Return a number of NumPy's as Python's, and raise TypeError for everything else."""
    return value.item() if isinstance(value, np.generic) else json.JSONEncoder().default(value)


def unpack(packed: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return what was given to `pack`. Raise ValueError if the bytes are damaged.

    Arrays of types that NumPy does not know, as bfloat16, have raw bytes as entries.
    """
    try:
        with np.load(io.BytesIO(packed), allow_pickle=False) as file:
            # By their whole names in the archive: "w.npy" is the file of "w", not of "w.npy".
            arrays = {name: file[f"{name}.npy"] for name in file.files if name != "json"}
            return arrays, json.loads(str(file["json.npy"]))
    except Exception as error:
        # The errors that NumPy, zip files and JSON raise for damaged bytes have no common class.
        raise ValueError(
            f"the saved state must be what a compressor wrote, but its {len(packed)} bytes cannot be read "
            f"({type(error).__name__}: {error}); the file is damaged or incomplete, load an older one"
        ) from error


def viewed(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an unpacked array in the type that it had if that is one of those that NumPy does not know."""
    return array.view(dtype) if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize else array


def packed_state(state: Mapping[str, Any]) -> bytes:
    """Return a compressor's state, whose arrays are NumPy's, as one byte string."""
    arrays = {f"{kind}/{name}": array for kind in ARRAYS for name, array in state[kind].items()}
    return pack(arrays, {key: value for key, value in state.items() if key not in ARRAYS})


def unpacked_state(packed: bytes) -> dict[str, Any]:
    """Return the state that was given to `packed_state`. Raise ValueError if the bytes are damaged."""
    arrays, state = unpack(packed)
    for kind in ARRAYS:
        prefix = f"{kind}/"
        state[kind] = {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}
    return state
