"""The hook of `DistributedDataParallel` in one process, where it is forced to compress: what it refuses, and what it needs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from horovod_sparse.torch.detached import Detached
from process import python
from test_step import EVERY, traced
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

from horovod_sparse.torch import DGC, LocalUpdates, NoOp, TopK, comm_hook, register
from horovod_sparse.torch.stock import Compressor

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
    with pytest.warns(UserWarning, match="there is one worker, so nothing is compressed"):
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
        (DGC(0.1, warmup=None), None, ValueError, "optimizer must be given with MomentumCorrection"),
        (DGC(0.1, momentum=0.9, warmup=None), _momentum, ValueError, "optimizer must have momentum=0"),
        (
            TopK(0.1, warmup=None),
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


@pytest.mark.parametrize("name", ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "NAdam", "RMSprop", "Rprop"])
def test_an_optimizer_that_divides_by_the_size_of_the_gradient_causes_a_warning(name: str) -> None:
    make = getattr(torch.optim, name)
    for compression in (TopK(0.1, warmup=None, updates=False), DGC(1.0, warmup=None)):
        model = make_model()
        with pytest.warns(UserWarning, match=rf"train worse with {name} than with SGD.*updates='auto'") as caught:
            register(model, compression, make(model.parameters()))
        assert len(caught) == 1


@pytest.mark.parametrize("compression", [TopK(0.1, lr_in_residual=True), DGC(0.1), TopK(0.1, updates=True)])
def test_a_hook_that_needs_the_optimizer_says_so(compression: Any) -> None:
    model = make_model()
    model.register_comm_hook(compression, comm_hook)
    with pytest.raises(ValueError, match=r"call register\(model, compression, optimizer\)"):
        backward(model)


def _bare(model: Any, compression: Any) -> None:
    model.register_comm_hook(compression, comm_hook)


def _steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        backward(model)
        optimizer.step()


@pytest.mark.parametrize("hook", [_bare, register])
@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (_momentum, "SGD, .* its momentum moves after the selection"),
        (torch.optim.Adam, "Adam, .* its updates are not exchanged in place of gradients"),
    ],
)
def test_an_optimizer_that_is_not_seen_causes_one_warning(hook: Any, make: Any, lost: str) -> None:
    model, other = make_model(), make_model()
    hooks = len(_global_optimizer_pre_hooks)
    hook(model, TopK(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        backward(model)
        _steps(other, make(other.parameters()))
    with pytest.warns(
        UserWarning, match=rf"TopK reduces .* of {lost}.*register\(model, compression, optimizer\)"
    ) as caught:
        _steps(model, make(model.parameters()))
    assert len(caught) == 1
    del model, other, caught
    gc.collect()
    assert len(_global_optimizer_pre_hooks) <= hooks


@pytest.mark.parametrize(
    ("compression", "make", "is_given"),
    [
        (NoOp(), torch.optim.Adam, True),
        (TopK(1.0, warmup=None), torch.optim.Adam, True),
        (DGC(0.1, warmup=None), torch.optim.SGD, True),
        (TopK(0.1, warmup=None), torch.optim.ASGD, True),
        (TopK(0.1), _momentum, True),
        (TopK(0.1), torch.optim.SGD, False),
        (TopK(0.1, updates=False, momentum=None), torch.optim.Adam, False),
        (TopK(0.1, momentum=None), _momentum, False),
        (NoOp(), torch.optim.Adam, False),
        (
            TopK(0.1),
            lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9),
            False,
        ),
    ],
)
def test_an_optimizer_that_is_given_or_would_not_train_better_causes_no_warning(
    compression: Any, make: Any, is_given: bool
) -> None:
    model = make_model()
    optimizer = make([*model.parameters()])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        register(model, compression, optimizer if is_given else None)
        _steps(model, optimizer)


def test_complex_parameters_are_refused_by_name() -> None:
    model = DistributedDataParallel(nn.Linear(2, 3, bias=False, dtype=torch.complex64))
    register(model, TopK(0.1, warmup=None))
    with pytest.raises(TypeError, match="parameter 'weight' must be real"):
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
    given: dict[str, torch.Tensor] = {}

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    layers.get_parameter("1.weight").register_hook(lambda gradient: given.update({"1.weight": gradient.clone()}))
    layers.get_parameter("0.weight").register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward(model)
    # What had arrived is there whole, also what was on its way.
    interrupted = compression.state_dict()["residuals"]
    assert torch.equal(interrupted["0.weight"], saved["residuals"]["0.weight"])
    torch.testing.assert_close(interrupted["1.weight"], saved["residuals"]["1.weight"] + given["1.weight"])
    compression.load_state_dict(saved)
    residuals = compression.state_dict()["residuals"]
    assert all(torch.equal(one, residuals[name]) for name, one in saved["residuals"].items())


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


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_a_step_that_passes_by_what_register_has_left_is_refused(make: Any) -> None:
    """Momentum would be applied twice, or updates would not be exchanged."""
    model = make_model()
    optimizer = make(model.parameters(), lr=0.1)
    register(model, TopK(0.1, min_numel=0, warmup=None), optimizer)
    backward(model)
    with pytest.raises(RuntimeError, match="register has left"):
        type(optimizer).step(optimizer)
    optimizer.step()


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.reshape(-1) for one in model.state_dict().values()])


def test_an_exception_at_any_line_leaves_no_parameter_moved() -> None:
    """Another one comes while they are restored."""
    model = nn.Linear(20, 30)
    parameters, before = [*model.parameters()], values(model)
    detached = Detached(0.5, parameters, lambda: [(one, torch.ones_like(one), 0.1) for one in parameters])
    inputs = torch.ones(2, 20)

    def compute() -> None:
        model(inputs)
        assert not torch.equal(parameters[0].view(-1), before[:600])
        detached.restore()

    compute()
    number, _ = traced(compute)
    for at in range(1, number + 1):
        _, place = traced(compute, at)
        assert place is not None
        traced(detached.restore, at)
        assert torch.equal(values(model), before), place


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_begins_with_the_parameters_themselves(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an exception at the end of backward has left them moved."""

    def trained(*, is_interrupted: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model, compression = make_model(), TopK(0.1, min_numel=0, warmup=None)
        optimizer = make(model.parameters(), lr=0.1)
        register(model, compression, optimizer)
        for step in range(3):
            with monkeypatch.context() as patch:
                if is_interrupted and step:
                    patch.setattr(Detached, "restore", lambda _: None)
                backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    assert torch.equal(trained(is_interrupted=True), trained(is_interrupted=False))


# An interrupt while Python closes a generator cannot be raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_at_any_line_leaves_updates_made_or_not_begun() -> None:
    def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
        """Before a step, with other parameters than the last one has left."""
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        register(model, TopK(0.1, min_numel=0, warmup=None, detached=0), optimizer)
        backward(model)
        optimizer.step()
        model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
        backward(model)
        return model, optimizer

    model, optimizer = stepped()
    before = values(model)
    number, _ = traced(optimizer.step)
    after = values(model)
    assert number > 300 and not torch.equal(before, after)
    for at in range(1, number + 1, EVERY):
        model, optimizer = stepped()
        _, place = traced(optimizer.step, at)
        assert any(torch.equal(values(model), one) for one in (before, after)), place
        # What is loaded then is what the next step begins with.
        model.load_state_dict({name: one * 0 for name, one in model.state_dict().items()})
        backward(model)
        optimizer.step()
        assert values(model).abs().max() < 0.5, place
