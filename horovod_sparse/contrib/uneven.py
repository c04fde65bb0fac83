"""Training on uneven data: a rank that has no data left repeats its last batch, with weight zero, until nobody has any.

Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Batch = TypeVar("Batch")

_NO_DATA: Any = object()
_HAS_DATA, _ENDED, _EMPTY = "has data", "ended", "empty"


def repeated(
    dataset: Iterable[Batch], gather: Callable[[str], Sequence[str]], ranks: Sequence[int] | None, rank: int
) -> Iterator[tuple[Batch, float]]:
    """Yield a dataset's batches, each with the weight 1.0, and the last one again with 0.0 until all ranks' have ended.

    Args:
        dataset: this rank's data.
        gather: takes this rank's value, and returns that of each rank. Blocks.
        ranks: those that train together; None for all.
        rank: this one's number among all, for messages.

    Raises:
        ValueError: on all ranks, if the dataset is empty on some only.
    """
    iterator, last = iter(dataset), _NO_DATA
    while True:
        new = next(iterator, _NO_DATA)
        state = _HAS_DATA if new is not _NO_DATA else _EMPTY if last is _NO_DATA else _ENDED
        states = gather(state)
        if _HAS_DATA not in states:
            return
        if _EMPTY in states:
            empty = [one for one, said in zip(ranks or range(len(states)), states, strict=True) if said == _EMPTY]
            raise ValueError(
                f"rank {rank}: dataset must have at least one batch on every rank, got none on the ranks {empty}; a rank "
                "without data repeats its last batch"
            )
        if state == _HAS_DATA:
            last = new
        yield last, float(state == _HAS_DATA)
