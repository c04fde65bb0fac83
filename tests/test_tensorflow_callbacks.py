"""Checkpoints of TensorFlow in one process: arguments, and the bytes of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

import tensorflow as tf

from horovod_sparse.core.checkpoint import Workers
from horovod_sparse.tensorflow import checkpoint
from horovod_sparse.tensorflow.keras import callbacks
from horovod_sparse.tensorflow.names import same_name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be >= 1, got 0"),
        ({"every": "epoch"}, TypeError, "every must be an int >= 1, got 'epoch'"),
        ({"keep": 0}, ValueError, "keep must be >= 1, got 0"),
        ({"damaged": "ignore"}, ValueError, "damaged must be one of 'skip', 'raise', got 'ignore'"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        callbacks.CheckpointCallback(tmp_path, **arguments)
    assert str(raised.value) == message


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without Horovod."""
    monkeypatch.setattr(checkpoint.checkpoints, "workers", lambda: Workers(0, 1, lambda value: [value]))


def module(**variables: Any) -> tf.Module:
    made = tf.Module()
    for name, variable in variables.items():
        setattr(made, name, variable)
    return made


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_variables_of_every_type_come_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    saved, new = (
        [tf.Variable(tf.cast(tf.fill(shape, value), dtype), name=name) for name in (f"dense_{number}/kernel", "b")]
        for number, value in ((1, 1.5), (7, 0.0))
    )
    values = [1, 2.5, "text", None]
    checkpoint.save_checkpoint(tmp_path, 1, model=module(one=saved[0], two=saved[1]), empty=tf.Module(), values=values)
    with pytest.raises(RuntimeError, match="variable 0 of model must be 'dense_1/kernel' with shape"):
        checkpoint.load_checkpoint(tmp_path, model=module(one=new[1], two=new[0]))
    assert not any(one.numpy().any() for one in new)
    found = checkpoint.load_checkpoint(tmp_path, model=module(one=new[0], two=new[1]), empty=tf.Module())
    assert found.values == {"values": values}
    for mine, theirs in zip(new, saved, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@pytest.mark.usefixtures("alone")
def test_a_variable_without_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variable 'words' must hold numbers, got string"):
        checkpoint.save_checkpoint(tmp_path, 1, model=tf.Variable(["one"], name="words"))


@pytest.mark.parametrize(
    ("saved", "name", "same"),
    [
        ("sequential/dense/kernel", "sequential/dense/kernel", True),
        ("sequential/dense/kernel", "sequential_3/dense_1/kernel", True),
        ("sequential/dense_1/kernel", "dense/kernel", True),
        ("dense/kernel", "sequential/dense/kernel", True),
        ("sequential/dense/kernel", "sequential/dense/bias", False),
        ("embedding/kernel", "bedding/kernel", False),
    ],
)
def test_names_of_the_same_model(saved: str, name: str, same: bool) -> None:
    assert same_name(saved, name) == same
