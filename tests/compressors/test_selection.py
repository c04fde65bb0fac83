"""What `select` returns is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from horovod_sparse.compressors import TopK
from horovod_sparse.compressors.selection import check_selection
from horovod_sparse.ops.protocol import Selection
from tests.harness.table import WITH_OPERATIONS, Backend
from tests.harness.workers import make_worker, take_step

# --- what `select` returns is checked ---


def some(*indices: int, found: Any = 2, dtype: str = "int64") -> Any:
    """Return these indices, as an array of the framework."""

    def select(ops: Any, x: Any) -> Any:
        chosen = ops.indices(np.array(indices, np.int64), x)
        return Selection(chosen if dtype == "int64" else chosen // 1.0, found)

    return select


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unsorted": (some(3, 1), ValueError, "got indices that do not ascend, or occur twice"),
    "twice": (some(3, 3), ValueError, "got indices that do not ascend, or occur twice"),
    "beyond": (some(3, 8), ValueError, "got indices from 3 to 8"),
    "negative": (some(-1, 3), ValueError, "got indices from -1 to 3"),
    "too many": (some(0, 1, 2, 3, 4, found=5), ValueError, r"got indices of shape \(5,\)"),
    "found too few": (some(1, 3, found=1), ValueError, "got found=1 with 2 indices"),
    "found no int": (some(1, 3, found=2.0), TypeError, "got found=2.0"),
    "floats": (some(1, 3, dtype="float"), TypeError, "got indices of type (torch.)?float.."),
    "a list": (lambda ops, x: Selection([1, 3], 2), TypeError, "got indices of type list for entries of type"),
    "nothing": (lambda ops, x: None, TypeError, "got an object of type NoneType"),
    "no array": (lambda ops, x: ([1, 3], 2), TypeError, "got an object of type tuple"),
    "indices alone": (lambda ops, x: some(1, 3)(ops, x).indices, TypeError, "got an object of type (ndarray|Tensor)"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_what_is_no_selection_is_refused_by_name(backend: Backend, name: str) -> None:
    select, error, text = WRONG[name]

    class Mine(TopK):
        def select(self, ops: Any, x: Any, *arguments: Any) -> Any:
            return select(ops, x)

    worker = make_worker(backend, Mine(0.5, min_numel=0, warmup=None), {"p": (8,)})
    with pytest.raises(
        error, match=rf"^Mine\.select must return Selection\(indices, found\) with at most 4 .* {text}.*; use"
    ):
        take_step(backend, [worker], [{"p": np.ones(8, np.float32)}])
    worker.abort()
    assert not backend.numpy(worker.residuals.views["p"]).any()


@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_any_ascending_indices_are_taken(backend: Backend) -> None:
    x = np.arange(8, dtype=np.float32)

    class Mine(TopK):
        def select(self, ops: Any, x: Any, *arguments: Any) -> Any:
            return some(0, 1, 4, 6, found=5)(ops, x)

    worker = make_worker(backend, Mine(0.5, min_numel=0, warmup=None), {"p": (8,)})
    take_step(backend, [worker], [{"p": x}])
    assert backend.numpy(worker.residuals.views["p"]).tolist() == [0, 0, 2, 3, 0, 5, 0, 7]


@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_a_selection_that_writes_to_x_is_refused(backend: Backend) -> None:
    """Also through NumPy's view of it, if that can be written to. `as_numpy` cannot."""

    class Clips(TopK):
        def select(self, ops: Any, x: Any, *arguments: Any) -> Any:
            selection = super().select(ops, x, *arguments)
            np.asarray(x)[2:4] *= 0.5
            return selection

    class ByView(TopK):
        def select(self, ops: Any, x: Any, *arguments: Any) -> Any:
            view = ops.as_numpy(x)
            np.testing.assert_array_equal(view, np.arange(8.0))
            assert view.dtype == np.float32 and np.shares_memory(view, np.asarray(x))
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1.0
            return super().select(ops, x, *arguments)

    gradient = {"p": np.arange(8, dtype=np.float32)}
    take_step(backend, [make_worker(backend, ByView(0.5, min_numel=0, warmup=None), {"p": (8,)})], [gradient])
    worker = make_worker(backend, Clips(0.5, min_numel=0, warmup=None), {"p": (8,)})
    with pytest.raises(
        ValueError, match=r"^Clips\.select must not write to x, .* has changed 2 of 8 entries; .* ops\.copy"
    ):
        take_step(backend, [worker], [gradient])


def test_a_device_is_not_waited_for() -> None:
    """Whoever asks what is in an array on the device "meta" gets an error."""
    torch = pytest.importorskip("torch")
    x, indices = torch.empty(8, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    check_selection("Mine", Selection(indices, 2), x, 4)
    for wrong, error in (
        (indices.int(), TypeError),
        (indices.reshape(1, 2), ValueError),
        (torch.arange(2), ValueError),
    ):
        with pytest.raises(error, match=r"^Mine.select must return .* got indices o(f|n) "):
            check_selection("Mine", Selection(wrong, 2), x, 4)
