"""Scenarios: checkpoints and states. What is loaded continues bit for bit."""

from __future__ import annotations

import copy
import random
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from horovod_sparse.torch import load_checkpoint, save_checkpoint

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_close,
    assert_identical,
    digest,
    everyone,
    kept,
    loss_of,
    small_model,
    train,
    wrap,
)
from .scenario import MPI, PAIR, folder_of, scenario


class Training:
    """A training in which everything that can be kept from step to step matters."""

    def __init__(self, compression: Any) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(64, 10))
        adam = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.compression = compression
        self.optimizer = hvd.DistributedOptimizer(adam, self.model.named_parameters(), compression=compression)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.data = torch.Generator().manual_seed(hvd.rank())
        # Dropout draws from the global generator; what is added to the inputs, from those of NumPy and Python.
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(100 + hvd.rank())

    @property
    def objects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "data")
        return {name: getattr(self, name) for name in names}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(16, 32, generator=self.data) + random.random() + float(np.random.normal())
            labels = torch.randint(0, 10, (16,), generator=self.data)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()
            self.scheduler.step()

    def digest(self) -> str:
        residuals = self.compression.state_dict()["residuals"]
        return digest([*self.model.state_dict().values(), *(residuals[name] for name in sorted(residuals))])


@scenario(*PAIR, cases={name: (make,) for name, make in COMPRESSORS.items()})
def checkpoint_continues_bit_for_bit(make: MakeCompression) -> None:
    with folder_of(hvd.rank(), everyone) as folder:
        first = Training(make(granularity=BUCKET_BYTES))
        assert load_checkpoint(folder, **first.objects).step == 0
        first.train(5)
        save_checkpoint(folder, 5, **first.objects, epoch=2, rank=hvd.rank())
        first.train(5)

        for trained in (0, 2):
            second = Training(make(granularity=BUCKET_BYTES))
            second.train(trained)
            found = load_checkpoint(folder, **second.objects)
            assert (found.step, found.values) == (5, {"epoch": 2, "rank": hvd.rank()})
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
    """Gradients that were handed over are gone, unless the step was held back; everything else goes on."""
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
