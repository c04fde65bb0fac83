"""Scenarios: programs of models that `fully_shard` has sharded, which train by local updates between the replicas.

The programs and the laws are those of plain models. On two ranks each replica is one shard, on four there are two of two.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from horovod_sparse.torch import LocalUpdates, TopK, register

from .. import local_programs as programs
from ..common import digest, everyone, hvd, raised, small_model, train
from ..local_programs import ADAMW, STEPS, Placing, Way, loss_of, mark, sparse
from ..scenario import TORCHRUN, TORCHRUN_2, TORCHRUN_4, logged, scenario
from .common import sgd
from .nodes import over
from .sharded import assert_same_shards, here, mesh_of, replica, shard


def sharded(model: nn.Module, **arguments: Any) -> Any:
    return shard(model, mesh_of(2)["shard"], **arguments)


SHARDED = Placing(sharded, lambda: mesh_of(2)["replicate"])


def a_model(every: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Return a model and its local updates."""
    model = sharded(programs.net())
    updates = LocalUpdates(ADAMW(model.parameters()), model, sparse(), every=every, group=SHARDED.group(), **settings)
    return model, updates


# --- programs ---


def accumulation_that_is_averaged_once(way: Way) -> nn.Module:
    """Over the shards, after the last pass of a step."""
    model = way.net()
    local = way.wrap(model)
    for step in range(STEPS):
        local.zero_grad()
        for part in range(2):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == 1)
            way.backward(local, model, 2 * step + part)
        local.step()
    return model


_HAVE_COPIES = (programs.averages_of_weights, programs.stochastic_weight_averaging)
"""FSDP refuses to copy a model."""
PROGRAMS = (*(one for one in programs.PROGRAMS if one not in _HAVE_COPIES), accumulation_that_is_averaged_once)
WITH_SHARDS = (
    programs.plain,
    programs.groups_whose_rates_are_zero,
    programs.clipping,
    programs.a_loss_scaler,
    programs.tied_unused_and_frozen_parameters,
    programs.one_optimizer_for_each_parameter,
    accumulation_that_is_averaged_once,
)
"""Those that four ranks run, too: what they do may depend on how a parameter is divided."""


def sending_all_of_shards_is_dense(program: Any) -> None:
    programs.sending_all_is_dense(program, SHARDED)


def sparse_shards_end_near_dense(program: Any) -> None:
    programs.sparse_ends_near_dense(program, SHARDED)


_LINEAR = [one for one in PROGRAMS if one is not programs.clipping]
for _law, _programs in ((sending_all_of_shards_is_dense, _LINEAR), (sparse_shards_end_near_dense, PROGRAMS)):
    mark(_law, _programs, (programs.plain,), lambda one: TORCHRUN if one in WITH_SHARDS else (TORCHRUN_2,))


@scenario(*TORCHRUN, quick=False)
def shards_that_compute_in_bfloat16_end_near_dense() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    programs.sparse_ends_near_dense(programs.plain, Placing(partial(sharded, mp_policy=policy), SHARDED.group))


# --- what the programs do not show ---


@scenario(*TORCHRUN, cases={"every step": (1,), "every fourth": (4,)})
def a_forward_pass_of_shards_moves_nothing(every: int) -> None:
    model, local = a_model(every)
    SHARDED.way(ADAMW, sparse).train(local, model, range(6))
    before = digest(here(model))
    with local.ahead():
        loss_of(model, 6)
    loss_of(model, 7)
    with torch.no_grad(), local.shared():
        loss_of(model, 8)
        assert_same_shards(model, mesh_of(2))
    assert digest(here(model)) == before


@scenario(
    *TORCHRUN,
    cases={"by a norm": ("norm",), "by the argument": ("argument",), "by a scaler": ("scaler",)},
)
def a_step_that_one_replica_leaves_out_moves_by_the_others(how: str) -> None:
    """Gradients of one rank are infinite. After the average over the shards they are so on all ranks of its replica."""
    mesh = mesh_of(2)
    model, local = a_model(skip_nonfinite=how == "argument")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=how == "scaler")
    for step in range(12):
        local.zero_grad()
        spoiled = float("inf") if (step, hvd.rank()) == (5, hvd.size() - 1) else 1.0
        scaler.scale(loss_of(model, step) * spoiled).backward()
        before = digest(here(model))
        norm: Any = nn.utils.get_total_norm([one.grad for one in model.parameters()])
        finite = bool(norm.full_tensor().isfinite())
        assert finite == ((step, replica(mesh)) != (5, 1))
        if how == "norm" and not finite:
            local.skip()
        else:
            scaler.step(local)
            scaler.update()
        assert digest(here(model)) != before
        assert_same_shards(model, mesh)
    if how == "scaler":
        assert everyone(scaler.get_scale()) == [2.0**8, 2.0**7] if hvd.size() == 2 else [2.0**8] * 2 + [2.0**7] * 2


@scenario(TORCHRUN_4, cases={"every step": (1,), "every third": (3,)})
def a_step_that_raises_in_one_shard_raises_on_all_ranks(every: int) -> None:
    """Parameters are those of the last exchange then, and training goes on."""

    model = sharded(programs.net())
    optimizer, way = programs.Raises(model.parameters(), lr=5e-3), SHARDED.way(ADAMW, sparse)
    local = LocalUpdates(optimizer, model, sparse(), every=every, group=SHARDED.group())
    way.train(local, model, range(2 * every))
    before = digest(here(model))
    way.train(local, model, range(every - 1))
    optimizer.raises = hvd.rank() == 1
    mine = ArithmeticError if optimizer.raises else RuntimeError
    assert "half-way" in raised(mine, lambda: way.train(local, model, range(every - 1, every)))
    assert digest(here(model)) == before
    optimizer.raises = False
    way.train(local, model, range(2 * every))
    assert digest(here(model)) != before
    assert_same_shards(model, mesh_of(2))


@scenario(*TORCHRUN, cases={"every step": (1,), "every fourth": (4,)})
def sharded_local_updates_go_on_from_files(every: int) -> None:
    """Bit for bit, also between two exchanges. The model and the optimizer are in checkpoints of each replica."""
    mesh, folder = mesh_of(2), Path(everyone(tempfile.mkdtemp())[0])
    way, own = SHARDED.way(ADAMW, sparse, ahead=True), folder / f"replica-{replica(mesh)}"

    def states(model: Any, local: LocalUpdates) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, local.optimizer), strict=True))

    model, local = a_model(every)
    way.train(local, model, range(6))
    dcp.save(states(model, local), checkpoint_id=own, process_group=mesh["shard"].get_group())
    torch.save(local.state_dict(), own / f"local-{mesh.get_local_rank('shard')}.pt")
    everyone("saved")

    twin, its = a_model(every)
    before = digest(here(twin))
    # To have something to load into, PyTorch makes a step whose rates are 0.
    state = states(twin, its)
    assert digest(here(twin)) == before
    dcp.load(state, checkpoint_id=own, process_group=mesh["shard"].get_group())
    set_state_dict(twin, its.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    its.load_state_dict(torch.load(own / f"local-{mesh.get_local_rank('shard')}.pt", weights_only=True))
    for one, updates in ((model, local), (twin, its)):
        way.train(updates, one, range(6, 13))
    assert digest(here(twin)) == digest(here(model)) != before


@scenario(*TORCHRUN)
def models_that_are_not_sharded_over_the_shards_alone_are_refused() -> None:
    def refuse(model: Any, text: str, **arguments: Any) -> None:
        given = {"group": SHARDED.group(), **arguments}
        message = raised((TypeError, ValueError), lambda: LocalUpdates(ADAMW(model.parameters()), model, **given))
        assert text in message, message

    refuse(sharded(programs.net()), 'group must be mesh["replicate"]', group=None)
    refuse(shard(programs.net(), mesh_of(2)), "FSDP would exchange whole gradients")
    layers = programs.net()
    fully_shard(layers[0], mesh=mesh_of(2)["shard"])
    refuse(layers, "call fully_shard for the whole model, too")
    refuse(programs.net(), "leave it out to exchange between all workers", group=mesh_of(2)["replicate"])
    if hvd.size() > 2:
        refuse(sharded(programs.net()), "different shards of one", group=mesh_of(2)["shard"])


# --- the log ---


def of_nodes(compression: Any) -> tuple[Any, Any]:
    model = small_model()
    optimizer = sgd(model)
    return over(model, compression, optimizer=optimizer), optimizer


def of_shards(compression: Any) -> tuple[Any, Any]:
    model = sharded(small_model())
    optimizer = sgd(model)
    register(model, compression, optimizer, replicate=SHARDED.group())
    return model, optimizer


def of_movements(compression: Any) -> tuple[Any, Any]:
    model = sharded(small_model())
    return model, LocalUpdates(sgd(model), model, compression, group=SHARDED.group())


@scenario(TORCHRUN_4, cases={"nodes": (of_nodes,), "shards": (of_shards,), "movements": (of_movements,)})
def one_rank_of_all_speaks(make: Any) -> None:
    """In the first step, of an optimizer that has made steps, and when the warm-up has ended."""
    model, optimizer = make(TopK(0.1, warmup=0.2))
    getattr(optimizer, "optimizer", optimizer).state[next(model.parameters())]["step"] = 5
    said = everyone(logged(lambda: train(model, optimizer, range(4))))
    for text in ("parameters dense", "has made 5 steps, but no state", "the warm-up has ended"):
        assert [sum(text in line for line in of_rank) for of_rank in said] == [1, 0, 0, 0], (text, said)
