"""The compressors as TensorFlow users pass them: each algorithm combined with Horovod's Compressor interface.

Tested by tests/compressors/test_registry.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor as HorovodCompressor
from numpy.typing import NDArray

from horovod_sparse import compressors
from horovod_sparse.core.binding import BoundCompressor, Source
from horovod_sparse.core.state import check_parts, empty_state
from horovod_sparse.numpy.compiled import host_ops

Tensor = Any


class TensorflowCompressor(BoundCompressor, HorovodCompressor):
    """A sparsifier that serves one `hvd.DistributedOptimizer`, or the tapes of one training loop.

    `state_dict` returns NumPy arrays and plain values.
    """

    _pending: dict[str, Any] | None = None
    _scaler: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{type(self).__name__} must not be made inside of a function that is being traced: every trace would begin "
                "with an empty residual; make it once, outside"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_pending", "_scaler")}

    def bind(self, source: Source) -> None:
        super().bind(source)
        if self._pending is not None:
            source.driver.load(self._pending)
            self._pending = None

    def scale_with(self, scaler: Any) -> None:
        """Keep residuals without the loss scale of a `keras.optimizers.LossScaleOptimizer`, which changes.

        Raises:
            TypeError: it is not one.
            RuntimeError: residuals have the scale already.
        """
        if not hasattr(scaler, "initial_scale"):
            raise TypeError(f"scaler must be a keras.optimizers.LossScaleOptimizer, got {scaler!r}")
        if self.steps:
            raise RuntimeError(
                f"scale_with must be called before the first step, got {self.steps} steps whose residuals have the scale; make "
                "a new compressor"
            )
        self._scaler = scaler

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale by which gradients are multiplied, if residuals are kept without it."""
        if self._scaler is None:
            return None
        return tf.convert_to_tensor(self._scaler.dynamic_scale if self._scaler.built else self._scaler.initial_scale)

    def compress(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Return a new tensor of the same shape and dtype, in which all entries but the selected ones are zero.

        Horovod itself calls this outside the optimizer (`hvd.allreduce(x, compression=...)`). The result is right, but there
        is no error feedback, and no bandwidth is saved, since Horovod allreduces what is returned. Tensors below
        `min_numel`, tensors that are not floating point, and tensors with NaN or infinity are returned unchanged.
        """
        self.warn_dense()
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.dtype.is_floating:
            return tensor, None
        dtype = self.residual_dtype_of(tensor)

        def choose(array: NDArray[Any]) -> NDArray[np.bool_]:
            if self.leaves_dense("", array.size) or not np.isfinite(array).all():
                return np.ones(array.shape, np.bool_)
            chosen = np.zeros(array.size, np.bool_)
            chosen[self.choose_alone(host_ops(), array.reshape(-1).astype(dtype))] = True
            return chosen.reshape(array.shape)

        chosen = tf.ensure_shape(tf.numpy_function(choose, [tensor], tf.bool), tensor.shape)
        # This is differentiable, as Horovod's own compressors are.
        return tf.where(chosen, tensor, tf.zeros_like(tensor)), None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.source is not None else copy.deepcopy(self._pending or empty_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.source is not None:
            super().load_state_dict(state)
        else:
            check_parts(state, self)
            self._pending = copy.deepcopy(dict(state))


class DGC(TensorflowCompressor, compressors.DGC): ...


class GaussianK(TensorflowCompressor, compressors.GaussianK): ...


class MiCRO(TensorflowCompressor, compressors.MiCRO): ...


class NoOp(TensorflowCompressor, compressors.NoOp): ...


class RandomBlock(TensorflowCompressor, compressors.RandomBlock): ...


class RandomK(TensorflowCompressor, compressors.RandomK): ...


class RedSync(TensorflowCompressor, compressors.RedSync): ...


class SIDCo(TensorflowCompressor, compressors.SIDCo): ...


class Threshold(TensorflowCompressor, compressors.Threshold): ...


class TopK(TensorflowCompressor, compressors.TopK): ...


if not TYPE_CHECKING:
    # For type checkers it would have to be written out. Without it they take all classes above.
    __all__ = compressors.__all__
