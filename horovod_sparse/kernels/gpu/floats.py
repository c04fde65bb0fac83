"""What the kernels do with float32 and float64: their bits, and their range. Imports triton, and constants."""

from __future__ import annotations

import sys

import triton
import triton.language as tl

from horovod_sparse.exchange import wire

LARGEST_FLOAT32 = tl.constexpr(wire.LARGEST)
_LARGEST_FLOAT64 = tl.constexpr(sys.float_info.max)


@triton.jit
def bits_of(x):
    """Return the bits of |x|."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def rounded_bits(number, like):
    """Round a float64 number >= 0 to the type of the elements of `like`, and return its bits as int64."""
    return bits_of(tl.full((), number, tl.float64).to(like.dtype.element_ty)).to(tl.int64)


@triton.jit
def value_of(bits, like):
    """Read the bits in an int64 as a number of the type of the elements of `like`, and return it as float64."""
    if like.dtype.element_ty == tl.float32:
        return bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        return bits.to(tl.float64, bitcast=True)


@triton.jit
def clip(x, largest):
    """Replace numbers beyond the largest one, of either sign, by that one."""
    return tl.minimum(tl.maximum(x, -largest), largest)


@triton.jit
def largest_of(x):
    """Return the largest number of the type of x."""
    return LARGEST_FLOAT32 if x.dtype == tl.float32 else _LARGEST_FLOAT64
