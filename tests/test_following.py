"""Elastic jobs, in one process: what is lost is reported, new workers begin as they must, a pipeline changes its workers."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest

from horovod_sparse.core.elastic import WorkersBefore
from horovod_sparse.core.layout import Parameter, plan
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.core.state import empty_state
from horovod_sparse.numpy import DGC, MiCRO
from horovod_sparse.numpy.ops import NumpyOps

SHAPES = {"weight": (40, 30), "bias": (30,)}


class Workers(WorkersBefore):
    """Workers in one process: what the others send is given."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.now = rank
        self.others: list[Any] = []
        self.sent: object = None
        self.velocity = np.zeros(0)

    def rank(self) -> int:
        return self.now

    def gather(self, value: object, name: str) -> list[Any]:
        self.sent = value
        return json.loads(json.dumps([*self.others[: self.now], value, *self.others[self.now :]]))

    def broadcast(self, array: Any, name: str) -> Any:
        return self.velocity

    def zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, np.float32)

    def norm(self, array: Any) -> float:
        return float(np.linalg.norm(array))


def _pipeline(compressor: Any, world: int, position: int) -> Pipeline:
    pipeline = Pipeline(NumpyOps(), compressor, world=world, position=position, rank=position)
    parameters = [Parameter(name, shape, "float32", "cpu") for name, shape in SHAPES.items()]
    small = [parameter for parameter in parameters if compressor.leaves_dense(parameter.name, parameter.numel)]

    def like(name: str) -> Any:
        return np.zeros(0, np.float32)

    pipeline.add_buckets(plan([one for one in parameters if one not in small], compressor), like)
    pipeline.add_dense([layout for one in small for layout in plan([one], compressor)], like)
    return pipeline


def _state(step: int = 3) -> dict[str, Any]:
    pipeline = _pipeline(DGC(0.01), 2, 0)
    pipeline.residuals.view("weight")[:] = 3.0
    pipeline.velocities.view("bias")[:] = 2.0
    pipeline.buckets[0].state.step = step
    return pipeline.state_dict()


def test_lost_residuals_are_reported_once() -> None:
    workers = Workers()
    workers.others = [[None, 30.0], [None, 40.0]]
    workers.commit(empty_state())
    # The last worker has died.
    workers.others = [[1, 30.0]]
    with pytest.warns(UserWarning, match=r"ranks \[2\] have left.* was 40, of 50 of all workers"):
        workers.commit(empty_state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workers.commit(empty_state())


def test_a_new_worker_begins_with_zeros_and_the_first_ones_step() -> None:
    first, new = Workers(), Workers(rank=1)
    first.velocity = new.velocity = np.full((30,), 2.0)
    first.align(_state())
    new.others = [first.sent]
    state = new.align(None)
    assert state is not None
    assert state["adaptive"]["weight"]["step"] == 3
    assert state["residuals"].keys() == {"weight"} and not state["residuals"]["weight"].any()
    assert not state["velocities"]["weight"].any()
    np.testing.assert_array_equal(state["velocities"]["bias"], np.full((30,), 2.0))
    _pipeline(DGC(0.01), 3, 1).load_state_dict(state)


def test_a_pipeline_changes_its_workers_and_keeps_the_rest() -> None:
    compressor = MiCRO(0.01)
    pipeline, afresh = _pipeline(compressor, 2, 1), _pipeline(compressor, 3, 0)
    gradient = np.random.default_rng(0).standard_normal(SHAPES["weight"]).astype(np.float32)
    pipeline.start_step()
    pipeline.arrive("weight", gradient)
    pipeline.abort()
    pipeline.buckets[0].state.step = 5
    before = pipeline.state_dict()
    buffer = pipeline.residuals.buffer("weight")
    pipeline.change_workers(world=3, position=0, rank=0)
    assert pipeline.residuals.buffer("weight") is buffer, "graphs hold this memory"
    after = pipeline.state_dict()
    np.testing.assert_array_equal(after["residuals"]["weight"], before["residuals"]["weight"])
    assert after["adaptive"] == before["adaptive"]
    assert (pipeline.world, pipeline.position, pipeline.divisor) == (3, 0, 3.0)
    afresh.load_state_dict(before)
    messages = []
    for one in (pipeline, afresh):
        one.start_step()
        one.arrive("weight", gradient)
        messages.append(np.asarray(one.begin(one.bucket_of["weight"]).message))
    np.testing.assert_array_equal(*messages)
