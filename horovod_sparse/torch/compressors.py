"""The compressors as PyTorch users pass them: the algorithms joined with Horovod's Compressor interface."""

from __future__ import annotations

from contextlib import AbstractContextManager
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
        residuals: `discardable` becomes True. The first `scaler.step(optimizer)` calls this by itself if nothing was reduced
        before it.

        Raises:
            RuntimeError: the compressor serves no optimizer yet, or its first step is over.
        """
        server: Any = self._bound()
        server.scale_with(scaler)

    def detached(self, optimizer: torch.optim.Optimizer, coefficient: float = 1.0) -> AbstractContextManager[None]:
        """Compute gradients at parameters that part of this rank's residual has moved already (detached error feedback).

            with compression.detached(optimizer):
                loss(model, batch).backward()
            optimizer.step()

        Within the block the parameters are `x - c eta e`, with this rank's residual e and the learning rate eta. At its end
        they are x again, bit by bit, so all ranks step the same x, and evaluations and checkpoints outside of the block see
        it (https://arxiv.org/abs/2004.05298). The gradient then knows of what waits to be sent. Compressors that choose at
        random need that (`docs/ablation.md`). Parameters that are reduced dense stay where they are. The block needs the
        memory of a second copy of the others. Where updates are exchanged, e is one, and eta is 1.

        Args:
            optimizer: the one that steps the parameters: `hvd.DistributedOptimizer`'s, or that of the model in DDP.
            coefficient: c, in [0, 1]. 0 is error feedback as usual.

        Raises:
            ValueError: the coefficient is not in its range, the optimizer has other parameters, or a residual may also hold
                what other ranks have sent (`balanced`, `hierarchical`).
            RuntimeError: the compressor serves no optimizer and no model in DDP yet, or parameters were changed within the
                block; they are restored all the same.
        """
        server: Any = self._bound()
        block: AbstractContextManager[None] = server.detached(optimizer, coefficient)
        return block


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
