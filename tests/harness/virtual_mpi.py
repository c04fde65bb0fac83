"""Workers in threads of this process, over what MPI does: collectives of a communicator are matched by their order."""

# ruff: noqa: N802
# The names are those of mpi4py.

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


class Deadlock(BaseException):
    """All workers that go on wait for others."""


class _Workers:
    def __init__(self, world: int) -> None:
        self.world = self.alive = world
        self.changed = threading.Condition()
        self.posts: dict[tuple[Hashable, int], list[tuple[str, Any]]] = defaultdict(list)
        self.blocked = 0
        self.asked = 0

    def post(self, lane: Hashable, rank: int, kind: str, message: Any) -> int:
        with self.changed:
            self.posts[lane, rank].append((kind, message))
            self.asked = 0
            self._wake()
            return len(self.posts[lane, rank]) - 1

    def _wake(self) -> None:
        self.blocked = 0
        self.changed.notify_all()

    def leave(self) -> None:
        with self.changed:
            self.alive -= 1
            self._wake()

    def ask(self) -> None:
        """Some worker asks again and again."""
        self.asked += 1
        if self.asked > 10**6:
            raise Deadlock

    def is_complete(self, lane: Hashable, number: int) -> bool:
        return all(len(self.posts[lane, rank]) > number for rank in range(self.world))

    def wait(self, lane: Hashable, number: int) -> list[Any]:
        """Return all workers' messages of a collective."""
        with self.changed:
            while not self.is_complete(lane, number):
                self.blocked += 1
                if self.blocked >= self.alive:
                    self.changed.notify_all()
                    raise Deadlock
                self.changed.wait()
            kinds, messages = zip(*(self.posts[lane, rank][number] for rank in range(self.world)), strict=True)
            assert len(set(kinds)) == 1, f"MPI would mix up {kinds}"
            assert len({getattr(message, "shape", None) for message in messages}) == 1, "MPI would cut messages off"
            return list(messages)


class _Request:
    def __init__(self, is_complete: Callable[[], bool]) -> None:
        self.Test = is_complete


class Comm:
    """An mpi4py communicator, as far as `SparseAllreduce` uses it."""

    def __init__(self, workers: _Workers, rank: int, lane: Hashable = ()) -> None:
        self._workers, self._rank, self._lane = workers, rank, lane

    def Get_size(self) -> int:
        return self._workers.world

    def Get_rank(self) -> int:
        return self._rank

    def _begin(self, kind: str, message: Any, result: Any, come_together: Callable[[list[Any]], Any]) -> _Request:
        number = self._workers.post(self._lane, self._rank, kind, message.copy())

        def wait() -> None:
            result[...] = come_together(self._workers.wait(self._lane, number))

        def has_come() -> bool:
            self._workers.ask()
            if self._workers.is_complete(self._lane, number):
                wait()
                return True
            return False

        return _Request(has_come)

    def Iallgather(self, message: Any, result: Any) -> _Request:
        return self._begin("allgather", message, result, np.concatenate)

    def Iallreduce(self, message: Any, result: Any) -> _Request:
        return self._begin("allreduce", message, result, lambda messages: np.sum(messages, 0, message.dtype))


def run(world: int, work: Callable[[Comm], Any]) -> list[Any]:
    """Run `work` on every worker; return what it returns, or the exception that it raises."""
    workers = _Workers(world)

    def one(rank: int) -> Any:
        try:
            return work(Comm(workers, rank))
        except BaseException as error:
            return error
        finally:
            workers.leave()

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(one, range(world)))
