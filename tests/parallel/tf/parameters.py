"""Scenarios: variables of every kind, a row each, with TensorFlow. They are reduced rightly, or refused on every rank.

Complex variables, embeddings, frozen, shared and missing ones are in `tape` and `keras3`.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..kinds import KINDS, Kind
from ..scenario import TF_2, TF_GLOO_2, scenario
from .common import COMPRESSORS, everyone, normals, reduce


@scenario(TF_2, TF_GLOO_2, cases={name: (kinds,) for name, kinds in KINDS.items()})
def nothing_is_lost_of_any_kind_of_variable(kinds: dict[str, Kind]) -> None:
    """What was sent and what is kept are what was given, to the last bit, with every exchange."""
    for compressor in ("TopK", "RandomK", "MiCRO", "NoOp"):
        compression = COMPRESSORS[compressor](min_numel=0, granularity="model")
        weights = {
            name: tf.Variable(tf.zeros(shape, getattr(tf, dtype)), name=name) for name, (shape, dtype) in kinds.items()
        }
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
                assert reduced[name].shape == kinds[name][0]
                assert reduced[name].dtype == weights[name].dtype.as_numpy_dtype
                sent[name] += reduced[name].astype(np.float64)
        kept = everyone({name: one.astype(np.float64) for name, one in compression.state_dict()["residuals"].items()})
        for name in kinds:
            names = [found for found in kept[0] if found.split(":")[0].endswith(name)]
            total = sent[name] + sum(one[found] for one in kept for found in names)
            np.testing.assert_array_equal(total, given[name], err_msg=f"{compression}, {name}")
