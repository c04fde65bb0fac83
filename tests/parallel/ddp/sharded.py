"""Scenarios: models that `fully_shard` has sharded, whose replicas exchange gradients while backward goes on."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from horovod_sparse.torch import LocalUpdates, MiCRO, NoOp, SIDCo, TopK, joined, register
from horovod_sparse.torch.parameters import local_part

from ..common import (
    BUCKET_BYTES,
    COMPRESSORS,
    DEVICE,
    MakeCompression,
    Oracle,
    digest,
    distributed,
    everyone,
    hvd,
    loss_of,
    raised,
    small_model,
    train,
    whole_numbers,
)
from ..scenario import TORCHRUN_2, TORCHRUN_4, TORCHRUN_6, scenario, warned
from .common import Exact, adamw, sgd, train_in_passes

SHAPES: dict[str, tuple[int, ...]] = {"first": (41, 50), "second": (3001,), "third": (20, 5, 9)}
"""Neither 41 nor 3001 is even."""


@cache
def mesh_of(replicas: int) -> DeviceMesh:
    """All ranks: those of a row hold a replica together, those of a column the same shard."""
    shape = (replicas, hvd.size() // replicas)
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: Any, **arguments: Any) -> Any:
    """Shard every layer with parameters, and then what is left."""
    for layer in model.children():
        if [*layer.parameters()]:
            fully_shard(layer, mesh=mesh, **arguments)
    return fully_shard(model, mesh=mesh, **arguments)


def wrapped(model: nn.Module, make: Callable[[Any], Any], compression: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """Shard a model, and let a compression reduce its gradients. Return the model and its optimizer."""
    sharded = shard(model, mesh["shard"])
    register(sharded, compression, replicate=mesh["replicate"])
    return sharded, make(sharded)


def here(model: Any) -> list[Tensor]:
    """The parts of the parameters that this rank holds."""
    return [parameter.detach().to_local() for parameter in model.parameters()]


def assert_same_shards(model: nn.Module, mesh: DeviceMesh) -> None:
    """Ranks with the same shard have the same values, to the last bit, and finite."""
    assert all(bool(part.isfinite().all()) for part in here(model))
    digests = everyone(digest(here(model)))
    for column in mesh.mesh.T.tolist():
        assert len({digests[rank] for rank in column}) == 1, digests


def whole(model: Any) -> dict[str, Tensor]:
    return {name: one.full_tensor().detach() for name, one in model.named_parameters()}


def replica(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank("replicate")


def part(array: np.ndarray, mesh: DeviceMesh) -> np.ndarray:
    """What this rank holds of an array."""
    chunks = torch.chunk(torch.from_numpy(array), mesh["shard"].size())
    return np.ascontiguousarray(chunks[mesh.get_local_rank("shard")].numpy())


# --- what is exchanged ---


@scenario(TORCHRUN_4, TORCHRUN_6, cases={name: (make,) for name, make in COMPRESSORS.items()})
def shards_are_exchanged_as_numpy_does(make: MakeCompression) -> None:
    """All ranks of a replica have the same gradient, so that each shard's is known.

    Means of whole numbers over two replicas are exact, and so is all that is sent and kept.
    """
    mesh = mesh_of(hvd.size() // 2)
    settings: dict[str, Any] = {"granularity": 16_000}
    compression = make(**settings)
    model, optimizer = wrapped(Exact(SHAPES), partial(sgd, momentum=0.0), compression, mesh)

    parts = {name: part(np.zeros(shape), mesh).shape for name, shape in SHAPES.items()}
    oracle = Oracle(make(**settings), parts, mesh["replicate"].size())
    tolerance = 0.0 if mesh["replicate"].size() == 2 else 1e-6
    for step in range(6):
        given = [
            {name: whole_numbers(shape, step=step, rank=one) for name, shape in SHAPES.items()}
            for one in range(mesh["replicate"].size())
        ]
        optimizer.zero_grad()
        model(given[replica(mesh)]).backward()
        expected = oracle.reduce([{name: part(array, mesh) for name, array in local.items()} for local in given])
        for name, parameter in model.named_parameters():
            reduced = parameter.grad.to_local().numpy()
            np.testing.assert_allclose(reduced, expected[name], tolerance, tolerance, err_msg=f"{name}, {step}")
        optimizer.step()
    mine, theirs = compression.stats().mean.total, oracle.workers[replica(mesh)].stats().mean.total
    assert mine.count == theirs.count > 0
    residuals = oracle.workers[replica(mesh)].state_dict()["residuals"]
    for name, residual in compression.state_dict()["residuals"].items():
        np.testing.assert_allclose(residual.numpy(), residuals[name], tolerance, tolerance)


def assert_nothing_is_lost(
    waits: dict[str, Tensor], mesh: DeviceMesh, model: Any, optimizer: Any, compression: Any, tolerance: float
) -> None:
    """In five steps, replicas together send what waits on them and what they are given, less what then waits."""
    sent, given = (
        {name: torch.zeros_like(one, dtype=torch.float64) for name, one in zip(SHAPES, here(model), strict=True)}
        for _ in range(2)
    )
    for step in range(5):
        optimizer.zero_grad()
        local = {name: whole_numbers(shape, step=step, rank=replica(mesh)) for name, shape in SHAPES.items()}
        model(local).backward()
        for name, parameter in model.named_parameters():
            given[name] += torch.from_numpy(part(local[name], mesh))
            sent[name] += parameter.grad.to_local()
        optimizer.step()
    residuals = compression.state_dict()["residuals"]
    replicas = mesh["replicate"]
    for name in SHAPES:
        mine = (waits[name] + given[name] - residuals[name]).contiguous()
        dist.all_reduce(mine, group=replicas.get_group())
        mean = mine / replicas.size()
        torch.testing.assert_close(mean, sent[name], rtol=tolerance, atol=tolerance)


@scenario(TORCHRUN_4)
def passes_are_one_step() -> None:
    """What FSDP does not average yet is not exchanged."""
    results = []
    for passes in (1, 2):
        model, optimizer, compression = made(sgd, mesh_of(2))
        train_in_passes(model, optimizer, passes)
        assert compression.stats().steps == 4
        results.append(digest(here(model)))
    assert results[0] == results[1]


# --- training ---


class Tied(nn.Module):
    """Its first and last layers have one matrix. A layer is not trained, and a bias has one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(32, 128, bias=False)
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.single = nn.Linear(128, 1)
        self.score = nn.Linear(128, 32, bias=False)
        self.score.weight = nn.Parameter(self.embedding.weight.T.contiguous().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.frozen(self.embedding(inputs).relu()).relu()
        return (hidden @ self.embedding.weight + self.single(hidden))[:, :10] + self.score(hidden)[:, :10]


def _summed(model: Any) -> None:
    for module in (model, model.frozen):
        module.set_force_sum_reduction_for_comms(True)


def _divided(model: Any) -> None:
    # Gloo has no other way to do it.
    _summed(model)
    for module in (model, model.frozen):
        module.set_gradient_divide_factor(8.0)


_WAYS: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "plain": ({}, lambda model: None),
    "kept": ({"reshard_after_forward": False}, lambda model: None),
    "half": (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        lambda model: None,
    ),
    "divided": ({}, _divided),
    "summed": ({}, _summed),
}


@scenario(TORCHRUN_4, cases=_WAYS)
def ratio_one_is_fsdp_with_replicas(arguments: dict[str, Any], change: Callable[[Any], None]) -> None:
    """Also with frozen layers, a matrix in two layers, and parameters with fewer entries than there are shards."""
    mesh = mesh_of(2)
    for nesterov in (False, True):
        torch.manual_seed(1)
        model, optimizers = Tied(), []
        models = copy.deepcopy(model), model
        for one, over in zip(models, (mesh, mesh["shard"]), strict=True):
            fully_shard(one.frozen, mesh=over, **arguments)
            fully_shard(one, mesh=over, **arguments)
            change(one)
            optimizers.append(
                torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=1e-3)
            )
        register(model, TopK(1.0, min_numel=0, warmup=None), replicate=mesh["replicate"])
        for one, optimizer in zip(models, optimizers, strict=True):
            train(one, optimizer, range(8))
        found = whole(model)
        for name, expected in whole(models[0]).items():
            torch.testing.assert_close(found[name], expected, rtol=2e-5, atol=2e-6, msg=f"{name}: {{}}".format)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {"SGD": sgd, "AdamW": adamw}
_STEPS = {name: (step,) for name, step in OPTIMIZERS.items()}
_MAKES: dict[str, Callable[[], Any]] = {
    "plain line": lambda: SIDCo(0.05, warmup=2.0, granularity=BUCKET_BYTES),
    "TopK": lambda: TopK(0.02, warmup=None, granularity=BUCKET_BYTES),
    "MiCRO": lambda: MiCRO(0.05, warmup=2.0, granularity=BUCKET_BYTES),
    "clipped": lambda: TopK(0.02, clip=0.5, warmup=None, granularity=BUCKET_BYTES),
}


_TRAININGS = {f"{name}-{make}": (OPTIMIZERS[name], _MAKES[make]) for name in OPTIMIZERS for make in _MAKES}
_SOME = ("SGD-plain line", "SGD-MiCRO", "AdamW-plain line")


@scenario(TORCHRUN_2, cases=_TRAININGS)
def one_shard_is_ddp_to_the_last_bit(step: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    plain, model = small_model(), small_model()
    ddp, optimizer = distributed(plain, step(plain), make())
    train(ddp, optimizer, range(20))
    sharded, steps = wrapped(model, step, make(), mesh_of(2))
    train(sharded, steps, range(20))
    assert digest(here(sharded)) == digest(plain.parameters())


@scenario(TORCHRUN_4, TORCHRUN_6, cases={name: _TRAININGS[name] for name in _SOME})
def replicas_stay_identical(step: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    mesh = mesh_of(hvd.size() // 2)
    model, optimizer = wrapped(small_model(), step, make(), mesh)
    before = digest(here(model))
    # The warm-up ends after 40 steps.
    train(model, optimizer, range(60))
    assert_same_shards(model, mesh)
    assert digest(here(model)) != before


@scenario(TORCHRUN_4)
def activation_checkpointing_and_compiled_layers() -> None:
    mesh, plain = mesh_of(2), small_model()
    models = []
    for change in (False, True):
        model = copy.deepcopy(plain)
        if change:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
            model[2].compile(backend="eager")
        sharded, optimizer = wrapped(model, sgd, TopK(0.02, warmup=None), mesh)
        train(sharded, optimizer, range(4))
        models.append(sharded)
    assert_same_shards(models[1], mesh)
    for mine, theirs in zip(here(models[1]), here(models[0]), strict=True):
        torch.testing.assert_close(mine, theirs)


@scenario(TORCHRUN_2)
def parameters_move_ahead_as_those_of_ddp() -> None:
    models = []
    for sharded in (False, True):
        model, compression, mesh = small_model(), TopK(0.02, warmup=None, granularity=BUCKET_BYTES), mesh_of(2)
        called: Any = shard(model, mesh["shard"]) if sharded else nn.parallel.DistributedDataParallel(model)
        optimizer = sgd(called)
        register(called, compression, optimizer, **({"replicate": mesh["replicate"]} if sharded else {}))
        for step in range(6):
            optimizer.zero_grad()
            before = digest(map(local_part, model.parameters()))
            with compression.ahead(called, 0.5):
                assert (digest(map(local_part, model.parameters())) != before) == (step > 0)
                loss_of(called, step).backward()
            assert digest(map(local_part, model.parameters())) == before
            optimizer.step()
        models.append(digest(map(local_part, model.parameters())))
    assert models[0] == models[1]


@scenario(TORCHRUN_4)
def reduced_gradients_can_be_clipped() -> None:
    """After backward, as in a process with whole gradients. The optimizer's step is its own."""
    mesh, compression = mesh_of(2), NoOp()
    model, optimizer = wrapped(small_model(), partial(sgd, momentum=0.0), compression, mesh)
    plain = small_model()
    reference = sgd(plain, momentum=0.0)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        clipped = digest(one.grad.to_local() for one in model.parameters())
        optimizer.step()
        # The step reduces nothing again.
        assert digest(one.grad.to_local() for one in model.parameters()) == clipped
        reference.zero_grad()
        for rank in range(hvd.size()):
            (loss_of(plain, step, rank) / hvd.size()).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step()
        found_norm: Any = norm
        torch.testing.assert_close(found_norm.full_tensor(), expected)
    found = whole(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert compression.stats().steps == 4
    assert not hasattr(optimizer, "synchronize") and "step" not in vars(optimizer)


@scenario(TORCHRUN_4, cases={"none": (True,), "zeros": (False,)})
def a_step_can_be_left_out(set_to_none: bool) -> None:
    mesh = mesh_of(2)
    model, optimizer = wrapped(small_model(), sgd, TopK(0.02, warmup=None), mesh)
    for step in range(4):
        loss_of(model, step).backward()
        if step % 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none)
        assert_same_shards(model, mesh)


# --- while backward goes on ---


@scenario(TORCHRUN_4)
def exchanges_begin_within_backward() -> None:
    """From the second step on: in the first one, ranks agree on the parameters at the end."""
    mesh = mesh_of(2)
    model = small_model()
    begun: list[int] = []

    def note(_: Tensor) -> None:
        step = compression.source.driver.step
        begun.append(0 if step is None else sum(not one.missing for one in step.sendings.values()))

    sharded = shard(model, mesh["shard"])
    compression = TopK(0.02, warmup=None, granularity=BUCKET_BYTES)
    register(sharded, compression, replicate=mesh["replicate"])
    # Its gradient is the last one.
    next(sharded.parameters()).register_post_accumulate_grad_hook(note)
    train(sharded, sgd(sharded), range(3))
    assert begun[0] == 0 and min(begun[1:]) > 0, begun
    assert_same_shards(sharded, mesh)


class Called(nn.Module):
    """Calls its middle layer twice, and one of its last ones only where it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.score = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.some = nn.Linear(64, 10)
        self.is_some = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).relu()
        hidden = self.middle(self.middle(hidden).relu()).relu()
        return self.score(hidden) + self.some(hidden) if self.is_some else self.score(hidden)


@scenario(TORCHRUN_2)
def layers_that_are_called_twice_and_layers_that_some_ranks_leave_out() -> None:
    """With ratio 1 that is a mean over the ranks, as it is without the compression, whatever a rank has left out."""
    torch.manual_seed(1)
    plain, mesh = Called(), mesh_of(2)
    model: Any = shard(copy.deepcopy(plain), mesh["shard"])
    register(model, TopK(1.0, min_numel=0, warmup=None, granularity=4096), replicate=mesh["replicate"])
    reference, optimizer = sgd(plain), sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        model.is_some = step == 0 or hvd.rank() == step % 2
        loss_of(model, step).backward()
        optimizer.step()
        reference.zero_grad()
        for rank in range(hvd.size()):
            plain.is_some = step == 0 or rank == step % 2
            (loss_of(plain, step, rank) / hvd.size()).backward()
        reference.step()
        assert_same_shards(model, mesh)
    found = whole(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=2e-5, atol=2e-6, msg=f"{name}: {{}}".format)


@scenario(TORCHRUN_2, TORCHRUN_4)
def training_goes_on_after_an_exception_within_backward() -> None:
    """Nothing of the pass is left, and later ones are exchanged."""
    mesh = mesh_of(2)
    models = []
    for raises in (False, True):
        model, optimizer, _ = made(sgd, mesh)
        for step in range(12):
            if raises and step == 6:
                fail(model)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert_same_shards(model, mesh)
        models.append(model)
    for mine, theirs in zip(here(models[1]), here(models[0]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def fail(model: Any) -> None:
    """Let a pass end by an exception when the gradients of the last layer are there."""

    def stop(*_: object) -> None:
        raise KeyError("stopped")

    hook = model[0].register_full_backward_hook(stop)
    raised(KeyError, loss_of(model, 0).backward)
    hook.remove()
    # Otherwise FSDP would reduce nothing from now on.
    model.reset_iter_state()


# --- states ---


def made(step: Callable[[Any], Any], mesh: DeviceMesh) -> tuple[Any, Any, Any]:
    """A model, its optimizer and the compression that reduces its gradients."""
    compression = SIDCo(0.02, warmup=2.0, granularity=BUCKET_BYTES)
    return *wrapped(small_model(), step, compression, mesh), compression


def save(folder: Path, mesh: DeviceMesh, model: Any, optimizer: Any, compression: Any) -> None:
    """Model and optimizer by `torch.distributed.checkpoint` in each replica, the compression by each rank."""
    own = folder / f"replica-{replica(mesh)}"
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=own, process_group=mesh["shard"].get_group())
    torch.save(compression.state_dict(), own / f"compression-{mesh.get_local_rank('shard')}.pt")


def load(
    folder: Path, mesh: DeviceMesh, model: Any, optimizer: Any, compression: Any, shard: int | None = None
) -> None:
    """Load what `save` has written for this replica. If there are more or fewer now, what has waited in all is joined.

    `shard` is the place of the shard whose residuals are loaded; None for this rank's.
    """
    own = folder / f"replica-{replica(mesh)}"
    own = own if own.exists() else folder / "replica-0"
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=own, process_group=mesh["shard"].get_group())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    place = mesh.get_local_rank("shard") if shard is None else shard
    files = sorted(folder.glob(f"replica-*/compression-{place}.pt"))
    files = [own / files[0].name] if len(files) == mesh["replicate"].size() else files
    compression.load_state_dict(joined(torch.load(file, weights_only=True) for file in files))


@scenario(TORCHRUN_4, cases=_STEPS)
def training_resumes_bit_for_bit(step: Callable[[Any], Any]) -> None:
    mesh, folder = mesh_of(2), Path(everyone(tempfile.mkdtemp())[0])
    straight, optimizer, _ = made(step, mesh)
    train(straight, optimizer, range(12))
    model, optimizer, compression = made(step, mesh)
    train(model, optimizer, range(6))
    optimizer.zero_grad()
    save(folder, mesh, model, optimizer, compression)
    model, optimizer, compression = made(step, mesh)
    load(folder, mesh, model, optimizer, compression)
    train(model, optimizer, range(6, 12))
    assert digest(here(model)) == digest(here(straight))
    everyone("saved")
    other = 1 - mesh.get_local_rank("shard")
    message = raised(ValueError, lambda: load(folder, mesh, model, optimizer, compression, shard=other))
    assert "state must be that of shard" in message, message


@scenario(TORCHRUN_6, quick=False)
def more_replicas_send_what_fewer_have_kept() -> None:
    """Four ranks save, and six go on: as three replicas of two shards, and not as two replicas of three."""
    folder = Path(everyone(tempfile.mkdtemp())[0])
    two, three = DeviceMesh(DEVICE, [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard")), mesh_of(3)

    def fresh(mesh: DeviceMesh) -> tuple[Any, Any, Any]:
        compression = TopK(0.05, warmup=None, granularity=16_000)
        return *wrapped(Exact(SHAPES), partial(sgd, momentum=0.0), compression, mesh), compression

    training = fresh(three)
    means: dict[str, Tensor] = {}
    if two.get_coordinate() is not None:
        saved = fresh(two)
        nothing = {name: torch.zeros_like(part) for name, part in zip(SHAPES, here(saved[0]), strict=True)}
        assert_nothing_is_lost(nothing, two, *saved, tolerance=0.0)
        save(folder, two, *saved)
        means = {name: one.contiguous() for name, one in saved[-1].state_dict()["residuals"].items()}
        assert all(one.any() for one in means.values())
        for one in means.values():
            dist.all_reduce(one, group=two["replicate"].get_group())
            one /= 2
    everyone("saved")
    load(folder, three, *training)
    waits = training[-1].state_dict()["residuals"]
    for name, one in means.items():
        torch.testing.assert_close(waits[name], one, rtol=0.0, atol=0.0)
    # Thirds are rounded.
    assert_nothing_is_lost(waits, three, *training, tolerance=1e-3)
    assert_same_shards(training[0], three)
    message = raised(ValueError, lambda: load(folder, mesh_of(2), *fresh(mesh_of(2)), shard=0))
    assert "state must be that of shard" in message, message


# --- what goes wrong ---


@scenario(TORCHRUN_4, cases=_STEPS)
def what_is_not_finite_in_one_shard_fails_on_all_ranks(step: Callable[[Any], Any]) -> None:
    """The other shards exchange nothing with that. All ranks see the same norm, and leave the step out."""
    mesh, compression = mesh_of(2), TopK(0.05, warmup=None)
    model, optimizer = wrapped(small_model(), step, compression, mesh)
    train(model, optimizer, range(6))
    before, waits, steps = digest(here(model)), compression.state_dict(), compression.steps
    first = next(model.parameters())

    def spoil(parameter: Any) -> None:
        parameter.grad.to_local()[0, 0] = float("nan")

    optimizer.zero_grad()
    loss = loss_of(model, 7)
    hook = first.register_post_accumulate_grad_hook(spoil if hvd.rank() == 1 else lambda _: None)
    (text,) = warned(loss.backward)
    hook.remove()
    assert ("'0.weight' on rank 1" in text) == (hvd.rank() % 2 == 1), text
    norm: Any = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
    assert not norm.full_tensor().isfinite()
    assert bool(first.grad.to_local().isnan().all()) == (hvd.rank() % 2 == 1)
    optimizer.zero_grad()
    now = compression.state_dict()
    assert now["adaptive"] == waits["adaptive"] and compression.steps == steps
    for name, residual in waits["residuals"].items():
        torch.testing.assert_close(now["residuals"][name], residual, rtol=1e-5, atol=1e-6)
    assert digest(here(model)) == before
    train(model, optimizer, range(8, 11))
    assert_same_shards(model, mesh)


@scenario(TORCHRUN_4)
def local_updates_that_are_not_finite_in_one_shard_fail_on_all_ranks() -> None:
    mesh, compression = mesh_of(2), TopK(0.05, warmup=None)
    model = shard(small_model(), mesh["shard"])
    local = LocalUpdates(adamw(model), model, compression, every=3, group=mesh["replicate"])
    train(model, local, range(6))
    assert_same_shards(model, mesh)
    train(model, local, range(6, 8))
    if hvd.rank() == 1:
        next(model.parameters()).detach().to_local()[0, 0] = float("nan")
    state = local.compression.state_dict()["residuals"]
    local.synchronize()
    # As with a dense average. In the residuals of all shards, the step has never been.
    assert bool(here(model)[0].isfinite().all()) == (hvd.rank() % 2 == 0)
    for name, one in local.compression.state_dict()["residuals"].items():
        torch.testing.assert_close(one, state[name], rtol=1e-4, atol=1e-6)


@scenario(TORCHRUN_4, cases={"two": (2,), "one": (1,)})
def workers_whose_values_differ_in_one_shard_raise_on_all_ranks(rows: int) -> None:
    """Also where a rank has no entries."""
    torch.manual_seed(0)
    mesh = mesh_of(2)
    model = shard(nn.Linear(40, rows), mesh["shard"])
    arguments: dict[str, Any] = {"every": 1, "group": mesh["replicate"]}
    local = LocalUpdates(adamw(model), model, TopK(0.1, warmup=None, min_numel=0), **arguments)

    def step() -> None:
        local.zero_grad()
        model(torch.ones(8, 40)).square().mean().backward()
        local.step()

    step()
    state, before = local.state_dict(), [one.clone() for one in here(model)]
    local.load_state_dict(state)
    if hvd.rank() == 2:
        for one in here(model):
            one.add_(1.0)
    assert ("in another shard" in raised(ValueError, step)) == (hvd.rank() % 2 == 1)
    for one, value in zip(here(model), before, strict=True):
        one.copy_(value)
    step()
    assert_same_shards(model, mesh)


@scenario(TORCHRUN_4)
def what_does_not_fit_is_refused_by_name() -> None:
    mesh, compression = mesh_of(2), TopK(0.05)

    def refuse(error: type[Exception], model: Any, text: str, **arguments: Any) -> None:
        given = {"optimizer": sgd(model), "replicate": mesh["replicate"], **arguments}
        message = raised(error, lambda: register(model, compression, **given))
        assert text in message, message
        assert compression.source is None

    plain, good = small_model(), shard(small_model(), mesh["shard"])
    refuse(TypeError, plain, "sharded by fully_shard")
    refuse(ValueError, shard(small_model(), mesh), "exchange whole gradients between replicas itself")
    refuse(ValueError, replicate(small_model(), mesh=mesh["replicate"]), "exchange whole gradients")
    refuse(ValueError, good, "different shards of one", replicate=mesh["shard"])
    refuse(ValueError, good, "mesh of one dimension", replicate=mesh)
    refuse(TypeError, good, "mesh of one dimension, or a process group", replicate=None)
    compression = TopK(0.05, lr_in_residual=True)
    refuse(ValueError, good, "optimizer must be given", optimizer=None)
    some = torch.optim.SGD(good[0].parameters(), lr=0.1)
    refuse(ValueError, good, "optimizer must have all parameters", optimizer=some)
    compression = TopK(0.05)
    ignored = small_model()
    fully_shard(ignored, mesh=mesh["shard"], ignored_params={*ignored[0].parameters()})
    refuse(ValueError, ignored, "must be sharded, but is whole")
    two = small_model()
    fully_shard(two[0], mesh=mesh["replicate"])
    refuse(ValueError, fully_shard(two, mesh=mesh["shard"]), "all be sharded over one mesh")
    with_ddp = nn.parallel.DistributedDataParallel(small_model())
    message = raised(ValueError, lambda: register(with_ddp, compression, replicate=mesh["replicate"]))
    assert "replicate must be left out" in message
    register(good, compression, replicate=mesh["replicate"])
    compression = TopK(0.05)
    message = raised(RuntimeError, lambda: register(good, compression, replicate=mesh["replicate"]))
    assert "model must have no compression yet" in message


@scenario(TORCHRUN_4)
def a_scaler_leaves_out_a_step_on_all_ranks() -> None:
    """Nothing special is done. Residuals are kept without the scale."""
    mesh, compression = mesh_of(2), TopK(0.05, warmup=None)
    model, optimizer = wrapped(small_model(), sgd, compression, mesh)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**7)
    compression.scale_with(scaler)
    for step in range(6):
        overflows, before = step in (0, 3), digest(here(model))
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * float("inf") if overflows and hvd.rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (digest(here(model)) == before) == overflows, step
        assert_same_shards(model, mesh)
    assert everyone(scaler.get_scale()) == [2.0**5] * hvd.size()
    assert compression.steps == 4


@scenario(TORCHRUN_4)
def ranks_with_other_settings_raise_together() -> None:
    mesh = mesh_of(2)
    model, _ = wrapped(small_model(), sgd, TopK(0.05 if hvd.rank() < 2 else 0.1, warmup=None), mesh)
    assert "with the same compression" in raised(ValueError, loss_of(model, 0).backward)


@scenario(TORCHRUN_4, cases=_STEPS)
def layers_can_be_frozen_later_and_not_unfrozen(step: Callable[[Any], Any]) -> None:
    """What waits of them is set aside."""
    mesh, compression = mesh_of(2), TopK(0.05, warmup=None)
    model, optimizer = wrapped(small_model(), step, compression, mesh)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    for frozen in (True, False, True):
        waits = compression.state_dict()["residuals"]["0.weight"]
        assert waits.any()
        model[0].requires_grad_(not frozen)
        before = digest(here(model)[:2])
        train(model, optimizer, range(2, 5))
        optimizer.zero_grad()
        assert (digest(here(model)[:2]) == before) == frozen
        assert torch.equal(compression.state_dict()["residuals"]["0.weight"], waits) == frozen
        assert_same_shards(model, mesh)
    frozen_first = small_model()
    frozen_first[0].requires_grad_(False)
    model, optimizer = wrapped(frozen_first, step, TopK(0.05, warmup=None), mesh)
    train(model, optimizer, range(2))
    model[0].requires_grad_(True)
    assert "from the first step on, or never" in raised(ValueError, loss_of(model, 2).backward)


@scenario(TORCHRUN_4)
def what_was_frozen_at_first_is_exchanged_or_refused_when_it_is_trained_alone() -> None:
    """No other gradient of the step makes the end of its backward pass known."""
    mesh = mesh_of(2)
    later = shard(small_model().requires_grad_(False), mesh["shard"])
    register(later, TopK(1.0, warmup=None), replicate=mesh["replicate"])
    later[0].requires_grad_(True)
    train(later, sgd(later), range(2))
    assert_same_shards(later, mesh)
    other = small_model()
    other[0].requires_grad_(False)
    model, optimizer = wrapped(other, sgd, TopK(0.05, warmup=None), mesh)
    train(model, optimizer, range(2))
    model.requires_grad_(False)
    model[0].requires_grad_(True)
    assert "from the first step on, or never" in raised(ValueError, loss_of(model, 2).backward)


# --- local updates ---


@scenario(TORCHRUN_2, cases={"all": (None,), "TopK": (0.05,)})
def local_updates_of_one_shard_are_those_of_a_plain_model(ratio: float | None) -> None:
    models = []
    for sharded in (False, True):
        model: Any = small_model()
        group = None
        if sharded:
            model, group = shard(model, mesh_of(2)["shard"]), mesh_of(2)["replicate"]
        compression = None if ratio is None else TopK(ratio, warmup=None)
        local = LocalUpdates(adamw(model), model, compression, every=3, group=group)
        train(model, local, range(12))
        models.append(model)
    assert digest(here(models[1])) == digest(models[0].parameters())
