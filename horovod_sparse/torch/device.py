"""Decides what NVIDIA GPUs do without the host. Imports torch, and Triton when it is used; never Horovod.

Tested by tests/kernels/gpu/test_bucket.py.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.selector import Selector
from horovod_sparse.kernels import asked


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether there are kernels for a device: it is an NVIDIA GPU, Triton is installed, and they are not turned off."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None or asked() == "off":
        return False
    # Triton compiles for no lower capability.
    return torch.cuda.get_device_capability(device) >= (7, 0)


def on_gpu(compressor: Compressor, layout: Layout, buffer: Tensor, velocity: Tensor | None) -> Selector | None:
    """Return a selector for a bucket on a GPU with kernels, if the compressor can do without the host."""
    if not has_kernels(buffer.device):
        return None
    from horovod_sparse.kernels.gpu.bucket import selector_for

    return selector_for(compressor, layout, buffer, velocity)
