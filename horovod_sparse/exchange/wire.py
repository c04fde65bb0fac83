"""The messages on the wire, version 1: what one worker sends for one bucket in one step. And their numbers.

`tests/exchange/test_wire.py` checks the exact bytes. For all messages:

- They are in the machine's byte order, which all workers must share.
- Their shapes depend on the bucket's size, the settings, the number of workers and, with a schedule, the step, but
  never on the data. So Horovod's response cache stays valid, and NCCL gathers equal parts.
- They hold float32 values (dense steps: the residual's type; message 4: one of two magnitudes). The error of rounding
  a value to that type stays in the residual. The receiver divides by the number of workers.
- A dense message has the name that the usual message of its bucket has. If some ranks are in dense steps and others
  not, Horovod compares the operations under this name, and raises on all ranks.

`k` is the number of entries asked for, `max(1, floor(ratio * size of the bucket))`. The *capacity* is the number of
entries that a message has room for: `ceil(slack * k)`, but at most the size of the bucket. For `MiCRO` it is a worker's
share of this number: `ceil(slack * k / workers)`.

## Message 1: pairs

An int32 array of shape `(capacity, 2)`, row by row: `8 * capacity` bytes. It is allgathered: the result holds the
messages of all ranks in rank order. With room for 3 entries, 3.0 at index 1 and -1.0 at index 3 are the bytes
`01000000 00004040`, `03000000 000080bf` and `ffffffff 00000000`.

| bytes of row i | type | meaning |
|---|---|---|
| 8i to 8i + 3 | int32 | index: position in the bucket, counted from 0; or -1, padding; or -2, not finite |
| 8i + 4 to 8i + 7 | float32, sent as the int32 with the same bits | value; 0 where the index is negative |

1. Rows in use come first. Their indices are unique, ascending and smaller than the bucket's size. All other rows are
   `(-1, 0)`.
2. A rank whose gradient holds NaN or infinity sends `(-2, 0)` in row 0 and padding in all other rows.
3. The receiver raises an error for anything else, before it adds anything: an entry that occurs twice or out of order,
   rows in use after padding, an index beyond the bucket, another negative number, or messages of different lengths. The
   error names the rank, the sender and the bucket. Of a message that begins with -2, the rest is not read.

## Message 2: values

The values of entries whose indices all ranks know. It is allreduced, by sum. Its type is float32, or the residual's
type in dense steps.

| elements | meaning |
|---|---|
| 0 to n - 1 | the values, in ascending order of their indices |
| n to length - 1 | zeros |
| length | 1 if this rank's gradient holds NaN or infinity, else 0 |
| length + 1 to length + 16 | the lowest 16 bits of the rank's checksum, one number each, lowest bit first |

- Shared indices: `length` is the capacity, which is k unless you set `slack`. Dense: the size of the bucket. Union:
  `min(workers * capacity, size of the bucket)`, and the last 17 elements are left out, because message 3 has sent this
  information.
- The checksum is of what must be equal on all ranks: the step, the adaptive state, the drawn indices; in dense steps
  the step alone. If all ranks agree, each of the 16 sums is 0 or the number of workers. If not, all ranks see the same
  sums, and all raise an error.

## Message 3: indices

An int32 array of shape `(2 + capacity,)`: `8 + 4 * capacity` bytes. It is allgathered.

| element | meaning |
|---|---|
| 0 | the checksum (31 bits, never negative); or -2 if this rank's gradient holds NaN or infinity |
| 1 | the bits of a float32 that the rank proposes: `MiCRO`'s threshold; otherwise 0 |
| 2 to 1 + n | indices, unique and ascending; another order raises an error |
| the rest | padding, -1 |

`MiCRO` divides the bucket into equal parts, one for each worker, and a worker's indices lie in its part. Every rank
forms the union of all indices, takes its own values there out of its residual, and sends them as message 2, also if a
rank's gradient is not finite.

## Message 4: packed pairs

With `exchange=Pairs("packed")`, this message takes the place of message 1. An entry takes 14 bits. A chunk is 4,096
consecutive positions of the bucket. The message is allgathered as int32. It has three rows of int16, one number for
each chunk in each, then zeros up to a multiple of 4 bytes, and then three rows about the entries, in ascending order of
their indices, with zeros up to a multiple of 16 entries:

| row | meaning |
|---|---|
| counts | the number of entries of each chunk; or, in the first, -2 if this rank's gradient holds NaN or infinity |
| first and second levels | two magnitudes of each chunk, as bfloat16 |
| lower bits | a byte for each entry: the lowest 8 bits of its position within the chunk |
| upper bits | half a byte for each entry, the first one in the lower half: the other 4 bits |
| values | 2 bits for each entry, the first one lowest: 1 for a negative value, plus 2 for the second level |

1. Magnitudes up to the mean of their chunk's become the first level, the others the second: the mean of either half,
   but at most twice its smallest magnitude, rounded down to bfloat16. A level is 0 if a magnitude is more than 2^15
   times as large. So the difference is always a float, and stays in the residual: sent + kept is exact.
2. The receiver makes message 1 of it, and checks that. If a count is negative, or the counts are together more than the
   capacity, index -3 stands in row 0, which is refused. What follows the last entry is not read.
"""

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


def tail(checksum: int, *, is_bad: bool = False) -> list[float]:
    """Return the numbers that follow the values of a rank in message 2, of which a gradient may not be finite."""
    return [float(is_bad)] + [float(checksum >> bit & 1) for bit in range(_CHECKSUM_BITS)]


def float_bits(number: float) -> int:
    """Return the bits of a number rounded to float32, as an int32; larger numbers become the largest float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", max(-LARGEST, min(number, LARGEST))))[0]
    return bits
