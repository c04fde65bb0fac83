"""Check what must be equal on all ranks before anything is exchanged, and refuse what cannot be honoured. No framework."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

from horovod_sparse import __version__
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.transport import Transport

Description = Mapping[str, str | list[str]]

RELEASE = __version__
"""The release of this package: a part of every first description."""
_ABSENT = "not there"

DIVIDING = frozenset({"betas", "eps", "etas", "beta_1", "beta_2_decay", "epsilon", "learning_rate_power"})
"""The settings, in PyTorch and Keras, of optimizers that divide by the size of the gradient. SGD has none of them."""


def compare(mine: Description, everyone: Iterable[Description], rank: int) -> None:
    """Raise ValueError, with both values, if the description of another rank differs from `mine`."""
    for position, theirs in enumerate(everyone):
        # Another release may describe other things.
        different = {
            key: _difference(mine.get(key, _ABSENT), theirs.get(key, _ABSENT))
            for key in dict.fromkeys([*mine, *theirs])
            if mine.get(key) != theirs.get(key)
        }
        if different:
            raise ValueError(
                f"rank {rank}: all ranks must run the same model with the same compression, but worker {position} "
                f"of its group differs (mine, theirs): {different}"
            )


def agree_on_states(check: Callable[[], None], transport: Transport) -> None:
    """Raise ValueError on every rank if any rank has loaded a state for which `check` raises it. Blocks."""
    problem = ""
    try:
        check()
    except ValueError as error:
        problem = str(error)
    compare({"problem": problem}, transport.everyone({"problem": problem}), transport.rank)
    if problem:
        raise ValueError(f"rank {transport.rank}: the state that was loaded does not fit: {problem}")


def check_steps(steps: Sequence[int], rank: int) -> None:
    """Raise RuntimeError on every rank if their steps differ: a ratio that changes makes messages of other sizes."""
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"rank {rank}: the ranks are in different steps of a ratio that changes, {[*steps]}; load the state on every rank "
            "or on none"
        )


def op_name(op: object, average: object, total: object) -> str:
    """Return the name of an operation that Horovod knows by a number; `average` and `total` are its average and its sum."""
    return "hvd.Average" if op == average else "hvd.Sum" if op == total else repr(op)


def _difference(mine: str | list[str], theirs: str | list[str]) -> tuple[str, str]:
    """Return both values; for lists, the first entry that differs."""
    if isinstance(mine, str) or isinstance(theirs, str):
        return str(mine), str(theirs)
    entries = enumerate(zip_longest(mine, theirs, fillvalue=_ABSENT))
    number, one, other = next((number, one, other) for number, (one, other) in entries if one != other)
    return f"{len(mine)}, number {number} is {one}", f"{len(theirs)}, number {number} is {other}"


def warn_of_values(names: Sequence[str], sums: Sequence[Sequence[int]], position: int, rank: int, remedy: str) -> None:
    """Warn if parameters have other values on another worker. `sums` are all workers' numbers, in the order of `names`."""
    for other, theirs in enumerate(sums):
        different = [name for name, *pair in zip(names, sums[position], theirs, strict=True) if pair[0] != pair[1]]
        if different:
            warnings.warn(
                f"horovod_sparse: rank {rank}: before the first step {len(different)} of {len(names)} parameters, such as "
                f"{different[0]!r}, have other values here than on worker {other} of its group. Gradients are reduced, but "
                f"replicas stay apart; {remedy}",
                stacklevel=1,
            )
            return


def check_arguments(op: object, average: object, total: object, adasum: object, groups: object, c: Compressor) -> None:
    """Refuse what a sparse exchange cannot honour; `average`, `total` and `adasum` are Horovod's operations."""
    if op == adasum:
        raise ValueError(
            "op must be hvd.Average or hvd.Sum with a sparsifier, got hvd.Adasum: Adasum weighs whole gradients by the "
            "angle between them, which selected entries do not have; use op=hvd.Average or hvd.Compression.none"
        )
    if op not in (average, total):
        raise ValueError(
            f"op must be hvd.Average or hvd.Sum with a sparsifier, got {op!r}: entries that a rank did not select are "
            "unknown, not zero; use hvd.Compression.none"
        )
    if groups is not None and isinstance(c.granularity, str):
        raise ValueError(
            f"groups= makes every group one bucket, but compression has granularity={c.granularity!r}; "
            "leave granularity or groups= out"
        )


def is_elastic() -> bool:
    """Return whether `horovodrun` has started an elastic job, in which workers come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def check_sparse(found: Iterable[str], c: Compressor, *, sparse_as_dense: bool, rank: int) -> None:
    """Raise ValueError if embeddings with sparse gradients would not get the momentum that all other parameters get."""
    names = sorted(found)
    if names and c.momentum_correction is not None and not sparse_as_dense:
        raise ValueError(
            f"rank {rank}: sparse_as_dense must be True with {c.momentum_correction!r}, since the sparse gradients of "
            f"{names} would get no momentum; pass sparse_as_dense=True to hvd.DistributedOptimizer"
        )


def divides(groups: Iterable[Mapping[str, object]]) -> bool:
    """Return whether an optimizer with these settings divides by the size of the gradient."""
    return any(DIVIDING.intersection(group) for group in groups)


def check_optimizer(c: Compressor, name: str, groups: Sequence[Mapping[str, object]]) -> None:
    """Refuse momentum twice, and warn of an optimizer of class `name` that divides by the size of the gradient."""
    if c.momentum != "auto":
        check_momentum(c, groups)
    elif c.residual:
        check_dampening(groups)
    correction = c.momentum_correction
    if (c.ratio == 1.0 and correction is None) or not divides(groups):
        return
    twice = "" if correction is None else f" It also averages gradients that {correction!r} has averaged before."
    warnings.warn(
        f"horovod_sparse: sparse gradients train worse with {name} than with SGD: {name} divides by the size of the gradient, "
        f"which cancels most of what an entry has gathered while it waited.{twice} Use SGD, or updates='auto', which "
        "exchanges the updates of the optimizer in place of gradients",
        stacklevel=1,
    )


def warn_unseen(c: Compressor, name: str, groups: Sequence[Mapping[str, object]], instead: str) -> None:
    """Warn of an optimizer as in `check_optimizer` that the compressor does not see, if this trains worse than `instead`."""
    by_updates = c.updates == "auto" and divides(groups)
    has_momentum = c.momentum == "auto" and c.residual and any(group.get("momentum") for group in groups)
    if c.ratio == 1.0 or not (by_updates or has_momentum):
        return
    updates, momentum = "its updates are not exchanged in place of gradients", "its momentum moves after the selection"
    warnings.warn(
        f"horovod_sparse: {type(c).__name__} reduces gradients of {name}, but does not see this optimizer: "
        f"{updates if by_updates else momentum}, which trains worse; {instead}",
        stacklevel=1,
    )


def check_dampening(groups: Iterable[Mapping[str, object]]) -> None:
    """Raise ValueError if momentum cannot move, because PyTorch's SGD has dampening."""
    for group in groups:
        if group.get("momentum") and group.get("dampening"):
            raise ValueError(
                f"dampening must be 0 with momentum='auto', got {group['dampening']}; make the compressor with momentum=None, "
                "which leaves the momentum in the optimizer"
            )


def exchanges_updates(c: Compressor, groups: Sequence[Mapping[str, object]]) -> bool:
    """Return whether updates are exchanged in place of gradients, for an optimizer with these settings (`check_moves`)."""
    updates = (divides(groups) and c.ratio != 1.0) if c.updates == "auto" else c.updates
    if updates:
        check_moves(c, "where updates are exchanged, as for Adam (updates=False exchanges gradients)")
    return updates


def refuse_updates(c: Compressor, framework: str) -> None:
    """Raise ValueError if a compressor is to exchange updates where that cannot be done."""
    if c.updates is True:
        raise ValueError(
            f"updates must be 'auto' or False with {framework}, got True; use an optimizer of PyTorch or Keras 3"
        )


def refuse_detached(
    c: Compressor, framework: str, remedy: str = "PyTorch's hvd.DistributedOptimizer and register can have it"
) -> None:
    """Raise ValueError if a compressor is to move parameters where that cannot be done."""
    if c.detached not in ("auto", 0):
        raise ValueError(f"detached must be 'auto' or 0 with {framework}, got {c.detached!r}; {remedy}")


def check_moves(c: Compressor, where: str) -> None:
    """Let a compressor take movements of parameters. Raise ValueError if it does what has no meaning for them."""
    if c.momentum == "auto":
        c.move_momentum(0.0, nesterov=False)
    for name, value, needed, why in (
        ("momentum", c.momentum_correction, None, "momentum is the optimizer's, or outer_momentum of LocalUpdates"),
        ("clip", c.clip, None, "what it clips off a movement is lost; clip gradients before the optimizer steps"),
        ("not_finite", c.not_finite, "raise", "the shared parameters would stay NaN"),
        ("lr_in_residual", c.in_updates, False, "residuals are in units of the parameters already"),
    ):
        if value != needed:
            raise ValueError(f"compression must have {name}={needed!r} {where}, got {value!r}: {why}")


def check_momentum(c: Compressor, groups: Iterable[Mapping[str, object]]) -> None:
    """Refuse to apply momentum twice: by the compressor before the selection, and by the optimizer after the reduction."""
    momentum = next((group["momentum"] for group in groups if group.get("momentum")), None)
    if c.momentum_correction is not None and momentum is not None:
        raise ValueError(
            f"optimizer must have momentum=0 with {c.momentum_correction!r}, got momentum={momentum}: it would be applied "
            "twice. Use SGD(..., momentum=0), or leave momentum out of the compression, which then takes the optimizer's"
        )
