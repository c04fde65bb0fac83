"""A plugin of pytest for Horovod's tests of TensorFlow and Keras: what has no compression gets a compressor."""

from __future__ import annotations

import horovod.keras as alone
import horovod.tensorflow as of_tensorflow
import horovod.tensorflow.keras as of_keras

from suites import outcomes

# Dense is stock Horovod, which this package extends when it is imported.
if outcomes.ours():
    from horovod_sparse.tensorflow import TopK

    for _module, _name in (
        (of_tensorflow, "DistributedOptimizer"),
        (of_tensorflow, "DistributedGradientTape"),
        (of_tensorflow, "PartialDistributedGradientTape"),
        (of_keras, "DistributedOptimizer"),
        (alone, "PartialDistributedOptimizer"),
    ):
        _compressed = outcomes.with_compression(getattr(_module, _name), lambda: TopK(1.0, min_numel=0, warmup=None))
        setattr(_module, _name, _compressed)
