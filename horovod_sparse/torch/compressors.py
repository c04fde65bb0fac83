"""The compressors as PyTorch users pass them: the algorithms joined with Horovod's Compressor interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from horovod_sparse import compressors
from horovod_sparse.core.binding import BoundCompressor
from horovod_sparse.torch import stock
from horovod_sparse.torch.compiled import tensor_ops


class TorchCompressor(BoundCompressor, stock.Compressor):
    """A sparsifier that serves one optimizer or model; its state loads with `torch.load(weights_only=True)`."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Return a new tensor of the same shape and dtype in which all but the selected entries are zero.

        Horovod calls this outside the optimizer (`hvd.allreduce(x, compression=...)`). The result is right, but there is no
        error feedback, and no bandwidth is saved, since Horovod allreduces what is returned. Tensors below `min_numel`,
        tensors that are not floating point, sparse tensors, and tensors with NaN or infinity are returned as they are.
        """
        self.warn_dense()
        ops = tensor_ops()
        compressible = tensor.is_floating_point() and not tensor.is_sparse and not self.leaves_dense("", tensor.numel())
        if not compressible or not ops.all_finite(tensor):
            return tensor, None
        flat = tensor.reshape(-1)
        wide = flat.detach().to(getattr(torch, self.residual_dtype_of(flat)))
        chosen = self.choose_alone(ops, wide)
        # Differentiable, as Horovod's own compressors are.
        return torch.zeros_like(flat).scatter(0, chosen, flat[chosen]).view(tensor.shape), None

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """Follow a loss scaler: residuals are kept without its scale, and all ranks leave out the same steps.

        The usual form then works: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`, with
        `scaler.unscale_(optimizer)` before the step if reduced gradients are clipped. If any rank's gradient overflows, all
        ranks skip the update, and residuals, velocities and thresholds are as before the step. This needs a copy of the
        residuals. The first `scaler.step(optimizer)` calls this by itself if nothing was reduced before it.

        Raises:
            RuntimeError: the compressor serves no optimizer yet, or its first step is over.
        """
        store: Any = self._bound()
        store.scale_with(scaler)


class ChunkTopK(TorchCompressor, compressors.ChunkTopK): ...


class DGC(TorchCompressor, compressors.DGC): ...


class GaussianK(TorchCompressor, compressors.GaussianK): ...


class MiCRO(TorchCompressor, compressors.MiCRO): ...


class NoOp(TorchCompressor, compressors.NoOp): ...


class RandomBlock(TorchCompressor, compressors.RandomBlock): ...


class RandomK(TorchCompressor, compressors.RandomK): ...


class RedSync(TorchCompressor, compressors.RedSync): ...


class SIDCo(TorchCompressor, compressors.SIDCo): ...


class Threshold(TorchCompressor, compressors.Threshold): ...


class TopK(TorchCompressor, compressors.TopK): ...


if not TYPE_CHECKING:
    # For type checkers it would have to be written out. Without it they take all classes above.
    __all__ = compressors.__all__
