"""How often the host waits for a device in a step of an adapter: counted on the CPU, with kernels interpreted."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from triton.runtime.interpreter import GridExecutor

from horovod_sparse.kernels.gpu.bucket import MOST_SLOTS, selector_for
from horovod_sparse.torch import LocalUpdates, Pairs, SIDCo, TopK, Union, comm_hook, device, ops, register, source
from tests.kernels.gpu.test_step import READS, Launches

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process group of one rank, whose residuals are as on a device."""
    monkeypatch.setenv("HOROVOD_SPARSE_FORCE", "1")
    monkeypatch.setattr(device, "has_kernels", lambda where: True)
    monkeypatch.setattr(ops, "on_host", lambda x: False)
    monkeypatch.setattr(source, "tensor_ops", ops.TorchOps)
    monkeypatch.setattr(source, "on_gpu", partial(selector_for, groups=2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield monkeypatch
    dist.destroy_process_group()


def waits_of(patch: pytest.MonkeyPatch, step: Callable[[], object]) -> Counter[str]:
    """What a step reads of tensors, by name. Kernels run on the host here, and an optimizer counts its steps there."""
    counts, is_paused = Counter[str](), False
    run = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        nonlocal is_paused
        is_paused = True
        run(self, *args, **kwargs)
        is_paused = False

    def reading(name: str) -> Callable[..., Any]:
        stock = getattr(torch.Tensor, name)

        def read(*args: Any) -> Any:
            of_optimizer = sys._getframe(1).f_globals["__name__"].startswith("torch.optim.")
            counts[name] += not (is_paused or of_optimizer)
            return stock(*args)

        return read

    with patch.context() as patched:
        patched.setattr(GridExecutor, "__call__", launch)
        for name in READS:
            patched.setattr(torch.Tensor, name, reading(name))
        step()
    return +counts


MOST_LAUNCHES = 6
"""Of `LocalUpdates` for each parameter: two take entries of the sample, and two make them float64."""


def steps_of(
    model: nn.Module, optimizer: Any, *, ahead: bool = False, inputs: torch.Tensor | None = None
) -> Callable[[], None]:
    given = torch.ones(8, 40) if inputs is None else inputs

    def step() -> None:
        optimizer.zero_grad()
        with optimizer.ahead() if ahead else nullcontext():
            model(given).square().mean().backward()
        optimizer.step()

    return step


def settled(step: Callable[[], None]) -> Callable[[], None]:
    """What happens once only has happened."""
    for _ in range(3):
        step()
    return step


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30))


@pytest.mark.parametrize("warmup", [None, "auto"], ids=["sparse", "dense"])
@pytest.mark.parametrize("named", [True, False], ids=["registered", "bare hook"])
def test_ddp_waits_once(alone: pytest.MonkeyPatch, named: bool, warmup: Any) -> None:
    """With a sparse bucket and a dense one; also in the dense steps of the warm-up."""
    model, compression = DistributedDataParallel(small_model()), SIDCo(0.05, min_numel=100, warmup=warmup)
    if named:
        register(model, compression)
    else:
        model.register_comm_hook(compression, comm_hook)
    step = settled(steps_of(model, torch.optim.SGD(model.parameters(), 0.1)))
    assert waits_of(alone, step) == {"tolist": 1}


class Unused(nn.Module):
    """Makes no use of its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 50), nn.Linear(50, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


def test_what_has_no_gradient_takes_no_waits(alone: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(Unused(), find_unused_parameters=True)
    register(model, SIDCo(0.05, min_numel=100, warmup=None))
    step = settled(steps_of(model, torch.optim.SGD(model.parameters(), 0.1)))
    assert waits_of(alone, step) == {"tolist": 1}


@pytest.mark.parametrize("warmup", [None, "auto"], ids=["sparse", "dense"])
def test_fsdp_waits_twice(alone: pytest.MonkeyPatch, warmup: Any) -> None:
    """Once as DDP does, and once to know whether a gradient in another shard was not finite."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = small_model()
    for layer in [*model.children(), model]:
        fully_shard(layer, mesh=mesh["shard"])
    register(model, SIDCo(0.05, min_numel=100, warmup=warmup), replicate=mesh["replicate"])
    step = settled(steps_of(model, torch.optim.SGD(model.parameters(), 0.1)))
    assert waits_of(alone, step) == {"tolist": 1, "item": 1}


def tensors() -> list[torch.Tensor]:
    """All tensors of the process that have entries in the host's memory, also those that other tests have left."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    return [one for one in found if one.layout == torch.strided and one.device.type == "cpu"]


def memory_of(some: Iterable[torch.Tensor]) -> dict[int, int]:
    """Where the memory of tensors is, with its bytes."""
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in some}


NOTES_EACH, NOTES = 1 / MOST_SLOTS, 44_000
"""What a device notes: so many words for each entry of whole tiles, and so many bytes for a bucket."""


@pytest.mark.parametrize(
    ("exchange", "warmup"),
    [
        pytest.param(Pairs(), None, id="pairs"),
        pytest.param(Pairs(), "auto", id="dense", marks=pytest.mark.full),
        pytest.param(Pairs("packed"), None, id="packed", marks=pytest.mark.full),
        pytest.param(Union(), None, id="union", marks=pytest.mark.full),
    ],
)
def test_between_two_steps_residuals_and_notes_are_kept(alone: pytest.MonkeyPatch, exchange: Any, warmup: Any) -> None:
    """4 bytes per parameter, and a quarter of a byte: no message, and no copy of a gradient."""
    torch.manual_seed(0)
    others, wrapped = tensors(), DistributedDataParallel(nn.Linear(80, 100))
    compression = TopK(0.05, min_numel=1000, warmup=warmup, exchange=exchange)
    of_ddp: list[torch.Tensor] = []

    # DDP would compare annotations that are strings with its classes.
    def noting(_, bucket):  # type: ignore[no-untyped-def]
        of_ddp.append(bucket.buffer())
        return comm_hook(compression, bucket)

    wrapped.register_comm_hook(None, noting)
    step = steps_of(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), inputs=torch.ones(8, 80))
    settled(step)
    parameters = [*wrapped.parameters()]
    gradients = [one.grad for one in parameters if one.grad is not None]
    known, numel = memory_of([*others, *of_ddp, *parameters, *gradients]), sum(one.numel() for one in parameters)
    kept = sum(nbytes for address, nbytes in memory_of(tensors()).items() if address not in known)
    # The weights, and the biases, which are dense.
    buckets = 2
    assert 4 * numel <= kept <= 4 * numel * (1 + NOTES_EACH) + buckets * NOTES


@pytest.mark.parametrize("ahead", [False, True])
def test_local_updates_wait_twice(alone: pytest.MonkeyPatch, ahead: bool) -> None:
    """Workers know before an exchange that all are in the same step; then as all others do."""
    model = small_model()
    adamw = torch.optim.AdamW(model.parameters(), 1e-3)
    local = LocalUpdates(adamw, model, SIDCo(0.05, min_numel=100, warmup=None))
    assert waits_of(alone, settled(steps_of(model, local, ahead=ahead))) == {"tolist": 2}


def test_local_updates_launch_little_for_each_parameter(alone: pytest.MonkeyPatch) -> None:
    """Each of them has entries of the sample, by which workers know how far the others have moved."""
    counts = []
    for layers in (2, 6):
        model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(layers)))
        adamw = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
        local = LocalUpdates(adamw, model, SIDCo(0.05, min_numel=100, warmup=None, granularity="model"))
        settled(steps_of(model, local))
        model(torch.ones(8, 40)).square().mean().backward()
        with Launches() as launches:
            local.step()
        counts.append(sum(launches.counts.values()))
    assert counts[1] - counts[0] <= 4 * MOST_LAUNCHES, counts


def test_local_updates_follow_a_model_that_gets_another_type(alone: pytest.MonkeyPatch) -> None:
    """Also between a step and the exchange. With ratio 1 the parameters are those of the optimizer alone."""
    for every in (1, 2):
        models = [small_model(), small_model()]
        models[1].load_state_dict(models[0].state_dict())
        optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in models]
        local = LocalUpdates(optimizers[1], models[1], TopK(1.0, min_numel=0, warmup=None), every=every)
        x = torch.ones(8, 40)
        for number in range(4):
            if number == 3:
                x = x.bfloat16()
                models = [model.to(torch.bfloat16) for model in models]
            for model in models:
                model.zero_grad()
                model(x).square().mean().backward()
            optimizers[0].step()
            local.step()
        local.synchronize()
        for expected, got in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(got, expected, rtol=0.02, atol=1e-3)
