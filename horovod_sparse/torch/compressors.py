"""The compressors as PyTorch users pass them: the algorithms joined with Horovod's Compressor interface."""

from __future__ import annotations

import torch
from horovod.torch.compression import Compressor as HorovodCompressor
from torch import Tensor

from horovod_sparse.compressors import (
    dgc,
    gaussiank,
    micro,
    noop,
    randomblock,
    randomk,
    redsync,
    sidco,
    threshold,
    topk,
)
from horovod_sparse.core.binding import BoundCompressor
from horovod_sparse.torch.ops import TorchOps


class TorchCompressor(BoundCompressor, HorovodCompressor):
    """A sparsifier that serves one `hvd.DistributedOptimizer`; its state loads with `torch.load(weights_only=True)`."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Return a new tensor of the same shape and dtype in which all but the selected entries are zero.

        Horovod calls this outside the optimizer (`hvd.allreduce(x, compression=...)`). The result is right, but there is no
        error feedback, and no bandwidth is saved, since Horovod allreduces what is returned. Tensors below `min_numel`,
        tensors that are not floating point, sparse tensors, and tensors with NaN or infinity are returned as they are.
        """
        self.warn_dense()
        ops = TorchOps()
        compressible = tensor.is_floating_point() and not tensor.is_sparse and not self.leaves_dense("", tensor.numel())
        if not compressible or not ops.all_finite(tensor):
            return tensor, None
        flat = tensor.reshape(-1)
        wide = flat.detach().to(getattr(torch, self.residual_dtype_of(flat)))
        chosen = self.choose_alone(ops, wide)
        # Differentiable, as Horovod's own compressors are.
        return torch.zeros_like(flat).scatter(0, chosen, flat[chosen]).view(tensor.shape), None

    def decompress(self, tensor: Tensor, ctx: None) -> Tensor:
        """Return the tensor as it is."""
        return tensor

    def residual_dtype_of(self, tensor: Tensor) -> str:
        """Return the residual's dtype for gradients like `tensor`."""
        return self.residual_dtype or ("float64" if tensor.dtype == torch.float64 else "float32")


class TopK(TorchCompressor, topk.TopK):
    __doc__ = topk.TopK.__doc__


class SIDCo(TorchCompressor, sidco.SIDCo):
    __doc__ = sidco.SIDCo.__doc__


class GaussianK(TorchCompressor, gaussiank.GaussianK):
    __doc__ = gaussiank.GaussianK.__doc__


class DGC(TorchCompressor, dgc.DGC):
    __doc__ = dgc.DGC.__doc__


class RedSync(TorchCompressor, redsync.RedSync):
    __doc__ = redsync.RedSync.__doc__


class MiCRO(TorchCompressor, micro.MiCRO):
    __doc__ = micro.MiCRO.__doc__


class RandomK(TorchCompressor, randomk.RandomK):
    __doc__ = randomk.RandomK.__doc__


class RandomBlock(TorchCompressor, randomblock.RandomBlock):
    __doc__ = randomblock.RandomBlock.__doc__


class Threshold(TorchCompressor, threshold.Threshold):
    __doc__ = threshold.Threshold.__doc__


class NoOp(TorchCompressor, noop.NoOp):
    __doc__ = noop.NoOp.__doc__
