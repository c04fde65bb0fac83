"""Scenarios: models in DDP whose ranks reduce gradients dense within a node, and each its part of them between nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import NoOp, SIDCo, TopK, comm_hook, register
from horovod_sparse.torch.group import Group

from ..common import (
    BUCKET_BYTES,
    COMPRESSORS,
    DEVICE,
    MakeCompression,
    Oracle,
    assert_close,
    assert_identical,
    digest,
    everyone,
    hvd,
    loss_of,
    normals,
    overflowing,
    raised,
    small_model,
    train,
    whole_numbers,
)
from ..kinds import KINDS, Kind
from ..programs import laws
from ..programs.table import PROGRAMS, Program, Way
from ..scenario import TORCHRUN_2, TORCHRUN_4, TORCHRUN_6, Scenario, scenario, warned
from .common import Exact, adamw, reduce, sgd, wrap

SHAPES: dict[str, Sequence[int]] = {"first": (41, 50), "second": (3001,), "third": (20, 5, 9), "few": (1,)}
"""No part of `few` is left for the second rank of a node, and 3001 entries are no multiple of 2 or 3."""


@cache
def mesh_of(nodes: int) -> DeviceMesh:
    """All ranks: a row is a node."""
    return init_device_mesh(DEVICE, (nodes, hvd.size() // nodes), mesh_dim_names=("replicate", "shard"))


def over(model: nn.Module, compression: Any, nodes: int = 2, optimizer: Any = None, **arguments: Any) -> Any:
    """Put a model into DDP; `arguments` are DDP's. Reduce its gradients between nodes."""
    model = wrap(model, **arguments)
    register(model, compression, optimizer, mesh=mesh_of(nodes))
    return model


def node(nodes: int = 2) -> int:
    return mesh_of(nodes).get_local_rank("replicate")


def position(nodes: int = 2) -> int:
    return mesh_of(nodes).get_local_rank("shard")


def part(array: np.ndarray, nodes: int) -> np.ndarray:
    """What this rank has of an array that a node shares."""
    flat, ranks = array.reshape(-1), hvd.size() // nodes
    each = -(-len(flat) // ranks)
    return flat[position(nodes) * each : (position(nodes) + 1) * each]


def residuals(compression: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = compression.state_dict()["residuals"]
    return found


def whole(parts: Mapping[str, np.ndarray], shapes: Mapping[str, Sequence[int]], nodes: int) -> dict[str, np.ndarray]:
    """The sums over nodes of what the parts of a node are together."""
    told, ranks = everyone(parts), hvd.size() // nodes
    return {
        name: sum(np.concatenate([one[name] for one in told[first : first + ranks]]) for first in range(0, len(told), ranks))
        .reshape(tuple(shape))
        for name, shape in shapes.items()
    }  # fmt: skip


# --- what is exchanged ---


@scenario(
    TORCHRUN_4,
    TORCHRUN_6,
    cases={name: (make,) for name, make in COMPRESSORS.items()},
)
def parts_are_exchanged_as_numpy_does(make: MakeCompression) -> None:
    """Means of two ranks' whole numbers are exact, and so is all that is sent and kept."""
    settings: dict[str, Any] = {"granularity": 16_000}
    nodes, ranks = 2, hvd.size() // 2
    compression = make(**settings)
    model = over(Exact(SHAPES), compression, nodes)
    # What is below the smallest size is dense.
    parts = {name: part(np.zeros(tuple(SHAPES[name])), nodes).shape for name in SHAPES if name != "few"}
    oracle = Oracle(make(**settings), parts, nodes)
    for step in range(6):
        given = [
            {name: whole_numbers(shape, step=step, rank=rank) for name, shape in SHAPES.items()}
            for rank in range(hvd.size())
        ]
        reduced = reduce(model, given[hvd.rank()])
        means = [
            {name: np.mean([one[name] for one in given[first : first + ranks]], axis=0, dtype=np.float64) for name in SHAPES}
            for first in range(0, hvd.size(), ranks)
        ]  # fmt: skip
        local = [{name: part(np.asarray(one[name], np.float32), nodes) for name in parts} for one in means]
        expected = {
            **oracle.reduce(local),
            "few": part(np.array(np.mean([one["few"] for one in given], axis=0)), nodes),
        }
        tolerance = 0.0 if ranks == 2 else 1e-6
        for name in SHAPES:
            found = part(reduced[name], nodes)
            np.testing.assert_allclose(found, expected[name], tolerance, 10 * tolerance, err_msg=f"{name}, {step}")
        assert len(set(everyone(digest(map(torch.from_numpy, reduced.values()))))) == 1
    one, other = compression.stats().mean.total, oracle.workers[node(nodes)].stats().mean.total
    assert one.count == other.count > 0
    # What a rank sends does not grow with the ranks of its node.
    assert one.bytes_sent == other.bytes_sent > 0
    mine = residuals(compression)
    for name, residual in oracle.workers[node(nodes)].state_dict()["residuals"].items():
        np.testing.assert_allclose(mine[name].numpy(), residual, tolerance, 100 * tolerance)


@scenario(TORCHRUN_4)
def a_rank_sends_and_keeps_its_part_between_nodes() -> None:
    """Half of what it does without nodes. Within a node every entry goes once, there and back."""
    sent: dict[int, dict[str, int]] = {}
    start, scatter = Group.start, Group.scatter

    def recorded(self: Group, collective: Any, *given: Any) -> Any:
        group = sent.setdefault(self.world if self.world > 2 else -int(self.group is mesh_of(2).get_group(1)), {})
        group[collective.kind] = (
            group.get(collective.kind, 0) + collective.message.numel() * collective.message.itemsize
        )
        return start(self, collective, *given)

    def scattered(self: Group, message: Tensor) -> Any:
        group = sent.setdefault(-1, {})
        group["scatter"] = group.get("scatter", 0) + message.nbytes
        return scatter(self, message)

    kept, entries = [], sum(one.numel() for one in small_model().parameters())
    for nodes in (2, 4):
        compression = TopK(0.05, min_numel=0, warmup=None, granularity="model")
        model = over(small_model(), compression, nodes)
        optimizer = sgd(model)
        train(model, optimizer, range(3))
        with patch.object(Group, "start", recorded), patch.object(Group, "scatter", scattered):
            train(model, optimizer, range(3, 4))
        kept.append(compression.residual_bytes)
    (between,), (plain,) = sent[0].values(), sent[4].values()
    assert abs(between - plain / 2) < 200 < between, sent
    # Bytes, of which none is sent to others than those of the node. The other number tells whether the step fails.
    assert sent[-1] == {"scatter": 4 * entries, "allgather": 2 * entries, "allreduce": 8}, sent
    assert kept[0] == kept[1] // 2, kept


@scenario(TORCHRUN_4)
def exchanges_between_nodes_begin_before_backward_ends() -> None:
    model = over(small_model(), TopK(0.02, granularity=BUCKET_BYTES, warmup=None))
    optimizer = sgd(model)
    train(model, optimizer, range(3))
    events: list[str] = []
    start, scatter = Group.start, Group.scatter

    def started(self: Group, *given: Any) -> Any:
        events.append("exchange" if self.world == 2 else "other")
        return start(self, *given)

    def scattered(self: Group, message: Tensor) -> Any:
        events.append("scatter")
        return scatter(self, message)

    with (
        patch.object(Group, "start", started),
        patch.object(Group, "scatter", scattered),
        patch.object(Group, "everyone", side_effect=AssertionError("told")),
        # The first layer's gradient comes last.
        model.module[0].weight.register_hook(lambda _: events.append("last")),
    ):
        train(model, optimizer, [3])
    before = events[: events.index("last")]
    assert before == ["scatter", "scatter", "exchange"], events
    assert_identical(model)


# --- programs ---


@dataclass(frozen=True)
class OverNodes(Way):
    """Gradients are compressed between two nodes."""

    def ddp(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any) -> Any:
        assert self.make is not None
        model = DistributedDataParallel(module, **{"bucket_cap_mb": 0.005, **arguments})
        register(model, self.make(), optimizer, mesh=mesh_of(2))
        return model


def programs_over_nodes(one: Program) -> None:
    """At ratio 1 it trains as with dense averages, and at a small one replicas stay equal."""
    laws.ratio_one_is_dense(one, [OverNodes("TopK", partial(TopK, 1.0, min_numel=0))])
    laws.replicas_are_equal(one, [OverNodes("SIDCo", partial(SIDCo, 0.02, min_numel=0, warmup=None))])


# What a program does after the reduction knows nothing of nodes. So one of its cases is enough, but for the options of DDP.
_CASES = {
    name if "options" in name else name.partition("-")[0]: (name, one)
    for name, one in reversed(PROGRAMS.items())
    if TORCHRUN_2 in one.launches
}
_law: Any = programs_over_nodes
_law.scenarios = [
    Scenario(f"{_law.__name__}[{name}]", _law, (one,), (TORCHRUN_4,), quick=False) for name, one in _CASES.values()
]


@scenario(TORCHRUN_6, cases={"2 nodes": (2,), "3 nodes": (3,)}, quick=False)
def ratio_one_is_dense_and_replicas_are_equal_on_more_ranks(nodes: int) -> None:
    for arguments in ({}, {"find_unused_parameters": True}, {"static_graph": True, "gradient_as_bucket_view": True}):
        dense = wrap(small_model(), **arguments)
        train(dense, sgd(dense), range(8))
        model = over(small_model(), NoOp(), nodes, **arguments)
        train(model, sgd(model), range(8))
        assert_close(model, dense)
        model = over(small_model(), SIDCo(0.01, warmup=None, granularity=BUCKET_BYTES), nodes, **arguments)
        train(model, sgd(model), range(20))
        assert_identical(model)


class Mixed(nn.Module):
    """Parameters of all kinds, each with the gradient that it is given."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        super().__init__()
        for name, (shape, dtype) in kinds.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, name) * one).sum().double() for name, one in gradients.items()]).sum()


@scenario(
    TORCHRUN_4, cases={name: ({f"the_{one}": kind for one, kind in kinds.items()},) for name, kinds in KINDS.items()}
)
def parameters_of_any_kind(kinds: Mapping[str, Kind]) -> None:
    """Of whole numbers nothing is lost, and at ratio 1 they arrive at once."""
    for ratio in (1.0, 0.3):
        compression = TopK(ratio, min_numel=0, warmup=None)
        model = over(Mixed(kinds), compression)
        given = {name: np.zeros(shape) for name, (shape, _) in kinds.items()}
        sent = {name: np.zeros(shape) for name, (shape, _) in kinds.items()}
        for step in range(4):
            each = [
                {n: whole_numbers(s, step=step, rank=rank) % 16 for n, (s, _) in kinds.items()} for rank in range(hvd.size())
            ]  # fmt: skip
            model.zero_grad()
            model(
                {n: torch.as_tensor(one).to(getattr(model.module, n).dtype) for n, one in each[hvd.rank()].items()}
            ).backward()
            assert_identical([one.grad for one in model.parameters()])
            for name, parameter in model.module.named_parameters():
                given[name] += sum(one[name] for one in each)
                sent[name] += parameter.grad.double().numpy() * hvd.size()
                if ratio == 1.0:
                    np.testing.assert_array_equal(sent[name], given[name], err_msg=name)
        shapes = {name: shape for name, (shape, _) in kinds.items()}
        waits = whole({name: one.double().numpy() for name, one in residuals(compression).items()}, shapes, 2)
        for name in kinds:
            # A node's residual is that of its mean.
            np.testing.assert_array_equal(sent[name] + 2 * waits[name], given[name], err_msg=name)


class Dot(nn.Module):
    """A parameter of bfloat16 whose gradient is what the model is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(41, 50, dtype=torch.bfloat16))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


@scenario(TORCHRUN_4)
def sums_of_half_precision_are_rounded_once() -> None:
    """Not within a node, and again between nodes."""
    model = over(Dot(), TopK(1.0, min_numel=0, warmup=None))
    for step in range(3):
        given = [torch.from_numpy(normals((41, 50), step=step, rank=rank)).bfloat16() for rank in range(hvd.size())]
        model.zero_grad()
        model(given[hvd.rank()]).backward()
        mean = torch.stack([one.float() for one in given]).view(2, 2, 41, 50).mean(1).mean(0)
        assert torch.equal(model.module.weight.grad, mean.bfloat16())


@scenario(TORCHRUN_4)
def updates_can_wait_in_place_of_gradients() -> None:
    """`lr_in_residual`, with rates that change. At ratio 1 it is as without."""
    models = []
    for compression in (
        None,
        TopK(1.0, min_numel=0, warmup=None, lr_in_residual=True),
        TopK(0.02, lr_in_residual=True),
    ):
        module = small_model()
        optimizer = sgd(module, momentum=0.0)
        model = wrap(module) if compression is None else over(module, compression, 2, optimizer)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
            train(model, optimizer, [step])
        assert_identical(model)
        models.append(model)
    assert_close(*models[:2])
    message = raised(ValueError, lambda: compression.ahead(model, 0.5).__enter__())
    assert "mesh must be left out" in message and "compression.ahead" in message, message


# --- what is not in every step ---


@scenario(TORCHRUN_4, cases={"none": (True, {}), "views": (False, {"gradient_as_bucket_view": True})})
def what_waits_of_what_a_node_does_not_use_is_set_aside(set_to_none: bool, arguments: dict[str, Any]) -> None:
    """In turns all, nobody, one rank, and the ranks of one node use the second parameter. Nothing is lost."""
    compression = TopK(0.02, granularity=16_000, warmup=None, min_numel=0)
    model = over(Exact(SHAPES), compression, find_unused_parameters=True, **arguments)
    total = {name: np.zeros(tuple(shape)) for name, shape in SHAPES.items()}
    users: list[list[int]] = [[0, 1, 2, 3], [], [1], [2, 3]]
    for step in range(9):
        using = users[step % 4]

        def local(rank: int, step: int = step, using: Sequence[int] = using) -> dict[str, np.ndarray]:
            used = [name for name in SHAPES if name != "second" or rank in using]
            return {name: whole_numbers(SHAPES[name], step=step, rank=rank) for name in used}

        for one in map(local, range(hvd.size())):
            for name, gradient in one.items():
                total[name] += gradient
        model.zero_grad(set_to_none=set_to_none)
        before = residuals(compression)["second"] if step else torch.zeros(1)
        model(local(hvd.rank())).backward()
        second = model.module.second.grad
        assert (second is not None and bool(second.any())) == bool(using)
        if using and not {2 * node(), 2 * node() + 1}.intersection(using):
            assert torch.equal(residuals(compression)["second"], before) and before.any()
        for name in SHAPES:
            gradient = getattr(model.module, name).grad
            if gradient is not None:
                total[name] -= gradient.numpy().astype(np.float64) * hvd.size()
    waits = whole({name: one.double().numpy() for name, one in residuals(compression).items()}, SHAPES, 2)
    for name in SHAPES:
        np.testing.assert_array_equal(2 * waits[name], total[name], err_msg=name)


@scenario(TORCHRUN_4)
def parts_trained_in_turns_keep_what_waits() -> None:
    module, compression = small_model(), TopK(0.02, warmup=None, granularity="layer")
    model = over(module, compression, find_unused_parameters=True)
    optimizer = sgd(model)
    train(model, optimizer, range(2))
    for step in range(2, 8):
        frozen, trained = ("0", "2") if step % 2 else ("2", "0")
        layer: nn.Module = module.get_submodule(frozen)
        layer.requires_grad_(False)
        before, values = residuals(compression), digest(layer.parameters())
        train(model, optimizer, [step])
        after = residuals(compression)
        layer.requires_grad_(True)
        assert digest(layer.parameters()) == values
        assert torch.equal(before[f"{frozen}.weight"], after[f"{frozen}.weight"]) and after[f"{frozen}.weight"].any()
        assert not torch.equal(before[f"{trained}.weight"], after[f"{trained}.weight"])
        assert_identical(model)


# --- what goes wrong ---


@scenario(TORCHRUN_4, cases={"all": (None,), "one entry": (0,)})
def not_finite_on_one_rank_is_nan_on_all(entry: int | None) -> None:
    """Also where the other parts of the gradient are finite. All leave the step out, and what waits is as before."""
    network, compression = overflowing(), SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None)
    if entry is not None:
        network.get_parameter("0.weight").register_hook(
            lambda gradient: gradient.index_fill(0, torch.tensor([entry]), float("nan")) if network.spoils else gradient
        )
    model = over(network, compression)
    optimizer, texts = sgd(model), []
    for step in range(12):
        fails = step % 4 == 2
        network.spoils = fails and entry is not None and hvd.rank() == 1
        network.overflows = fails and entry is None and hvd.rank() == 1
        optimizer.zero_grad()
        before, steps = compression.state_dict() if step else {}, compression.steps if step else 0
        texts += warned(loss_of(model, step).backward)
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])
        assert bool(norm.isfinite()) == (not fails)
        assert len(set(everyone(digest([one.grad.nan_to_num() for one in model.parameters()])))) == 1
        if not fails:
            optimizer.step()
            continue
        first, last = (network.get_parameter(name).grad for name in ("0.weight", "6.weight"))
        halves = first.view(2, -1).isnan().all(1).tolist()
        assert halves == [True, entry is None] and bool(last.isfinite().all())
        now = compression.state_dict()
        assert now["adaptive"] == before["adaptive"] and compression.steps == steps
        for name, residual in before["residuals"].items():
            torch.testing.assert_close(now["residuals"][name], residual, rtol=1e-5, atol=1e-6)
    (text,) = texts
    assert "'0.weight' on rank" in text, text
    assert compression.steps == 9
    assert_identical(model)


@scenario(
    TORCHRUN_4,
    cases={
        **{f"plain-{step}": (step, {}) for step in (4, 1)},
        **{f"unused-{step}": (step, {"find_unused_parameters": True}) for step in (4, 1, 0)},
    },
)
def a_rank_that_raises_gives_the_step_up_on_all_nodes(step: int, arguments: dict[str, Any]) -> None:
    """Also in the first two steps, which have other buckets of DDP's. A new DDP goes on with what has waited.

    In the first one DDP has one bucket, unless it finds unused parameters: then a rank that raises has begun no step.
    """

    def stop(_: Tensor) -> None:
        raise KeyError("stopped")

    network, culprit = small_model(), hvd.size() - 1
    compression = TopK(0.02, warmup=None, granularity=BUCKET_BYTES)
    model = over(network, compression, **arguments)
    train(model, sgd(model), range(step))
    state = compression.state_dict()
    loss = loss_of(model, step)
    if hvd.rank() == culprit:
        # The first layer's gradient comes last: other buckets are on their way.
        with network.get_parameter("0.weight").register_hook(stop):
            raised(KeyError, loss.backward)
    else:
        text = raised(RuntimeError, loss.backward)
        assert text.startswith(f"rank {hvd.rank()}: rank {culprit} has given up"), text
    now = compression.state_dict()
    assert now["adaptive"] == state["adaptive"] and compression.steps == step
    for name, residual in state["residuals"].items():
        torch.testing.assert_close(now["residuals"][name], residual, rtol=1e-5, atol=1e-6)
    network.zero_grad()
    again = TopK(0.02, warmup=None, granularity=BUCKET_BYTES)
    model = over(network, again, **arguments)
    again.load_state_dict(now)
    train(model, sgd(model), range(step + 1, step + 4))
    assert_identical(network)


@scenario(TORCHRUN_4)
def an_exchange_that_raises_for_one_part_raises_on_all_ranks() -> None:
    """As a damaged message does, on all ranks that have received it. The others learn it at once."""
    compression = TopK(0.02, warmup=None)
    model = over(small_model(), compression)
    train(model, sgd(model), range(3))
    driver: Any = compression.source.driver
    complete = driver.complete

    def damaged() -> Any:
        complete()
        raise RuntimeError("damaged")

    with patch.object(driver, "complete", damaged if position() else complete):
        text = raised(RuntimeError, loss_of(model, 3).backward)
    assert text.startswith("damaged" if position() else f"rank {hvd.rank()}: rank 1 has given up"), text


@scenario(TORCHRUN_4, cases={"settings": ("settings",), "mesh": ("mesh",), "state": ("state",)})
def ranks_that_differ_raise_together(what: str) -> None:
    """Also those that exchange nothing with the one that differs."""
    meshes = mesh_of(2), DeviceMesh(DEVICE, [[0, 2], [1, 3]])
    saved, is_other = TopK(0.05, warmup=None), hvd.rank() == 3
    other = over(small_model(), saved)
    train(other, sgd(other), range(2))
    model, compression = wrap(small_model()), TopK(0.1 if what == "settings" and is_other else 0.05, warmup=None)
    register(model, compression, mesh=meshes[what == "mesh" and is_other])
    if what == "state" and is_other:
        compression.load_state_dict(saved.state_dict())
    text = raised(ValueError, loss_of(model, 0).backward)
    expected = {"settings": "'compression': ", "mesh": "'mesh': ('[[0, ", "state": "'step': "}
    assert expected[what] in text, text


@scenario(TORCHRUN_4)
def a_mesh_that_does_not_fit_is_refused_by_name() -> None:
    mesh, compression = mesh_of(2), TopK(0.05, warmup=None)
    in_halves = wrap(small_model())
    in_halves.process_group = [dist.new_group(half) for half in ([0, 1], [2, 3])][node()]
    first = 2 * node()

    def refuse(error: type[Exception], text: str, mesh: Any, model: Any = None, **arguments: Any) -> None:
        model = wrap(small_model()) if model is None else model
        message = raised(error, lambda: register(model, compression, mesh=mesh, **arguments))
        assert text in message, message
        assert compression.source is None

    refuse(ValueError, "mesh must have two dimensions, nodes", mesh["replicate"])
    refuse(ValueError, "mesh must have two dimensions, nodes", init_device_mesh(DEVICE, (2, 2, 1)))
    refuse(TypeError, "mesh must be a DeviceMesh of two dimensions, got 2", 2)
    text = f"mesh must have the ranks of the model's process group, [{first}, {first + 1}], got [0, 1, 2, 3]"
    refuse(ValueError, text, mesh, in_halves)
    refuse(ValueError, "replicate must be left out", mesh, replicate=mesh["replicate"])
    sharded = fully_shard(small_model(), mesh=mesh["shard"])
    refuse(ValueError, "replicate=mesh['replicate']", mesh, sharded, replicate=mesh["replicate"])
    with patch.object(DeviceMesh, "device_type", "meta"):
        refuse(ValueError, "mesh must be of the type of the model's device", mesh)
    model = over(small_model(), compression)
    message = raised(RuntimeError, lambda: register(model, TopK(0.05), mesh=mesh))
    assert "model must have no communication hook yet" in message, message
    other = wrap(small_model())
    other.register_comm_hook(compression, comm_hook)
    train(model, sgd(model), range(1))
    assert "compression must serve one model" in raised(ValueError, loss_of(other, 0).backward)


@scenario(TORCHRUN_4)
def one_node_is_ddp_and_one_rank_per_node_is_as_without_a_mesh() -> None:
    models = {}
    for name, mesh in (("dense", None), ("one node", mesh_of(1)), ("plain", None), ("one rank per node", mesh_of(4))):
        model = wrap(small_model())
        if name != "dense":
            compression = TopK(0.02, warmup=None, granularity=BUCKET_BYTES)
            texts = warned(partial(register, model, compression, mesh=mesh))
            assert [("there is one worker" in text) for text in texts] == [True] * (name == "one node"), texts
        train(model, sgd(model), range(6))
        models[name] = digest(model.parameters())
    assert models["dense"] == models["one node"] != models["plain"] == models["one rank per node"]


# --- states ---


@scenario(TORCHRUN_4, cases={"SGD": (sgd,), "AdamW": (adamw,)})
def training_resumes_bit_for_bit_with_the_own_part(step: Callable[[Any], Any]) -> None:
    def made() -> tuple[Any, Any, Any]:
        compression = SIDCo(0.02, warmup=2.0, granularity=BUCKET_BYTES)
        model = over(small_model(), compression)
        return model, step(model), compression

    straight, optimizer, _ = made()
    train(straight, optimizer, range(12))
    model, optimizer, compression = made()
    train(model, optimizer, range(6))
    saved = model.state_dict(), optimizer.state_dict(), compression.state_dict()
    model, optimizer, compression = made()
    for one, state in zip((model, optimizer, compression), saved, strict=True):
        one.load_state_dict(state)
    train(model, optimizer, range(6, 12))
    assert digest(model.parameters()) == digest(straight.parameters())
    # The next rank has the other part of the node.
    other = everyone(saved[2])[hvd.rank() ^ 1]
    message = raised(ValueError, lambda: compression.load_state_dict(other))
    assert f"state must be that of shard {position()} of 2 in a node, got that of {1 - position()}" in message, message
