"""States that release 0.1.0 saved go on in today's code, bit for bit.

The files in tests/data were written by the code of commit 42d39bf, without compiled kernels: the state after six steps with
gradients of `np.random.default_rng(0).laplace`, then gradients and results of three more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse.numpy import DGC, SIDCo, SparseAllreduce

DATA = Path(__file__).parent / "data"
COMPRESSORS: dict[str, Callable[[], Any]] = {
    "sidco": lambda: SIDCo(0.05, warmup=None),
    "dgc": lambda: DGC(0.05, warmup=None),
}
"""With controllers, and with velocities also of a dense parameter."""
SHAPES = {"weight": (20, 15), "kernel": (270,), "bias": (7,)}
ARRAYS = ("residuals", "velocities")
SAVED_AT, STEPS = 6, 9

Named = dict[str, np.ndarray]


def load(name: str) -> tuple[dict[str, Any], dict[int, Named], dict[int, Named]]:
    """The state, and the gradients and the results of the steps after it."""
    state = json.loads((DATA / f"state_0.1.0_{name}.json").read_text())
    state |= {part: {} for part in ARRAYS}
    gradients: dict[int, Named] = {step: {} for step in range(SAVED_AT, STEPS)}
    reduced: dict[int, Named] = {step: {} for step in gradients}
    parts: dict[str, Named] = {part: state[part] for part in ARRAYS}
    parts |= {f"gradients {step}": gradients[step] for step in gradients}
    parts |= {f"reduced {step}": reduced[step] for step in reduced}
    with np.load(DATA / f"state_0.1.0_{name}.npz", allow_pickle=False) as file:
        for key, array in file.items():
            part, parameter = key.split("/")
            parts[part][parameter] = array
    return state, gradients, reduced


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_state_of_release_0_1_0_goes_on(name: str) -> None:
    state, gradients, expected = load(name)
    reduce = SparseAllreduce(None, COMPRESSORS[name]())
    reduce.load_state_dict(state, gradients[SAVED_AT])
    for step, given in gradients.items():
        got = reduce(given)
        assert got.keys() == expected[step].keys() == SHAPES.keys()
        for parameter, array in expected[step].items():
            np.testing.assert_array_equal(got[parameter], array, f"{parameter} in step {step}")
