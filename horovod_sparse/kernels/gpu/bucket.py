"""One bucket's step on a GPU: gradients in, message out, without waiting for the device. Imports torch and Triton."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.plan import Stage
from horovod_sparse.core.selector import Outcome
from horovod_sparse.exchange import wire
from horovod_sparse.kernels.gpu.message import (
    CHUNK,
    MOST_GROUPS,
    numbered,
    sent_to,
    take,
    union,
    write,
    write_all,
    write_indices,
)
from horovod_sparse.kernels.gpu.rules import Blind, Request, Rule, rule_of
from horovod_sparse.kernels.gpu.search import WORDS, collect, count, histogram, sample
from horovod_sparse.kernels.gpu.threshold import MOST_BINS, fit
from horovod_sparse.kernels.gpu.tiles import MOST_BLOCK, NUMBERS, RUN, SUMS, accumulate
from horovod_sparse.ops.protocol import Moved, Part, Selection

_BLOCK = 4096
_TILES = 2048
"""A tile has `_BLOCK` entries, or more, a power of two up to `MOST_BLOCK`, as long as there are this many tiles."""
_CHUNK_OF_GRADIENT = 512
"""`accumulate` takes in so many entries at a time: more would leave a thread too few registers."""
_LEAST_SLOTS = 32
_SPARE = 4
"""Slots of a tile for candidates, as a multiple of the number of entries that a tile sends on average."""
MOST_SLOTS = 16
"""There is at most one slot per this many entries of the residual."""
_STRIDE = 32
"""If there are too few candidates, one run of this many is looked at to estimate what they should exceed."""
_MARGIN = 0.1
"""Candidates exceed the last limit less at most this part of it. It adapts: with error feedback many entries are just below."""
_MANY, _LESS, _MORE = 3.0, 0.7, 4.0
"""If there are this many times as many candidates as are sent, the margin shrinks; if there are too few, it grows."""
_WIDTHS = 8, 8, 8, 7
"""Width of each digit of a magnitude, in bits, from the most significant digit."""
_SAMPLED_WIDTH = 11
"""That of the digit that a sample is counted by: the exponent and three more bits of a float32."""


_DENSE = Blind()


class _Given(NamedTuple):
    """What a part of the residual takes in."""

    offset: int
    arrays: tuple[Tensor, ...] = ()
    """Contiguous: a gradient, or `now` and `start` of what has moved; none if there is nothing."""
    factors: tuple[float, float] = (0.0, 0.0)
    """`growth` and `pull`."""


def _given(offset: int, gradient: Tensor | Moved | None) -> _Given:
    if gradient is None:
        return _Given(offset)
    if isinstance(gradient, Moved):
        return _Given(
            offset, (gradient.now.contiguous(), gradient.start.contiguous()), (gradient.growth, gradient.pull)
        )
    return _Given(offset, (gradient.contiguous(),))


class DeviceBucket:
    """A `core.selector.Selector` that launches the kernels for one bucket, and never makes the host wait.

    Args:
        rule: what the compressor asks for.
        buffer: the residual, float32, flat and contiguous. It belongs to the caller and is changed here.
        velocity: an array like the buffer, which is changed, too; None without momentum.
        sizes: the number of entries of each parameter, > 0, in the order of the bucket.
        ratio: approximately the fraction of the entries that will be sent.
        block: the number of entries of a tile, a power of two, at most `tiles.MOST_BLOCK`; None: as fits the size.
        chunk: the number of entries that the later kernels look at in one go, a power of two, at most `block`.
        groups: the most programs that are launched of each later kernel, a power of two.
    """

    def __init__(
        self,
        rule: Rule,
        buffer: Tensor,
        velocity: Tensor | None,
        sizes: Sequence[int],
        ratio: float,
        *,
        block: int | None = None,
        chunk: int = CHUNK,
        groups: int = MOST_GROUPS,
    ) -> None:
        if block is None:
            most = 1 << max(buffer.numel() // _TILES, 1).bit_length() - 1
            block = min(max(most, _BLOCK), MOST_BLOCK)
        assert RUN <= chunk <= block <= MOST_BLOCK
        self.rule = self._now = rule
        self.buffer, self._velocity = buffer, velocity
        assert min(sizes) > 0 and sum(sizes) == buffer.numel() <= wire.MAX_BUCKET
        self._tiles_of: dict[int, range] = {}
        """The tiles of each parameter, keyed by the index of its first entry."""
        starts: list[int] = []
        offset = 0
        for size in sizes:
            tiles = range(offset, offset + size, block)
            self._tiles_of[offset] = range(len(starts), len(starts) + len(tiles))
            starts.extend(tiles)
            offset += size
        self._tiles = len(starts)
        spread = triton.next_power_of_2(math.ceil(_SPARE * ratio * block))
        self._slots_each = min(max(_LEAST_SLOTS, spread), max(block // MOST_SLOTS, 1))
        self._tiles_each = triton.next_power_of_2(-(-self._tiles // groups))
        self._groups = -(-self._tiles // self._tiles_each)
        self._lanes = triton.next_power_of_2(self._groups)
        self._shape = {"BLOCK": block, "SLOTS": self._slots_each, "TILES": self._tiles_each, "CHUNK": chunk}

        def zeros(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=buffer.device)

        self._edges = np.array([*starts, buffer.numel()], np.int64)
        """The first entry of each tile, and the end of the last one, for the host; `_starts` has them on the device."""
        self._starts = torch.from_numpy(self._edges).to(buffer.device)
        self._found = zeros(self._tiles, torch.int32)
        self._slots = zeros(self._tiles * self._slots_each, torch.int32)
        self._entries = (buffer, self._starts, self._found, self._slots, self._tiles)
        """What every kernel after `fit` reads."""
        self._partials = zeros(self._tiles * len(SUMS), torch.float64)
        self._above, self._equal = zeros(self._groups, torch.int32), zeros(self._groups, torch.int32)
        self._histograms = zeros((len(_WIDTHS) + 1) * MOST_BINS, torch.int32)
        self._sampled = self._histograms[len(_WIDTHS) * MOST_BINS :]
        self._words = zeros(WORDS, torch.int64)
        self.numbers = zeros(len(NUMBERS), torch.float64)
        """Those of the last step (`tiles.NUMBERS`)."""
        self._limit = math.inf
        """The magnitude that the last step compared entries with."""
        self._margin = _MARGIN
        self._state, self._k, self._capacity = BucketState(), 0, 0
        """Of the step that has begun, as are `_now`, its rule, and `_request`."""
        self._request = Request("nothing")

    def forget(self) -> None:
        self._limit = math.inf

    def begin(self, state: BucketState, stage: Stage) -> None:
        self._state, self._k, self._capacity = state, stage.k, stage.capacity
        self._now = _DENSE if stage.is_dense else self.rule
        self._request = self._now.request(state, stage.k, stage.capacity)

    def _floor(self) -> float:
        return self._now.floor(self._state, self._limit * (1.0 - self._margin))

    def _adapt(self, numbers: Mapping[str, float]) -> None:
        """Let the next step have more candidates than it sends, but not many more."""
        sent = max(self._k, numbers["sent"])
        if numbers["limit"] < self._floor() or numbers["candidates"] < numbers["exact"] * sent:
            self._margin = min(self._margin * _MORE, _MARGIN)
        elif numbers["candidates"] > _MANY * sent:
            self._margin *= _LESS

    def accumulate(self, gradients: Sequence[Part], momentum: float | None, rate: float) -> None:
        numbers = *self._part, self._request.cut, self._floor(), momentum or 0.0, rate
        moved = any(isinstance(gradient, Moved) for _, gradient in gradients)
        constants = {
            "SLOTS": self._slots_each,
            "CHUNK": min(_CHUNK_OF_GRADIENT, self._shape["CHUNK"]),
            "HAS_VELOCITY": momentum is not None,
            "MOVED": moved,
            "MEASURES": self._now.measures,
            # A product and a sum must round twice, as they do everywhere else.
            "enable_fp_fusion": momentum is None and rate == 1.0 and not moved,
        }
        together: dict[torch.dtype, list[_Given]] = defaultdict(list)
        for offset, gradient in gradients:
            given = _given(offset, gradient)
            together[given.arrays[0].dtype if given.arrays else self.buffer.dtype].append(given)
        velocity = self.buffer if self._velocity is None else self._velocity
        results = self._partials, self._found, self._slots
        for dtype, parts in together.items():
            table, aligned = self._table(parts, 1 + moved)
            where = self._starts, sent_to(self.buffer.device, table), table.shape[1], self._tiles
            kind = {"GRADIENT": getattr(tl, str(dtype).removeprefix("torch.")), "ALIGNED": aligned}
            with torch.cuda.device_of(self.buffer):
                accumulate[(table.shape[1],)](self.buffer, velocity, *where, *numbers, *results, **kind, **constants)

    def _table(self, parts: Sequence[_Given], arrays: int) -> tuple[NDArray[np.int64], bool]:
        """Return the table of `accumulate`, with so many addresses, and whether all that it tells of is aligned."""
        offsets = np.array([one.offset for one in parts], np.int64)
        itemsize = max((one.arrays[0].element_size() for one in parts if one.arrays), default=0)
        ranges = [self._tiles_of[one.offset] for one in parts]
        part, tiles = numbered([len(tiles) for tiles in ranges], [tiles.start for tiles in ranges])
        begins, ends = self._edges[tiles], self._edges[tiles + 1]
        at = np.zeros((arrays, len(tiles)), np.int64)
        for row, number in zip(at, range(arrays), strict=True):
            addresses = np.array([one.arrays[number].data_ptr() if one.arrays else 0 for one in parts], np.int64)
            row[:] = np.where(addresses[part] != 0, addresses[part] + (begins - offsets[part]) * itemsize, 0)
        aligned = not (at % 16).any() and not (begins % RUN).any() and not (ends % RUN).any()
        factors = np.array([one.factors for one in parts], np.float64).view(np.int64)[part, : 2 * (arrays - 1)]
        return np.vstack([tiles, at, factors.T]), aligned

    def message(self) -> Tensor:
        drawn = self._drawn()
        return self._searched(takes=True) if drawn is None else self._taken(drawn, self._capacity)

    def select(self) -> Selection:
        drawn = self._drawn()
        assert drawn is not None
        return Selection(drawn, self._k)

    def index_message(self, checksum: int) -> Tensor:
        pairs, (share, most) = self._searched(takes=False), self._request.proposes
        proposed = torch.topk(pairs.view(torch.float32)[:, 1].abs(), share).values[-1:] if share else pairs
        message = torch.empty(wire.HEADER + len(pairs), dtype=torch.int32, device=pairs.device)
        asked = pairs, len(pairs), checksum, proposed, most, message, self.numbers
        with torch.cuda.device_of(self.buffer):
            write_indices[(-(-len(pairs) // CHUNK),)](*asked, PROPOSES=share > 0, CHUNK=CHUNK)
        return message

    def union(self, gathered: Tensor, world: int) -> tuple[Tensor, Tensor]:
        return union(gathered, world, self.buffer.numel())

    def take_out(self, indices: Tensor, length: int, checksum: int | None) -> tuple[Tensor, Tensor]:
        message = self._values(length, checksum)
        return self._taken(indices, len(indices), message, length, checksum or 0), message

    def whole(self, checksum: int | None) -> Tensor:
        message = self._values(self.buffer.numel(), checksum)
        end = len(message)
        with torch.cuda.device_of(self.buffer):
            asked = self.buffer, self.buffer.numel(), end, checksum or 0, self.numbers, message
            write_all[(-(-end // CHUNK),)](*asked, CHUNK=CHUNK)
        return message

    def _values(self, length: int, checksum: int | None) -> Tensor:
        """Return memory for message 2."""
        tail = [] if checksum is None else wire.tail(checksum)
        return torch.empty(length + len(tail), dtype=self.buffer.dtype, device=self.buffer.device)

    def decide(self, *, gives_up: bool) -> None:
        request, given = self._request, self.numbers
        if request.sample is not None:
            start, stride, number = request.sample
            given = torch.topk(self.buffer[start::stride].abs(), number).values[-1:]
        asked = self._k, request.aim, request.cut, request.most_tail, request.scale, given, self._floor(), int(gives_up)
        results = self._histograms, self.numbers, self._words
        constants = {"HISTOGRAMS": len(_WIDTHS) + 1, "RULE": request.rule, "MEASURED": self._now.measures}
        with torch.cuda.device_of(self.buffer):
            where = self._partials, self._tiles, *self._part
            fit[(1,)](*where, *asked, *results, **constants, CHUNK=MOST_BINS, num_warps=8)

    @property
    def _part(self) -> tuple[int, int]:
        return self._request.part or (0, self.buffer.numel())

    def _drawn(self) -> Tensor | None:
        indices = self._now.drawn(self._state, self._k)
        return None if indices is None else sent_to(self.buffer.device, indices)

    def _taken(
        self, indices: Tensor, rows: int, values: Tensor | None = None, length: int = 0, checksum: int = 0
    ) -> Tensor:
        """Return the message of pairs of indices; write message 2, of so many values, too, if there is memory for it."""
        pairs, end = self._rows(rows), 0 if values is None else len(values)
        asked = self.buffer, self.buffer.numel(), indices, len(indices), rows
        written = pairs, pairs if values is None else values, length, end, checksum
        with torch.cuda.device_of(self.buffer):
            grid = (-(-max(rows, end) // CHUNK),)
            take[grid](*asked, *written, self.numbers, VALUES=values is not None, CHUNK=CHUNK)
        return pairs

    def _searched(self, *, takes: bool) -> Tensor:
        capacity, request = self._capacity, self._request
        message = self._rows(capacity)
        with torch.cuda.device_of(self.buffer):
            # Where at most k entries are not zero, a rule that measures selects these without a search.
            if request.rule != "largest" or self._now.measures:
                self._count(-1, 0)
            self._search(request)
            self._count(len(_WIDTHS) - 1, _WIDTHS[-1])
            counts = self._above, self._equal, self._groups
            self._launch(write, *counts, capacity, message, self.numbers, GROUPS=self._lanes, TAKES=takes)
        return message

    def _rows(self, count: int) -> Tensor:
        return torch.empty((count, 2), dtype=torch.int32, device=self.buffer.device)

    def _launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        """Launch one of the kernels after `fit`: all of them begin with the entries and end with the words and the shape."""
        kernel[(self._groups,)](*self._entries, *arguments, self._words, **constants, **self._shape)

    def _count(self, last: int, width: int) -> None:
        self._launch(count, self._above, self._equal, self._histograms, LAST=last, WIDTH=width)

    def _search(self, request: Request) -> None:
        shift, stride = sum(_WIDTHS), min(_STRIDE, self._shape["BLOCK"] // RUN)
        digit = {"SHIFT": shift - _SAMPLED_WIDTH, "WIDTH": _SAMPLED_WIDTH, "STRIDE": stride}
        rank = self._k if request.rank is None else request.rank
        room = self._capacity if request.room is None else request.room
        counts, asked = (self._above, self._groups), (rank, room, *request.trust)
        cuts = request.cut_exponent is not None
        results, constants = (self._sampled, self.numbers), {"CUTS": cuts, "GROUPS": self._lanes}
        self._launch(sample, *counts, *asked, *results, **constants, **digit)
        self._launch(collect, self._k, request.cut_exponent or 0.0, self._sampled, self.numbers, **digit)
        for number, width in enumerate(_WIDTHS):
            shift -= width
            before = _WIDTHS[number - 1]
            self._launch(histogram, self._histograms, ROUND=number, SHIFT=shift, WIDTH=width, BEFORE=before)

    def finish(self, numbers: Sequence[float]) -> Outcome:
        told = dict(zip(NUMBERS, numbers, strict=True))
        if told["not_finite"]:
            # Nothing was sent, and nothing is learned.
            return Outcome(not_finite=self._not_finite())
        if self._now is _DENSE:
            # What was known of the entries is known no more.
            self.forget()
            return Outcome()
        self._adapt(told)
        self._now.learn(self._state, self._k, told)
        self._limit = told["limit"]
        sent, found = int(told["sent"]), int(told["found"])
        least, most = self._request.trust
        return Outcome(sent, max(found - sent, 0) if least <= found <= most else 0)

    def _not_finite(self) -> list[int]:
        """Return the offsets of the parameters whose gradients in this step held NaN or infinity. It may wait."""
        row = self._partials.view(len(SUMS), -1)[NUMBERS.index("not_finite")].cpu()
        return [offset for offset, tiles in self._tiles_of.items() if row[tiles.start : tiles.stop].any()]


def selector_for(
    compressor: Compressor, layout: Layout, buffer: Tensor, velocity: Tensor | None, **shape: int
) -> DeviceBucket | None:
    """Return what selects from a bucket on its device; None if the compressor, or the kind of the residual, needs the host."""
    rule = _DENSE if layout.is_dense else rule_of(compressor, layout.numel)
    if rule is None or buffer.dtype != torch.float32 or not all(slot.numel for slot in layout.slots):
        return None
    ratio = compressor.target_count(layout.numel) / layout.numel
    return DeviceBucket(rule, buffer, velocity, [slot.numel for slot in layout.slots], ratio, **shape)
