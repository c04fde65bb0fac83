"""What only the driver that TensorFlow calls from a graph does. It reduces what NumPy does: parallel/tf/tape.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from horovod_sparse.core.layout import Layout, Parameter
from horovod_sparse.core.plan import first_sparse_step

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from horovod_sparse.tensorflow import host  # noqa: E402
from horovod_sparse.tensorflow.compressors import TopK  # noqa: E402


def driver_of(compressor: TopK, shapes: Mapping[str, tuple[int, ...]], world: int = 1) -> Any:
    """A worker's, with a bucket for each parameter."""
    driver = host.HostDriver(compressor, Mock(), world=world, position=0, rank=0)
    driver.extend([Layout.of([Parameter(name, shape, "float32", "cpu")]) for name, shape in shapes.items()], [], "")
    return driver


@pytest.mark.parametrize(
    ("chosen", "variable", "threads"),
    [(5, "3", 5), (0, "3", 3), (0, "0", os.cpu_count()), (0, None, os.cpu_count())],
    ids=["chosen", "variable", "variable_0", "nothing"],
)
def test_kernels_use_as_many_threads_as_tensorflow(
    monkeypatch: pytest.MonkeyPatch, chosen: int, variable: str | None, threads: int
) -> None:
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: chosen)
    if variable is None:
        monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    else:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", variable)
    assert host._threads() == threads


@pytest.mark.filterwarnings("ignore:.*sent dense")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_compress_keeps_the_largest_entries(dtype: str, traced: bool) -> None:
    compressor = TopK(0.1, min_numel=5, warmup=None)
    run = lambda x: compressor.compress(x)[0]  # noqa: E731
    function = tf.function(run, input_signature=[tf.TensorSpec(None, dtype)]) if traced else run
    tensor = tf.cast(tf.constant(np.random.default_rng(5).laplace(size=(20, 30))), dtype)
    got, flat = function(tensor), tf.cast(tensor, tf.float64).numpy().reshape(-1)
    assert got.dtype == dtype and got.shape == (20, 30)
    expected = np.zeros(600)
    largest = np.argsort(-np.abs(flat), kind="stable")[:60]
    expected[largest] = flat[largest]
    np.testing.assert_array_equal(tf.cast(got, tf.float64).numpy().reshape(-1), expected)
    for left in ([1.0, np.nan] * 10, np.ones(4)):
        np.testing.assert_array_equal(tf.cast(function(tf.constant(left, dtype)), tf.float64).numpy(), left)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_a_sum_that_its_type_cannot_hold_is_infinite(dtype: Any) -> None:
    """As a dense sum in that type would be."""
    driver = driver_of(TopK(0.1, warmup=None), {"p": (2,)})
    driver._reduced["p"] = [np.array([1.0, 1e6], np.float32)]
    (written,) = driver._hand_out("p", ["p"], [dtype])
    assert written.dtype == dtype.as_numpy_dtype and not driver._reduced
    assert written.tolist() == [1.0, np.inf if dtype == tf.float16 else 1e6]


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_raised_between_its_collectives_has_never_been(reads: bool) -> None:
    """Whether a state is read next, or a step begins."""
    shapes = {"a": (400,), "b": (300,)}
    driver = driver_of(TopK(0.1, warmup=None), shapes)
    for step in range(2):
        driver._start_step(np.float64(1.0))
        rate = np.float64(np.nan)
        messages = {
            name: driver._add(name, [name], rate, np.full(shape, 3.0, np.float32)) for name, shape in shapes.items()
        }
        for name, message in messages.items():
            if step == 0 or name == "a":
                driver._conclude(name, message)
        if step == 0:
            driver._end([])
            kept = driver.state_dict()
    if reads:
        driver.state_dict()
        assert driver.step is None
    else:
        driver._start_step(np.float64(1.0))
    assert not driver._reduced and not driver._ended and driver.stats().steps == 1
    np.testing.assert_equal(driver.state_dict(), kept)


def test_buckets_that_were_made_together_end_their_dense_steps_together() -> None:
    """Also if one took no part in some steps: the graph decides for all of them."""
    shapes = {"a": (400,), "b": (300,)}
    driver = driver_of(TopK(0.1), shapes, world=2)
    first = first_sparse_step(driver.compressor, 2)
    assert first > 1 and driver._are_dense([*shapes])
    driver.known.bucket_of["b"].state.step = first
    assert not driver._are_dense([*shapes])
    assert not any(bucket.stage.is_dense for bucket in driver.known.buckets)
