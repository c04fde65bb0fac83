"""What scenarios share: a small model, data that differ per rank, gradients given exactly, comparisons across ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import is_torchelastic_launched
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse.torch as adapter
from tests.harness.backend import ORACLE
from tests.harness.makers import MakeCompression, makers
from tests.harness.worker import Worker
from tests.harness.workers import dense_sum, end_step, exchange, make_worker

from .ddp import ranks
from .scenario import normals as normals
from .scenario import raised as raised
from .scenario import selected as selected

IN_DDP = is_torchelastic_launched()
hvd: Any = ranks if IN_DDP else import_module("horovod.torch")
"""What tells the rank and gathers: of a launch by torchrun, `torch.distributed`."""
DEVICE = ranks.DEVICE
BUCKET_MIB = 0.01
"""Of DDP's buckets. Ours are others."""
BUCKET_BYTES = 40_000
"""Puts the weights of `small_model` into three buckets."""

COMPRESSORS: dict[str, MakeCompression] = {
    name: partial(make, adapter) for name, make in makers(0.01, Threshold={"threshold": 0.05}).items()
}


def small_model(seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """About 29 000 parameters; the same on every rank. The biases are below the default `min_numel`."""
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10)).to(dtype)


def overflowing() -> Any:
    """The gradient of the first layer is infinite while `overflows` is true."""
    model: Any = small_model()
    model.overflows = False
    weight = model.get_parameter("0.weight")
    weight.register_hook(lambda gradient: gradient * float("inf") if model.overflows else gradient)
    return model


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A rank's own inputs and labels of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 32, generator=generator)
    return inputs.to(dtype), torch.randint(0, 10, (16,), generator=generator)


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """A rank's loss, or this one's."""
    inputs, labels = batch(step, hvd.rank() if rank is None else rank, next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs), labels)


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def closure_of(model: nn.Module, optimizer: Any, step: int) -> Callable[[], Tensor]:
    """What an optimizer's step can be given."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    return closure


def wrap(model: nn.Module, compression: Any, *, lr: float = 0.05, momentum: float = 0.9, **arguments: Any) -> Any:
    """SGD, made distributed."""
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return hvd.DistributedOptimizer(
        sgd, named_parameters=model.named_parameters(), compression=compression, **arguments
    )


def distributed(model: nn.Module, optimizer: Any, compression: Any = None, **arguments: Any) -> tuple[Any, Any]:
    """Make training distributed, with DDP or with Horovod, which take the arguments; dense if there is no compression.

    Return the model to call and the optimizer to step.
    """
    if IN_DDP:
        wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": BUCKET_MIB, **arguments})
        if compression is not None:
            adapter.register(wrapped, compression, optimizer)
        return wrapped, optimizer
    compression = hvd.Compression.none if compression is None else compression
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, **arguments)


def assert_trains_as_one(
    make: Callable[[], nn.Module],
    loss: Callable[[Any, int, int], Tensor],
    prepare: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
    *,
    trained: Callable[[Any], Iterable[Tensor]] = nn.Module.parameters,
    momentum: float = 0.0,
    set_to_none: bool = True,
    **arguments: Any,
) -> tuple[Any, Any]:
    """Ranks that send all train as one process with everybody's loss(model, step, rank). Those that select stay the same.

    `prepare(model, optimizer, step)` comes before a step; `trained(model)` are the parameters from the first step on, and
    `arguments` those of Horovod's optimizer. Return the model that sends all, and its compression.
    """
    models, compression = [make() for _ in range(3)], adapter.NoOp()
    optimizers: list[Any] = [torch.optim.SGD(trained(model), lr=0.05, momentum=momentum) for model in models]
    for number, one in ((1, compression), (2, adapter.SIDCo(0.05, granularity="layer", warmup=None))):
        _, optimizers[number] = distributed(models[number], optimizers[number], one, **arguments)
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            prepare(model, optimizer, step)
            optimizer.zero_grad(set_to_none=set_to_none)
            ranks = range(hvd.size()) if model is models[0] else [hvd.rank()]
            torch.stack([loss(model, step, rank) for rank in ranks]).mean().backward()
            optimizer.step()
    assert_close(models[1], models[0])
    for model in models[1:]:
        assert_identical(model)
    return models[1], compression


# --- gradients that are known exactly ---


def zeros(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Named parameters that are zero."""
    return {name: nn.Parameter(torch.zeros(tuple(shape), dtype=dtype)) for name, shape in shapes.items()}


def wrap_parameters(parameters: Mapping[str, nn.Parameter], compression: Any, **arguments: Any) -> Any:
    """SGD over named parameters, made distributed."""
    sgd = torch.optim.SGD(list(parameters.values()), lr=0.1)
    return hvd.DistributedOptimizer(sgd, list(parameters.items()), compression=compression, **arguments)


def feed(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, np.ndarray]) -> None:
    """Run a backward pass in which every named parameter gets exactly the gradient given."""
    products = [
        (parameters[name] * torch.from_numpy(gradient).to(parameters[name].dtype)).sum()
        for name, gradient in gradients.items()
    ]
    torch.stack(products).sum().backward()


def reduce(optimizer: Any, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, np.ndarray]) -> None:
    """One step's reduction, without the update. It is written where the gradients were: there is no dense buffer besides."""
    optimizer.zero_grad()
    feed(parameters, gradients)
    memory = {name: parameters[name].grad.data_ptr() for name in gradients}
    optimizer.synchronize()
    assert {name: parameters[name].grad.data_ptr() for name in gradients} == memory
    with optimizer.skip_synchronize():
        optimizer.step()


def whole_numbers(shape: Sequence[int], *, step: int, rank: int, salt: int = 0) -> np.ndarray:
    """Gradients whose sums over a few ranks and steps are exact in float32; heavy-tailed, so that selections differ."""
    generator = np.random.default_rng((salt, step, rank))
    return np.rint(generator.laplace(scale=50.0, size=tuple(shape)) ** 3 / 1e3).clip(-1e4, 1e4).astype(np.float32)


def gradient_of(parameter: Tensor) -> np.ndarray:
    """A copy of a parameter's gradient."""
    return parameter.grad.clone().numpy()


class Oracle:
    """All ranks' workers, in NumPy and in this process."""

    def __init__(self, compression: Any, shapes: Mapping[str, Sequence[int]], world: int) -> None:
        self.workers: list[Worker] = [
            make_worker(ORACLE, compression, shapes, world=world, position=position) for position in range(world)
        ]

    def reduce(self, gradients: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The mean of all ranks' gradients, as it is after one step."""
        world, first = len(self.workers), self.workers[0]
        for worker, local in zip(self.workers, gradients, strict=True):
            worker.start_step()
            for name, gradient in local.items():
                worker.arrive(name, gradient)
        reduced: dict[str, np.ndarray] = {}
        for buckets in zip(*(worker.buckets for worker in self.workers), strict=True):
            for name, parts in exchange(ORACLE, self.workers, buckets, float(world))[0].items():
                slot = first.bucket_of[name].slots[name]
                reduced[name] = dense_sum(parts, slot.numel).reshape(slot.shape)
        for worker in self.workers:
            end_step(worker)
        return reduced


# --- across ranks ---


def everyone(value: Any, name: str = "everyone") -> list[Any]:
    """Every rank's value, in rank order."""
    gathered: list[Any] = hvd.allgather_object(value, name=name)
    return gathered


def digest(tensors: Iterable[Tensor]) -> str:
    """Of the bytes of some tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        sha.update(dense.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def kept(compression: Any) -> str:
    """A digest of what a rank keeps from step to step."""
    state = compression.state_dict()
    arrays = [array for part in ("residuals", "velocities") for _, array in sorted(state[part].items())]
    return digest(arrays) + str(sorted(state["adaptive"].items()))


def assert_identical(model: nn.Module | Iterable[Tensor]) -> None:
    """The parameters are the same on every rank, to the last bit, and finite."""
    tensors = list(model.parameters() if isinstance(model, nn.Module) else model)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    digests = everyone(digest(tensors))
    assert len(set(digests)) == 1, f"replicas differ: {digests}"


def assert_close(model: nn.Module, other: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Two models have the same parameters, to float32 tolerance."""
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))
