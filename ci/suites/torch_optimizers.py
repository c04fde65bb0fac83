"""PyTorch's optimizers in all configurations that its own tests know, as tests for pytest on 2 ranks under mpirun.

Each optimizer trains on two halves of the data, and in one process on the union. Parameters must be the same, to rounding.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_optimizers

from suites import outcomes

STEPS = 6
HOROVOD, DDP = "Horovod", "DDP"
DIFFERENTIABLE = "differentiable"
"""Steps of such an optimizer can be differentiated. It trains no leaves, so it trains copies of the parameters."""


def configurations() -> Iterator[Any]:
    """All optimizers, with each of their settings, and with each implementation that runs on CPUs."""
    database: list[Any] = common_optimizers.optim_db
    for info in database:
        kinds: list[Mapping[str, bool]] = [{}]
        kinds += [{kind: True} for kind in ("foreach", "fused", DIFFERENTIABLE) if kind in info.supported_impls]
        for given in info.optim_inputs_func("cpu"):
            for kind in kinds:
                if kind.get("fused") and "cpu" not in info.supports_fused_on:
                    continue
                name = "-".join([info.optim_cls.__name__, given.desc, *kind])
                yield pytest.param(info, {**given.kwargs, **kind}, id=name)


class _Looked(nn.Module):
    """A model with what the optimizer can train: only matrices, sparse gradients, or anything."""

    def __init__(self, info: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        sparse, matrices = info.only_supports_sparse_grads, info.optim_cls.__name__ == "Muon"
        self.table = None if matrices else nn.Embedding(20, 8, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(8, 16, bias=not matrices), nn.Tanh(), nn.Linear(16, 3, bias=not matrices))
        if sparse:
            self.layers.requires_grad_(False)

    def forward(self, indices: Tensor) -> Tensor:
        rows = torch.nn.functional.one_hot(indices % 8, 8).float() if self.table is None else self.table(indices)
        result: Tensor = self.layers(rows)
        return result


class _OfCopies:
    """A differentiable optimizer of copies of the parameters, whose gradients `sender` reduces when it is told to."""

    def __init__(self, parameters: list[nn.Parameter], make: Callable[[list[Tensor]], Any], sender: Any = None) -> None:
        self._parameters, self._sender = parameters, sender
        self.copies = [one.clone() for one in parameters]
        self._optimizer = make(self.copies)

    def step(self) -> None:
        if self._sender is not None:
            self._sender.synchronize()
        for copied, parameter in zip(self.copies, self._parameters, strict=True):
            copied.grad = parameter.grad
        self._optimizer.step()
        with torch.no_grad():
            for copied, parameter in zip(self.copies, self._parameters, strict=True):
                parameter.copy_(copied)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _halves(step: int) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(step)
    indices = torch.randint(20, (2, 12), generator=numbers)
    return [(one, one % 3) for one in indices]


def _step(optimizer: Any, model: nn.Module, parts: list[tuple[Tensor, Tensor]], closed: bool) -> None:
    """Train on parts of the data. An optimizer that needs a closure decides by the loss, which must be that of all ranks."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [torch.nn.functional.cross_entropy(model(indices), labels) for indices, labels in parts]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.detach() if len(parts) == 2 or not closed else hvd.allreduce(loss.detach(), name="loss")

    if closed:
        optimizer.step(closure)
        return
    closure()
    optimizer.step()


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    hvd.init()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = hvd.broadcast_object(free.getsockname()[1])
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size()
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("transport", [HOROVOD, DDP])
@pytest.mark.parametrize(("info", "settings"), [*configurations()])
def test_trains_as_on_the_union(info: Any, settings: dict[str, Any], transport: str) -> None:
    union, own = _Looked(info), _Looked(info)
    differentiable = bool(settings.get(DIFFERENTIABLE))

    def make(parameters: list[Any]) -> Any:
        return info.optim_cls(parameters, **copy.deepcopy(settings))

    trained = [(name, one) for name, one in own.named_parameters() if one.requires_grad]
    parameters = [one for _, one in trained]
    aimed = [one for one in union.parameters() if one.requires_grad]
    wanted = _OfCopies(aimed, make) if differentiable else make(aimed)
    # Horovod reduces for an optimizer of leaves.
    optimizer: Any = torch.optim.SGD(parameters, lr=0.0) if differentiable else make(parameters)
    model: nn.Module = own
    compression: Any = None
    # Dense is stock Horovod, which this package extends when it is imported.
    if outcomes.ours():
        from horovod_sparse.torch import TopK, register

        compression = TopK(1.0, min_numel=0, warmup=None)
        outcomes.note_use()
    if transport == HOROVOD:
        chosen = {} if compression is None else {"compression": compression}
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=trained, **chosen)
    else:
        model = DistributedDataParallel(own)
        if compression is not None:
            register(model, compression)
    if differentiable:
        optimizer = _OfCopies(parameters, make, optimizer if transport == HOROVOD else None)
    for step in range(STEPS):
        halves = _halves(step)
        _step(wanted, union, halves, info.step_requires_closure)
        _step(optimizer, model, [halves[hvd.rank()]], info.step_requires_closure)
    for one, other in zip(own.parameters(), union.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert not differentiable or all(one.grad_fn is not None for one in optimizer.copies)
    # Horovod's own path for sparse gradients serves those of embeddings.
    assert compression is None or info.only_supports_sparse_grads or compression.stats().steps >= STEPS
