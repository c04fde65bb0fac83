"""What the workers of local updates tell each other before each exchange. Never imports Horovod.

Tested by tests/parallel/local.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from horovod_sparse.core.agreement import Description, compare
from horovod_sparse.core.transport import Transport
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch.group import Group

_agreed = 0
"""The number of the next meetings that workers agree on. Those that only one worker has made have none."""


class Meeting:
    """Lets workers begin the same exchange, or raise all together.

    Args:
        transport: what joins the workers.
        shards: what joins the ranks of this worker, if its parameters are sharded.
    """

    def __init__(self, transport: Transport, shards: Sequence[Group]) -> None:
        self._transport, self._shards = transport, shards
        self.compares = True
        """Whether the next meeting is to compare everything, which all workers then do."""
        self._number: int | None = None
        """The same on all workers; None before the first meeting."""

    def meet(
        self, age: int, numbers: Tensor, problem: Exception | None, describe: Callable[[], Description]
    ) -> list[float]:
        """Return the mean of the workers' `numbers`.

        Raises:
            Exception: the `problem` of this worker, because of which it gives the step up.
            RuntimeError: another worker gives it up.
            ValueError: the workers are in different steps (`age`), or what they compare differs.
        """
        number = -1 if self._number is None else self._number
        mine = torch.tensor([self.compares or problem is not None, age, number], dtype=torch.float64)
        line = torch.cat([mine.to(numbers.device), numbers])
        lines = self._transport.start(Collective("allgather", line.view(1, -1)), "meeting")()
        differs = (lines[:, 0].any() | (lines[:, 1:3] != lines[0, 1:3]).any()).to(torch.int32).view(1)
        for shards in self._shards:
            differs = shards.start(Collective("allreduce", differs))()
        # A device is waited for once.
        is_different, *mean = torch.cat([differs.double(), lines[:, 3:].mean(0)]).tolist()
        if is_different:
            # Where this raises, the next meeting compares again.
            self.compares = True
            self._compare({"local updates": f"number {self._number}", "step": str(age), **describe()}, problem)
        self.compares = False
        return mean

    def _compare(self, mine: Description, problem: Exception | None) -> None:
        global _agreed
        rank = self._transport.rank
        told = "" if problem is None else f"rank {rank} has given up the step: {problem}"
        everyone = self._transport.everyone([mine, _agreed, told])
        given_up = "; ".join(theirs for _, _, theirs in everyone if theirs)
        differ: ValueError | None = None
        try:
            compare(mine, [theirs for theirs, _, _ in everyone], rank)
        except ValueError as error:
            differ = error
        for shards in self._shards:
            for theirs, other in shards.everyone([given_up, "" if differ is None else str(differ)]):
                given_up = given_up or theirs
                differ = differ or (ValueError(f"in another shard: {other}") if other else None)
        if problem is not None:
            raise problem
        if given_up:
            raise RuntimeError(f"{given_up}; the parameters are those of before, and training can go on")
        if differ is not None:
            raise differ
        if self._number is None:
            self._number = max(number for _, number, _ in everyone)
            _agreed = self._number + 1
