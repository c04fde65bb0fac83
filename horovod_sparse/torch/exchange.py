"""Horovod's collectives of one process set, matched by their names."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.pipeline import AnyBucket, Wait
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.exchange.received import disagreement

Kind = Literal["allgather", "allreduce", "sparse"]
"""The collectives of exchanges (`protocols.Collective`), or Horovod's own reduction of a sparse gradient."""

_GIVEN_UP = "int64"
"""The type of a message that a rank sends in place of one of a step that it has given up. No other message has it, so that
Horovod raises on all ranks if one of them is in a step."""


@dataclass
class _Started:
    kind: Kind
    message: Tensor
    wait: Callable[[], Any] | None
    """Waits for the result; None once it has been waited for."""
    handle: int | None
    """Horovod's; None for sparse gradients, which have two."""

    @property
    def dtype(self) -> str:
        return str(self.message.dtype).removeprefix("torch.")


class Collectives:
    """The collectives of one optimizer, as a `Transport`, and which of them are under way."""

    def __init__(self, process_set: Any, number: int | str | None = None) -> None:
        self._process_set = process_set
        self._prefix = f"horovod_sparse.{process_set.process_set_id}."
        """Begins the names of the collectives, as Horovod knows them."""
        self.number = number
        """Comes next: the optimizer's number, the same on all ranks. None before the first agreement."""
        self._started: dict[str, _Started] = {}
        """The collectives that were started in this step, by name."""
        self._kinds: dict[str, Kind] = {}
        """The kinds of all that were ever started, by name: what other ranks may wait for."""
        self._starts: Counter[str] = Counter()
        """How often each was started."""
        self.steps = 0
        """Steps of which all collectives have ended."""
        self.given_up = False
        """True if a step was given up. Nobody waits for the collectives that it may have left under way."""
        self.told = False
        """True if another rank has said that it gave up a step, and waits for this rank."""
        self.group: object = None
        """Whose collectives are under way between two blocks (`HorovodGroup.together`); None if nobody's."""

    @property
    def world(self) -> int:
        return int(self._process_set.size())

    @property
    def position(self) -> int:
        return int(self._process_set.rank())

    @property
    def rank(self) -> int:
        return int(mpi_ops.rank())

    def start(self, collective: Collective, name: str = "", bucket: AnyBucket | None = None) -> Wait:
        """See `Transport`. If ranks in other steps would begin with another collective, one of that kind goes first.

        It has the name of theirs. Its type tells what follows, and is never that of a message, so that Horovod raises on all
        ranks if there are any. Without it the ranks would wait for each other: Horovod compares what has the same name, and
        the name of an allreduce is never that of an allgather.
        """
        kind, message = collective
        if bucket is None or bucket.stands_in is None:
            return self._start(kind, message, name, bucket)
        marker = message.new_zeros(1, dtype=torch.uint8)
        first = self._start(bucket.stands_in, marker, name, bucket)
        second = self._start(kind, message, f"{name}.second", bucket)
        return lambda: (first(), second())[1]

    def start_sparse(self, gradient: Tensor, name: str, op: Any) -> Wait:
        """Start Horovod's own reduction of a sparse gradient."""
        return self._start("sparse", gradient, name, op=op)

    def everyone(self, value: Any, name: str = "agree.state") -> list[Any]:
        """See `Transport`. All optimizers of the process set have the same name: at first they have no numbers."""
        return gather_json(value, f"{self._prefix}{name}", self._process_set)

    def _start(
        self,
        kind: Kind,
        message: Tensor,
        name: str,
        bucket: AnyBucket | None = None,
        op: Any = mpi_ops.Sum,
    ) -> Wait:
        """Start a collective. Waiting for it raises RuntimeError if a rank has given up the step, or is in another one."""
        mine, full = self._process_set, f"{self._prefix}{self.number}.{name}"
        handle = None
        if kind == "sparse":
            wait = mpi_ops.sparse_allreduce_async(message, full, op, mine)
        elif kind == "allgather":
            handle = mpi_ops.allgather_async(message, name=full, process_set=mine)
        else:
            handle = mpi_ops.allreduce_async_(message, name=full, op=mpi_ops.Sum, process_set=mine)
        if handle is not None:
            wait = partial(mpi_ops.synchronize, handle)
        started = self._started[name] = _Started(kind, message, wait, handle)
        self._kinds[name] = kind
        self._starts[name] += 1

        def result() -> Tensor:
            started.wait = None
            try:
                reduced: Tensor = wait()
            except HorovodInternalError as error:
                if _GIVEN_UP in str(error):
                    self.told = True
                    raise RuntimeError(
                        f"rank {mpi_ops.rank()}: another rank has given up a step after an exception, so this rank gives up "
                        "its own; see what the other rank reports. All ranks may go on with the next step"
                    ) from error
                if bucket is not None and "Mismatched" in str(error):
                    raise disagreement(bucket) from error
                raise
            return reduced

        return result

    def end_step(self) -> None:
        """Forget the step's collectives, which have all been waited for."""
        self._started.clear()
        self.steps += 1

    def take_back_step(self, steps: int) -> None:
        """Note that this rank has made no more than so many steps, though a step's collectives have ended."""
        self.given_up, self.steps = True, steps

    def give_up(self, following: Mapping[str, Kind]) -> None:
        """Tell the other ranks, which may wait for what this rank has started before, or `following`. Never waits."""
        self.given_up = True
        self._kinds |= following
        # If Horovod is down, the others know.
        with contextlib.suppress(HorovodInternalError):
            self._say_so()

    def clear_up(self) -> None:
        """Meet the other ranks after a step that was given up, on this rank or another. Blocks if there was such a step.

        Collectives that such steps left under way are ended. A rank takes part with zeros in what only others have started.

        Raises:
            RuntimeError: on every rank, if some have made a step that others have given up.
        """
        if not self.given_up:
            return
        self._say_so()
        name = f"{self._prefix}{self.number}.given_up"
        met = mpi_ops.allgather_async(torch.zeros(1), name=name, process_set=self._process_set)
        while not mpi_ops.poll(met):
            time.sleep(0.001)
            self._say_so()
        mpi_ops.synchronize(met)
        # From here on no rank starts anything but what is missing.
        mine = {
            key: (self._starts[key], one.kind, list(one.message.shape), one.dtype, one.message.device.type)
            for key, one in self._started.items()
        }
        everyone = gather_json((self.steps, mine), f"{name}.left", self._process_set)
        for _, theirs in everyone:
            for key, (starts, kind, *like) in theirs.items():
                if self._starts[key] < starts:
                    self._end(key)
                    self._start(kind, _nothing(kind, *like), key)
        for key in self._started:
            self._end(key)
        self._started.clear()
        self.given_up = self.told = False
        steps = [theirs for theirs, _ in everyone]
        self.steps = max(steps)
        if min(steps) < max(steps):
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: replicas differ, because some ranks have given up a step that the others have made "
                f"(steps by rank: {steps}); load a checkpoint on all ranks, or call hvd.broadcast_parameters, "
                "hvd.broadcast_optimizer_state and compression.reset() on all"
            )

    def _say_so(self) -> None:
        """Tell ranks that are in a step that it was given up: under each name that they may wait for, once. Never waits."""
        for key, kind in self._kinds.items():
            one = self._started.get(key)
            over = one is None or one.wait is None or (one.handle is not None and mpi_ops.poll(one.handle))
            if over and (one is None or one.dtype != _GIVEN_UP):
                self._end(key)
                self._start(kind, _nothing(kind, (1, 1), _GIVEN_UP, "cpu"), key)

    def _end(self, key: str) -> None:
        started = self._started.get(key)
        if started is not None and started.wait is not None:
            # The result is not needed any more. If Horovod is down, the next collective says so.
            with contextlib.suppress(HorovodInternalError):
                started.wait()
            started.wait = None


def _nothing(kind: Kind, shape: Sequence[int], dtype: str, device: str) -> Tensor:
    like = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    return empty_sparse(shape, like) if kind == "sparse" else like.new_zeros(shape)


def empty_sparse(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an empty sparse gradient for an embedding of this shape, with the type and on the device of `like`."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    return torch.sparse_coo_tensor(indices, like.new_empty((0, *shape[1:])), tuple(shape), check_invariants=False)


def gather_json(value: object, name: str, process_set: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. Blocks. Uses JSON, because data from other machines is not unpickled."""
    line = torch.frombuffer(bytearray(json.dumps(value).encode("ascii") + b"\n"), dtype=torch.uint8)
    lines = mpi_ops.allgather(line, name=name, process_set=process_set)
    return [json.loads(one) for one in lines.numpy().tobytes().splitlines()]
