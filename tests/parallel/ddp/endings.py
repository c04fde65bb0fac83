"""What a rank does in a launch that must end by itself: rank 1 raises between two steps of a sharded model."""

from __future__ import annotations

from horovod_sparse.torch import TopK

from ..common import small_model, train
from . import ranks
from .common import sgd
from .sharded import mesh_of, wrapped

if __name__ == "__main__":
    ranks.init()
    model, optimizer = wrapped(small_model(), sgd, TopK(0.01, warmup=None), mesh_of(2))
    train(model, optimizer, range(5))
    if ranks.rank() == 1:
        raise RuntimeError("rank 1 has enough")
    train(model, optimizer, range(100_000))
    print("trained to the end")
