"""Scenarios: variables of every kind, a row each, with TensorFlow. They are reduced rightly, or refused on every rank.

Complex variables, embeddings, frozen, shared and missing ones are in `tape` and `keras3`.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..scenario import TF_2, TF_GLOO_2, scenario
from .common import COMPRESSORS, everyone, normals, reduce

Kind = tuple[tuple[int, ...], Any]
"""A variable's shape and type."""

SINGLE, DOUBLE, HALF, BRAIN = tf.float32, tf.float64, tf.float16, tf.bfloat16
VARIABLES: dict[str, dict[str, Kind]] = {
    "scalar": {"scalar": ((), SINGLE)},
    "empty": {"first": ((500,), SINGLE), "empty": ((0, 4), SINGLE), "last": ((500,), SINGLE)},
    "one_element": {"one": ((1,), SINGLE), "cube": ((1, 1, 1), SINGLE)},
    "types": {
        "half": ((30, 40), HALF),
        "brain": ((500,), BRAIN),
        "single": ((300,), SINGLE),
        "double": ((600,), DOUBLE),
    },
    "types_of_scalars": {"half": ((), HALF), "brain": ((), BRAIN), "single": ((), SINGLE), "double": ((), DOUBLE)},
}


@scenario(TF_2, TF_GLOO_2, cases={name: (kinds,) for name, kinds in VARIABLES.items()})
def nothing_is_lost_of_any_kind_of_variable(kinds: dict[str, Kind]) -> None:
    """What was sent and what is kept are what was given, to the last bit, with every exchange."""
    for compressor in ("TopK", "RandomK", "MiCRO", "NoOp"):
        compression = COMPRESSORS[compressor](min_numel=0, granularity="model")
        weights = {name: tf.Variable(tf.zeros(shape, dtype), name=name) for name, (shape, dtype) in kinds.items()}
        sent = {name: np.zeros(shape) for name, (shape, _) in kinds.items()}
        given = {name: np.zeros(shape) for name, (shape, _) in kinds.items()}
        for step in range(3):
            # Small whole numbers: half precision has all of their sums.
            mine = {
                name: np.asarray(np.rint(4 * normals(shape, step=step, rank=hvd.rank())))
                for name, (shape, _) in kinds.items()
            }
            reduced = reduce(compression, weights, mine, op=hvd.Sum)
            for name, theirs in given.items():
                theirs += sum(one[name] for one in everyone(mine))
                assert (reduced[name].shape, reduced[name].dtype) == (kinds[name][0], kinds[name][1].as_numpy_dtype)
                sent[name] += reduced[name].astype(np.float64)
        kept = everyone({name: one.astype(np.float64) for name, one in compression.state_dict()["residuals"].items()})
        for name in kinds:
            names = [found for found in kept[0] if found.split(":")[0].endswith(name)]
            total = sent[name] + sum(one[found] for one in kept for found in names)
            np.testing.assert_array_equal(total, given[name], err_msg=f"{compression}, {name}")
