"""Elastic jobs, in one process: new workers begin as they must."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod.torch", reason="Horovod was built without PyTorch", exc_type=ImportError)

import torch

from horovod_sparse.core.layout import Parameter, layouts_of
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.torch import DGC, elastic_jobs
from horovod_sparse.torch.elastic_jobs import align
from horovod_sparse.torch.ops import TorchOps

SHAPES = {"weight": (40, 30), "bias": (30,)}


class Workers:
    """The workers of now, in one process: what the others send is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self.others: list[Any] = []
        self.sent: object = None
        self.velocity = torch.zeros(0)
        collectives = SimpleNamespace(
            rank=lambda: self.rank, global_process_set=None, broadcast=lambda array, root, name: self.velocity
        )
        monkeypatch.setattr(elastic_jobs, "mpi_ops", collectives)
        monkeypatch.setattr(elastic_jobs, "gather_json", self.gather)

    def gather(self, value: object, name: str, process_set: object) -> list[Any]:
        self.sent = value
        return json.loads(json.dumps([*self.others[: self.rank], value, *self.others[self.rank :]]))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


def _pipeline(compressor: Any, world: int, position: int) -> Pipeline:
    pipeline = Pipeline(TorchOps(), compressor, world=world, position=position, rank=position)
    parameters = [Parameter(name, shape, "float32", "cpu") for name, shape in SHAPES.items()]
    small = [parameter for parameter in parameters if compressor.leaves_dense(parameter.name, parameter.numel)]

    def like(name: str) -> Any:
        return torch.zeros(0)

    pipeline.add_buckets(layouts_of([one for one in parameters if one not in small], compressor), like)
    pipeline.add_dense([layout for one in small for layout in layouts_of([one], compressor)], like)
    return pipeline


def _state(step: int = 3) -> dict[str, Any]:
    pipeline = _pipeline(DGC(0.01, warmup=None), 2, 0)
    pipeline.residuals.view("weight")[:] = 3.0
    pipeline.velocities.view("bias")[:] = 2.0
    pipeline.buckets[0].state.step = step
    return pipeline.state_dict()


def test_a_new_worker_begins_with_zeros_and_the_first_ones_step(workers: Workers) -> None:
    workers.velocity = torch.full((30,), 2.0)
    align(_state())
    workers.others, workers.rank = [workers.sent], 1
    state = align(None)
    assert state is not None
    assert state["adaptive"]["weight"]["step"] == 3
    assert state["residuals"].keys() == {"weight"} and not state["residuals"]["weight"].any()
    assert not state["velocities"]["weight"].any()
    assert torch.equal(state["velocities"]["bias"], torch.full((30,), 2.0))
    _pipeline(DGC(0.01, warmup=None), 3, 1).load_state_dict(state)
