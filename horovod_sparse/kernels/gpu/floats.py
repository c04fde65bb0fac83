"""What the kernels do with float32: its bits, and its range. Imports triton, and constants.

Tested by tests/kernels/gpu/test_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from horovod_sparse.exchange import wire

_LARGEST = tl.constexpr(wire.LARGEST)


@triton.jit
def bits_of(x):
    """Return the bits of |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rounded_bits(number):
    """Round a float64 number >= 0 to float32, and return its bits as int64."""
    return bits_of(tl.full((), number, tl.float64).to(tl.float32)).to(tl.int64)


@triton.jit
def value_of(bits):
    """Read the bits in an int64 as a float32 number, and return it as float64."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def clip(x):
    """Replace infinity, of either sign, by the largest number of float32."""
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
