"""The hook of `DistributedDataParallel` in one process, where it is forced to compress: what it refuses, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import DGC, LocalUpdates, TopK, comm_hook, register
from horovod_sparse.torch.stock import Compressor
from tests.harness.process import python

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather:FutureWarning")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_SPARSE_FORCE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(20, 30))


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 20)).sum().backward()


def test_one_worker_without_force_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SPARSE_FORCE", "0")
    model, plain = make_model(), make_model()
    with pytest.warns(UserWarning, match="one worker.*HOROVOD_SPARSE_FORCE=1"):
        register(model, TopK(0.1, warmup=None))
    for one in (model, plain):
        backward(one)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None and mine.grad.equal(theirs.grad)


@pytest.mark.parametrize(
    ("compression", "make", "error", "text"),
    [
        (TopK, None, TypeError, "compression must be an instance, such as TopK"),
        *(
            (one, None, TypeError, r"horovod_sparse.torch, such as TopK\(ratio=0.01\), got")
            for one in ("TopK", Compressor)
        ),
        (TopK(0.1, lr_in_residual=True, warmup=None), None, ValueError, "optimizer must be given"),
        (DGC(0.1, momentum=0.9, warmup=None), _momentum, ValueError, "optimizer must have momentum=0"),
        (
            TopK(0.1, lr_in_residual=True, warmup=None),
            lambda parameters: torch.optim.AdamW([*parameters][:1]),
            ValueError,
            r"optimizer must have all parameters of the model .* got none of \['bias'\]",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused(compression: Any, make: Any, error: type[Exception], text: str) -> None:
    model = make_model()
    optimizer = None if make is None else make(model.parameters())
    with pytest.raises(error, match=text):
        register(model, compression, optimizer)


def test_a_compressor_serves_one_model_in_ddp_which_has_one_hook() -> None:
    with pytest.raises(TypeError, match=r"model must be in torch\.nn.parallel.DistributedDataParallel, or sharded"):
        register(nn.Linear(2, 2), TopK(0.1, warmup=None))
    model, compression, second = make_model(), TopK(0.1, warmup=None), TopK(0.1, warmup=None)
    register(model, compression)
    with pytest.raises(ValueError, match="compression must serve one optimizer"):
        register(make_model(), compression)
    with pytest.raises(RuntimeError, match="model must have no communication hook yet"):
        register(model, second)
    register(make_model(), second)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.ones(3), "For a model of fully_shard, call register"),
        # As torch._dynamo.config.optimize_ddp = "python_reducer" calls it, which would keep the model alive.
        ((torch.ones(3), nn.Parameter(torch.ones(3))), "set it to True, or to 'ddp_optimizer'"),
    ],
    ids=["FSDP", "python_reducer"],
)
def test_what_is_no_bucket_of_ddp_is_refused(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        comm_hook(TopK(0.1, warmup=None), given)


def test_complex_parameters_are_refused_by_name() -> None:
    model = DistributedDataParallel(nn.Linear(2, 3, bias=False, dtype=torch.complex64))
    register(model, TopK(0.1, warmup=None))
    with pytest.raises(TypeError, match=r"parameter 'weight' must be real, got torch\.complex64.*torch\.view_as_real"):
        model(torch.ones(2, dtype=torch.complex64)).abs().sum().backward()


@pytest.mark.parametrize(
    "serve",
    [register, lambda model, compression: LocalUpdates(_momentum(model.parameters()), model.module, compression)],
)
def test_a_dtensor_is_refused_by_name(serve: Any) -> None:
    model = make_model()
    mesh = init_device_mesh("cpu", (1,))
    model.module.weight = nn.Parameter(distribute_tensor(model.module.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(TypeError, match=r"parameter 'weight' must have its values in memory of its own, got a DTensor"):
        serve(model, TopK(0.1, warmup=None))


def test_a_state_can_be_loaded_after_an_interrupted_backward_pass() -> None:
    """DDP itself does not go on after it."""
    layers = nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 30))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.001)
    compression = TopK(0.1, min_numel=0, granularity=1000, warmup=None)
    register(model, compression)
    backward(model)
    saved = compression.state_dict()
    model.zero_grad()

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    layers.get_parameter("0.weight").register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward(model)
    # Nothing of it is left, also of what was on its way.
    for loads in (False, True):
        if loads:
            compression.load_state_dict(saved)
        residuals = compression.state_dict()["residuals"]
        for name, residual in saved["residuals"].items():
            torch.testing.assert_close(residuals[name], residual, rtol=0.0, atol=0.0 if loads else 1e-6)


ALONE = """
import gc, sys
from pathlib import Path
sys.modules["horovod"] = None
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import horovod_sparse.torch as sparse

def train():
    model, compression = DistributedDataParallel(torch.nn.Linear(20, 30)), sparse.TopK(0.1, min_numel=0, warmup=None)
    sparse.register(model, compression)
    model(torch.ones(2, 20)).sum().backward()
    assert sum(int(parameter.grad.count_nonzero()) for parameter in model.parameters()) == 63
    assert compression.stats().last.total.bytes_sent == 0

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train()
assert not [name for name in sys.modules if name.startswith("horovod.")]
try:
    sparse.DistributedOptimizer
except AttributeError as error:
    print(error)
gc.collect()
dist.destroy_process_group()
print("threads:", *[thread.joinpath("comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()])
"""


def test_horovod_is_not_needed_and_no_thread_of_gloo_outlives_its_group() -> None:
    """A thread that outlives Python can abort the process."""
    done = python("-c", ALONE)
    assert done.returncode == 0, done.stderr
    assert "horovod.torch cannot be imported" in done.stdout
    assert "gloo" not in done.stdout.partition("threads: ")[2], done.stdout


def test_two_models_may_have_one_optimizer() -> None:
    models = [make_model() for _ in range(2)]
    optimizer = torch.optim.AdamW([one for model in models for one in model.parameters()], lr=0.1)
    for model in models:
        register(model, TopK(0.1, min_numel=0, warmup=None), optimizer)
    before = [one.detach().clone() for model in models for one in model.parameters()]
    for model in models:
        backward(model)
    optimizer.step()
    after = [one.detach() for model in models for one in model.parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def make_keras() -> Any:
    return pytest.importorskip("horovod_sparse.tensorflow", exc_type=ImportError).TopK(0.1)


def test_a_compressor_of_another_framework_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"compression must be a compressor of horovod_sparse\.torch, got one of .*; import"
    ):
        register(make_model(), make_keras())


@pytest.mark.parametrize(("make", "advised"), [(torch.optim.SGD, ""), (torch.optim.AdamW, "AdamW")])
def test_the_log_advises_where_an_optimizer_is_given(make: Any, advised: str, caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer stays as it is."""
    caplog.set_level("INFO", "horovod_sparse")
    model = make_model()
    optimizer = make(model.parameters(), lr=0.1)
    before = {name: value for name, value in vars(optimizer).items() if name != "param_groups"}
    register(model, TopK(0.1, min_numel=0, warmup=None), optimizer)
    for _ in range(2):
        backward(model)
    (line,) = caplog.messages
    assert ("LocalUpdates(optimizer, model, compression)" in line) == bool(advised) and advised in line
    assert {name: value for name, value in vars(optimizer).items() if name != "param_groups"} == before
