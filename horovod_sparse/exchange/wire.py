"""The messages on the wire, version 1. Imports no framework.

All messages are in the machine's byte order. Their shapes depend only on the bucket's size, on the compressor's settings, on
the number of workers and, with a schedule, on the step. They never depend on the data, so Horovod's response cache holds and
NCCL uses one allgather. Entries for which there is no room stay in the residual of their rank. Values are not averaged on the
wire; the receiver divides.

**1. Pairs** (allgather): int32 of shape `(capacity, 2)`, row-major.

- A row is `(index, bits)`: the entry's position in the bucket and the IEEE-754 bits of its float32 value.
- Rows in use come first. Their indices are unique, ascending, and in `[0, bucket size)`.
- Every other row is padding: `(-1, 0)`. Its value reads as +0.0.
- A rank whose gradient holds NaN or infinity sends `(-2, 0)` in the first row and padding in all others. Every rank then
  reduces the whole bucket to NaN, as a dense allreduce would have spread it.

**2. Values** (allreduce, sum): float32 (the residual's type when all entries are sent) of shape `(capacity + 17,)` or, as
the second message after indices, `(min(world * capacity, bucket size),)`.

- First come the values of the entries that all ranks know, in ascending order of their indices, then zeros up to the capacity.
- If indices were not gathered, 17 numbers follow. The first is 1 for a rank whose gradient is not finite, else 0. The others
  are the lowest 16 bits of the checksum of what the ranks must have in common, one number each. If all ranks agree, the sum of
  each bit is 0 or the number of ranks. If they do not, all ranks see it in the same sums.

**3. Indices** (allgather): int32 of shape `(2 + capacity,)`.

- The checksum (31 bits), or -2 from a rank whose gradient is not finite.
- The bits of a float32 that the rank proposes (MiCRO's first threshold; else 0).
- Ascending indices, then padding: -1.

**4. Packed pairs** (allgather): int32 of shape `(ceil(1.5 * chunks) + 7 * ceil(capacity / 16),)`, in place of message 1 with
packed values.

- A chunk is 4,096 consecutive positions of the bucket; `chunks = ceil(bucket size / 4,096)`.
- First come three rows of `chunks` int16: the number of entries of each chunk, and its two levels, the smaller first, as
  bfloat16; then zeros up to a multiple of 4 bytes. The first number is -2 from a rank whose gradient is not finite.
- Then come three rows of the entries in ascending order of their indices, with zeros up to a multiple of 16 entries. The first
  row has the lower 8 bits of an entry's position within its chunk, the second one the upper 4 bits, the third one 2 bits of
  value: the lower one is 1 if the value is negative, the upper one is 1 for the second level. The first of the entries
  that share a byte has its lowest bits.

**5. Pairs by region** (alltoall): int32 of shape `(world * room, 2)`.

- A part of `room` rows goes to each rank, in rank order: the entries of that rank's region of the bucket (`regions`).
- The rows of a part are as in message 1, and its indices count from the beginning of the region. No first row holds -2.

**6. Sums of a region** (allgather, after message 5): int32 of shape `(forwarded + 1, 2)`.

- First come rows as in message 1: the largest sums of its own residual and of what the rank has received, in its own region.
- The last row holds the checksum of the regions' bounds (31 bits), or -2 from a rank whose gradient or whose sums are not
  finite; and then the number of entries that the rank has received, or -3 if a part of message 5 was not as required.

**7 to 10. Hosts that act as one worker** (alltoalls with parts of different sizes, some empty; then an allgather).

- 7: the bucket's values in the residual's type, a shard for each rank of the host (`grid`).
- 8: message 1 or 4 of a shard of the host's sum, with positions in the shard, for the rank with the same slot on every host.
- 9: what a rank has received as message 8, in rank order, as message 1 with positions in the bucket, for every rank of its
  host.
- 10: a number, int32: `digest` of what a rank has received as message 9, or -3 if message 7, 8 or 9 had another length or
  type than it expects.

Gathered messages stand one after the other, in rank order.

A receiver checks what it got before it adds anything: the length and the type together, the indices (if the counts of
message 4 are wrong, its first index reads as -3), the header of message 3, the last row of message 6 and the
numbers that follow the values of message 2. What is wrong in message 5, 7, 8 or 9 only some ranks can see, and
message 6 or 10 tells the others.

It raises an error if indices are in any other order: two rows of the same entry, rows in use after padding, an index outside
of the bucket or a negative number without a meaning. If the first row of message 1, the first count of message 4, the
header of message 3 or the last row of message 6 holds -2, the receiver does not read the rest of that message. All ranks
have received the same bytes, so all of them raise the same error.
"""

from __future__ import annotations

import struct

from horovod_sparse.ops.protocol import Array

PADDING = -1
NOT_FINITE = -2
BAD_COUNTS = -3
"""What `Ops.unquantize` puts in place of the first index if the counts of message 4 are wrong."""
LARGEST = 3.4028234663852886e38
"""The largest float32."""
HEADER = 2
"""How many numbers come before the indices in message 3."""
BAD_PART = -3
"""What a rank sends in message 6 or 10 if it has received a part of message 5, 7, 8 or 9 that is not as required."""
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
    """Return the number of chunks in a bucket, or in a shard, of `numel`; at least 1."""
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


def excess(numel: int, gathered: int, world: int) -> str | None:
    """Return what is too much for the format or for Horovod's collectives in a bucket of `numel`; None if nothing is.

    `gathered` is the most that a worker gets in a message from `world` workers, in int32; 0 if nothing is gathered.
    """
    if numel > MAX_BUCKET:
        return f"has {numel} elements, expected at most {MAX_BUCKET} (Horovod counts in C ints)"
    if gathered > MAX_GATHERED:
        return (
            f"gathers {gathered} int32 from {world} workers, expected at most {MAX_GATHERED} (Horovod counts in C ints)"
        )
    return None


def split(gathered: Array, world: int) -> list[Array]:
    """Return the messages of all ranks, in rank order. Raise ValueError unless the array has `world` equal parts."""
    if len(gathered) % world:
        raise ValueError(f"gathered must have {world} equal parts, got {len(gathered)} rows")
    rows = len(gathered) // world
    return [gathered[sender * rows : (sender + 1) * rows] for sender in range(world)]


def tail(finite: bool, checksum: int) -> list[float]:
    """Return the numbers that follow the values of a rank in message 2."""
    return [0.0 if finite else 1.0, *(float(checksum >> bit & 1) for bit in range(_CHECKSUM_BITS))]


def float_bits(number: float) -> int:
    """Return the bits of a number rounded to float32, as an int32; larger numbers become the largest float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", max(-LARGEST, min(number, LARGEST))))[0]
    return bits


def digest(pairs: Array) -> int:
    """Return a number in [0, 2^31 - 1) that tells whether ranks have received the same pairs: the sum of index XOR bits."""
    # No change of one bit adds a multiple of this modulus.
    return int((pairs[:, 0] ^ pairs[:, 1]).sum()) % (2**31 - 1)
