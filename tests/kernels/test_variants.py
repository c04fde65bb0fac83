"""The variants of the compiled kernels: which is used, and that it does not matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_sparse import kernels
from horovod_sparse.numpy.compiled import CompiledOps, host_ops
from horovod_sparse.ops.protocol import EXTENT, SUMS, Hints, Moving

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the kernels are not compiled, or turned off")


def sums_found(x: np.ndarray, threads: int) -> str:
    """The sums that the kernels find in an array, with all bits; `test_ops` compares the rest with NumPy's bits."""
    ops = CompiledOps(threads)
    residual, velocity = np.zeros_like(x), np.zeros_like(x)
    tracked: Any = ops.tracked(residual)
    noted = []
    for sums in (True, False):
        for moving in (None, Moving(velocity, 0.9)):
            tracked.begin(Hints(0.7, x.size, SUMS if sums else EXTENT))
            tracked.add([(0, x)], moving)
            noted.append(tracked.extent(residual))
    return repr([*noted, ops.measure(x), ops.measure(x, 0.7), ops.measure(np.abs(x) + 1, 0.5, with_log=True)])


@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 65, 1023, 1025, 20_000, 3 * 2**18 + 4101])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_find_the_same_sums(size: int, dtype: type[np.floating], monkeypatch: pytest.MonkeyPatch) -> None:
    """So is everything that is fitted to them: which processor a worker has does not matter."""
    x = np.random.default_rng(size).laplace(size=size).astype(dtype)
    found = {}
    for name in kernels.variants():
        monkeypatch.setenv(kernels.VARIABLE, name)
        assert kernels.available() and kernels.variant() == name
        for threads in (1, 2, 3, 100):
            found[name, threads] = sums_found(x, threads)
    assert len(set(found.values())) == 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("0", "NumpyOps off"),
        ("off", "NumpyOps off"),
        *((said, f"CompiledOps {name}") for said in ("1", "auto", "") for name in kernels.variants()[:1]),
        *((name, f"CompiledOps {name}") for name in kernels.variants()),
    ],
)
def test_an_environment_variable_chooses(said: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, said)
    assert f"{type(host_ops()).__name__} {kernels.variant()}" == expected
