"""The numbers of the messages on the wire, version 1. docs/how-it-works.md has every message byte for byte."""

from __future__ import annotations

import struct

from horovod_sparse.ops.protocol import Array

PADDING = -1
DAMAGED = -1
"""What `Ops.rows_in_use` says of a message that is not as it must be."""
NOT_FINITE = -2
BAD_COUNTS = -3
"""What `Ops.unquantize` puts in place of the first index if the counts of message 4 are wrong."""
LARGEST = 3.4028234663852886e38
"""The largest float32."""
HEADER = 2
"""How many numbers come before the indices in message 3."""
_CHECKSUM_BITS = 16
CHUNK_BITS = 12
CHUNK = 1 << CHUNK_BITS
"""Number of positions in a chunk of message 4."""
LEVEL_RANGE = 2.0**15
"""A level of message 4 stands for magnitudes of up to so many times its size."""
SIGN = -(2**31)
"""The bit of the sign of a float32, as an int32."""
BLOCK, BLOCK_LENGTH = 16, 7
"""So many entries of message 4 take so many int32."""

# Horovod counts elements in C ints. All of a bucket's values and the tail are one message. Indices are int32.
MAX_GATHERED = 2**31 - 1
MAX_BUCKET = 2**31 - 1 - (1 + _CHECKSUM_BITS)


def chunks_of(numel: int) -> int:
    """Return the number of chunks in a bucket of `numel`; at least 1."""
    return max(-(-numel // CHUNK), 1)


def header_length(chunks: int) -> int:
    """Return how many int32 of message 4 come before its entries."""
    return (3 * chunks + 1) // 2


def packed_length(numel: int, capacity: int) -> int:
    """Return how many int32 message 4 has for a bucket of `numel`."""
    return header_length(chunks_of(numel)) + BLOCK_LENGTH * -(-capacity // BLOCK)


def packed_room(length: int, chunks: int) -> int:
    """Return how many entries there is room for in message 4 of so many int32."""
    return (length - header_length(chunks)) // BLOCK_LENGTH * BLOCK


def split(gathered: Array, world: int) -> list[Array]:
    """Return the messages of all ranks, in rank order. Raise ValueError unless the array has `world` equal parts."""
    if len(gathered) % world:
        raise ValueError(f"gathered must have {world} equal parts, got {len(gathered)} rows")
    rows = len(gathered) // world
    return [gathered[sender * rows : (sender + 1) * rows] for sender in range(world)]


def tail(checksum: int) -> list[float]:
    """Return the numbers that follow the values of a rank in message 2, if its gradients are finite."""
    return [0.0] + [float(checksum >> bit & 1) for bit in range(_CHECKSUM_BITS)]


def float_bits(number: float) -> int:
    """Return the bits of a number rounded to float32, as an int32; larger numbers become the largest float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", max(-LARGEST, min(number, LARGEST))))[0]
    return bits
