"""Train alone. With HOROVOD_SPARSE_FORCE=1 the gradient is compressed for real, without it training is the stock one.

python -m tests.parallel.one_worker
"""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch

from .common import BUCKET_BYTES, COMPRESSORS, digest, small_model, train, wrap

if __name__ == "__main__":
    hvd.init()
    reference = small_model()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9), range(5))
    for name, make in COMPRESSORS.items():
        model, compression = small_model(), make(granularity=BUCKET_BYTES)
        optimizer, before = wrap(model, compression), digest(model.parameters())
        train(model, optimizer, range(5))
        after, stats = digest(model.parameters()), compression.stats()
        if os.environ["HOROVOD_SPARSE_FORCE"] == "1":
            assert after != before, name
            assert 0 < stats.mean.total.count <= stats.mean.total.numel, name
            assert name != "SIDCo" or 0.005 < stats.last.total.ratio < 0.02
            assert stats.last.total.bytes_sent == 0.0, "there is nobody to send to"
        else:
            assert after == digest(reference.parameters()), name
            assert stats.steps == 0 and compression.residual_bytes == 0, name
        optimizer.zero_grad(set_to_none=True)
        optimizer.synchronize()
    print("training works")
