"""Compile every Triton kernel for a real GPU, as the class that launches them would, on a machine that has none.

The interpreter runs kernels that the compiler refuses; this finds those. It prints what each one takes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from horovod_sparse.compressors.dgc import DGC
from horovod_sparse.compressors.gaussiank import GaussianK
from horovod_sparse.compressors.micro import MiCRO
from horovod_sparse.compressors.randomk import RandomK
from horovod_sparse.compressors.redsync import RedSync
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.compressors.threshold import Threshold
from horovod_sparse.compressors.topk import TopK
from horovod_sparse.core.layout import Parameter
from horovod_sparse.core.plan import Stage, layouts_of
from horovod_sparse.kernels.gpu.bucket import selector_for
from horovod_sparse.kernels.gpu.message import assemble, pack, rows_in_use, union
from horovod_sparse.kernels.gpu.packed import quantize, unquantize
from horovod_sparse.ops.protocol import Moved

COMPRESSORS = [
    TopK(0.001, warmup=None),
    Threshold(1.0),
    SIDCo(0.001, warmup=None),
    SIDCo(0.001, distribution="gpareto", warmup=None),
    RandomK(0.001, warmup=None),
    GaussianK(0.001, warmup=None),
    DGC(0.001, warmup=None),
    RedSync(0.001, warmup=None),
    MiCRO(0.001, warmup=None),
]


class Absent:
    """What Triton asks of a driver before it compiles; nothing can be launched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: dict[str, Any] = {}


def compile_only(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    kernel = _run(function, *arguments, grid=grid, warmup=True, **options)
    compiled[kernel.hash] = kernel


_run, JITFunction.run = JITFunction.run, compile_only


def step(compressor: Any, gradient: torch.dtype | None, momentum: float | None) -> None:
    size = 40_000
    velocity = torch.zeros(size) if momentum is not None else None
    (layout,) = layouts_of([Parameter("p", (size,), "float32", "device")], compressor)
    bucket = selector_for(compressor, layout, torch.zeros(size), velocity)
    assert bucket is not None
    bucket.begin(compressor.new_state(), Stage(range(1), 40, 50, compressor.exchange, False, 0.0))
    given = None if gradient is None else torch.zeros(size, dtype=gradient)
    bucket.accumulate([(0, given)], momentum, 1.0)
    if given is not None:
        bucket.accumulate([(0, Moved(given, given, 1.4, 1e-6))], None, 1.0)
    bucket.decide(gives_up=False)
    message = bucket.message()
    if not isinstance(compressor, RandomK):
        indices, _ = union(bucket.index_message(0), 1, size)
        _, values = bucket.take_out(indices, 80, None)
        pack(indices, values, 80)
    bucket.whole(0)
    packed = quantize(torch.zeros(size), message)
    rows_in_use(unquantize(packed, 1, size), 1, size)
    assemble([(0, torch.zeros(size)), (0, torch.zeros(size, dtype=torch.float64))], message, 1, 2.0)


def main(capability: int) -> None:
    triton.runtime.driver.set_active(Absent(capability))
    for compressor in COMPRESSORS:
        step(compressor, torch.float32, momentum=None)
    for gradient in (None, torch.bfloat16, torch.float16, torch.float64):
        step(COMPRESSORS[0], gradient, momentum=0.9)
    for kernel in compiled.values():
        # What the compiler makes in the end.
        assert kernel.asm["cubin"]
        print(kernel.name, "shared memory", kernel.metadata.shared)


if __name__ == "__main__":
    main(int(sys.argv[1]))
