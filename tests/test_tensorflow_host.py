"""What only the pipeline that TensorFlow calls from a graph does. It reduces what NumPy does: parallel/tf/tape.py."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver import make_pipeline
from table import BACKENDS

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from horovod_sparse.tensorflow import host  # noqa: E402
from horovod_sparse.tensorflow.compressors import TopK  # noqa: E402
from horovod_sparse.tensorflow.reducer import Reducer  # noqa: E402

BACKEND = next(one for one in BACKENDS if one.name == "tensorflow")


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


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_a_sum_that_its_type_cannot_hold_fails_the_step(dtype: Any) -> None:
    pipeline: Any = make_pipeline(BACKEND, TopK(0.1, warmup=None), {"p": (2,)})
    pipeline.start_step()
    pipeline._reduced["p"] = [np.array([1.0, 1e6], np.float32)]
    (written,) = pipeline._write_out("p", [dtype], np.zeros(1))
    assert written.dtype == dtype.as_numpy_dtype
    if dtype == tf.float32:
        pipeline.end_step()
        return
    with pytest.raises(FloatingPointError, match="parameter 'p' is finite, but beyond the range of its type"):
        pipeline.end_step()


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_raised_between_its_collectives_has_lost_nothing(reads: bool) -> None:
    """Whether a state is read next, or a step begins."""
    shapes = {"a": (400,), "b": (300,)}
    pipeline: Any = make_pipeline(BACKEND, TopK(0.1, granularity="layer", warmup=None), shapes)
    pipeline.start_step()
    for name, shape in shapes.items():
        bucket = pipeline.arrive(name, np.full(shape, 3.0, np.float32))
        message = bucket.begin().message
    pipeline.advance(bucket, message, 1.0, pipeline._keep_reduced(bucket))
    assert pipeline._reduced
    if reads:
        Reducer.between_steps(SimpleNamespace(pipeline=pipeline))  # type: ignore[arg-type]
    else:
        pipeline.start_step()
    assert not pipeline._reduced and pipeline.stats().steps == 0
    assert all((kept == 3.0).all() for kept in pipeline.state_dict()["residuals"].values())
