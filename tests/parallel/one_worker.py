"""Train alone. With HOROVOD_SPARSE_FORCE=1 the gradient is compressed for real, without it nothing happens to it.

python -m parallel.one_worker forced|plain
"""

from __future__ import annotations

import sys
import warnings

import horovod.torch as hvd
import numpy as np
import torch

from horovod_sparse.torch import NoOp, SIDCo, TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    digest,
    normals,
    reduce,
    selected,
    small_model,
    train,
    wrap,
    wrap_parameters,
    zeros,
)


def forced() -> None:
    parameters = zeros({"weight": (40, 50), "small": (30,)})
    optimizer = wrap_parameters(parameters, TopK(0.01, warmup=None), backward_passes_per_step=1)
    memory = np.zeros(2000, np.float32)
    for step in range(4):
        local = {name: normals(tuple(p.shape), step=step, rank=0) for name, p in parameters.items()}
        reduce(optimizer, parameters, local)
        memory += local["weight"].reshape(-1)
        sent = selected(memory, 20)
        memory -= sent
        np.testing.assert_array_equal(parameters["weight"].grad.numpy().reshape(-1), sent)
        np.testing.assert_array_equal(parameters["small"].grad.numpy(), local["small"])
    model = small_model()
    compression = SIDCo(0.01, warmup=None)
    optimizer = wrap(model, compression, groups=2)
    train(model, optimizer, range(5))
    total = compression.stats().last.total
    assert total.bytes_sent == 0.0, "there is nobody to send to"
    assert 0.005 < total.ratio < 0.02
    for name, make in COMPRESSORS.items():
        model, compression = small_model(), make(granularity=BUCKET_BYTES)
        before = digest(model.parameters())
        train(model, wrap(model, compression), range(5))
        assert digest(model.parameters()) != before, name
        assert 0 < compression.stats().mean.total.count <= compression.stats().mean.total.numel, name


def plain() -> None:
    reference, model = small_model(), small_model()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9), range(5))
    compression = SIDCo(0.01, warmup=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        optimizer = wrap(model, compression)
        train(model, optimizer, range(5))
        wrap(small_model(), NoOp())
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1 and "HOROVOD_SPARSE_FORCE=1" in texts[0], texts
    assert digest(reference.parameters()) == digest(model.parameters())
    optimizer.zero_grad(set_to_none=True)
    optimizer.synchronize()
    assert compression.stats().steps == 0 and compression.residual_bytes == 0
    compression.load_state_dict(compression.state_dict())


if __name__ == "__main__":
    hvd.init()
    assert hvd.size() == 1
    {"forced": forced, "plain": plain}[sys.argv[1]]()
    print(f"{sys.argv[1]} works")
