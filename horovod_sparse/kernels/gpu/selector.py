"""Selects from a bucket on its GPU, while the host goes on. Imports torch and Triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.selector import Outcome, SlotGradient
from horovod_sparse.kernels.gpu.bucket import DeviceBucket
from horovod_sparse.kernels.gpu.rules import rule_of
from horovod_sparse.ops.protocol import Momentum


class DeviceSelector:
    """A `core.selector.Selector` that never makes the host wait before `finish`. It changes the bucket's velocity."""

    def __init__(self, bucket: DeviceBucket, velocity: Tensor | None) -> None:
        self.bucket = bucket
        self._velocity = velocity

    def begin(self, *, selects: bool) -> None:
        return

    def accumulate(
        self, gradients: Sequence[SlotGradient], state: BucketState, k: int, momentum: Momentum | None, rate: float
    ) -> None:
        velocity = self._velocity
        for slot, gradient in gradients:
            self.bucket.accumulate(slot.offset, gradient, state, k, velocity=velocity, momentum=momentum, rate=rate)

    def message(self, state: BucketState, k: int, capacity: int) -> Tensor:
        return self.bucket.select(state, k, capacity)

    def finish(self, state: BucketState, k: int, capacity: int) -> Outcome:
        told = self.bucket.finish(state, k)
        sent, found = int(told["sent"]), int(told["found"])
        truncated = found - sent if sent == capacity and found > capacity else 0
        return Outcome(sent, truncated, self.bucket.not_finite() if told["not_finite"] else ())

    def forget(self) -> None:
        self.bucket.forget()


def selector_for(
    compressor: Compressor, layout: Layout, buffer: Tensor, velocity: Tensor | None, **shape: int
) -> DeviceSelector | None:
    """Return what selects from a bucket on its device, or None if the compressor needs the host for that."""
    rule = rule_of(compressor)
    if rule is None:
        return None
    ratio = compressor.target_count(layout.numel) / layout.numel
    bucket = DeviceBucket(rule, buffer, [slot.numel for slot in layout.slots], ratio, **shape)
    return DeviceSelector(bucket, velocity)
