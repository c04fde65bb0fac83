"""Checkpoints of NumPy's arrays on one worker: what a file can hold, and a file that older code wrote.

tests/data/checkpoint_801e177_numpy was written by the code of commit 801e177, which had no `warmup`, after `trained`:

    save_checkpoint(folder, 3, None, allreduce, weights, random=rng.bit_generator.state)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse.numpy import SparseAllreduce, TopK, load_checkpoint, save_checkpoint

SAVED = Path(__file__).parent / "data" / "checkpoint_801e177_numpy"


def trained() -> tuple[dict[str, Any], SparseAllreduce, np.random.Generator]:
    """What was saved, by training to there. The sums of one worker need no rounding that could differ."""
    rng, allreduce = np.random.default_rng(0), SparseAllreduce(None, TopK(0.2, min_numel=0, warmup=None))
    weights: dict[str, Any] = {"weights": np.zeros((6, 5)), "bias": np.zeros(5, np.float32)}
    for _ in range(3):
        gradients = {name: rng.normal(size=one.shape).astype(one.dtype) for name, one in weights.items()}
        for name, mean in allreduce(gradients).items():
            weights[name] -= mean
    return weights, allreduce, rng


def test_a_file_that_older_code_wrote_is_loaded() -> None:
    expected, before, rng = trained()
    weights: dict[str, Any] = {name: np.ones_like(one) for name, one in expected.items()}
    allreduce = SparseAllreduce(None, TopK(0.2, min_numel=0, warmup=None))
    found = load_checkpoint(SAVED, None, allreduce, weights)
    assert found == (3, {"random": rng.bit_generator.state})
    residuals = before.state_dict()["residuals"]
    assert any(one.any() for one in residuals.values())
    for name, one in expected.items():
        np.testing.assert_array_equal(weights[name], one)
        np.testing.assert_array_equal(allreduce.state_dict()["residuals"][name], residuals[name])


def test_arrays_of_all_names_come_back(tmp_path: Path) -> None:
    arrays = {
        name: np.array([number]) for number, name in enumerate(("w", "w.npy", "w.npy.npy", "file", "json", "ü/w"))
    }
    save_checkpoint(tmp_path, 1, None, None, arrays)
    loaded = {name: np.array([-1]) for name in arrays}
    load_checkpoint(tmp_path, None, None, loaded)
    assert loaded == arrays


def test_arrays_of_types_that_numpy_does_not_know_come_back(tmp_path: Path) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    arrays, loaded = {"a": np.full(3, 1.5, bfloat16)}, {"a": np.zeros(3, bfloat16)}
    save_checkpoint(tmp_path, 1, None, None, arrays)
    load_checkpoint(tmp_path, None, None, loaded)
    np.testing.assert_array_equal(loaded["a"], arrays["a"])


def test_numbers_of_numpys_come_back_as_pythons(tmp_path: Path) -> None:
    step: Any = np.int64(5)
    save_checkpoint(tmp_path, step, None, None, {}, count=np.int64(5), nested=[np.float32(0.5), np.bool_(True)])
    assert load_checkpoint(tmp_path, None, None, {}) == (5, {"count": 5, "nested": [0.5, True]})


@pytest.mark.parametrize(
    ("arrays", "values", "text"),
    [
        ({}, {"home": Path("a")}, "home must be a value that JSON can express, got PosixPath"),
        ({}, {"nested": [{"a": {1}}]}, "nested must be a value that JSON can express, got list: Object of type set"),
        ({}, {"rows": np.ones(2)}, "rows must be a value that JSON can express, got ndarray"),
        ({"a": np.array([None])}, {}, "arrays/a must be an array of numbers, got object"),
    ],
)
def test_what_could_not_be_read_again_is_not_saved(
    tmp_path: Path, arrays: dict[str, Any], values: dict[str, Any], text: str
) -> None:
    save_checkpoint(tmp_path, 1, None, None, {})
    with pytest.raises(ValueError, match=text):
        save_checkpoint(tmp_path, 2, None, None, arrays, keep=1, **values)
    assert load_checkpoint(tmp_path, None, None, {}).step == 1


def test_arrays_that_cannot_be_written_to_are_refused_before_anything_changes(tmp_path: Path) -> None:
    weights, allreduce, _ = trained()
    save_checkpoint(tmp_path, 3, None, allreduce, weights)
    other = SparseAllreduce(None, TopK(0.2, min_numel=0, warmup=None))
    weights["bias"].flags.writeable = False
    with pytest.raises(RuntimeError, match=r"arrays must be writeable, got read-only ones: \['bias'\]; copy them"):
        load_checkpoint(tmp_path, None, other, weights)
    assert not other.state_dict()["residuals"]
