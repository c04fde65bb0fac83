"""Check what must be equal on all ranks before anything is exchanged, and refuse what cannot be honoured. No framework."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from horovod_sparse import __version__
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.state import step_of
from horovod_sparse.core.transport import Transport

Description = Mapping[str, str | list[str]]

RELEASE = __version__
"""The release of this package."""
_ABSENT = "not there"

DIVIDING = frozenset({"betas", "eps", "etas", "beta_1", "beta_2_decay", "epsilon", "learning_rate_power"})
"""The settings, in PyTorch and Keras, of optimizers that divide by the size of the gradient. SGD has none of them."""


def description(c: Compressor, parameters: Iterable[str], **more: str | list[str]) -> Description:
    """Return what must be equal on all ranks: release, settings, parameters with their shapes and types, and `more`."""
    return {"release": RELEASE, "compression": repr(c), "parameters": [*parameters], **more}


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


def agree_on_states(check: Callable[[], None], state: Mapping[str, Any], transport: Transport) -> None:
    """Raise ValueError on every rank if `check` raises it for the state that some rank has loaded, or if steps differ. Blocks.

    Ranks in different steps would send messages of different sizes.
    """
    problem = step = ""
    try:
        check()
        step = str(step_of(state))
    except ValueError as error:
        problem = str(error)
    mine = {"problem": problem, "step": step}
    compare(mine, transport.everyone(mine), transport.rank)
    if problem:
        raise ValueError(f"rank {transport.rank}: the state that was loaded does not fit: {problem}")


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
    if groups is not None and c.granularity in ("layer", "model"):
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


def advice(
    name: str,
    groups: Iterable[Mapping[str, object]],
    instead: str = "LocalUpdates(optimizer, model, compression) ends within 1 %",
) -> str:
    """Return what a sparse exchange of gradients costs with an optimizer of class `name`, and what to do; "" if nothing."""
    if not divides(groups):
        return ""
    return (
        f"{name} divides by the size of the gradient, so with sparse gradients it ends 1 to 4 % above the loss of dense "
        f"training, more with more workers; {instead}"
    )


def steps_made(optimizer: object) -> int:
    """Return how many steps an optimizer of PyTorch has counted in its state; 0 if it counts none, as SGD."""
    states: Any = getattr(optimizer, "state", None) or {}
    counts = (one["step"] for one in states.values() if isinstance(one, Mapping) and "step" in one)
    return int(next(counts, 0))


def warn_of_no_state(steps: int, whose: str = "compression") -> None:
    """Warn if an optimizer has made `steps`, while no state was loaded of what reduces its gradients before the first one."""
    # Horovod's broadcast and PyTorch's checkpoints let a new optimizer make one step.
    if steps > 1 and not is_elastic():
        warnings.warn(
            f"horovod_sparse: the optimizer has made {steps} steps, but no state of {whose} was loaded: the warm-up begins "
            f"anew, and what had waited is lost. To go on with a run, call {whose}.load_state_dict(...) on all ranks, too, "
            "before the first step (docs/running.md)",
            stacklevel=1,
        )


def check_momentum(c: Compressor, groups: Iterable[Mapping[str, object]]) -> None:
    """Refuse to apply momentum twice: by the compressor before the selection, and by the optimizer after the reduction."""
    momentum = next((group["momentum"] for group in groups if group.get("momentum")), None)
    if c.momentum_correction is not None and momentum is not None:
        raise ValueError(
            f"optimizer must have momentum=0 with {c.momentum_correction!r}, got momentum={momentum}: it would be applied "
            "twice. Use SGD(..., momentum=0), or make the compressor without momentum"
        )
