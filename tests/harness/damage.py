"""What can go wrong with a message: every change that the fuzzer makes (`fuzz_messages`)."""

from __future__ import annotations

from random import Random

import numpy as np

from horovod_sparse.exchange import wire

_LEAST, _MOST = -(2**31), 2**31 - 1
_BITS = (0x7FC00000, 0x7F800001, -1, 0x7F800000, -0x800000, 1, -(2**31), 0, 0x7F7FFFFF)
"""Bits of special float32: NaN of three kinds, infinities, the smallest denormal, -0, 0, the largest."""
_SUMS = (0.5, -1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1e9, float("nan"), float("inf"), -0.0)


def change_pairs(messages: list[np.ndarray], sender: int, numel: int, random: Random) -> None:
    """Change the message of pairs of one of the senders, in place."""
    message = messages[sender]
    kind = random.randrange(10)
    if kind == 0:
        message[random.randrange(len(message)), 1] = random.choice((*_BITS, random.randint(_LEAST, _MOST)))
    elif kind == 1:
        # The message of another sender. It is valid here too.
        message[:] = random.choice(messages)
    elif kind == 2:
        count = random.randint(0, len(message))
        message[count:] = wire.PADDING, 0
    elif kind == 3:
        count = random.randint(0, min(len(message), numel))
        message[:count, 0] = sorted(random.sample(range(numel), count))
        message[count:] = wire.PADDING, random.choice((0, 0, 1))
    else:
        _change_rows(message, message[:, 0], numel, random)


def change_packed(messages: list[np.ndarray], sender: int, numel: int, random: Random) -> None:
    """Change the packed message of one of the senders, in place."""
    message, chunks = messages[sender], wire.chunks_of(numel)
    header = message[: wire.header_length(chunks)].view(np.int16)
    entries = message[wire.header_length(chunks) :].view(np.uint8)
    kind = random.randrange(6)
    if kind == 0:
        message[:] = random.choice(messages)
    elif kind <= 2:
        room = len(entries) * wire.BLOCK // (4 * wire.BLOCK_LENGTH)
        header[random.randrange(chunks)] = random.choice((-1, -2, -3, 0, 1, room, room + 1, -(2**15), 2**15 - 1))
    elif kind == 3:
        header[random.randrange(len(header))] ^= np.int16(1 << random.randrange(15))
    else:
        entries[random.randrange(len(entries))] ^= np.uint8(1 << random.randrange(8))


def change_indices(messages: list[np.ndarray], sender: int, numel: int, random: Random) -> None:
    """Change the message of indices of one of the senders, in place."""
    message = messages[sender]
    indices = message[wire.HEADER :]
    kind = random.randrange(14)
    if kind == 0:
        message[0] = random.choice((wire.NOT_FINITE, -1, -3, message[0] ^ (1 << random.randrange(31)), _LEAST, _MOST))
    elif kind <= 2:
        message[1] = random.choice((*_BITS, random.randint(_LEAST, _MOST)))
    elif kind == 3:
        indices[random.randint(0, len(indices)) :] = wire.PADDING
    elif kind <= 5:
        count = random.randint(0, min(len(indices), numel))
        indices[:count], indices[count:] = sorted(random.sample(range(numel), count)), wire.PADDING
    else:
        _change_rows(indices, indices, numel, random)


def _change_rows(rows: np.ndarray, indices: np.ndarray, numel: int, random: Random) -> None:
    """Change rows so that their indices will hardly be valid."""
    kind, row, other = random.randrange(9), random.randrange(len(rows)), random.randrange(len(rows))
    words = rows.reshape(-1)
    if kind == 0:
        words[random.randrange(len(words))] ^= np.int32(random.choice((_LEAST, *(1 << bit for bit in range(31)))))
    elif kind == 1:
        words[random.randrange(len(words))] = random.randint(_LEAST, _MOST)
    elif kind == 2:
        indices[row] = random.choice((0, numel - 1, numel, numel + 1, _MOST, -1, -2, -3, _LEAST))
    elif kind == 3:
        rows[[row, other]] = rows[[other, row]]
    elif kind == 4:
        rows[row:] = rows[row]
    elif kind == 5:
        rows[:] = rows[::-1].copy()
    elif kind == 6:
        rows[:] = np.roll(rows, 1 + row, axis=0)
    elif kind == 7:
        words[:] = np.frombuffer(random.randbytes(words.nbytes), np.int32)
    else:
        indices[0] = wire.NOT_FINITE


def change_gathered(gathered: np.ndarray, random: Random) -> np.ndarray:
    """Return a gathered array of another length, shape or type."""
    kind, some = random.randrange(6), random.randint(1, 5)
    if kind == 0:
        return gathered[:-some].copy()
    if kind == 1:
        return np.concatenate([gathered, gathered[:some]])
    if kind == 2:
        # The lengths of two messages differ, and all are as long together as they should be.
        return np.concatenate([gathered[some:], gathered[:some]])
    if kind == 3:
        return gathered.astype(random.choice((np.int64, np.float32, np.int16)))
    if kind == 4:
        return gathered.reshape(-1) if gathered.ndim > 1 else gathered.reshape(1, -1)
    return gathered[:0].copy()


def change_values(total: np.ndarray, world: int, tail: int, random: Random) -> np.ndarray:
    """Return a changed sum of messages of values, with `tail` numbers after the values."""
    kind, some = random.randrange(10), random.randint(1, min(5, len(total)))
    total = total.copy()
    if kind == 0:
        return total[:-some].copy()
    if kind == 1:
        return np.concatenate([total, total[:some]])
    if kind == 2:
        return total.astype(np.float64 if total.dtype == np.float32 else np.float32)
    if kind == 3:
        return total.reshape(1, -1)
    if tail and kind == 4:
        total[-tail] = random.choice(_SUMS)
    elif tail and kind == 5:
        total[-random.randint(1, tail)] = random.choice((*_SUMS, world))
    elif kind == 6:
        total[random.randrange(len(total))] = random.choice(_SUMS)
    else:
        at = random.randrange(len(total) - tail)
        bits = np.array(random.choice((*_BITS, random.randint(_LEAST, _MOST))), np.int32)
        # Assigning a signalling NaN would make it a quiet one, with a warning.
        total[at : at + 1] = bits.view(np.float32)
    return total
