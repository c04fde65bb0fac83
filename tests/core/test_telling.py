"""What the host learns in a step is read together."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.core.telling import Telling
from horovod_sparse.exchange.protocols import Told
from horovod_sparse.numpy.ops import NumpyOps


class Counting(NumpyOps):
    waits = 0

    def told(self, arrays: Any) -> list[list[Any]]:
        self.waits += 1
        return super().told(arrays)


def test_all_that_was_asked_for_is_waited_for_once() -> None:
    ops = Counting()
    telling = Telling(ops)
    first = telling.ask(Told([np.arange(3), np.array([0.5])]))
    second = telling.ask(Told([]))
    third = telling.ask(Told([np.array([True])]))
    assert ops.waits == 0
    # In any order.
    assert third() == [[True]] and first() == [[0, 1, 2], [0.5]] and second() == []
    assert ops.waits == 1
    assert telling.ask(Told([np.array([7])]))() == [[7]] and third() == [[True]]
    assert ops.waits == 2
