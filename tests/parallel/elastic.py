"""What a worker of an elastic job does, with PyTorch. Workers kill themselves, and ask for others, in given steps.

horovodrun ... python -m tests.parallel.elastic HOSTS

HOSTS is the file that the discovery script prints. A host is a name of this machine that Horovod takes for another one.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from horovod_sparse.torch import DGC, MiCRO, SIDCo

from .common import BUCKET_BYTES, assert_identical, digest, distributed, small_model, train

FIRST_HOSTS = ("localhost", "127.0.0.1")
MORE_HOSTS = ("127.1", "127.0.1")
DIES = {6: "127.0.0.1", 20: "127.0.1"}
"""The step in which a worker gets SIGKILL, and its host: first it is one of two workers, then one of three."""
ASKS = 12
"""The step in which the only worker that is left asks for two more. It trains on until they are there."""
STEPS = 30
MOST = 20_000
"""Steps after which nobody has come."""


def write_hosts(path: Path, hosts: tuple[str, ...]) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text("".join(f"{host}:1\n" for host in hosts))
    unfinished.replace(path)


def begin_step(hosts: Path, step: int, rank: int) -> None:
    """Die, or ask for other workers, if it is time. `hosts` is the file that the discovery script prints."""
    if DIES.get(step) == os.environ["HOROVOD_HOSTNAME"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == ASKS and rank == 0:
        write_hosts(hosts, (FIRST_HOSTS[0], *MORE_HOSTS))


class Trainings:
    """Trainings in step with each other."""

    def __init__(self) -> None:
        makers: dict[str, Any] = {"sidco": SIDCo, "micro": MiCRO, "dgc": partial(DGC, momentum=0.9), "adam": SIDCo}
        self.compressions = {name: make(0.01, granularity=BUCKET_BYTES, warmup=None) for name, make in makers.items()}
        self.models = {name: small_model() for name in self.compressions}
        self.optimizers: dict[str, Any] = {}
        for name, model in self.models.items():
            sgd_or_adam = (torch.optim.Adam if name == "adam" else torch.optim.SGD)(model.parameters(), lr=0.05)
            _, self.optimizers[name] = distributed(model, sgd_or_adam, self.compressions[name])

    @property
    def objects(self) -> dict[str, Any]:
        models = {f"model_{name}": model for name, model in self.models.items()}
        return models | {f"optimizer_{name}": optimizer for name, optimizer in self.optimizers.items()}

    def train(self, step: int) -> None:
        for name, optimizer in self.optimizers.items():
            train(self.models[name], optimizer, [step])

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
        while state.step < STEPS or hvd.size() == 1:
            begin_step(hosts, state.step, hvd.rank())
            trainings.train(state.step)
            for model in trainings.models.values():
                assert_identical(model)
            # The second death is in a step that begins when three workers train.
            state.step = min(state.step + 1, 19) if hvd.size() == 1 else state.step + 1
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
