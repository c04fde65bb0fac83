"""Time steps with dense and sparse exchanges, on the machines where a launcher has started this. Needs PyTorch."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import random
import socket
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.tools.quantities import add_optimizer, parse_count, parse_number

if TYPE_CHECKING:
    from torch import nn

ALONE = "none: computation alone"
POWER = "PowerSGD rank 4"
_HOOK = "model.register_comm_hook(None, default_hooks.{}_compress_hook)"
WITH_HOROVOD = {"dense fp32": "hvd.Compression.none", "dense fp16": "hvd.Compression.fp16"}
"""What is written for each dense exchange."""
WITH_DDP = {
    "dense fp32": "DDP as it is",
    "dense fp16": _HOOK.format("fp16"),
    "dense bf16": _HOOK.format("bf16"),
    POWER: "DDP's powerSGD_hook",
}
"""The same under torchrun."""
RATIOS = (0.01, 0.001)
_WRAPPED, _REGISTER = "compression=SIDCo(ratio={})", "register(model, SIDCo(ratio={}))"
_LOCAL = 'LocalUpdates(adamw, model, SIDCo(ratio={}, exchange=Pairs("packed")))'
"""What is written for a sparse exchange: with Horovod, with DDP, and with AdamW with both."""
_BETWEEN = "register(model, SIDCo(ratio={}), mesh=mesh)"
"""The same with DDP, where torchrun has started several workers on each node."""
_ONE_HOST = "All workers are on one host, {}: these times say nothing about a network between hosts."
WARM_STEPS = 4
"""Steps before the first that is timed. PowerSGD begins in the third, and thresholds have settled by then."""
_NO_GAIN = 0.95
"""A step that takes more than this part of another one's time is not worth a change."""


class Result(NamedTuple):
    """The steps of one contender."""

    title: str
    use: str
    """What a user writes."""
    bytes_sent: float | None
    """Bytes that a worker sends in a step; None if nobody counts them."""
    seconds: Sequence[float]
    """Of each round, the seconds of the slowest worker."""

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


def advice(results: Sequence[Result]) -> str:
    """Return the sentence that says what to use. The first result is computation alone."""
    alone, *others = results
    fastest = min(one.median for one in others)
    # Of those that are as fast, the first changes least.
    chosen = next(one for one in others if _NO_GAIN * one.median <= fastest)
    dense = min((one for one in others if one.title in WITH_DDP), key=lambda one: one.median)
    if _NO_GAIN * chosen.median < alone.median:
        return f"Use {chosen.use}: a step takes {chosen.median / alone.median:.2f} times as long as computation alone."
    if chosen.title in WITH_DDP:
        return f"Use {chosen.use}: no other exchange makes a step more than {100 * (1 - _NO_GAIN):.0f} % faster."
    return f"Use {chosen.use}: a step takes {chosen.median / dense.median:.2f} times as long as with {dense.use}."


def table(results: Sequence[Result]) -> list[str]:
    """Return a Markdown table."""
    lines = [
        "| exchange | bytes sent per step and worker | step, ms: median (quartiles) | beyond computation, ms | what to write |"
    ]
    lines.append("|---|---:|---:|---:|---|")
    for one in results:
        first, third = 1e3 * np.quantile(one.seconds, [0.25, 0.75])
        sent = "not counted" if one.bytes_sent is None else f"{one.bytes_sent:,.0f}"
        beyond = 1e3 * (one.median - results[0].median)
        times = f"{1e3 * one.median:.1f} ({first:.1f}–{third:.1f}) | {beyond:.1f}"
        lines.append(f"| {one.title} | {sent} | {times} | {one.use and f'`{one.use}`'} |")
    return lines


def _group() -> tuple[Any, Any]:
    """Start Horovod, or torch.distributed under torchrun. Return the transport and this worker's device."""
    import torch

    # First, because it imports the other one.
    hvd: Any = import_module("horovod_sparse.torch")
    from horovod_sparse.contrib.torch_workers import transport_of

    device = torch.device("cpu")
    if torch.cuda.is_available():
        local = os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or "0"
        device = torch.device("cuda", int(os.environ.get("HOROVOD_LOCAL_RANK", local)))
        torch.cuda.set_device(device)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_disconnect)
        return transport_of(None, device), device
    if hvd.stock.module is None:
        raise SystemExit(f"try needs Horovod with PyTorch ({hvd.stock.missing}), or torchrun; see horovod-sparse check")
    hvd.init()
    if hvd.size() < 2:
        raise SystemExit(
            "try needs at least 2 workers, got 1: mpirun -np 2 horovod-sparse try --parameters 25M --step-ms 110"
        )
    return transport_of(None, device), device


def _disconnect() -> None:
    """Join Gloo's threads, which belong to the group and to every model that uses it: one that outlives Python aborts."""
    gc.collect()
    import_module("torch.distributed").destroy_process_group()


def _sleeper(parameters: int, seconds: float, rank: int) -> nn.Module:
    """Return a model with so many parameters that sleeps for so long in a step, a third forward and two thirds backward."""
    # A worker that sleeps leaves the processor to the exchange, as one that computes on a GPU does.
    import torch
    from torch import nn

    # Matrices, which PowerSGD factorises, and what is left.
    side = 1024
    whole, rest = divmod(parameters, side * side)
    shapes = [(side, side)] * whole + ([(rest,)] if rest else [])
    noise = torch.randn(2 * side * side, generator=torch.Generator().manual_seed(rank))
    places = random.Random(rank)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, pause: float) -> torch.Tensor:
            context.weight, context.pause = weight, pause
            time.sleep(pause)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            end = time.perf_counter() + 2 * context.pause
            start = places.randrange(side * side)
            made = noise[start : start + context.weight.numel()].to(context.weight.device, copy=True)
            time.sleep(max(0.0, end - time.perf_counter()))
            return gradient, made.view_as(context.weight), None

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = Layer.apply(x, weight, seconds / 3 * weight.numel() / parameters)  # type: ignore[no-untyped-call]
            return x

    return Sleeper()


Made = tuple[Any, Any, Any]
"""The model to call, its optimizer and its compression, if that counts bytes."""


def _with_horovod(dense: str, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """Return what to call, and the optimizer, with a dense exchange."""
    hvd: Any = import_module("horovod_sparse.torch")
    made = {"dense fp32": hvd.Compression.none, "dense fp16": hvd.Compression.fp16}[dense]
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=made)


def _with_ddp(dense: str, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """Return the same under torchrun."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # PowerSGD in one bucket: with several, its callbacks race over Gloo.
    made = DistributedDataParallel(model, bucket_cap_mb=1 << 20 if dense == POWER else 25)
    if dense == POWER:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif dense != "dense fp32":
        made.register_comm_hook(None, getattr(default_hooks, f"{dense.removeprefix('dense ')}_compress_hook"))
    return made, optimizer


def _mesh(group: Any, device: Any) -> Any:
    """Return the mesh of nodes with several workers each; None if there is none."""
    from torch.distributed.device_mesh import init_device_mesh

    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if set(group.everyone(here)) != {here} or not 1 < here < group.world:
        return None
    shape = (group.world // here, here)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _sparse(ratio: float, line: str, mesh: Any, model: nn.Module, optimizer: Any) -> Made:
    """Return a contender with SIDCo, as its line says."""
    from torch.nn.parallel import DistributedDataParallel

    from horovod_sparse.torch import LocalUpdates, Pairs, SIDCo, register

    if line == _LOCAL:
        packed = SIDCo(ratio=ratio, warmup=None, exchange=Pairs("packed"))
        return model, LocalUpdates(optimizer, model, packed), packed
    made = SIDCo(ratio=ratio, warmup=None)
    if line in (_REGISTER, _BETWEEN):
        wrapped = DistributedDataParallel(model)
        register(wrapped, made, optimizer=optimizer, mesh=mesh if line == _BETWEEN else None)
        return wrapped, optimizer, made
    hvd: Any = import_module("horovod_sparse.torch")
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=made), made


def measure(arguments: argparse.Namespace) -> tuple[list[Result], Sequence[str], int]:
    """Time the contenders in turns. Return the results, the host of each worker and this worker's rank."""
    import torch

    group, device = _group()
    under_ddp = "TORCHELASTIC_RUN_ID" in os.environ
    dense, make = (WITH_DDP, _with_ddp) if under_ddp else (WITH_HOROVOD, _with_horovod)
    # Gloo has no hook for bfloat16.
    dense = {title: use for title, use in dense.items() if title != "dense bf16" or device.type == "cuda"}
    line = _LOCAL if arguments.optimizer == "adamw" else _REGISTER if under_ddp else _WRAPPED
    mesh = _mesh(group, device) if line == _REGISTER else None
    sparse = {f"SIDCo {ratio:g}": (ratio, line) for ratio in RATIOS}
    if mesh is not None:
        sparse |= {f"SIDCo {ratio:g} between nodes": (ratio, _BETWEEN) for ratio in RATIOS}
    uses = {ALONE: "", **dense, **{title: use.format(f"{ratio:g}") for title, (ratio, use) in sparse.items()}}
    new = torch.optim.AdamW if arguments.optimizer == "adamw" else torch.optim.SGD
    contenders: list[Made] = []
    for title in uses:
        torch.manual_seed(0)
        model = _sleeper(arguments.parameters, arguments.step_ms / 1e3, group.rank).to(device)
        optimizer = new(model.parameters(), lr=1e-4)
        if title in sparse:
            contenders.append(_sparse(*sparse[title], mesh, model, optimizer))
        else:
            contenders.append((*((model, optimizer) if title == ALONE else make(title, model, optimizer)), None))

    def step(contender: Made) -> float:
        called, stepper, _ = contender
        x = torch.zeros((), device=device, requires_grad=True)
        group.everyone(0)
        begun = time.perf_counter()
        stepper.zero_grad()
        called(x).backward()
        stepper.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(WARM_STEPS + arguments.rounds):
        for contender, times in zip(contenders, seconds, strict=True):
            spent = step(contender)
            if number >= WARM_STEPS:
                times.append(spent)
    slowest = np.max(group.everyone(seconds), axis=0)
    known = {"dense fp32": allreduce_bytes(4 * arguments.parameters, group.world), ALONE: 0.0}
    known["dense fp16"] = known["dense bf16"] = known["dense fp32"] / 2
    results = []
    for (title, use), (_, _, compression), times in zip(uses.items(), contenders, slowest.tolist(), strict=True):
        sent = known.get(title) if compression is None else compression.stats().last.total.bytes_sent
        results.append(Result(title, use, sent, times))
    return results, group.everyone(socket.gethostname()), group.rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    text = "of your model, as 25M or 350k"
    add("--parameters", type=partial(parse_count, "parameters"), required=True, metavar="N", help=text)
    milliseconds = partial(parse_number, "step-ms", most=1e6, example="110")
    text = "what a worker computes in a step of your model"
    add("--step-ms", type=milliseconds, required=True, metavar="MS", help=text)
    text = "steps of each exchange; default: 10"
    add("--rounds", type=partial(parse_count, "rounds"), default=10, metavar="N", help=text)
    add_optimizer(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the results on one worker, and return the exit status."""
    if find_spec("torch") is None:
        raise SystemExit("try needs PyTorch, which is not installed; see horovod-sparse check")
    results, hosts, rank = measure(arguments)
    if rank == 0:
        computing = f"{arguments.parameters:,} parameters, {arguments.step_ms:g} ms of computing"
        title = f"{computing}, {len(hosts)} workers, {arguments.rounds} rounds"
        remarks = [_ONE_HOST.format(hosts[0])] if len(set(hosts)) == 1 else []
        print(title, "", *table(results), "", advice(results), *remarks, sep="\n", flush=True)
    return 0
