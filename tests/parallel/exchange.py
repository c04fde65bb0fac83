"""Scenarios: what one exchange computes, against references in NumPy from every rank's true gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest.mock import patch

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops

from horovod_sparse.torch import Pairs, SIDCo, TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_identical,
    digest,
    everyone,
    gradient_of,
    loss_of,
    normals,
    reduce,
    selected,
    small_model,
    train,
    whole_numbers,
    wrap,
    wrap_parameters,
    zeros,
)
from .scenario import EVERYWHERE, MPI_2, MPI_4, scenario

SHAPES: dict[str, Sequence[int]] = {"first": (40, 50), "second": (3000,), "third": (20, 5, 9), "small": (30,)}
COMPRESSED = ("first", "second", "third")


def _residuals(compression: Any) -> dict[str, np.ndarray]:
    state = compression.state_dict()["residuals"]
    return {name: state[name].double().numpy() if name in state else np.zeros(SHAPES[name]) for name in SHAPES}


def _total(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The sum over all ranks, in double precision."""
    gathered = everyone(arrays)
    return {name: sum(one[name].astype(np.float64) for one in gathered) for name in arrays}


@scenario(
    MPI_4,
    MPI_2,
    cases={
        f"{name}-{granularity}": (make, granularity, torch.float32)
        for (name, make), granularity in zip(COMPRESSORS.items(), cycle(("layer", "model")), strict=False)
    }
    | {"TopK-float64": (COMPRESSORS["TopK"], 16_000, torch.float64)},
)
def nothing_is_lost(make: MakeCompression, granularity: str | int, dtype: torch.dtype) -> None:
    # Whole numbers, so that every sum is exact and the law must hold to the last bit:
    # reduced + sum over ranks of (new residual - old residual) == sum over ranks of the gradients.
    parameters = zeros(SHAPES, dtype)
    compression = make(granularity=granularity)
    optimizer = wrap_parameters(parameters, compression, op=hvd.Sum)
    old = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(8):
        local = {name: whole_numbers(shape, step=step, rank=hvd.rank()) for name, shape in SHAPES.items()}
        reduce(optimizer, parameters, local)
        new = _residuals(compression)
        given = _total(local)
        kept = _total({name: new[name] - old[name] for name in SHAPES})
        for name, parameter in parameters.items():
            np.testing.assert_array_equal(gradient_of(parameter) + kept[name], given[name], err_msg=f"{name}, {step}")
        if compression.ratio < 1.0:
            sent = sum(np.count_nonzero(gradient_of(parameters[name])) for name in COMPRESSED)
            entries = sum(parameters[name].numel() for name in COMPRESSED)
            assert 1 <= sent <= hvd.size() * compression.slack * 0.011 * entries
        old = new


@scenario(
    *EVERYWHERE,
    cases={
        # Two halves of the ranks, at the same time.
        "halves": (lambda: np.array_split(range(hvd.size()), 2),),
        # Rank 0 runs the same lines, and its gradients stay its own.
        "all but one": (lambda: [range(1, hvd.size())],),
    },
)
def process_sets_reduce_for_themselves(split: Any) -> None:
    # Each reduces over itself only, and divides by its own size.
    groups = [[int(rank) for rank in ranks] for ranks in split()]
    sets = [hvd.add_process_set(ranks) for ranks in groups]
    number = next((number for number, ranks in enumerate(groups) if hvd.rank() in ranks), 0)
    members = groups[number] if hvd.rank() in groups[number] else [hvd.rank()]
    try:
        parameters = zeros(SHAPES)
        optimizer = wrap_parameters(
            parameters, TopK(1.0, granularity=16_000, min_numel=0, warmup=None), process_set=sets[number]
        )
        for step in range(3):
            reduce(optimizer, parameters, {n: whole_numbers(s, step=step, rank=hvd.rank()) for n, s in SHAPES.items()})
            for name, shape in SHAPES.items():
                # Every value is divided, then summed in rank order: three workers do not divide exactly.
                shares = [whole_numbers(shape, step=step, rank=rank) / np.float32(len(members)) for rank in members]
                np.testing.assert_array_equal(gradient_of(parameters[name]), sum(shares), err_msg=name)
        model = small_model()
        compression = SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None)
        train(model, wrap(model, compression, process_set=sets[number]), range(10))
        assert (compression.residual_bytes > 0) == (len(members) > 1), "one worker alone compresses nothing"
        digests = everyone(digest(model.parameters()))
        for rank in range(hvd.size()):
            assert (digests[rank] == digests[hvd.rank()]) == (rank in members)
    finally:
        hvd.barrier()
        for one in sets:
            hvd.remove_process_set(one)


@scenario(*EVERYWHERE)
def allreduces_outside_the_optimizer() -> None:
    shapes = [(40, 50), (700,), (5,)]
    mine = [torch.from_numpy(normals(shape, step=0, rank=hvd.rank())) for shape in shapes]
    before = [tensor.clone() for tensor in mine]
    means = hvd.grouped_allreduce(mine, name="sparse_group", compression=TopK(0.1, warmup=None))
    for shape, mean in zip(shapes, means, strict=True):
        flats = [normals(shape, step=0, rank=rank).reshape(-1) for rank in range(hvd.size())]
        # Five elements are below min_numel, and go as they are.
        parts = [selected(flat, flat.size // 10) if flat.size >= 256 else flat for flat in flats]
        expected = (sum(part.astype(np.float64) for part in parts) / hvd.size()).reshape(shape)
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6, atol=1e-7)
    alone = hvd.allreduce(mine[0], name="sparse", compression=TopK(0.1, warmup=None))
    total = hvd.allreduce(mine[0], name="sparse_sum", op=hvd.Sum, compression=TopK(0.1, warmup=None))
    for one, expected in ((alone, means[0]), (total, means[0] * hvd.size())):
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(mine, before, strict=True))


@contextmanager
def noted_calls() -> Iterator[list[tuple[str, str, tuple[int, ...]]]]:
    """Note Horovod's asynchronous calls, with their names and shapes, and let them through."""
    events: list[tuple[str, str, tuple[int, ...]]] = []

    def noted(name: str, kind: str) -> Any:
        function = getattr(mpi_ops, name)

        def called(given: Any, *arguments: Any, **named: Any) -> Any:
            shape = tuple(given.shape) if kind != "wait" else ()
            events.append((kind, str(named.get("name", arguments[:1])), shape))
            return function(given, *arguments, **named)

        return patch.object(mpi_ops, name, called)

    with noted("allgather_async", "gather"), noted("allreduce_async_", "sum"), noted("synchronize", "wait"):
        yield events


@scenario(*EVERYWHERE, cases={name: (COMPRESSORS[name],) for name in ("TopK", "SIDCo", "MiCRO", "TopK-union")})
def hooks_start_gathers_and_never_wait(make: MakeCompression) -> None:
    model = small_model()
    compression = make(granularity=BUCKET_BYTES, min_numel=1)
    optimizer = wrap(model, compression)
    # Values start when the indices of all buckets are there; no result of values is waited for before the last has started.
    rest = ["wait"] * 3 if compression.exchange == Pairs() else ["wait"] * 3 + ["sum"] * 3 + ["wait"] * 3
    sent: list[list[tuple[str, tuple[int, ...]]]] = []
    with noted_calls() as events:
        next(model.parameters()).register_hook(lambda _: events.append(("first layer", "", ())))
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            events.clear()
            loss.backward()
            during = [kind for kind, _, _ in events if kind != "first layer"]
            if step == 0:
                # The ranks compare their settings first.
                assert not during
                optimizer.step()
                continue
            assert during == ["gather"] * 3, "one message for each bucket, started in backward; no hook waits"
            assert events[0][0] == "gather", "the last layers are sent while backward goes on"
            sent.append(sorted((name, shape) for kind, name, shape in events if kind == "gather"))
            optimizer.step()
            assert [kind for kind, _, _ in events[4:]] == rest
    assert sent[0] == sent[1] == sent[2], "names or shapes changed from step to step"
    assert len(set(map(str, everyone(sent)))) == 1, "names or shapes differ between ranks"
    assert_identical(model)
