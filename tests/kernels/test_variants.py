"""The variants of the compiled kernels: which is used, and that it does not matter. The threads of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse import kernels
from horovod_sparse.numpy.compiled import CompiledOps, host_ops
from horovod_sparse.ops.protocol import EXTENT, SUMS, Hints, Moving
from tests.harness.process import python

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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_asking_the_memory_ahead_changes_no_bit(dtype: type[np.floating], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).laplace(size=2**18 + 77).astype(dtype)
    found = set()
    for said in ("on", "off"):
        monkeypatch.setenv(kernels.PREFETCH, said)
        assert kernels.available() and kernels.asks_ahead() == (said == "on")
        found.add(sums_found(x, 1))
    assert len(found) == 1


def test_memory_is_asked_ahead_on_processors_of_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.PREFETCH, "auto")
    assert kernels.asks_ahead() == ("GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    monkeypatch.setenv(kernels.PREFETCH, "yes")
    with pytest.raises(ValueError, match="HOROVOD_SPARSE_PREFETCH must be on, off or auto, got 'yes'"):
        kernels.available()


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


# --- threads, which are the same in all ---


IN_THREADS = """
import hashlib, os, sys
import numpy as np
from horovod_sparse.kernels import available, lib
from horovod_sparse.numpy.compiled import CompiledOps
assert available()
if sys.argv[1] == "openmp":
    import torch
assert lib.hs_share_threads() == (sys.argv[1] == "openmp")
x = np.random.default_rng(0).laplace(size=2**20 + 77).astype(np.float32)
residual, before = x.copy(), len(os.listdir("/proc/self/task"))
ops = CompiledOps(4)
ops.accumulate(residual, [(0, x)])
found = ops.select_above(residual, 3.0, 10**6).indices
print(len(os.listdir("/proc/self/task")) - before)
print(hashlib.sha256(residual.tobytes() + found.tobytes()).hexdigest(), ops.measure(residual))
"""


def test_threads_of_openmp_find_the_same_bits_as_threads_of_our_own() -> None:
    """PyTorch's threads are there after the work, ours are not."""
    pytest.importorskip("torch")
    done = [python("-c", IN_THREADS, kind, OMP_NUM_THREADS="4") for kind in ("own", "openmp")]
    assert [one.returncode for one in done] == [0, 0], done
    own, openmp = (one.stdout.splitlines() for one in done)
    assert own[0] == "0" and int(openmp[0]) > 0
    assert own[1] == openmp[1]


IN_A_CHILD = """
import os, sys
import numpy as np
import torch
from horovod_sparse.kernels import available, lib
from horovod_sparse.numpy.compiled import CompiledOps
assert available() and lib.hs_share_threads()
x, ops = np.zeros(2**20, np.float32), CompiledOps(4)
assert ops.measure(x, 1.0).count == 0
child = os.fork()
if child == 0:
    os._exit(0 if ops.measure(x, 1.0).count == 0 and not lib.hs_share_threads() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of the OpenMP runtime are not there: it would wait for them forever."""
    pytest.importorskip("torch")
    done = python("-c", IN_A_CHILD, limit=60, OMP_NUM_THREADS="4")
    assert done.returncode == 0, done
