"""Scenarios: ranks that differ in what only the messages tell. All of them raise, or all are told."""

from __future__ import annotations

import os
import warnings

import horovod.torch as hvd

import horovod_sparse
from horovod_sparse import kernels
from horovod_sparse.torch import TopK, agreement

from .common import BUCKET_BYTES, COMPRESSORS, MakeCompression, assert_identical, raised, small_model, train, wrap
from .scenario import EVERYWHERE, MPI_2, PAIR, scenario


@scenario(*PAIR)
def another_release_raises_on_all() -> None:
    describe = agreement._describe
    if hvd.rank() == 1:
        agreement._describe = lambda *arguments: {**describe(*arguments), "release": "0.0.9"}
    try:
        model = small_model()
        optimizer = wrap(model, TopK(0.01))
        message = raised(ValueError, lambda: train(model, optimizer, range(1)))
    finally:
        agreement._describe = describe
    assert "'release'" in message and "'0.0.9'" in message and repr(horovod_sparse.__version__) in message, message
    train(model, optimizer, range(2))
    assert_identical(model)


@scenario(
    *EVERYWHERE,
    cases={name: (COMPRESSORS[name],) for name in ("TopK", "TopK-union", "SIDCo-balanced", "RandomK", "MiCRO")},
)
def dense_steps_that_end_in_different_steps_raise_on_all(make: MakeCompression) -> None:
    # On one rank they end a step later than on the others, which gather by then.
    model = small_model()
    compression = make(bucket_bytes=BUCKET_BYTES, dense_steps=3)
    optimizer = wrap(model, compression)
    train(model, optimizer, range(2))
    state = compression.state_dict()
    train(model, optimizer, range(2, 3))
    if hvd.rank() == 1:
        compression.load_state_dict(state)
    message = raised(RuntimeError, lambda: train(model, optimizer, range(3, 4)))
    assert f"rank {hvd.rank()}: the ranks disagree on the state of bucket" in message
    compression.load_state_dict(state)
    train(model, optimizer, range(2, 6))
    assert_identical(model)
    assert compression.stats().last.total.ratio < 0.1


@scenario(*PAIR)
def weights_that_were_not_broadcast_cause_a_warning() -> None:
    """Once, on all ranks that differ, with the first parameter's name; none if they are equal, whatever their layout is."""
    for seeds, names in (((1, 2), ["0.weight"]), ((1, 1), [])):
        model = small_model(seed=seeds[hvd.rank() % 2])
        if hvd.rank() == 1:
            model[4].weight.data = model[4].weight.data.t().contiguous().t()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, wrap(model, TopK(0.01)), range(2))
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == len(names), texts
        for text, name in zip(texts, names, strict=True):
            assert f"8 of 8 parameters, such as {name!r}, have other values here than on worker" in text, text
            assert "call hvd.broadcast_parameters first" in text, text


@scenario(
    MPI_2,
    cases={
        name: (COMPRESSORS[name], kernel) for name in ("SIDCo", "MiCRO", "RandomK") for kernel in ("off", "slowest")
    },
)
def workers_with_different_kernels_are_told_and_stay_the_same(make: MakeCompression, kernel: str) -> None:
    before = os.environ.get(kernels.VARIABLE)
    if hvd.rank() == 1:
        os.environ[kernels.VARIABLE] = kernels.variants()[-1] if kernel == "slowest" else kernel
    try:
        model = small_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, wrap(model, make(bucket_bytes=BUCKET_BYTES)), range(8))
    finally:
        os.environ.pop(kernels.VARIABLE, None)
        if before is not None:
            os.environ[kernels.VARIABLE] = before
        kernels.available()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1 and f"rank {hvd.rank()}: the kernels here are" in texts[0], texts
    assert_identical(model)
