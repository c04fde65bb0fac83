"""A plugin of pytest for Horovod's test/parallel/test_torch.py: its optimizers get a compressor where they have none."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from suites import outcomes

# The suite builds every optimizer of torch.optim for vectors, which Muon refuses, also with stock Horovod.
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "hidden"

# Dense is stock Horovod, which this package extends when it is imported.
if outcomes.ours():
    from horovod_sparse.torch import TopK

    hvd.DistributedOptimizer = outcomes.with_compression(
        hvd.DistributedOptimizer, lambda: TopK(1.0, min_numel=0, warmup=None)
    )
