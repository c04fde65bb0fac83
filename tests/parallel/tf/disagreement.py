"""Scenarios: ranks that differ in what only the messages tell, with TensorFlow. All of them raise."""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_sparse.tensorflow import RandomBlock, TopK

from ..scenario import TF_2, scenario
from .common import MakeCompression, assert_identical, raised, reduce, variables
from .tape import SETTINGS, SHAPES, gradients_of


@scenario(
    TF_2,
    cases={
        "pairs": (lambda **settings: TopK(0.05, dense_steps=3, **settings),),
        "union": (lambda **settings: TopK(0.05, union=True, dense_steps=3, **settings),),
        "balanced": (lambda **settings: TopK(0.05, balanced=True, dense_steps=3, **settings),),
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


@scenario(
    TF_2,
    cases={
        "pairs": (lambda: TopK(0.05, granularity="model", min_numel=0),),
        "union": (lambda: TopK(0.05, union=True, granularity="model", min_numel=0),),
        "shared": (lambda: RandomBlock(0.05, granularity="model", min_numel=0),),
        "dense": (lambda: TopK(0.05, exclude=["*"]),),
    },
)
def a_first_gradient_on_some_ranks_only_raises_on_all(make: MakeCompression) -> None:
    weights, compression = variables({**SHAPES, "late": (2000,)}), make()
    for number in range(2):
        reduce(compression, weights, gradients_of(number))
    late = {**gradients_of(2), "late": gradients_of(2)["first"].reshape(-1)}
    if hvd.rank() == 1:
        message = raised(RuntimeError, lambda: reduce(compression, weights, late))
        assert "rank 1: variables must get their first gradient in the same step on every rank" in message
    else:
        message = raised(tf.errors.OpError, lambda: reduce(compression, weights, gradients_of(2)))
        assert "Mismatched" in message, message
    for number in range(3, 6):
        both = {**gradients_of(number), "late": gradients_of(number)["first"].reshape(-1)}
        assert_identical(list(reduce(compression, weights, both).values()))
