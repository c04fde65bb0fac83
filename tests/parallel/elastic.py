"""What a worker of an elastic job does, with PyTorch.

horovodrun ... python -m parallel.elastic HOSTS

HOSTS is the file that the discovery script prints.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from horovod_sparse.torch import DGC, MiCRO, SIDCo

from .common import BUCKET_BYTES, assert_identical, digest, loss_of, small_model
from .hosts import MOST, after, begin_step, goes_on


class Trainings:
    """Trainings in step with each other. Adam's exchanges updates."""

    def __init__(self) -> None:
        self.compressions: dict[str, Any] = {
            "sidco": SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None),
            "micro": MiCRO(0.01, granularity=BUCKET_BYTES, warmup=None),
            "dgc": DGC(0.01, granularity=BUCKET_BYTES, warmup=None),
            "adam": SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None),
        }
        self.models = {name: small_model() for name in self.compressions}
        self.optimizers = {
            name: hvd.DistributedOptimizer(
                (torch.optim.Adam if name == "adam" else torch.optim.SGD)(self.models[name].parameters(), lr=0.05),
                self.models[name].named_parameters(),
                compression=compression,
            )
            for name, compression in self.compressions.items()
        }  # fmt: skip

    @property
    def objects(self) -> dict[str, Any]:
        models = {f"{name}_model": model for name, model in self.models.items()}
        return models | {f"{name}_optimizer": optimizer for name, optimizer in self.optimizers.items()}

    def train(self, step: int) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.zero_grad()
            loss_of(self.models[name], step).backward()
            optimizer.step()

    def lengths(self) -> Tensor:
        """By which all workers let their updates grow."""
        return torch.tensor(self.compressions["adam"].state_dict()["updates"])

    def residuals(self) -> list[Tensor]:
        states = [compression.state_dict() for compression in self.compressions.values()]
        return [array for state in states for part in ("residuals", "velocities") for array in state[part].values()]


def main(hosts: Path) -> None:
    trainings = Trainings()
    state = hvd.elastic.TorchState(**trainings.objects, step=0)
    committed: dict[int, str] = {}
    """Digests of this worker's residuals, by step."""

    @hvd.elastic.run
    def train(state: Any) -> None:
        print(f"rank {hvd.rank()} of {hvd.size()} begins at step {state.step}", flush=True)
        if state.step in committed:
            assert digest(trainings.residuals()) == committed[state.step], "a survivor's residuals have changed"
        while goes_on(state.step, hvd.size()):
            begin_step(hosts, state.step, hvd.rank())
            trainings.train(state.step)
            for model in trainings.models.values():
                assert_identical(model)
            assert_identical([trainings.lengths()])
            state.step = after(state.step, hvd.size())
            committed[state.step] = digest(trainings.residuals())
            state.commit()
            trained.append(hvd.size())
            assert len(trained) < MOST

    trained: list[int] = []
    train(state)
    print(f"rank {hvd.rank()} trained with {sorted(set(trained))} workers, and ended with {hvd.size()}", flush=True)


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
