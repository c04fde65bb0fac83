"""Scenarios: gradients that are not finite, and the same result from NumPy over MPI."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_sparse.torch import DGC, MomentumCorrection, Pairs, TopK, Union
from tests.harness.makers import makers
from tests.harness.stairs import Halving

from .common import (
    COMPRESSORS,
    MakeCompression,
    assert_identical,
    digest,
    everyone,
    gradient_of,
    normals,
    raised,
    reduce,
    wrap,
    wrap_parameters,
    zeros,
)
from .exchange import COMPRESSED, SHAPES
from .scenario import EVERYWHERE, MPI, MPI_2, MPI_4, scenario, warned


def _local(step: int, rank: int) -> dict[str, np.ndarray]:
    return {name: normals(shape, step=step, rank=rank) for name, shape in SHAPES.items()}


# --- the same from NumPy over MPI ---

_NUMPY_MAKERS: dict[str, Any] = {
    **makers(0.05, Threshold={"threshold": 2.5}),
    "DGC-schedule": lambda library, **s: library.DGC(
        Halving(0.25, 0.01), momentum=MomentumCorrection(), clip=10.0, **s
    ),
    "warm-up": lambda library, **s: library.TopK(0.05, warmup=2.0, **s),
    "no-residual": lambda library, **s: library.TopK(0.05, residual=False, warmup=None, **s),
}


@scenario(MPI_4, MPI_2, cases={name: (make,) for name, make in _NUMPY_MAKERS.items()})
def numpy_gives_the_same(make: Any) -> None:
    # One gradient, two ways: Horovod's optimizer on tensors, mpi4py on arrays.
    from mpi4py import MPI

    import horovod_sparse.numpy
    import horovod_sparse.torch

    settings: dict[str, Any] = {"granularity": 16_000}
    parameters, compression = zeros(SHAPES), make(horovod_sparse.torch, **settings)
    adds_pairs = compression.exchange == Pairs() and compression.warmup is None and compression.clip is None
    optimizer = wrap_parameters(parameters, compression)
    # Random choices depend on the bucket's name and this worker's position, not on the library.
    sparse_allreduce = horovod_sparse.numpy.SparseAllreduce(MPI.COMM_WORLD, make(horovod_sparse.numpy, **settings))
    for step in range(6):
        local = _local(step, hvd.rank())
        if step == 3:
            # From there on a new one goes on.
            saved = pickle.dumps(sparse_allreduce.state_dict())
            sparse_allreduce = horovod_sparse.numpy.SparseAllreduce(
                MPI.COMM_WORLD, make(horovod_sparse.numpy, **settings)
            )
            sparse_allreduce.load_state_dict(pickle.loads(saved), local)
        reduce(optimizer, parameters, local)
        reduced = sparse_allreduce(local)
        for name, parameter in parameters.items():
            assert reduced[name].dtype == np.float32 and reduced[name].shape == tuple(SHAPES[name])
            # Pairs are added rank by rank. An allreduce has an order of its own, and so have the sums of clipping.
            tolerance = 0.0 if adds_pairs and name in COMPRESSED else 1e-6
            np.testing.assert_allclose(gradient_of(parameter), reduced[name], tolerance, tolerance, err_msg=name)
        theirs, mine = sparse_allreduce.stats().last.total, compression.stats().last.total
        assert theirs.count == mine.count > 0 and theirs.bytes_sent == mine.bytes_sent


@scenario(*MPI)
def numpy_workers_that_differ_all_raise() -> None:
    from mpi4py import MPI

    from horovod_sparse.numpy import SparseAllreduce
    from horovod_sparse.numpy import TopK as NumpyTopK

    schedule = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(Halving(0.5, 0.1)))
    schedule({"weight": np.ones(1000)})
    state = schedule.state_dict()
    schedule({"weight": np.ones(1000)})
    later = schedule.state_dict()
    other_step = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(Halving(0.5, 0.1)))
    mine = state if hvd.rank() == 1 else later
    message = raised(ValueError, lambda: other_step.load_state_dict(mine, {"weight": np.ones(1000)}))
    assert "'step'" in message

    another, arrays = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(Halving(0.5, 0.1))), np.ones(1000 + hvd.rank())
    message = raised(ValueError, lambda: another.load_state_dict(state, {"weight": arrays}))
    assert f"({1000 + hvd.rank()},)" in message, message

    # The order of a dictionary is not the order of the collectives.
    names = ["a", "b", "c"] if hvd.rank() == 0 else ["c", "b", "a"]
    sizes = {"a": 3, "b": 1000, "c": 1000}
    ordered = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(1.0))
    ordered({name: np.zeros(size) for name, size in sizes.items()})
    reduced = ordered({name: np.full(sizes[name], ord(name), np.float64) for name in names})
    assert all((reduced[name] == ord(name)).all() for name in sizes)

    sparse_allreduce = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(0.1), average=False)
    gradients = {"weight": np.ones(1000), "small": np.full(3, np.inf if hvd.rank() == 1 else 1.0)}
    reduced = {}
    (text,) = warned(lambda: reduced.update(sparse_allreduce(gradients)))
    assert f"rank {hvd.rank()}: " in text and "'small' on rank 1" in text
    assert not np.isfinite(reduced["small"]).any() and np.isfinite(reduced["weight"]).all()
    total = sparse_allreduce({"weight": np.ones(1000), "small": np.ones(3)})
    np.testing.assert_array_equal(total["small"], hvd.size() * np.ones(3))
    assert sparse_allreduce.steps == 1


@scenario(*MPI)
def a_numpy_worker_that_raises_gives_the_call_up_for_all() -> None:
    """Nothing is left of the step on any worker, and all go on."""
    from mpi4py import MPI

    from horovod_sparse.numpy import DGC, SparseAllreduce

    shapes = {"first": (40, 50), "second": (3000,), "small": (30,)}
    plain, disturbed = (SparseAllreduce(MPI.COMM_WORLD, DGC(0.05, momentum=0.9, warmup=None)) for _ in range(2))
    for step in range(5):
        local = {name: normals(shape, step=step, rank=hvd.rank()) for name, shape in shapes.items()}
        if step in (2, 3):
            wrong = {**local, "second": np.zeros(5)} if hvd.rank() == 1 else local
            message = raised(ValueError if hvd.rank() == 1 else RuntimeError, lambda wrong=wrong: disturbed(wrong))
            assert hvd.rank() == 1 or f"rank {hvd.rank()}: rank 1 " in message, message
        expected, found = plain(local), disturbed(local)
        for name in shapes:
            np.testing.assert_array_equal(found[name], expected[name])


# --- NaN and infinity ---

_NOT_FINITE: dict[str, MakeCompression] = {
    **{name: COMPRESSORS[name] for name in ("TopK", "MiCRO", "RandomK")},
    "momentum": lambda **settings: DGC(0.01, momentum=0.9, warmup=None, **settings),
    "union": lambda **settings: TopK(0.01, exchange=Union(), warmup=None, **settings),
}


@scenario(
    *EVERYWHERE,
    cases={f"{name}-{where}": (_NOT_FINITE[name], where) for name in _NOT_FINITE for where in ("second", "small")},
)
def not_finite_comes_out_as_nan_and_the_step_has_never_been(make: MakeCompression, where: str) -> None:
    """On every rank, for the parameters of the bucket; what is reduced dense is as dense averages are.

    A warning names parameter and rank, once.
    """
    parameters = zeros(SHAPES)
    compression = make(granularity="layer")
    optimizer = wrap_parameters(parameters, compression, op=hvd.Sum)
    texts: list[str] = []
    for step in range(6):
        local = _local(step, hvd.rank())
        bad = step in (0, 2, 3)
        if bad and hvd.rank() == 1:
            local[where][3] = float("nan") if step < 3 else float("inf")
        before, steps = compression.state_dict(), compression.steps
        texts += warned(lambda local=local: reduce(optimizer, parameters, local))
        finite = {name: one.grad.isfinite() for name, one in parameters.items()}
        assert {name for name, one in finite.items() if not one.all()} == ({where} if bad else set())
        assert not bad or int(finite[where].sum()) == 0
        assert all(np.isfinite(gradient_of(one)).all() for name, one in parameters.items() if name != where or not bad)
        assert_equal_everywhere(parameters)
        if not bad:
            assert compression.steps == steps + 1
        elif steps:
            now, exactly = compression.state_dict(), compression.momentum_correction is not None
            assert now["adaptive"] == before["adaptive"] and compression.steps == steps
            for part in ("residuals", "velocities"):
                for name, array in before[part].items():
                    tolerance = 0.0 if exactly else 1e-5
                    torch.testing.assert_close(now[part][name], array, rtol=tolerance, atol=tolerance, msg=name)
    (text,) = texts
    assert f"rank {hvd.rank()}: " in text and f"{where!r} on rank 1" in text


def assert_equal_everywhere(parameters: Mapping[str, Any]) -> None:
    """Gradients have the same bits on every rank, but one NaN is as good as another."""
    digests = everyone(digest(one.grad.nan_to_num(nan=12345.0) for one in parameters.values()))
    assert len({*digests}) == 1, digests


@scenario(*EVERYWHERE, cases={"sparse": (False,), "sparse_as_dense": (True,)})
def not_finite_in_an_embedding_makes_the_step_fail(as_dense: bool) -> None:
    """Residuals of the other parameters are as before, and their reduced gradients are there, as with dense averages."""
    torch.manual_seed(4)
    embedding, out = torch.nn.Embedding(60, 20, sparse=True), torch.nn.Linear(20, 30)
    model = torch.nn.Sequential(embedding, out)
    compression = TopK(0.1, granularity="layer", warmup=None)
    optimizer = wrap(model, compression, momentum=0.0, sparse_as_dense=as_dense)
    words = torch.arange(8) + hvd.rank()
    for step in range(4):
        optimizer.zero_grad()
        loss = model(words).square().mean()
        before = compression.state_dict()["residuals"]
        if step == 2:
            # Only the embedding's gradient overflows.
            vectors = embedding(words)
            loss = loss + (vectors * (float("inf") if hvd.rank() == 1 else 0.0)).sum()
        loss.backward()
        texts = warned(optimizer.synchronize)
        gradient = embedding.weight.grad.to_dense()
        assert bool(gradient.isfinite().all()) == (step != 2) and bool(out.weight.grad.isfinite().all())
        if step == 2:
            assert "'0.weight' on rank 1" in texts[0], texts
            for name, residual in compression.state_dict()["residuals"].items():
                torch.testing.assert_close(residual, before[name], rtol=1e-5, atol=1e-6)
            continue
        assert not texts
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_identical(model)
