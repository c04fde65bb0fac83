"""Scenarios: saving and resuming. What is loaded continues bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import horovod.torch as hvd
import torch

from horovod_sparse.torch import TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_identical,
    digest,
    loss_of,
    small_model,
    train,
)
from .scenario import MPI, MPI_2, scenario


class _Run:
    """A model, its optimizer and its compressor."""

    def __init__(self, compression: Any) -> None:
        self.model = small_model()
        self.compression = compression
        adam = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.optimizer = hvd.DistributedOptimizer(adam, self.model.named_parameters(), compression=compression)

    def train(self, *steps: int) -> None:
        train(self.model, self.optimizer, range(*steps))

    def save(self) -> bytes:
        states = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "compression")}
        file = io.BytesIO()
        torch.save(states, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for name, state in states.items():
            getattr(self, name).load_state_dict(state)

    def digest(self) -> str:
        residuals = self.compression.state_dict()["residuals"]
        return digest([*self.model.parameters(), *(residuals[name] for name in sorted(residuals))])


@scenario(MPI_2)
def settings_are_not_part_of_the_state() -> None:
    # What a resumed run is asked for is what it does: here another ratio.
    first = _Run(TopK(0.01))
    first.train(3)
    second = _Run(TopK(0.1))
    second.compression.load_state_dict(first.compression.state_dict())
    second.train(3, 5)
    assert 0.09 < second.compression.stats().last.total.ratio <= 0.1
    assert_identical(second.model)


@scenario(
    *MPI,
    cases={
        f"{name}-{how}-{steps}": (make, how, steps)
        for name, make in {"SIDCo": COMPRESSORS["SIDCo"], "MiCRO": COMPRESSORS["MiCRO"]}.items()
        for how in ("reset", "load", "optimizer")
        for steps in (0, 3)
    },
)
def a_state_can_be_replaced_in_the_middle_of_a_step(make: MakeCompression, how: str, steps: int) -> None:
    """Gradients that were handed over are gone, unless the step was held back; everything else goes on."""
    run, other = (_Run(make(bucket_bytes=BUCKET_BYTES)) for _ in range(2))
    other.train(3)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    state = other.compression.state_dict()
    results = []
    for interrupted in (False, True):
        run.train(steps)
        if interrupted:
            run.optimizer.zero_grad()
            loss_of(run.model, 40).backward()
        if how == "reset":
            run.compression.reset()
        else:
            run.compression.load_state_dict(state)
        if interrupted and how == "optimizer":
            # It reduces what is under way, which moves the compression's state on.
            run.optimizer.load_state_dict(saved[1])
            run.compression.load_state_dict(state)
        if interrupted:
            run.optimizer.step()
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
        if how == "reset":
            run.compression.reset()
        else:
            run.compression.load_state_dict(state)
        run.train(5, 9)
        results.append(run.digest())
    assert results[0] == results[1]
    assert_identical(run.model)
