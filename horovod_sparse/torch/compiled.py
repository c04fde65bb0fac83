"""The array operations with compiled kernels, on tensors on the CPU. All other tensors are left to PyTorch's operations.

Tested by tests/kernels/test_ops.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_sparse import kernels
from horovod_sparse.kernels.memory import Memory, type_of
from horovod_sparse.kernels.ops import KernelOps
from horovod_sparse.torch.ops import TorchOps


def tensor_ops() -> TorchOps:
    """Return the array operations for tensors: with compiled kernels if there are any."""
    if not kernels.available():
        return TorchOps()
    kernels.lib.hs_share_threads()
    return CompiledTorchOps()


class CompiledTorchOps(KernelOps, TorchOps):
    """Implements `horovod_sparse.ops.protocol.Ops` on `torch.Tensor`. Selects the same entries as `TorchOps`."""

    threads = staticmethod(torch.get_num_threads)
    array = staticmethod(torch.from_numpy)

    def memory(self, array: Tensor) -> Memory | None:
        number = type_of(array.dtype)
        if number is None or not array.is_cpu:
            return None
        writable = array.is_contiguous()
        array = array if writable else array.contiguous()
        return Memory(kernels.ffi.cast("void *", array.data_ptr()), number, array.numel(), array, writable)
