"""Horovod's collectives as the reducer needs them: named, asynchronous, within one process set."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.pipeline import Wait
from horovod_sparse.exchange.protocols import Collective, disagreement

Kind = Literal["allgather", "allreduce", "alltoall", "dense", "sparse"]
"""The collectives of exchanges (`protocols.Collective`), or Horovod's own reduction of a dense or a sparse gradient."""


@dataclass
class _Started:
    kind: Kind
    message: Tensor
    wait: Callable[[], Tensor] | None
    """Waits for the result; None once it has been waited for."""


class Collectives:
    """The collectives of one optimizer, and which of them are under way. `predivide` is `gradient_predivide_factor`."""

    def __init__(self, op: Any, predivide: float, process_set: Any) -> None:
        self._op = op
        self._predivide = predivide
        self._process_set = process_set
        self._started: dict[str, _Started] = {}
        """The collectives that were started in this step, by name."""
        self.given_up = False
        """True if a step was given up. Nobody waits for the collectives that it may have left under way."""

    def start(self, kind: Kind, message: Tensor, name: str, to: Sequence[int] | None = None) -> Callable[[], Tensor]:
        """Start a collective and return a function that waits for its result. Allreduces of dense messages are in place.

        `to` is that of `protocols.Collective`.
        """
        wait = self._begin(kind, message, name, to)
        started = self._started[name] = _Started(kind, message, wait)

        def result() -> Tensor:
            started.wait = None
            return wait()

        return result

    def _begin(self, kind: Kind, message: Tensor, name: str, to: Sequence[int] | None) -> Callable[[], Tensor]:
        mine = self._process_set
        if kind == "sparse":
            result: Callable[[], Tensor] = mpi_ops.sparse_allreduce_async(message, name, self._op, mine)
            return result
        if kind == "allgather":
            handle = mpi_ops.allgather_async(message, name=name, process_set=mine)
        elif kind == "alltoall":
            splits = None if to is None else torch.tensor(to, dtype=torch.int32)
            handle = mpi_ops.alltoall_async(message, splits, name, mine)
            # The second result is how much came from each rank.
            return lambda: mpi_ops.synchronize(handle)[0]
        elif kind == "allreduce":
            handle = mpi_ops.allreduce_async_(message, name=name, op=mpi_ops.Sum, process_set=mine)
        else:
            scales = {"prescale_factor": 1.0 / self._predivide, "postscale_factor": self._predivide}
            handle = mpi_ops.allreduce_async_(message, name=name, op=self._op, process_set=mine, **scales)
        return lambda: mpi_ops.synchronize(handle)

    def start_round(self, bucket: Bucket, collective: Collective, name: Callable[[str], str]) -> Wait:
        """Start a bucket's next collective and return a function that waits for its result.

        If ranks in other steps would begin with another collective, one of that kind and name goes first. Its type tells what
        follows, and is never that of a message, so that Horovod raises on all ranks if there are any. Without it the ranks
        would wait for each other: Horovod compares what has the same name, and the name of an allreduce is never that of an
        allgather.
        """
        begun: list[Wait] = []
        if bucket.stands_in is not None:
            marker = collective.message.new_zeros(bucket.world, dtype=torch.uint8)
            begun.append(self.start(bucket.stands_in, marker, name(f"{bucket.name}.{bucket.rounds}")))
        number = bucket.rounds + len(begun)
        begun.append(self.start(collective.kind, collective.message, name(f"{bucket.name}.{number}"), collective.to))

        def result() -> Any:
            try:
                return [wait() for wait in begun][-1]
            except HorovodInternalError as error:
                if "Mismatched" in str(error):
                    raise disagreement(bucket) from error
                raise

        return result

    def end_step(self) -> None:
        """Forget the step's collectives, which have all been waited for."""
        self._started.clear()

    def clear_up(self, name: str) -> None:
        """End the collectives that a given-up step left under way, on this rank or another. Blocks if there was such a step.

        If a rank gave up before it had started a collective that others wait for, it takes part with zeros.
        """
        if not self.given_up:
            return
        mine = {key: _describe(started.kind, started.message) for key, started in self._started.items()}
        for theirs in gather_json(mine, name, self._process_set):
            for key, (kind, *like) in theirs.items():
                if key not in self._started:
                    self.start(kind, _nothing(kind, *like), key)
        for started in self._started.values():
            if started.wait is not None:
                # The result is not needed any more. If Horovod is down, the next collective says so.
                with contextlib.suppress(HorovodInternalError):
                    started.wait()
        self._started.clear()
        self.given_up = False


def _describe(kind: Kind, message: Tensor) -> tuple[Any, ...]:
    return kind, list(message.shape), str(message.dtype).removeprefix("torch."), message.device.type


def _nothing(kind: Kind, shape: Sequence[int], dtype: str, device: str) -> Tensor:
    like = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    if kind == "alltoall":
        # Nothing for anybody.
        shape = [0, *shape[1:]]
    return empty_sparse(shape, like) if kind == "sparse" else like.new_zeros(shape)


def empty_sparse(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an empty sparse gradient for an embedding of this shape, with the type and on the device of `like`."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    return torch.sparse_coo_tensor(indices, like.new_empty((0, *shape[1:])), tuple(shape), check_invariants=False)


def gather_json(value: object, name: str, process_set: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. Blocks. Uses JSON, because data from other machines is not unpickled."""
    return from_lines(mpi_ops.allgather(as_line(value), name=name, process_set=process_set))


def as_line(value: object) -> Tensor:
    """Return a value as a line of JSON."""
    return torch.frombuffer(bytearray(json.dumps(value).encode("ascii") + b"\n"), dtype=torch.uint8)


def from_lines(lines: Tensor) -> list[Any]:
    """Return the values of lines of JSON."""
    return [json.loads(line) for line in lines.numpy().tobytes().splitlines()]
