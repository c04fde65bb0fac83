"""A plugin of pytest for Horovod's tests of tapes in TensorFlow: a tape without compression gets a compressor.

The tests are written for Keras 2, which goes on as tf_keras.
"""

from __future__ import annotations

import os

# TensorFlow reads it when it is imported.
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import horovod.tensorflow as hvd

from suites import outcomes

# Dense is stock Horovod, which this package extends when it is imported.
if outcomes.ours():
    from horovod_sparse.tensorflow import TopK

    for _name in ("DistributedGradientTape", "PartialDistributedGradientTape"):
        _compressed = outcomes.with_compression(getattr(hvd, _name), lambda: TopK(1.0, min_numel=0, warmup=None))
        setattr(hvd, _name, _compressed)
