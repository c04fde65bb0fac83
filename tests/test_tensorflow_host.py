"""What the pipeline on the CPU takes from TensorFlow."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf

from horovod_sparse.tensorflow import host


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
