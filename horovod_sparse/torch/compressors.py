"""The compressors as PyTorch users pass them: the algorithms joined with Horovod's Compressor interface."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.statistics import Stats, StepStats
from horovod_sparse.torch.ops import TorchOps

if TYPE_CHECKING:
    from horovod_sparse.torch.reducer import Reducer


class TorchCompressor(Compressor, HorovodCompressor):  # type: ignore[misc]
    """A sparsifier that serves one `hvd.DistributedOptimizer`.

    Residuals and adaptive state are this rank's own; save them on every rank beside the optimizer's.
    """

    _reducer: Reducer | None = None
    _calls: int = 0

    def bind(self, reducer: Reducer) -> None:
        """Called by the optimizer that this compressor is given to; a second one is refused."""
        self.check_free()
        self._reducer = reducer

    def check_free(self) -> None:
        """Raise ValueError when this compressor serves an optimizer already."""
        if self._reducer is not None:
            raise ValueError(
                f"compression must serve one optimizer, but {self!r} already serves another, whose residuals it would "
                "mix in; give this optimizer a compressor of its own, for instance copy.deepcopy(compression)"
            )

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        """The tensor with everything but the selected entries zero; a new tensor of the same shape and dtype.

        For Horovod's own calls outside the optimizer (`hvd.allreduce(x, compression=...)`): right, without error
        feedback, and without saving bandwidth, since Horovod allreduces what is returned. Tensors below `min_numel`,
        tensors that are not floating point or sparse, and tensors with NaN or infinity are returned as they are.
        """
        _warn_dense(type(self).__name__)
        ops = TorchOps()
        numel = tensor.numel()
        compressible = tensor.is_floating_point() and not tensor.is_sparse and not self.leaves_dense("", numel)
        if not compressible or not ops.all_finite(tensor):
            return tensor, None
        flat = tensor.reshape(-1)
        wide = flat.detach().to(getattr(torch, self.residual_dtype_of(flat)))
        k = self.asked(numel)
        state = self.new_state()
        # Random choices are other ones at every call.
        state.step = self._calls
        self._calls += 1
        chosen = self.select(ops, wide, k, self.room(numel, k, 1), state).indices
        # Differentiable, as Horovod's own compressors are.
        return torch.zeros_like(flat).scatter(0, chosen, flat[chosen]).view(tensor.shape), None

    def decompress(self, tensor: Tensor, ctx: None) -> Tensor:
        """The tensor as it is."""
        return tensor

    def residual_dtype_of(self, tensor: Tensor) -> str:
        """The residual's dtype for gradients like `tensor`."""
        return self.residual_dtype or ("float64" if tensor.dtype == torch.float64 else "float32")

    def stats(self) -> Stats:
        """Counts, bytes and residual norms per bucket and in total, of the last step and on average; computed now."""
        if self._reducer is None or self._reducer.pipeline is None:
            return Stats(0, StepStats((), 0.0), StepStats((), 0.0))
        return self._reducer.pipeline.stats()

    @property
    def residual_bytes(self) -> int:
        """Memory that this rank's residuals take; 0 before the first step."""
        if self._reducer is None or self._reducer.pipeline is None:
            return 0
        return self._reducer.pipeline.residuals.nbytes

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and adaptive state by parameter name; loadable with `torch.load(weights_only=True)`."""
        return self._bound().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same model. Strict; bucketing and world size may differ."""
        self._bound().load_compression_state(state)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals, because gradients will be `factor` times as large from now on.

        With `torch.amp.GradScaler`: after `scaler.update()`, by the new scale / the old one.
        """
        if not (isinstance(factor, (int, float)) and 0.0 < factor < math.inf):
            raise ValueError(f"factor must be a finite number > 0, got {factor!r}")
        self._bound().rescale(float(factor))

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self._bound().reset()

    def _bound(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(
                f"{self!r} serves no optimizer yet; pass it to hvd.DistributedOptimizer(..., compression=...) first"
            )
        return self._reducer

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the settings, not the residuals: it is for another optimizer.
        return {name: value for name, value in vars(self).items() if name != "_reducer"}


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


def _warn_dense(name: str) -> None:
    # Python shows a warning once per place; this line is that place.
    warnings.warn(
        f"{name} was called by Horovod outside hvd.DistributedOptimizer: the result is right, but it is sent dense, so no "
        "bandwidth is saved",
        stacklevel=1,
    )
