"""Scenarios: the hook of `DistributedDataParallel` against NumPy, and with all that DDP offers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import NoOp, SIDCo, TopK, Union, comm_hook, register
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
    distributed,
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
from ..scenario import TORCHRUN, TORCHRUN_2, TORCHRUN_4, scenario, warned
from .common import Exact, adamw, reduce, sgd, train_in_passes, wrap

SHAPES: dict[str, Sequence[int]] = {"first": (40, 50), "second": (3000,), "third": (20, 5, 9), "small": (30,)}
COMPRESSED = {name: shape for name, shape in SHAPES.items() if name != "small"}


@scenario(
    TORCHRUN_4,
    TORCHRUN_2,
    cases={
        f"{name}-{granularity}": (make, granularity)
        for (name, make), granularity in zip(COMPRESSORS.items(), cycle(("layer", 16_000)), strict=False)
    },
)
def the_hook_does_as_numpy_does(make: MakeCompression, granularity: str | int) -> None:
    settings: dict[str, Any] = {"granularity": granularity}
    compression = make(**settings)
    model, oracle = wrap(Exact(SHAPES), compression), Oracle(make(**settings), COMPRESSED, hvd.size())
    for step in range(6):
        given = [
            {name: normals(shape, step=step, rank=rank) for name, shape in SHAPES.items()} for rank in range(hvd.size())
        ]
        reduced = reduce(model, given[hvd.rank()])
        expected = oracle.reduce([{name: local[name] for name in COMPRESSED} for local in given])
        small = np.mean([local["small"] for local in given], axis=0)
        for name, gradient in {**expected, "small": small}.items():
            # An allreduce adds in an order of its own.
            np.testing.assert_allclose(reduced[name], gradient, rtol=1e-6, atol=1e-6, err_msg=f"{name}, {step}")
    mine, theirs = compression.stats().mean.total, oracle.workers[hvd.rank()].stats().mean.total
    assert mine.count == theirs.count > 0


_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-bucket": {"bucket_cap_mb": 100},
    "static-graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused-views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


@scenario(*TORCHRUN, cases={name: (arguments,) for name, arguments in _FEATURES.items()})
def replicas_stay_identical_and_ratio_one_is_dense_training(arguments: dict[str, Any]) -> None:
    dense = wrap(small_model(), **arguments)
    train(dense, sgd(dense), range(10))
    for make in (NoOp, COMPRESSORS["SIDCo"], COMPRESSORS["MiCRO"]):
        compression = make(granularity=BUCKET_BYTES)
        model = wrap(small_model(), compression, **arguments)
        optimizer = sgd(model)
        train(model, optimizer, range(10))
        if compression.ratio == 1.0:
            assert_close(model, dense)
        train(model, optimizer, range(10, 30))
        assert_identical(model)
        assert len(compression.stats().last.buckets) == 3


@scenario(*TORCHRUN, cases={name: (COMPRESSORS[name],) for name in ("SIDCo", "MiCRO")})
def exchanges_begin_before_backward_ends(make: MakeCompression) -> None:
    model = wrap(small_model(), make(granularity=BUCKET_BYTES))
    optimizer = sgd(model)
    started: list[Any] = []
    ended: list[int] = []
    start = Group.start

    def recorded(self: Any, *given: Any) -> Any:
        started.append(len(ended))
        wait = start(self, *given)

        def waited() -> Any:
            ended.append(len(started))
            return wait()

        return waited

    train(model, optimizer, range(3))
    with patch.object(Group, "start", recorded):
        # The first layer's gradient comes last.
        model.module[0].weight.register_hook(lambda gradient: started.append("last"))
        train(model, optimizer, [3])
    before = started.index("last")
    assert before >= 2 and set(started[:before]) == {0}, (started, ended)
    assert everyone(started) == [started] * hvd.size()


@scenario(TORCHRUN_2)
def a_hook_without_names_does_the_same() -> None:
    models = []
    for named in (True, False):
        model, compression = wrap(small_model()), TopK(0.01, granularity=BUCKET_BYTES, warmup=None)
        if named:
            register(model, compression)
        else:
            model.register_comm_hook(compression, comm_hook)
        train(model, sgd(model), range(10))
        models.append(model)
    assert digest(models[0].parameters()) == digest(models[1].parameters())
    # DDP has packed its buckets anew, and every parameter has kept its number.
    assert len(compression.state_dict()["residuals"]) == len([*model.parameters()])


@scenario(TORCHRUN_2, cases={"float16": (torch.float16,), "bfloat16": (torch.bfloat16,)})
def half_precision(dtype: torch.dtype) -> None:
    model = wrap(small_model(dtype=dtype), SIDCo(0.05, granularity=BUCKET_BYTES, warmup=None))
    train(model, sgd(model, lr=0.01), range(20))
    assert_identical(model)


@scenario(TORCHRUN_2)
def autocast_and_memory_layouts() -> None:
    torch.manual_seed(0)
    network: Any = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 4)
    )
    network = network.to(memory_format=torch.channels_last)
    compression = TopK(0.05, granularity=BUCKET_BYTES, warmup=None)
    model = wrap(network, compression)
    optimizer = sgd(model)
    for step in range(10):
        images = torch.from_numpy(normals((4, 3, 8, 8), step=step, rank=hvd.rank()))
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)).float(), torch.arange(4))
        loss.backward()
        optimizer.step()
    assert_identical(model)


@scenario(TORCHRUN_2, cases={"SGD": (sgd,), "AdamW": (adamw,)})
def passes_without_synchronisation_are_one_step(step: Any) -> None:
    results = []
    for passes in (1, 2):
        network, compression = small_model(), TopK(0.05, granularity=BUCKET_BYTES, warmup=None)
        model, optimizer = distributed(network, step(network), compression)
        train_in_passes(model, optimizer, passes)
        assert compression.stats().steps == 4
        assert_identical(model)
        results.append(digest(model.parameters()))
    assert results[0] == results[1]


@scenario(
    *TORCHRUN, cases={"none": (True, {}), "zeros": (False, {}), "views": (False, {"gradient_as_bucket_view": True})}
)
def nothing_is_lost_of_parameters_that_are_not_used(set_to_none: bool, arguments: dict[str, Any]) -> None:
    """In every third step nobody uses the second parameter, and in others only rank 0 does. What waits of it is set aside."""
    compression = TopK(0.02, granularity=16_000, warmup=None)
    model = wrap(Exact(COMPRESSED), compression, find_unused_parameters=True, **arguments)
    total = {name: np.zeros(shape) for name, shape in COMPRESSED.items()}
    for step in range(7):

        def local(rank: int, step: int = step) -> dict[str, np.ndarray]:
            used = [name for name in COMPRESSED if name != "second" or step % 3 == 0 or (step % 3 == 1 and rank == 0)]
            return {name: whole_numbers(COMPRESSED[name], step=step, rank=rank) for name in used}

        for one in map(local, range(hvd.size())):
            for name, gradient in one.items():
                total[name] += gradient
        model.zero_grad(set_to_none=set_to_none)
        model(local(hvd.rank())).backward()
        for name in COMPRESSED:
            gradient = getattr(model.module, name).grad
            assert (gradient is not None and bool(gradient.any())) == (name != "second" or step % 3 != 2)
            if gradient is not None:
                total[name] -= gradient.numpy().astype(np.float64) * hvd.size()
    residuals = everyone({name: one.double().numpy() for name, one in compression.state_dict()["residuals"].items()})
    for name in COMPRESSED:
        np.testing.assert_array_equal(sum(one[name] for one in residuals), total[name], err_msg=name)


@scenario(
    TORCHRUN_2,
    cases={
        "TopK": (partial(TopK, 1.0), sgd),
        "SIDCo": (partial(SIDCo, 0.05, warmup=2.0), sgd),
        "AdamW": (partial(TopK, 0.02, warmup=None), adamw),
    },
)
def a_rank_without_data_takes_part_in_the_steps_of_others(make: Any, step: Any) -> None:
    """DDP's `join`. At ratio 1 it is as without a sparsifier."""
    models = []
    for compression in (None, make(granularity=BUCKET_BYTES)):
        model = small_model()
        called, optimizer = distributed(model, step(model), compression)
        with called.join():
            train(called, optimizer, range(4 + 3 * hvd.rank()))
        assert_identical(model)
        models.append(model)
    assert compression.stats().steps == 7
    if compression.ratio == 1.0:
        assert_close(*models)


@scenario(TORCHRUN_2)
def a_rank_without_data_takes_part_in_a_step_that_fails() -> None:
    network, compression = overflowing(), TopK(0.05, granularity=BUCKET_BYTES, warmup=None)
    model = wrap(network, compression)
    optimizer = sgd(model)

    def uneven() -> None:
        with model.join():
            for step in range(2 + 3 * hvd.rank()):
                network.overflows = step == 3
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if step != 3:
                    optimizer.step()

    (text,) = warned(uneven)
    assert "'0.weight' on rank 1" in text, text
    assert compression.steps == 4
    assert_identical(network)


@scenario(TORCHRUN_2, cases={"reentrant": (True,), "not-reentrant": (False,)})
def activations_are_computed_again(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = small_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            return checkpoint(self.layers[1:], first, use_reentrant=reentrant)

    models = [
        wrap(one(), TopK(0.05, granularity=BUCKET_BYTES, warmup=None), static_graph=True)
        for one in (small_model, Again)
    ]
    for model in models:
        train(model, sgd(model), range(6))
    assert digest(models[0].parameters()) == digest(models[1].parameters())


@scenario(TORCHRUN_2, cases={"together": (True,), "in-turn": (False,)})
def a_hook_serves_one_model(together: bool) -> None:
    compression, models = TopK(0.01, granularity=BUCKET_BYTES, warmup=None), [wrap(small_model()) for _ in range(2)]
    for model in models:
        model.register_comm_hook(compression, comm_hook)
    losses = [loss_of(model, 0) for model in models]
    if not together:
        losses.pop(0).backward()
    text = raised(ValueError, sum(losses).backward)
    assert "compression must serve one model" in text, text


@scenario(TORCHRUN_2)
def sparse_gradients_are_refused_by_name() -> None:
    network = nn.Sequential(nn.Embedding(50, 40, sparse=True), nn.Flatten(), nn.Linear(80, 4))
    model = wrap(network, TopK(0.1, warmup=None))
    loss = model(torch.tensor([[1, 2], [3, 4]])).sum()
    assert "got sparse ones of ['0.weight']" in raised(ValueError, loss.backward)


@scenario(*TORCHRUN, cases={"names": (True,), "bare hook": (False,)})
def not_finite_is_nan_on_all_ranks_and_training_goes_on(named: bool) -> None:
    """Whether to leave the step out, all ranks decide alike. What waits is as before the step, to rounding."""
    network, compression = overflowing(), SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None)
    model = wrap(network)
    if named:
        register(model, compression)
    else:
        model.register_comm_hook(compression, comm_hook)
    optimizer, texts = sgd(model), []
    for step in range(12):
        fails = step % 4 == 2
        network.overflows = fails and hvd.rank() == 1
        optimizer.zero_grad()
        before, steps = compression.state_dict() if step else {}, compression.steps if step else 0
        texts += warned(loss_of(model, step).backward)
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])
        assert bool(norm.isfinite()) == (not fails)
        if not fails:
            optimizer.step()
            continue
        first, last = (network.get_parameter(name).grad for name in ("0.weight", "6.weight"))
        assert bool(first.isnan().all()) and bool(last.isfinite().all())
        now = compression.state_dict()
        assert now["adaptive"] == before["adaptive"] and compression.steps == steps
        for name, residual in before["residuals"].items():
            torch.testing.assert_close(now["residuals"][name], residual, rtol=1e-5, atol=1e-6)
    (text,) = texts
    assert "on rank 1" in text and ("'0.weight'" in text) == named, text
    assert compression.steps == 9
    assert_identical(model)


@scenario(
    *TORCHRUN,
    cases={
        "TopK": (partial(TopK, 0.02, warmup=None),),
        "union": (partial(TopK, 0.02, exchange=Union(), warmup=None),),
        "DDP finds unused parameters": (partial(TopK, 0.02, warmup=None), True),
    },
)
def a_rank_that_raises_in_backward_gives_the_step_up_for_all(make: Any, finds_unused: bool = False) -> None:
    """Then DDP cannot go on itself, but the network can, in a new one, with what has waited."""

    def stop(_: torch.Tensor) -> None:
        raise KeyError("stopped")

    network, culprit = small_model(), hvd.size() - 1
    compression = make(granularity=BUCKET_BYTES)
    model = wrap(network, compression, find_unused_parameters=finds_unused)
    train(model, sgd(model), range(3))
    state = compression.state_dict()
    loss = loss_of(model, 3)
    if hvd.rank() == culprit:
        # The first layer's gradient comes last: other buckets are on their way.
        with network.get_parameter("0.weight").register_hook(stop):
            raised(KeyError, loss.backward)
        compression.state_dict()
    else:
        text = raised(RuntimeError, loss.backward)
        assert text.startswith(f"rank {hvd.rank()}: rank {culprit} "), text
    now = compression.state_dict()
    assert now["adaptive"] == state["adaptive"] and compression.steps == 3
    for name, residual in state["residuals"].items():
        torch.testing.assert_close(now["residuals"][name], residual, rtol=1e-5, atol=1e-6)
    network.zero_grad()
    again = make(granularity=BUCKET_BYTES)
    model = wrap(network, again, find_unused_parameters=finds_unused)
    again.load_state_dict(now)
    train(model, sgd(model), range(4, 7))
    assert_identical(network)


@scenario(TORCHRUN_2, cases={"names": (True,), "bare hook": (False,)})
def hooks_are_gone_with_the_compression(named: bool) -> None:
    """After three stages, each with a new DDP and a new compression."""
    network = small_model()
    counts = []
    for stage in range(3):
        model, compression = DistributedDataParallel(network, find_unused_parameters=True), TopK(0.05, warmup=None)
        if named:
            register(model, compression)
        else:
            model.register_comm_hook(compression, comm_hook)
        train(model, sgd(model), range(3 * stage, 3 * stage + 3))
        counts.append([len(one._post_accumulate_grad_hooks or ()) for one in network.parameters()])
        del model, compression
        gc.collect()
    assert counts == [[1] * 8] * 3, counts
    assert not any(one._post_accumulate_grad_hooks for one in network.parameters())
    assert_identical(network)


@scenario(TORCHRUN_2, cases={"no-unused": ({},), "unused": ({"find_unused_parameters": True},)})
def the_bare_hook_compares_nothing_on_the_host(arguments: dict[str, Any]) -> None:
    """In no step but the first are values told, and nothing waits for a device."""
    model, compression = wrap(small_model(), **arguments), TopK(0.05, granularity=BUCKET_BYTES, warmup=None)
    model.register_comm_hook(compression, comm_hook)
    optimizer = sgd(model)
    train(model, optimizer, range(2))
    with (
        patch.object(Group, "everyone", side_effect=AssertionError("told")),
        patch.object(torch.Tensor, "equal", side_effect=AssertionError("compared")),
        patch.object(torch, "equal", side_effect=AssertionError("compared")),
    ):
        train(model, optimizer, range(2, 5))
    assert compression.source.optimizer is None
    assert_identical(model)


@scenario(TORCHRUN_4)
def groups_of_ranks_train_apart() -> None:
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    mine = groups[hvd.rank() % 2]
    model = wrap(small_model(), SIDCo(0.01, granularity=BUCKET_BYTES, warmup=None), process_group=mine)
    train(model, sgd(model), range(10))
    digests = everyone(digest(model.parameters()))
    assert digests[0] == digests[2] != digests[1] == digests[3]
    other = wrap(small_model())
    other.process_group = groups[1 - hvd.rank() % 2]
    text = raised(ValueError, lambda: register(other, TopK(0.01, warmup=None)))
    assert f"rank {hvd.rank()} is not in the process group" in text, text


@scenario(TORCHRUN_2)
def a_state_that_does_not_fit_raises_on_all() -> None:
    saved = TopK(0.01, min_numel=0, warmup=None)
    other = wrap(small_model(), saved)
    train(other, sgd(other), range(2))
    compression = TopK(0.01, min_numel=0, warmup=None)
    model = wrap(nn.Linear(32, 64), compression)
    if hvd.rank() == 1:
        compression.load_state_dict(saved.state_dict())
    text = raised(ValueError, lambda: model(torch.ones(1, 32)).sum().backward())
    # Each rank has what stops it, and what does not stop the other.
    assert "'problem'" in text, text


@scenario(TORCHRUN_2)
def states_of_other_steps_raise_on_all() -> None:
    """When they are loaded before the first step."""
    saved = TopK(0.01, granularity=BUCKET_BYTES, warmup=3.0)
    other = wrap(small_model(), saved)
    train(other, sgd(other), range(2))
    early = saved.state_dict()
    train(other, sgd(other), range(2, 3))
    compression = TopK(0.01, granularity=BUCKET_BYTES, warmup=3.0)
    model = wrap(small_model(), compression)
    compression.load_state_dict(early if hvd.rank() == 1 else saved.state_dict())
    text = raised(ValueError, lambda: loss_of(model, 3).backward())
    assert "'step': " in text and "'2'" in text and "'3'" in text, text


class Sometimes(nn.Module):
    """Uses its second layer on rank 0 only, and in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.uses = nn.Linear(32, 64), nn.Linear(64, 64), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return (self.second(hidden) if self.uses else hidden)[:, :10]


@scenario(TORCHRUN_2, cases={"copied": (False,), "views": (True,)})
def parameters_that_are_not_used_do_not_move(as_view: bool) -> None:
    torch.manual_seed(1)
    model = Sometimes()
    wrapped, optimizer = distributed(
        model,
        adamw(model),
        TopK(0.5, warmup=None, min_numel=0),
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
    )
    for step in range(4):
        model.uses = hvd.rank() == 0 and step > 1
        before = digest(model.second.parameters())
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()
        assert (digest(model.second.parameters()) == before) == (step < 2)
        assert_identical(model)
