"""Scenarios: ranks that differ in what only the messages tell, with TensorFlow. All of them raise."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow import RandomBlock, TopK

from ..scenario import TF_2, TF_4, TF_GLOO_2, scenario
from .common import MakeCompression, assert_identical, raised, reduce, variables
from .tape import SETTINGS, SHAPES, gradients_of, graph_reducer, tensors


@scenario(TF_2, TF_4, TF_GLOO_2, cases={"eager": (False,), "function": (True,)})
def a_first_gradient_on_one_rank_only_raises_on_all(graph: bool) -> None:
    """Nobody waits, and when all ranks have one, training goes on as if nothing had been."""
    weights, alone = variables(SHAPES), variables(SHAPES)
    compression, never = TopK(0.05, **SETTINGS), TopK(0.05, **SETTINGS)
    function = graph_reducer(compression, weights)
    known = [name for name in SHAPES if name != "third"]

    def step(number: int, names: list[str]) -> dict[str, Any]:
        gradients = {name: gradient for name, gradient in gradients_of(number).items() if name in names}
        return function(tensors(gradients)) if graph else reduce(compression, weights, gradients)

    for number in range(2):
        step(number, known)
    # A function raises the same text as an error of TensorFlow.
    message = raised(Exception, lambda: step(2, list(SHAPES) if hvd.rank() == 1 else known))
    assert f"rank {hvd.rank()}: variables must have their first gradient in the same step" in message, message
    assert "third" in message and "worker 0 of the process set has none" in message, message
    for number in range(3, 6):
        got = {name: np.asarray(one) for name, one in step(number, list(SHAPES)).items()}
        assert_identical(list(got.values()))
    for number in range(2):
        reduce(never, alone, {name: one for name, one in gradients_of(number).items() if name in known})
    for number in range(3, 6):
        expected = reduce(never, alone, gradients_of(number))
    for name in SHAPES:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@scenario(
    TF_2,
    cases={
        "pairs": (lambda **settings: TopK(0.05, dense_steps=3, **settings),),
        "union": (lambda **settings: TopK(0.05, union=True, dense_steps=3, **settings),),
        "shared": (lambda **settings: RandomBlock(0.05, dense_steps=3, **settings),),
    },
)
def dense_steps_that_end_in_different_steps_raise_on_all(make: MakeCompression) -> None:
    weights, compression = variables(SHAPES), make(**SETTINGS)
    for number in range(2):
        reduce(compression, weights, gradients_of(number))
    state = compression.state_dict()
    reduce(compression, weights, gradients_of(2))
    if hvd.rank() == 1:
        compression.load_state_dict(state)
    message = raised(tf.errors.OpError, lambda: reduce(compression, weights, gradients_of(3)))
    assert "Mismatched" in message, message
    compression.load_state_dict(state)
    for number in range(2, 6):
        assert_identical(list(reduce(compression, weights, gradients_of(number)).values()))
