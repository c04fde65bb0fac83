"""The array operations with compiled kernels, on tensors on the CPU. All other tensors are left to PyTorch's operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse import kernels
from horovod_sparse.estimation.search import largest_candidates
from horovod_sparse.kernels.tracked import HostOps, TrackedMemory
from horovod_sparse.ops.protocol import Moments, Moving, Part, Selection, Sums, Tracked
from horovod_sparse.torch.ops import TorchOps


def tensor_ops() -> TorchOps:
    """Return the array operations for tensors: with compiled kernels if there are any."""
    if not kernels.available():
        return TorchOps()
    kernels.share_threads()
    return CompiledTorchOps()


class CompiledTorchOps(TorchOps):
    """Implements `horovod_sparse.ops.protocol.Ops` on `torch.Tensor`. Selects the same entries as `TorchOps`."""

    # --- what `kernels.tracked.HostOps` needs ---

    def threads(self) -> int:
        return torch.get_num_threads()

    def memory(self, array: Tensor) -> kernels.Memory:
        return _memory(array)

    def array(self, host: NDArray[Any]) -> Tensor:
        return torch.from_numpy(host)

    def gradients(self, parts: Sequence[Part]) -> tuple[list[kernels.Gradient], object] | None:
        if not all(gradient.is_cpu and gradient.dtype in _CODES for _, gradient in parts):
            return None
        flats = [gradient.contiguous() for _, gradient in parts]
        return [_given(first, flat) for (first, _), flat in zip(parts, flats, strict=True)], flats

    # --- operations ---

    def tracked(self, x: Tensor) -> Tracked:
        if _is_compiled(x) and x.is_contiguous():
            return cast(Tracked, TrackedMemory(cast(HostOps, self), x))
        return super().tracked(x)

    def accumulate(self, buffer: Tensor, gradients: Sequence[Part], moving: Moving | None = None) -> list[int]:
        given = self.gradients(gradients) if _is_compiled(buffer) else None
        if given is None:
            return super().accumulate(buffer, gradients, moving)
        how = None if moving is None else (_memory(moving.velocity), moving.momentum, moving.nesterov)
        return kernels.accumulate(_memory(buffer), given[0], self.threads(), how)

    def measure(self, x: Tensor) -> Sums:
        return kernels.measure(_flat(x), self.threads()) if _is_compiled(x) else super().measure(x)

    def counts(self, x: Tensor, thresholds: list[float]) -> list[int]:
        if not _is_compiled(x):
            return super().counts(x, thresholds)
        return kernels.counts(_flat(x), thresholds, self.threads())

    def all_finite(self, array: Tensor) -> bool:
        return kernels.all_finite(_flat(array), self.threads()) if _is_compiled(array) else super().all_finite(array)

    def moments(self, x: Tensor, threshold: float, *, with_log: bool = False) -> Moments:
        if not _is_compiled(x):
            return super().moments(x, threshold, with_log=with_log)
        return kernels.moments(_flat(x), threshold, with_log, self.threads())

    def max_abs(self, x: Tensor) -> float:
        return self.measure(x).largest if _is_compiled(x) else super().max_abs(x)

    def norm(self, x: Tensor) -> float:
        return math.sqrt(self.measure(x).squares) if _is_compiled(x) else super().norm(x)

    def select_above(self, x: Tensor, threshold: float, capacity: int) -> Selection:
        if not _is_compiled(x):
            return super().select_above(x, threshold, capacity)
        every = kernels.select_above(_flat(x), threshold, capacity, self.threads())
        chosen, found = torch.from_numpy(every), every.size
        if found > capacity:
            chosen = chosen[self.select_largest(x[chosen], capacity).indices]
        return Selection(chosen, found)

    def select_largest(self, x: Tensor, count: int) -> Selection:
        few = largest_candidates(self, x, count) if _is_compiled(x) else None
        if few is None:
            return super().select_largest(x, count)
        among = super().select_largest(x[few], count)
        return among._replace(indices=few[among.indices])

    def union(self, gathered: Tensor, world: int, header: int, numel: int) -> Tensor | None:
        if not gathered.is_cpu:
            return super().union(gathered, world, header, numel)
        merged = kernels.union(_flat(gathered), world, header, numel)
        return None if merged is None else torch.from_numpy(merged)

    def distinct(self, draw: Callable[[int], NDArray[np.int64]], numel: int, k: int) -> NDArray[np.int64]:
        return kernels.distinct(draw, numel, k)

    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        if not _is_compiled(x):
            return super().take(x, indices)
        values = torch.empty(indices.numel(), dtype=torch.float32)
        kernels.take(_memory(x), _flat(indices), _memory(values))
        return values

    def send(self, x: Tensor, indices: Tensor, capacity: int) -> Tensor:
        if not _is_compiled(x):
            return super().send(x, indices, capacity)
        message = torch.empty((capacity, 2), dtype=torch.int32)
        kernels.send(_memory(x), _flat(indices), _memory(message))
        return message

    def pack(self, indices: Tensor, values: Tensor, capacity: int) -> Tensor:
        if not _is_compiled(values):
            return super().pack(indices, values, capacity)
        message = torch.empty((capacity, 2), dtype=torch.int32)
        kernels.pack(_flat(indices), _flat(values), _memory(message))
        return message

    def rows_in_use(self, indices: Tensor, world: int, numel: int) -> list[int | None]:
        if not indices.is_cpu:
            return super().rows_in_use(indices, world, numel)
        first = kernels.Memory(indices.data_ptr(), _dtype(indices), indices.numel(), indices)
        return kernels.rows_in_use(first, indices.stride(0), world, numel)

    def unpack(self, message: Tensor, used: int) -> tuple[Tensor, Tensor]:
        if not message.is_cpu:
            return super().unpack(message, used)
        indices, values = torch.empty(used, dtype=torch.int64), torch.empty(used, dtype=torch.float32)
        kernels.unpack(_memory(message), used, _memory(indices), _memory(values))
        return indices, values

    def _message(self, count: int, like: Tensor) -> Tensor:
        return (
            torch.from_numpy(kernels.pool.lend(count, _dtype(like))) if like.is_cpu else super()._message(count, like)
        )

    def scatter_add(self, target: Tensor, indices: Tensor, values: Tensor) -> None:
        if _is_compiled(target) and _is_compiled(values):
            kernels.scatter_add(_memory(target), _flat(indices), _flat(values))
        else:
            super().scatter_add(target, indices, values)

    def assembler(self, messages: Tensor, used: list[int], divisor: float) -> Callable[[Sequence[Part]], None]:
        if not messages.is_cpu:
            return super().assembler(messages, used, divisor)
        write = kernels.assembler(_flat(messages), used, divisor)
        return lambda targets: write([_target(first, target) for first, target in targets])


_NAMES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64")}

_CODES = {dtype: kernels.code_of(name) for dtype, name in _NAMES.items() if kernels.supports(name)}


def _is_compiled(x: Tensor) -> bool:
    """Return whether the kernels can handle `x`: it is on the CPU, and of a type that they know."""
    return x.is_cpu and x.dtype in (torch.float32, torch.float64)


def _dtype(tensor: Tensor) -> str:
    return _NAMES.get(tensor.dtype) or str(tensor.dtype)


def _memory(tensor: Tensor) -> kernels.Memory:
    if not tensor.is_contiguous():
        raise ValueError("the tensor must be contiguous")
    return kernels.Memory(tensor.data_ptr(), _dtype(tensor), tensor.numel(), tensor)


def _flat(tensor: Tensor) -> kernels.Memory:
    """Return the memory of a tensor that is only read, or of a contiguous copy."""
    return _memory(tensor.contiguous())


def _target(first: int, part: Tensor) -> kernels.Target:
    if not part.is_contiguous():
        raise ValueError("the tensor must be contiguous")
    return kernels.Target(part.data_ptr(), kernels.WIDE[_dtype(part)], first, part.numel())


def _given(first: int, gradient: Tensor) -> kernels.Gradient:
    return kernels.Gradient(gradient.data_ptr(), _CODES[gradient.dtype], first, gradient.numel())
