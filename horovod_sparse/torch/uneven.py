"""Training on uneven data: a rank that has no data left takes part in the other ranks' reductions until nobody has any.

Before each reduction within `Join` all ranks exchange a row: which optimizer this rank is about to reduce, or that it has no
data left, or that it leaves with an error. The rows of all ranks together decide what each of them does next, so none waits for
a rank that does something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from horovod.torch import mpi_ops

from horovod_sparse.torch.exchange import gather_json
from horovod_sparse.torch.reducer import reducer_of
from horovod_sparse.torch.replicas import broadcast_states, broadcast_tensors

_FAILED, _NOTHING = -2, -1
"""What a rank says beside the number of an optimizer: it leaves with an error, or has no data left."""
_left_behind: dict[str, int] = {}
"""The handles of rows that ranks have started when they left with an error, without waiting, by the collective's name."""


class Join:
    """Lets every rank make its own number of steps, as `hvd.join()` does without compression. Use it in `with`.

    A rank that leaves the block takes part in the other ranks' reductions, without gradients, until all ranks have left. Its
    residuals are still sent. Averages are over all ranks. Then the parameters, the optimizers' states and the loss scalers of
    the last rank that reduced are copied to the ranks that had less data, so that all ranks are equal.

    An exception that leaves the block waits for nobody. The other ranks raise RuntimeError in their next reduction.

    Args:
        optimizers: all optimizers that are used in the block, in the same order on all ranks. They must belong to the same
            process set.

    Raises:
        TypeError: an optimizer has none of this package's compressors.
        ValueError: there is no optimizer, or they belong to different process sets.
        RuntimeError: a rank has left the block with an error, or ranks reduce different optimizers. All ranks raise it.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise ValueError("optimizers must be given to Join, at least one")
        self._members = [_Member(optimizer) for optimizer in optimizers]
        self._process_set = self._members[0].optimizer.process_set
        for member in self._members:
            if member.optimizer.process_set != self._process_set:
                raise ValueError(
                    "optimizers must have the same process_set in one Join, got "
                    f"{member.optimizer.process_set} and {self._process_set}; use one Join for each"
                )
        self.last_rank = 0
        """After the block: the rank that all others are equal to now, the lowest of those that made the most reductions."""
        self._over = False
        """Whether all ranks know that nobody takes part any more."""
        self._reductions = 0

    def __enter__(self) -> Join:
        if any(member.reducer.announce is not None for member in self._members):
            raise RuntimeError("Join must not be entered again before it was left, with the same optimizer")
        left_behind = _left_behind.pop(self._name, None)
        if left_behind is not None:
            with contextlib.suppress(Exception):
                mpi_ops.synchronize(left_behind)
        self._over, self._reductions = False, 0
        for number, member in enumerate(self._members):
            if member.reducer.active:
                member.reducer.announce = partial(self._announce, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if all(member.reducer.announce is None for member in self._members):
            # There are no other ranks.
            return
        for member in self._members:
            member.reducer.announce = None
            member.reducer.restore_moved()
        if kind is not None:
            self._break_off()
            return
        try:
            for member in self._members:
                member.check_complete()
            self._take_part()
            self._make_equal()
        except BaseException:
            self._break_off()
            raise

    # --- rows ---

    @property
    def _name(self) -> str:
        return f"horovod_sparse.{self._process_set.process_set_id}.join"

    def _start(self, what: int) -> int:
        """Start the exchange of rows; return its handle."""
        row = [float(what)]
        if what >= 0:
            row += self._members[what].settings()
        elif what == _NOTHING:
            row += [float(member.reducer.scaler is not None) for member in self._members]
        width = max(len(self._members), *(len(member.settings()) for member in self._members))
        row += [0.0] * (1 + width - len(row))
        message = torch.tensor([row], dtype=torch.float64)
        handle: int = mpi_ops.allgather_async(message, name=self._name, process_set=self._process_set)
        return handle

    def _exchange(self, what: int) -> list[list[float]]:
        """Exchange rows; return those of the ranks that reduce. Raises the same on every rank if they do not fit together."""
        rows = mpi_ops.synchronize(self._start(what)).tolist()
        ranks = self._process_set.ranks or range(len(rows))
        failed = [rank for rank, row in zip(ranks, rows, strict=True) if row[0] == _FAILED]
        reducing = [row for row in rows if row[0] >= 0]
        self._over = bool(failed) or not reducing
        if failed:
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: ranks {failed} left Join with an error, which they report themselves; the step was "
                "given up"
            )
        try:
            _check_rows(rows)
        except RuntimeError:
            self._over = True
            raise
        return reducing

    def _announce(self, number: int) -> None:
        """Say that this rank is about to reduce."""
        self._exchange(number)
        self._reductions += 1

    # --- after the block ---

    def _take_part(self) -> None:
        """Take part in the other ranks' reductions until nobody has data left."""
        while True:
            reducing = self._exchange(_NOTHING)
            if not reducing:
                return
            number, *settings = reducing[0]
            self._members[int(number)].take_part(settings)

    def _make_equal(self) -> None:
        """Make all ranks equal to the last one that reduced."""
        reductions = gather_json(self._reductions, f"{self._name}.last", self._process_set)
        most = max(reductions)
        ranks = self._process_set.ranks or range(len(reductions))
        self.last_rank = ranks[reductions.index(most)]
        if min(reductions) == most:
            return
        for number, member in enumerate(self._members):
            name, optimizer = f"{self._name}.{number}", member.optimizer
            is_behind, process_set = self._reductions < most, optimizer.process_set
            broadcast_states(optimizer, member.reducer.scaler, self.last_rank, name, process_set, is_behind=is_behind)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            broadcast_tensors(parameters, self.last_rank, f"{name}.parameters", process_set)

    def _break_off(self) -> None:
        """Give up the steps that have begun. Tell the other ranks, without waiting for them."""
        for member in self._members:
            if member.reducer.active:
                member.reducer.give_up()
        if not self._over:
            self._over = True
            # Horovod may be down.
            with contextlib.suppress(Exception):
                _left_behind[self._name] = self._start(_FAILED)


def _check_rows(rows: Sequence[Sequence[float]]) -> None:
    """Raise RuntimeError unless the ranks can go on together."""
    reducing = [row for row in rows if row[0] >= 0]
    if len({(row[0], row[1]) for row in reducing}) > 1:
        raise RuntimeError(
            f"rank {mpi_ops.rank()}: within Join all ranks with data must reduce the same optimizers in the same order and "
            f"give up the same steps; now they reduce the optimizers {[int(row[0]) for row in reducing]} (counted from 0), "
            f"and had given up a step: {[bool(row[1]) for row in reducing]}"
        )
    for number, _, scale, *_ in reducing[:1]:
        if any(row[0] == _NOTHING and bool(row[1 + int(number)]) != bool(scale) for row in rows):
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: a rank without data does not know the loss scaler of the others; call "
                "compression.scale_with(scaler) before Join on every rank"
            )


class _Member:
    """An optimizer within `Join`."""

    def __init__(self, optimizer: Any) -> None:
        reducer = reducer_of(optimizer)
        if reducer is None:
            raise TypeError(
                "optimizers must be made by hvd.DistributedOptimizer with a compressor of horovod_sparse, got "
                f"{type(optimizer).__name__}; to send everything use compression=NoOp(), or hvd.join() without Join"
            )
        self.optimizer = reducer.optimizer
        self.reducer = reducer

    def settings(self) -> list[float]:
        """Return what a rank that takes part must know: whether a step was given up, loss scale, learning rates."""
        scaler = self.reducer.scaler
        rates = [float(group.get("lr", 0.0)) for group in self.optimizer.param_groups]
        return [float(self.reducer.given_up), 0.0 if scaler is None else float(scaler.get_scale()), *rates]

    def check_complete(self) -> None:
        """Raise RuntimeError if gradients wait for a step."""
        if self.optimizer._handles:
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: Join was left after loss.backward() without optimizer.step(), so gradients would "
                "be lost; call optimizer.step() after the last backward pass, too, or leave that pass out"
            )

    def take_part(self, settings: Sequence[float]) -> None:
        """Reduce together with the other ranks, without gradients of this one. The reduced gradients are dropped."""
        given_up, scale, *rates = settings
        if given_up:
            self.reducer.give_up()
        scaler = self.reducer.scaler
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if "lr" in group:
                # Residuals may be in units of the update.
                group["lr"] = rate
        self._drop_gradients()
        try:
            # If the step fails on all ranks, those with data decide what follows.
            with contextlib.suppress(FloatingPointError):
                self.reducer.reduce()
        finally:
            self._drop_gradients()
            self.reducer.note_reduced()

    def _drop_gradients(self) -> None:
        self.optimizer._synchronized = False
        for parameter in self.optimizer._requires_update:
            if parameter.requires_grad:
                parameter.grad = None
