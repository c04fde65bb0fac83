"""Scenarios: gradients that are not finite, and the same result from NumPy over MPI."""

from __future__ import annotations

import pickle
from typing import Any

import horovod.torch as hvd
import numpy as np
from stairs import Halving

from horovod_sparse.torch import MomentumCorrection, Pairs

from .common import COMPRESSORS, MakeCompression, everyone, gradient_of, normals, raised, reduce, wrap_parameters, zeros
from .exchange import COMPRESSED, SHAPES
from .makers import makers
from .scenario import EVERYWHERE, MPI, MPI_2, MPI_4, scenario


def _local(step: int, rank: int) -> dict[str, np.ndarray]:
    return {name: normals(shape, step=step, rank=rank) for name, shape in SHAPES.items()}


# --- the same from NumPy over MPI ---

_NUMPY_MAKERS: dict[str, Any] = {
    **makers(0.05, Threshold={"threshold": 2.5}),
    "DGC-schedule": lambda library, **s: library.DGC(
        Halving(0.25, 0.01), momentum=MomentumCorrection(nesterov=True), clip=10.0, **s
    ),
    "warm-up": lambda library, **s: library.TopK(0.05, **s),
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
    if hvd.rank() == 1:
        schedule.load_state_dict(state)
    message = raised(RuntimeError, lambda: schedule({"weight": np.ones(1000)}))
    assert "different steps of a ratio that changes" in message

    another, arrays = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(Halving(0.5, 0.1))), np.ones(1000 + hvd.rank())
    message = raised(ValueError, lambda: another.load_state_dict(state, {"weight": arrays}))
    assert "all ranks must run the same model" in message

    # The order of a dictionary is not the order of the collectives.
    names = ["a", "b", "c"] if hvd.rank() == 0 else ["c", "b", "a"]
    sizes = {"a": 3, "b": 1000, "c": 1000}
    ordered = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(1.0))
    ordered({name: np.zeros(size) for name, size in sizes.items()})
    reduced = ordered({name: np.full(sizes[name], ord(name), np.float64) for name in names})
    assert all((reduced[name] == ord(name)).all() for name in sizes)

    sparse_allreduce = SparseAllreduce(MPI.COMM_WORLD, NumpyTopK(0.1), average=False)
    gradients = {"weight": np.ones(1000), "small": np.full(3, np.inf if hvd.rank() == 1 else 1.0)}
    message = raised(FloatingPointError, lambda: sparse_allreduce(gradients))
    assert f"rank {hvd.rank()}: the gradient of" in message
    total = sparse_allreduce({"weight": np.ones(1000), "small": np.ones(3)})
    np.testing.assert_array_equal(total["small"], hvd.size() * np.ones(3))


# --- NaN and infinity ---


@scenario(
    *EVERYWHERE,
    cases={
        f"{name}-{where}": (COMPRESSORS[name], where)
        for name in ("TopK", "MiCRO", "RandomK")
        for where in ("second", "small")
    },
)
def not_finite_raises_on_all_ranks_and_training_can_go_on(make: MakeCompression, where: str) -> None:
    parameters = zeros(SHAPES)
    compression = make(granularity="layer")
    optimizer = wrap_parameters(parameters, compression, op=hvd.Sum)
    memory = {name: np.zeros(SHAPES[name], np.float32) for name in SHAPES if name != "small"}
    for step in range(5):
        local = _local(step, hvd.rank())
        if step in (0, 2) and hvd.rank() == 1:
            local[where][3] = float("nan")
        if step not in (0, 2):
            reduce(optimizer, parameters, local)
            assert all(np.isfinite(gradient_of(parameter)).all() for parameter in parameters.values())
        else:
            messages = everyone(raised(FloatingPointError, lambda local=local: reduce(optimizer, parameters, local)))
            assert all(f"rank {rank}: the gradient of" in message for rank, message in enumerate(messages))
            assert f"parameter {where!r} holds NaN" in messages[1] and "scale_with(scaler)" in messages[1]
        state = compression.state_dict()["residuals"]
        for name, residual in state.items():
            if step in (0, 2):
                # Nothing was applied, so nothing may have left the residual, and all that is finite is in it.
                expected = memory[name] + np.where(np.isfinite(local[name]), local[name], np.float32(0))
                np.testing.assert_array_equal(residual.numpy(), expected, err_msg=f"{name}, {step}")
            memory[name] = residual.numpy().copy()
