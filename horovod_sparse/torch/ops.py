"""The array operations as PyTorch operations, for any device. Imports torch, never Horovod.

Statistics run over chunks that stay in the processor's cache: a pass costs about one read of the memory, and no temporary
is as large as the tensor. The results are Python numbers. On a GPU each of them costs one host synchronisation.

Tested by tests/ops/test_protocol.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse.exchange import wire
from horovod_sparse.ops.cached import Cached
from horovod_sparse.ops.protocol import Moved, Moving, Ops, Part, Selection, Sums, Tracked
from horovod_sparse.torch import device

# 64 Ki float64 take 512 KiB, which fits into a core's second-level cache. GPUs have no cache worth chunking for.
_CPU_CHUNK = 2**16
_GPU_CHUNK = 2**26


class TorchOps(Ops):
    """Implements `horovod_sparse.ops.protocol.Ops` on `torch.Tensor`."""

    def zeros(self, count: int, dtype: str, like: Tensor) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        if like.is_cpu:
            # NumPy asks the system for large pages. A pass over much memory is faster with them.
            return torch.from_numpy(np.zeros(count, f"i{kind.itemsize}")).view(kind)
        return torch.zeros(count, dtype=kind, device=like.device)

    def tracked(self, x: Tensor) -> Tracked:
        return cast(Tracked, Cached(self, x))

    def accumulate(
        self, buffer: Tensor, gradients: Sequence[Part], moving: Moving | None = None, rate: float = 1.0
    ) -> list[int]:
        counts = [self._accumulate(buffer, first, gradient, moving, rate) for first, gradient in gradients]
        if on_host(buffer) or not counts:
            return [int(one) for one in counts]
        # The host waits for the device once.
        told: list[int] = torch.stack(cast("list[Tensor]", counts)).tolist()
        return told

    def _accumulate(
        self, buffer: Tensor, first: int, gradient: Tensor | Moved, moving: Moving | None, rate: float
    ) -> int | Tensor:
        if isinstance(gradient, Moved):
            wide = torch.promote_types(gradient.now.dtype, buffer.dtype)
            now, start = gradient.now.to(wide), gradient.start.to(wide)
            distance: Tensor = now.sub(start).mul_(gradient.growth).add_(start.mul(gradient.pull))
            gradient = distance
        part = slice(first, first + gradient.numel())
        residual = buffer[part]
        if first < 0 or residual.numel() != gradient.numel():
            raise ValueError(f"gradients must be within the residual's {buffer.numel()} elements, got {part}")
        gradient, not_finite = self._finite(gradient, residual.dtype)
        # Products are rounded before they are added, as everywhere else: `add_` with alpha may round once.
        added = gradient
        if moving is not None:
            velocity = moving.velocity[part].view(gradient.shape)
            added = velocity.mul_(moving.momentum).add_(gradient)
        residual.view(gradient.shape).add_(added if rate == 1.0 else added.to(residual.dtype).mul(rate))
        if moving is not None:
            self._keep_finite(velocity)
        return not_finite + self._keep_finite(residual)

    def _keep_finite(self, sums: Tensor) -> int | Tensor:
        """Set sums that have overflowed to the largest number of their type, in place. Return how many there were."""
        if on_host(sums) and self.all_finite(sums):
            return 0
        overflowed = torch.count_nonzero(torch.isinf(sums))
        largest = torch.finfo(sums.dtype).max
        sums.clamp_(-largest, largest)
        return overflowed

    def _finite(self, gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, int | Tensor]:
        """Return the gradient, converted if that may matter, with zeros for entries that are not finite, and their number."""
        if gradient.dtype == torch.float64:
            gradient = gradient.to(dtype)
        if on_host(gradient) and self.all_finite(gradient):
            return gradient, 0
        finite = torch.isfinite(gradient)
        return torch.where(finite, gradient, 0.0), torch.count_nonzero(~finite)

    def measure(self, x: Tensor, threshold: float = 0.0, *, with_log: bool = False) -> Sums:
        sums, limit = Sums(logs=0.0 if with_log else math.nan), _limit(x, threshold)
        for chunk in _chunks(x):
            magnitudes = chunk.abs().double()
            excesses = magnitudes.sub(limit).clamp_(min=0.0)
            logs = excesses[excesses > 0].log_().sum() if with_log else excesses.new_tensor(math.nan)
            counts = torch.count_nonzero(excesses).double(), excesses.sum(), torch.dot(excesses, excesses)
            # The host waits for a device once.
            found, total, squares, largest, log = torch.stack([*counts, magnitudes.max(), logs]).tolist()
            sums.count, sums.total, sums.squares = sums.count + int(found), sums.total + total, sums.squares + squares
            sums.largest, sums.logs = max(sums.largest, largest), sums.logs + log
        return sums

    def assign(self, residual: Tensor, gradient: Tensor) -> None:
        residual.view(gradient.shape).copy_(torch.as_tensor(gradient))

    def copy_parts(self, x: Tensor, parts: Sequence[Part], divisor: float) -> None:
        targets = [target for _, target in parts]
        sizes = [target.numel() for target in targets]
        if sum(sizes) == x.numel():
            sources = [*torch.split(x, sizes)]
        else:
            sources = [x[first : first + size] for (first, _), size in zip(parts, sizes, strict=True)]
        if targets:
            torch._foreach_copy_(targets, sources)
            if divisor != 1.0:
                torch._foreach_div_(targets, divisor)

    def copy(self, array: Tensor) -> Tensor:
        return array.clone()

    def all_finite(self, array: Tensor) -> bool:
        # The sum is computed at memory speed, and it is not finite if any entry is not. Finite entries may overflow it too.
        return math.isfinite(array.sum().item()) or bool(torch.isfinite(array).all())

    def told(self, arrays: Sequence[Tensor]) -> list[list[Any]]:
        numbers: list[list[Any]] = []
        away: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
        for place, array in enumerate(arrays):
            numbers.append(array.tolist() if on_host(array) else [])
            if not numbers[-1]:
                away[array.device].append((place, array))
        for some in away.values():
            # The host waits here.
            read = iter(torch.cat([array.double() for _, array in some]).tolist())
            for place, array in some:
                kind = float if array.is_floating_point() else int
                numbers[place] = [kind(one) for one in islice(read, len(array))]
        return numbers

    def norm(self, x: Tensor) -> float:
        return math.sqrt(math.fsum(torch.dot(wide, wide).item() for wide in (chunk.double() for chunk in _chunks(x))))

    def select_above(self, x: Tensor, threshold: float, capacity: int) -> Selection:
        limit = _limit(x, threshold)
        found, start = [torch.empty(0, dtype=torch.int64, device=x.device)], 0
        for chunk in _chunks(x):
            found.append(_nonzero(chunk.abs() > limit).add_(start))
            start += chunk.numel()
        indices = torch.cat(found)
        number = indices.numel()
        if number > capacity:
            indices = indices[self.select_largest(x[indices], capacity).indices]
        return Selection(indices, number)

    def select_largest(self, x: Tensor, count: int) -> Selection:
        smallest, magnitudes = self.kth_largest(x, count), x.abs()
        chosen = magnitudes > smallest
        equal = _nonzero(magnitudes == smallest)
        chosen[equal[: count - int(torch.count_nonzero(chosen))]] = True
        return Selection(_nonzero(chosen), count, smallest)

    def kth_largest(self, x: Tensor, count: int) -> float:
        if x.device.type == "cpu":
            # NumPy's partition and sort use vector instructions and are many times faster than torch's.
            magnitudes = x.abs().numpy()
            magnitudes.partition(x.numel() - count)
            return float(magnitudes[x.numel() - count])
        return float(torch.topk(x.abs(), count, sorted=False).values.min())

    def indices(self, host: NDArray[np.int64], like: Tensor) -> Tensor:
        return torch.from_numpy(host).to(like.device)

    def as_numpy(self, array: Tensor) -> NDArray[Any]:
        on_host: NDArray[Any] = array.cpu().numpy()
        on_host.flags.writeable = False
        return on_host

    def union(self, gathered: Tensor, world: int, header: int, numel: int) -> Tensor | None:
        messages = gathered.view(world, -1)[:, header:]
        if min(self.rows_in_use(messages.flatten(), world, numel).tolist()) < 0:
            return None
        merged = messages.flatten().sort().values
        first = merged >= 0
        first[1:] &= merged[1:] != merged[:-1]
        return merged[first].long()

    def take_out(self, x: Tensor, indices: Tensor) -> Tensor:
        taken = x[indices]
        if x.dtype == torch.float32:
            x[indices] = 0.0
            return taken
        largest = torch.finfo(torch.float32).max
        values = taken.clamp(-largest, largest).float()
        x[indices] = taken - values
        return values

    def pack(self, indices: Tensor, values: Tensor, capacity: int) -> Tensor:
        if device.has_kernels(values.device):
            from horovod_sparse.kernels.gpu import message as kernels

            return kernels.pack(indices, values, capacity)
        message = torch.empty((capacity, 2), dtype=torch.int32, device=values.device)
        message[: indices.numel(), 0] = indices
        message[: indices.numel(), 1] = values.view(torch.int32)
        message[indices.numel() :, 0], message[indices.numel() :, 1] = wire.PADDING, 0
        return message

    def quantize(self, x: Tensor, message: Tensor) -> Tensor:
        if device.has_kernels(x.device):
            from horovod_sparse.kernels.gpu import packed

            return packed.quantize(x, message)
        # A device is not waited for: padding is in a chunk of its own, the last one.
        chunks = wire.chunks_of(x.numel())
        used = message[:, 0] >= 0
        indices, taken = message[:, 0].clamp(min=0).long(), message[:, 1].contiguous().view(torch.float32)
        chunk, magnitudes = torch.where(used, indices >> wire.CHUNK_BITS, chunks), taken.abs().double()
        ones, zeros = torch.ones_like(magnitudes), magnitudes.new_zeros
        counts = zeros(chunks + 1).index_add_(0, chunk, ones)
        means = zeros(chunks + 1).index_add_(0, chunk, magnitudes) / counts.clamp(min=1)
        is_large = magnitudes > means[chunk]
        # One for each chunk and level.
        group, groups = chunk + (chunks + 1) * is_large, 2 * (chunks + 1)
        levels = zeros(groups).index_add_(0, group, magnitudes)
        levels /= zeros(groups).index_add_(0, group, ones).clamp(min=1)
        smallest = torch.full_like(levels, math.inf).scatter_reduce_(0, group, magnitudes, "amin")
        largest = zeros(groups).scatter_reduce_(0, group, magnitudes, "amax")
        levels = torch.minimum(levels, 2 * smallest)
        levels = torch.where(largest > wire.LEVEL_RANGE * levels, 0.0, levels).float().view(torch.int32) >> 16
        header = message.new_zeros(2 * wire.header_length(chunks), dtype=torch.int16)
        header[:chunks] = counts[:chunks]
        header[chunks : 3 * chunks] = levels.view(2, -1)[:, :chunks].reshape(-1)
        header[0] = torch.where(message[0, 0] == wire.NOT_FINITE, wire.NOT_FINITE, header[0])
        bits = torch.where(used, levels[group] << 16 | message[:, 1] & wire.SIGN, message[:, 1])
        x.index_add_(0, indices, (taken - bits.view(torch.float32)).to(x.dtype))
        message[:, 1] = bits
        entries = message.new_zeros(2, -(-len(message) // wire.BLOCK) * wire.BLOCK)
        entries[0, : len(message)] = torch.where(used, indices & (wire.CHUNK - 1), 0)
        entries[1, : len(message)] = torch.where(used, (bits < 0) + 2 * is_large, 0)
        rows = entries[0] & 0xFF, _joined(entries[0] >> 8, 4), _joined(entries[1], 2)
        return torch.cat([header.view(torch.uint8), *(row.to(torch.uint8) for row in rows)]).view(torch.int32)

    def unquantize(self, gathered: Tensor, world: int, numel: int) -> Tensor:
        if device.has_kernels(gathered.device):
            from horovod_sparse.kernels.gpu import packed

            return packed.unquantize(gathered, world, numel)
        messages, chunks = gathered.view(world, -1), wire.chunks_of(numel)
        length = wire.header_length(chunks)
        header = messages[:, :length].contiguous().view(torch.int16)[:, : 3 * chunks].int()
        counts, levels = header[:, :chunks], header[:, chunks:]
        room = wire.packed_room(messages.shape[1], chunks)
        rows = messages[:, length:].contiguous().view(torch.uint8)
        lower, upper, values = torch.split(rows, [room, room // 2, room // 4], 1)
        code = _parted(values, 2)
        ends = counts.cumsum(1)
        numbers = torch.arange(room, device=gathered.device).repeat(world, 1)
        bad = (counts < 0).any(1, keepdim=True) | (ends[:, -1:] > room)
        used = (numbers < ends[:, -1:]) & ~bad
        chunk = torch.searchsorted(ends, numbers, right=True).clamp(max=chunks - 1)
        indices = torch.where(used, (chunk << wire.CHUNK_BITS) + (_parted(upper, 4) << 8) + lower, wire.PADDING)
        first = torch.where(counts[:, 0] == wire.NOT_FINITE, wire.NOT_FINITE, wire.BAD_COUNTS)
        indices[:, 0] = torch.where(bad[:, 0], first, indices[:, 0])
        bits = levels.gather(1, chunk + chunks * (code >> 1)) << 16 | code << 31
        return torch.stack((indices.int(), torch.where(used, bits, 0)), 2).view(-1, 2)

    def rows_in_use(self, messages: Tensor, world: int, numel: int) -> Tensor:
        if device.has_kernels(messages.device):
            from horovod_sparse.kernels.gpu import message

            return message.rows_in_use(messages, world, numel)
        indices = (messages if messages.dim() == 1 else messages[:, 0]).view(world, -1)
        before, after, padding = indices[:, :-1], indices[:, 1:], indices[:, 1:] == wire.PADDING
        follows = (padding | ((before >= 0) & (after > before))).all(1)
        in_range = (indices[:, 0] >= wire.PADDING) & (indices.amax(1) < numel)
        used = torch.where(follows & in_range, (indices >= 0).sum(1), wire.DAMAGED)
        return torch.where(indices[:, 0] == wire.NOT_FINITE, wire.NOT_FINITE, used)

    def unpack(self, message: Tensor, used: int) -> tuple[Tensor, Tensor]:
        return message[:used, 0].long(), message[:used, 1].contiguous().view(torch.float32)

    def pack_values(self, values: Tensor, length: int, tail: list[float]) -> Tensor:
        message = values.new_empty(length + len(tail))
        message[: values.numel()] = values
        message[values.numel() : length] = 0
        host = torch.tensor(tail, dtype=values.dtype)
        message[length:].copy_(host if values.is_cpu else host.pin_memory(), non_blocking=True)
        return message

    def pack_indices(self, indices: Tensor, header: list[int], capacity: int) -> Tensor:
        message = torch.full((len(header) + capacity,), wire.PADDING, dtype=torch.int32, device=indices.device)
        message[: len(header)] = torch.tensor(header, dtype=torch.int32)
        message[len(header) : len(header) + indices.numel()] = indices
        return message

    def assemble(self, parts: Sequence[Part], messages: Tensor, used: list[int], divisor: float) -> None:
        if device.has_kernels(messages.device):
            from horovod_sparse.kernels.gpu import message

            message.assemble(parts, messages, len(used), divisor)
            return
        split = zip(wire.split(messages, len(used)), used, strict=True)
        entries = [self.unpack(one, rows) for one, rows in split]
        for indices, _ in entries:
            if indices.device.type == "cpu" and bool((indices[1:] <= indices[:-1]).any()):
                raise IndexError(f"indices must be ascending in each of {len(used)} messages")
        divided = [(indices, values / divisor) for indices, values in entries]
        for first, part in parts:
            part.zero_()
            for indices, values in divided:
                _add(part, first, indices, values)


def _add(target: Tensor, first: int, indices: Tensor, values: Tensor) -> None:
    """Add what belongs to a part of a bucket, which begins at entry `first`."""
    numel = target.numel()
    if on_host(target):
        begin, end = torch.searchsorted(indices, torch.tensor((first, first + numel))).tolist()
        target.index_add_(0, indices[begin:end] - first, values[begin:end].to(target.dtype))
        return
    # To know where the target's entries begin, the host would have to wait. So all entries are added, and those outside
    # the target add zero to some entry.
    inside = (indices >= first) & (indices < first + numel)
    target.index_add_(0, (indices - first).clamp(0, numel - 1), torch.where(inside, values, 0.0).to(target.dtype))


def _joined(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers of so many bits, several in a byte, the first one lowest."""
    shifts = torch.arange(0, 8, bits, device=numbers.device, dtype=torch.int32)
    return (numbers.view(-1, len(shifts)) << shifts).sum(1)


def _parted(joined: Tensor, bits: int) -> Tensor:
    """Return the numbers of so many bits that are joined in the bytes of each row."""
    shifts = torch.arange(0, 8, bits, device=joined.device, dtype=torch.int32)
    return (joined.int().unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)


def on_host(x: Tensor) -> bool:
    """Return whether the host may read a tensor without waiting for a device."""
    return x.is_cpu


def _nonzero(mask: Tensor) -> Tensor:
    """Return the indices where the mask is true."""
    if mask.device.type == "cpu":
        # NumPy is several times faster here than torch.
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def _limit(x: Tensor, threshold: float) -> float:
    """Return the threshold in the precision of the comparison."""
    return float(torch.tensor(threshold, dtype=x.dtype).item())


def _chunks(x: Tensor) -> Sequence[Tensor]:
    return torch.split(x, _CPU_CHUNK if x.is_cpu else _GPU_CHUNK) if x.numel() else ()
