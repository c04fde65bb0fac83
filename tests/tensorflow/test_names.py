"""Names of variables: which are those of a saved state, and what has none."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

import keras
import tensorflow as tf

from horovod_sparse.core.state import empty_state
from horovod_sparse.tensorflow.keras import callbacks
from horovod_sparse.tensorflow.names import Names, renamed


def _found(saved: list[str], names: list[str]) -> list[str] | None:
    """Under which names the variables have been saved; None if they cannot be told apart."""
    state = empty_state() | {"residuals": {old: old for old in saved}}
    residuals = renamed(state, names)["residuals"]
    return [residuals[name] for name in names] if residuals.keys() == set(names) else None


@pytest.mark.parametrize(
    ("saved", "names"),
    [
        (["m/dense/kernel", "m/dense_1/kernel"], ["m/dense/kernel", "m/dense_1/kernel"]),
        # The same model, built again in one process, or in one that has built another before.
        (["m/dense/kernel", "m/dense_1/kernel"], ["m_1/dense_2/kernel", "m_1/dense_3/kernel"]),
        (["m_3/dense_9/kernel", "m_3/dense_10/kernel"], ["m/dense/kernel", "m/dense_1/kernel"]),
        (["m/dense_2/kernel", "m/dense_3/kernel"], ["m/dense_1/kernel", "m/dense_2/kernel"]),
        # As Keras loads it.
        (["m/dense_1/kernel", "m/norm/gamma"], ["dense/kernel", "norm/gamma"]),
        (["w", "w_1"], ["w", "w_1"]),
    ],
)
def test_a_state_is_found_under_other_names(saved: list[str], names: list[str]) -> None:
    assert _found(saved, names) == saved
    assert _found(saved[::-1], names) == saved


@pytest.mark.parametrize(
    ("saved", "names"),
    [
        (["m/dense/kernel"], ["m/dense/kernel", "m/dense_1/kernel"]),
        (["m/dense/kernel", "m/dense_1/kernel"], ["m/dense_2/kernel"]),
        (["m/dense/kernel"], ["m/conv/kernel"]),
        (["embedding/kernel"], ["bedding/kernel"]),
    ],
)
def test_another_model_has_other_names(saved: list[str], names: list[str]) -> None:
    assert _found(saved, names) is None


def test_a_variable_of_unknown_shape_is_refused() -> None:
    variable = tf.Variable([1.0], shape=tf.TensorShape([None]), name="growing")
    with pytest.raises(
        ValueError, match=r"variable 'growing' must have a known shape .*, got \(None,\).*shape=value.shape"
    ):
        Names().of([variable])


def test_a_callback_for_spark_alone_says_what_to_use() -> None:
    module: Any = callbacks
    with pytest.raises(AttributeError, match=r"use keras.callbacks.ModelCheckpoint\(path, save_best_only=True\)"):
        module.BestModelCheckpoint()
    assert hasattr(keras.callbacks, "ModelCheckpoint") and not hasattr(module, "no_such_name")
