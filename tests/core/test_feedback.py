"""What lasts of a worker, and its steps: state, statistics, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_sparse.compressors import TopK
from horovod_sparse.compressors.base import BUCKET_BYTES
from tests.harness.table import Backend, gradients, gradients_of, on_every_backend
from tests.harness.worker import Worker
from tests.harness.workers import SHAPES, make_workers, step, take_step, worker_of


@on_every_backend
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_what_a_parameter_has_kept_waits_while_it_has_no_gradient(backend: Backend, momentum: float | None) -> None:
    """Nothing of it is sent, and it goes on with the next gradient as if no step had been between."""
    compressor = TopK(0.1, granularity="model", momentum=momentum, warmup=None)
    worker = worker_of(backend, compressor)
    for seed in (2, 3, 0):
        step(backend, worker, seed)

    def kept(of: Worker, part: str = "residuals") -> np.ndarray:
        return np.array(backend.numpy(of.state_dict()[part]["kernel"]))

    residual, velocity = kept(worker), kept(worker, "velocities") if momentum else None
    assert residual.any()
    for seed in (4, 5):
        given = {**gradients_of(SHAPES, np.random.default_rng(seed)), "kernel": None}
        (result,) = take_step(backend, [worker], [given])
        assert all(not values.any() for _, values in result["kernel"] or ())
        np.testing.assert_array_equal(kept(worker), residual)
        assert not backend.numpy(worker.residuals.views["kernel"]).any()
        if velocity is not None:
            np.testing.assert_array_equal(kept(worker, "velocities"), velocity)
    # What was set aside is a part of the state, has its unit, and is loaded.
    worker.rescale(2.0)
    np.testing.assert_array_equal(kept(worker), 2 * residual)
    loaded = worker_of(backend, compressor)
    loaded.load_state_dict(worker.state_dict())
    before = worker.state_dict()
    for one in (worker, loaded):
        step(backend, one, 6)
    for name in SHAPES:
        mine, theirs = (backend.numpy(one.state_dict()["residuals"][name]) for one in (worker, loaded))
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(kept(worker), 2 * residual)
    for use in (lambda: worker.load_state_dict(before), worker.reset):
        take_step(backend, [worker], [{**dict.fromkeys(SHAPES), "head": np.ones((7, 11), np.float32)}])
        use()
        expected = np.zeros(500) if use == worker.reset else backend.numpy(before["residuals"]["kernel"])
        np.testing.assert_array_equal(kept(worker), expected)
        np.testing.assert_array_equal(backend.numpy(worker.residuals.views["kernel"]), expected)


@on_every_backend
def test_what_others_send_of_a_parameter_without_gradient_has_the_unit_of_its_rate(backend: Backend) -> None:
    """Replicas would part."""
    workers = make_workers(backend, TopK(1.0, lr_in_residual=True, warmup=None), {"p": (300,)}, 2)
    gradient = gradients("laplace", 300, np.random.default_rng(0))
    mine, theirs = take_step(backend, workers, [{"p": None}, {"p": gradient}], 0.25)
    np.testing.assert_equal(mine, theirs)
    np.testing.assert_array_equal((mine["p"] or [])[1][1], gradient)


@on_every_backend
def test_memory_is_one_residual(backend: Backend) -> None:
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    for granularity in ("layer", BUCKET_BYTES, "model"):
        worker = worker_of(backend, TopK(0.1, granularity=granularity, warmup=None))
        assert sum(bucket.buffer.nbytes for bucket in worker.buckets) == 4 * elements
