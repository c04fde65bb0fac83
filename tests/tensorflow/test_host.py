"""What only the driver that TensorFlow calls from a graph does. It reduces what NumPy does: parallel/tf/tape.py."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from horovod_sparse.core.layout import Layout, Parameter
from horovod_sparse.core.plan import first_sparse_step
from horovod_sparse.exchange.union import Union

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from horovod_sparse.tensorflow import host  # noqa: E402
from horovod_sparse.tensorflow.compressors import TopK  # noqa: E402


class Alike:
    """The collectives of workers that all send the same. It notes their kinds. One of them fails, if it is named."""

    def __init__(self, world: int) -> None:
        self.world, self.kinds, self.fails = world, list[str](), ""

    def result(self, kind: str, message: Any, name: str) -> Any:
        return tf.numpy_function(partial(self.run, kind, name), [message], message.dtype)

    def run(self, kind: str, name: str, message: np.ndarray) -> np.ndarray:
        if name == self.fails:
            raise LookupError(name)
        self.kinds.append(kind)
        return np.concatenate([message] * self.world) if kind == "allgather" else message * self.world


def driver_of(
    compressor: TopK, shapes: Mapping[str, tuple[int, ...]], collectives: Any, **arguments: Any
) -> host.HostDriver:
    """A worker's, with a bucket for each parameter."""
    driver = host.HostDriver(compressor, collectives, world=collectives.world, position=0, rank=0, **arguments)
    driver.extend([Layout.of([Parameter(name, shape, "float32", "cpu")]) for name, shape in shapes.items()], "")
    return driver


def reduce(driver: host.HostDriver, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    @tf.function
    def step() -> dict[str, Any]:
        given = {name: tf.constant(gradient) for name, gradient in gradients.items()}
        dtypes = {name: tensor.dtype for name, tensor in given.items()}
        unknown, unscaled = tf.constant(math.nan, tf.float64), tf.constant(1.0, tf.float64)
        return driver.reduce(host.Given(given, {}, {}, dtypes, unknown, unscaled))

    return {name: tensor.numpy() for name, tensor in step().items()}


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
    ops: Any = driver_of(TopK(0.1, warmup=None), {"p": (2,)}, Alike(1)).known.ops
    assert ops.threads() == threads


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
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_sum_that_its_type_cannot_hold_is_infinite(dtype: str) -> None:
    """As a dense sum in that type would be."""
    driver = driver_of(TopK(1.0, warmup=None), {"p": (2,)}, Alike(2), averages=False)
    (written,) = reduce(driver, {"p": np.array([1.0, 50_000.0], dtype)}).values()
    assert written.dtype == dtype
    assert written.tolist() == [2.0, math.inf if dtype == "float16" else 100_000.0]


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_raised_between_its_collectives_has_never_been(reads: bool) -> None:
    """Whether a state is read next, or a step begins; also if the exchange of one bucket has ended already."""
    shapes, broken = {"a": (400,), "b": (300,)}, Alike(1)
    compressor = TopK(0.1, exchange=Union(), warmup=None)
    whole, driver = (driver_of(compressor, shapes, collectives) for collectives in (Alike(1), broken))
    for fails in ("", "1.1"):
        gradients = {name: np.full(shape, 3.0, np.float32) for name, shape in shapes.items()}
        if fails:
            broken.fails = fails
            with pytest.raises(tf.errors.UnknownError, match=rf"LookupError: {re.escape(fails)}"):
                reduce(driver, gradients | {"a": np.full(400, np.nan, np.float32)})
            broken.fails = ""
        if fails and reads:
            np.testing.assert_equal(driver.state_dict(), whole.state_dict())
            assert driver.step is None
        np.testing.assert_equal(reduce(driver, gradients), reduce(whole, gradients))
        np.testing.assert_equal(driver.state_dict(), whole.state_dict())
        assert repr(driver.stats()) == repr(whole.stats())


def test_buckets_that_were_made_together_end_their_dense_steps_together() -> None:
    """Also if one took no part in some steps: the graph decides for all of them."""
    collectives, gradients = Alike(2), {"a": np.ones(400, np.float32), "b": np.ones(300, np.float32)}
    driver = driver_of(TopK(0.1, warmup=2.0), {"a": (400,), "b": (300,)}, collectives)
    reduce(driver, gradients)
    for _ in range(1, first_sparse_step(driver.compressor, 2)):
        reduce(driver, {"b": gradients["b"]})
    assert {*collectives.kinds} == {"allreduce"}
    collectives.kinds.clear()
    reduce(driver, gradients)
    assert collectives.kinds == ["allgather", "allgather"]
