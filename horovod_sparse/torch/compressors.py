"""The compressors as PyTorch users pass them: the algorithms joined with Horovod's Compressor interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import compressors
from horovod_sparse.compressors.checks import check_number
from horovod_sparse.core.binding import BoundCompressor
from horovod_sparse.torch import stock
from horovod_sparse.torch.ahead import Ahead
from horovod_sparse.torch.compiled import tensor_ops


class TorchCompressor(BoundCompressor, stock.Compressor):
    """A sparsifier that serves one optimizer or model; its state loads with `torch.load(weights_only=True)`."""

    _ahead: Ahead | None = None

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
        """Keep residuals without the scale of a loss scaler. Call it once, before the first step.

        Without it, what waits has the scale of the step in which it came, and counts for more or less once that has changed.

        Raises:
            RuntimeError: the compressor serves no optimizer yet, or its first step is over.
        """
        # Raises if there is no source.
        self._driver()
        source: Any = self.source
        source.scale_with(scaler)

    @contextmanager
    def ahead(self, model: nn.Module, coefficient: float) -> Iterator[None]:
        """A block for forward and backward in which this worker's parameters are `x - c eta e` (detached error feedback).

            with compression.ahead(model, 0.5):
                loss(model(batch)).backward()
            optimizer.step()

        e is this rank's residual, eta the learning rate: 1 with `lr_in_residual`, else the optimizer's, which
        `hvd.DistributedOptimizer` knows and `register` is given (https://arxiv.org/abs/2004.05298). What was moved is back when
        the block ends, whatever happens in it. It takes the memory of a copy of the parameters.

        Args:
            model: whose parameters move; the one in `DistributedDataParallel` will do.
            coefficient: c, in [0, 1].

        Raises:
            ValueError: the coefficient is not in its range, or nothing tells the learning rate.
            RuntimeError: a parameter that was moved was written to within the block; it is what it was before.
        """
        check_number("coefficient", coefficient, "in [0, 1]", lambda c: 0.0 <= c <= 1.0)
        source: Any = self.source
        if source is None or not source.active or coefficient == 0.0:
            yield
            return
        if self._ahead is None:
            self._ahead = Ahead()
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        with self._ahead.block(dict(inner.named_parameters()), coefficient, source.waiting):
            yield


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
