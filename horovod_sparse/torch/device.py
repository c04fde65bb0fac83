"""Decides which buckets select on their device, without the host. Imports torch, and Triton when it is used; never Horovod."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.selector import Selector
from horovod_sparse.kernels import gpu

_LEAST_CAPABILITY = (7, 0)
"""The lowest compute capability of a GPU that Triton compiles for."""


def on_gpu(compressor: Compressor, layout: Layout, buffer: Tensor) -> Selector | None:
    """Return a selector for a bucket on an NVIDIA GPU, if Triton is there and the compressor can do without the host."""
    if buffer.device.type != "cuda" or torch.version.cuda is None or not gpu.available():
        return None
    if torch.cuda.get_device_capability(buffer.device) < _LEAST_CAPABILITY:
        return None
    from horovod_sparse.kernels.gpu.bucket import selector_for

    return selector_for(compressor, layout, buffer)
