"""What a rank does in a launch that must end by itself: rank 1 has data for two steps, and calls Horovod's own `join`."""

from __future__ import annotations

import horovod.torch as hvd

from horovod_sparse.torch import TopK

from .common import small_model, train, wrap

if __name__ == "__main__":
    hvd.init()
    model = small_model()
    optimizer = wrap(model, TopK(0.01, warmup=None))
    train(model, optimizer, range(2 if hvd.rank() == 1 else 100_000))
    hvd.join()
    print("trained to the end")
