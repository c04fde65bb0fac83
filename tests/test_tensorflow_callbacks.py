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
from horovod_sparse.core.packing import pack, unpack, unpacked_state
from horovod_sparse.tensorflow import TopK, checkpoint
from horovod_sparse.tensorflow.keras import callbacks
from horovod_sparse.tensorflow.names import same_name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be >= 1, got 0"),
        ({"every": "epoch"}, TypeError, "every must be an int >= 1, got 'epoch'"),
        ({"keep": 0}, ValueError, "keep must be >= 1, got 0"),
        ({"unit": "step"}, ValueError, "unit must be one of 'epoch', 'batch', got 'step'"),
        ({"damaged": "ignore"}, ValueError, "damaged must be one of 'skip', 'raise', got 'ignore'"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        callbacks.CheckpointCallback(tmp_path, **arguments)
    assert str(raised.value) == message


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_variables_of_every_type_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    old = tf.Module()
    variables = [tf.Variable(tf.cast(tf.fill(shape, 1.5), dtype), name=name) for name in ("dense_1/kernel", "b")]
    old.one, old.two = variables
    values = {"random": [1, 2.5, "text", None]}
    arrays, plain = unpack(pack(checkpoint._arrays({"model": old}, shared=True), values))
    assert plain == values
    new = [tf.Variable(tf.zeros(shape, dtype), name=name) for name in ("dense_7/kernel", "b")]
    names = {"model": ["dense_1/kernel", "b"]}
    for variable, array in checkpoint._assignments("model", tf.Module(), {"model": []}, arrays):
        pytest.fail(f"a module without variables has {variable} and {array}")
    module = tf.Module()
    module.one, module.two = new[1], new[0]
    with pytest.raises(ValueError, match="variable 0 of model must be 'dense_1/kernel' with shape"):
        list(checkpoint._assignments("model", module, names, arrays))
    module.one, module.two = new
    for variable, array in checkpoint._assignments("model", module, names, arrays):
        variable.assign(array)
    for mine, saved in zip(new, variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), saved.numpy())


def test_a_variable_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="variable 'words' must hold numbers, got string"):
        checkpoint._arrays({"model": tf.Variable(["one"], name="words")}, shared=True)


def test_a_file_that_older_code_wrote_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of commit 801e177 wrote it, after 2 steps of a tape with the loss |range(6) W|^2 and ones as W, and

    save_checkpoint(folder, 2, model=model, compression=compression, epoch=[1, "two"])
    """
    monkeypatch.setattr(checkpoint, "_workers", lambda: Workers(0, 1, lambda value: [value]))
    folder = Path(__file__).parent / "data" / "checkpoint_801e177_tensorflow"
    model = tf.Module()
    model.mean = tf.Variable(tf.zeros(5, tf.bfloat16), trainable=False, name="mean")
    model.weights = [tf.Variable(tf.zeros((6, 5)), name="weights")]
    compression = TopK(0.2, min_numel=0, warmup=None)
    found = checkpoint.load_checkpoint(folder, damaged="raise", model=model, compression=compression)
    assert found == (2, {"epoch": [1, "two"]})
    (shared, _), (own, _) = (
        unpack((folder / "step-000000002" / name).read_bytes()) for name in ("shared", "rank-00000")
    )
    (weights,) = shared.values()
    assert weights.min() < 1 and np.array_equal(model.weights[0].numpy(), weights)
    assert set(model.mean.numpy().tolist()) == {2.5}
    (residual,) = compression.state_dict()["residuals"].values()
    (saved,) = unpacked_state(own["compression/state"].tobytes())["residuals"].values()
    assert residual.any() and np.array_equal(residual, saved)


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
