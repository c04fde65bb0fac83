"""Scenarios: states. What is loaded continues bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_close,
    assert_identical,
    digest,
    kept,
    loss_of,
    small_model,
    train,
    wrap,
)
from .scenario import MPI, PAIR, scenario


class Training:
    """A training in which everything that can be kept from step to step matters."""

    _PARTS = ("model", "optimizer", "scheduler", "compression")

    def __init__(self, compression: Any) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(64, 10))
        adam = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.compression = compression
        self.optimizer = hvd.DistributedOptimizer(adam, self.model.named_parameters(), compression=compression)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.data = torch.Generator().manual_seed(hvd.rank())
        # Dropout draws from the global generator.
        torch.manual_seed(100 + hvd.rank())

    def saved(self) -> bytes:
        """What this rank saves, in the bytes of a file."""
        file = io.BytesIO()
        states = {name: getattr(self, name).state_dict() for name in self._PARTS}
        torch.save({**states, "data": self.data.get_state(), "random": torch.get_rng_state()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for name in self._PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.data.set_state(state["data"])
        torch.set_rng_state(state["random"])

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(16, 32, generator=self.data)
            labels = torch.randint(0, 10, (16,), generator=self.data)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()
            self.scheduler.step()

    def digest(self) -> str:
        residuals = self.compression.state_dict()["residuals"]
        return digest([*self.model.state_dict().values(), *(residuals[name] for name in sorted(residuals))])


@scenario(*PAIR, cases={name: (make,) for name, make in COMPRESSORS.items()})
def what_was_saved_continues_bit_for_bit(make: MakeCompression) -> None:
    first = Training(make(granularity=BUCKET_BYTES))
    first.train(5)
    saved = first.saved()
    first.train(5)

    for trained in (0, 2):
        second = Training(make(granularity=BUCKET_BYTES))
        second.train(trained)
        second.load(saved)
        second.train(5)
        if hvd.size() == 2:
            assert second.digest() == first.digest()
        # More ranks add dense gradients in an order that depends on what Horovod fuses.
        assert_close(second.model, first.model, rtol=0.0, atol=1e-6)
    assert_identical(first.model)


@scenario(
    *MPI,
    cases={
        f"{name}-{how}-{steps}": (COMPRESSORS[name], how, steps)
        for name in ("SIDCo", "MiCRO")
        for how in ("reset", "load", "optimizer")
        for steps in (0, 3)
    },
)
def a_state_can_be_replaced_in_the_middle_of_a_step(make: MakeCompression, how: str, steps: int) -> None:
    """Gradients that were handed over are gone, unless it was the first step; everything else goes on."""
    (model, compression), (other_model, other) = ((small_model(), make(granularity=BUCKET_BYTES)) for _ in range(2))
    optimizer = wrap(model, compression)
    train(other_model, wrap(other_model, other), range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    state = other.state_dict()

    def replace() -> None:
        if how == "reset":
            compression.reset()
        else:
            compression.load_state_dict(state)

    results = []
    for interrupted in (False, True):
        train(model, optimizer, range(steps))
        if interrupted:
            optimizer.zero_grad()
            loss_of(model, 40).backward()
        replace()
        if interrupted and how == "optimizer":
            # It reduces what is under way, which moves the compression's state on.
            optimizer.load_state_dict(saved[1])
            replace()
        if interrupted:
            optimizer.step()
        model.load_state_dict(saved[0])
        # The optimizer goes on with the very tensors that it loads.
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        replace()
        train(model, optimizer, range(5, 9))
        results.append((digest(model.parameters()), kept(compression)))
    assert results[0] == results[1]
    assert_identical(model)
