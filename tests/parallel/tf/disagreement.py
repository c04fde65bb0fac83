"""Scenarios: ranks that differ in what only the messages tell, with TensorFlow. All of them raise."""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf
from stairs import dense_until

from horovod_sparse.tensorflow import Balanced, RandomBlock, TopK, Union

from ..scenario import TF_2, scenario
from .common import MakeCompression, assert_identical, raised, reduce, variables
from .tape import SETTINGS, SHAPES, gradients_of


@scenario(
    TF_2,
    cases={
        "pairs": (lambda **settings: TopK(0.05, **settings),),
        "union": (lambda **settings: TopK(0.05, exchange=Union(), **settings),),
        "balanced": (lambda **settings: TopK(0.05, exchange=Balanced(), **settings),),
        "shared": (lambda **settings: RandomBlock(0.05, **settings),),
    },
)
def warm_ups_that_are_dense_until_different_steps_raise_on_all(make: MakeCompression) -> None:
    weights, compression = variables(SHAPES), dense_until(3, make, hvd.size)(**SETTINGS)
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
