"""Time whole training steps of two processes that share this machine's GPU, over NCCL, dense and sparse, in turns.

    python benchmarks/gpu_step.py [--width 768 --layers 12] [--rounds 15] [--rows "dense fp32" "SIDCo 0.001"]
    python benchmarks/gpu_step.py --on-cpu --width 64 --layers 1 --rounds 3            (tests the script, measures nothing)

NCCL takes each process for a host of its own, so that what is exchanged goes through sockets of the loopback device. Prints one
table; fails unless the replicas are the same, bit by bit, after the last step. Needs no Horovod. Compressors have the warm-up
that they have by default, and take its end as loaded: their first steps would be dense.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import markdown
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import check_replicas
from text import CHARACTERS
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel
from torch_charlm import CharLM

from horovod_sparse.torch import DGC, GaussianK, MiCRO, Pairs, RandomBlock, SIDCo, TopK, register

WORLD = 2
SETTLING = 10
"""Rounds that are not timed: residuals grow, and Triton compiles."""
WARMED_UP = 10**6
"""A step in which every row's warm-up has ended."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""What calls of CUDA begin with that wait, or launch something."""
LIMIT = timedelta(seconds=60)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8, help="per process")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", default=list(ROWS))
    parser.add_argument("--on-cpu", action="store_true", help="over Gloo")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return 0
    device = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["torchrun", "--standalone", "--nproc-per-node", str(WORLD), *sys.argv]
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    return subprocess.run(command, env={**os.environ, **device}).returncode


Made = tuple[nn.Module, Any, Any]
"""Model, optimizer, and compression if there is one."""


def dense(hook: str, model: nn.Module, optimizer: Any) -> Made:
    wrapped = DistributedDataParallel(model)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "PowerSGD":
        state = power_sgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, power_sgd.powerSGD_hook)
    return wrapped, optimizer, None


def sparse(make: Callable[..., Any], model: nn.Module, optimizer: Any) -> Made:
    wrapped, compression = DistributedDataParallel(model), make()
    register(wrapped, compression, optimizer)
    return wrapped, optimizer, compression


SGD, ADAMW = partial(torch.optim.SGD, lr=0.01, momentum=0.9), partial(torch.optim.AdamW, lr=1e-4)
ROWS: dict[str, tuple[Callable[..., Any], Callable[[nn.Module, Any], Made]]] = {
    "computation alone": (SGD, lambda model, optimizer: (model, optimizer, None)),
    "dense fp32": (SGD, partial(dense, "")),
    "dense fp16": (SGD, partial(dense, "fp16")),
    "PowerSGD 4": (SGD, partial(dense, "PowerSGD")),
    "SIDCo 0.001": (SGD, partial(sparse, partial(SIDCo, 0.001))),
    "SIDCo 0.01": (SGD, partial(sparse, partial(SIDCo, 0.01))),
    "TopK 0.01": (SGD, partial(sparse, partial(TopK, 0.01))),
    "TopK 0.01 packed": (SGD, partial(sparse, partial(TopK, 0.01, exchange=Pairs("packed")))),
    "MiCRO 0.01": (SGD, partial(sparse, partial(MiCRO, 0.01))),
    "GaussianK 0.01": (SGD, partial(sparse, partial(GaussianK, 0.01))),
    "DGC 0.01": (SGD, partial(sparse, partial(DGC, 0.01))),
    "RandomBlock 0.01": (SGD, partial(sparse, partial(RandomBlock, 0.01))),
    "AdamW, dense fp32": (ADAMW, partial(dense, "")),
    "AdamW, SIDCo 0.01": (ADAMW, partial(sparse, partial(SIDCo, 0.01))),
}


class Contender:
    """One way of exchanging gradients, with a model of its own."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        make_optimizer, make = ROWS[name]
        module = CharLM(options.context, options.width, options.layers, max(1, options.width // 64)).to(device)
        self.name, self.module, self.device = name, module, device
        self.model, self.optimizer, self.compression = make(module, make_optimizer(module.parameters()))
        self.seconds: list[float] = []
        self.waits = self.launches = 0

    def end_warmup(self) -> None:
        """Go on behind the warm-up, after a step."""
        if self.compression is not None:
            state = self.compression.state_dict()
            for one in state["adaptive"].values():
                one["step"] = WARMED_UP
            self.compression.load_state_dict(state)

    def step(self, windows: torch.Tensor) -> None:
        """One training step, timed."""
        self._wait()
        begun = time.perf_counter()
        self._train(windows)
        self._wait()
        self.seconds.append(time.perf_counter() - begun)

    def _train(self, windows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(windows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()).backward()
        self.optimizer.step()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def count(self, windows: torch.Tensor) -> None:
        """Count how often the host waits for the device in a step, and what it launches, as CUDA sees it."""
        if self.device.type == "cuda":
            with torch.profiler.profile() as seen:
                self._train(windows)
            calls = Counter(one.name for one in seen.events())
            self.waits = sum(number for name, number in calls.items() if name.startswith(WAITS))
            self.launches = sum(number for name, number in calls.items() if name.startswith(LAUNCHES))

    def check(self) -> None:
        if self.name != "computation alone":
            parameters = {name: one.detach().cpu().numpy() for name, one in self.module.named_parameters()}
            check_replicas(parameters, gathered)

    @property
    def sent(self) -> str:
        if self.compression is None:
            return ""
        # The first step was dense.
        last = self.compression.stats().last
        return f"{last.total.bytes_sent + last.dense_bytes_sent:,.0f}"


def gathered(value: str, name: str) -> list[str]:
    everyone = [""] * WORLD
    dist.all_gather_object(everyone, value)
    return everyone


def work(options: argparse.Namespace) -> None:
    # NCCL refuses two ranks of one host on one GPU.
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    dist.init_process_group("gloo" if options.on_cpu else "cpu:gloo,cuda:nccl", timeout=LIMIT)
    race(options, torch.device("cpu" if options.on_cpu else "cuda"))
    # Every model keeps the group, and one of Gloo's threads that outlives Python aborts.
    gc.collect()
    dist.destroy_process_group()


def race(options: argparse.Namespace, device: torch.device) -> None:
    contenders = [Contender(name, options, device) for name in options.rows]
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = options.batch_size, options.context + 1
    for number in range(SETTLING + options.rounds):
        windows = torch.randint(CHARACTERS, shape, generator=generator).to(device)
        for one in contenders:
            one.step(windows)
            if number == 0:
                one.end_warmup()
            if number < SETTLING:
                one.seconds.clear()
    for one in contenders:
        one.count(windows)
        one.check()
    if dist.get_rank() == 0:
        numel = sum(parameter.numel() for parameter in contenders[0].module.parameters())
        name = "CPU: no measurement" if options.on_cpu else torch.cuda.get_device_name()
        print(f"{name}, torch {torch.__version__}; {numel:,} parameters, {shape[0]} x {options.context} per process\n")
        rows = []
        for one in contenders:
            quartiles = statistics.quantiles(one.seconds, n=4, method="inclusive")
            rows.append(
                [one.name, *(f"{1e3 * part:.1f}" for part in quartiles), one.sent, str(one.waits), str(one.launches)]
            )
        header = ("row", "quartile, ms", "median, ms", "quartile, ms", "bytes sent", "host waits", "launches")
        print(markdown.table(header, rows))
    dist.barrier()


if __name__ == "__main__":
    raise SystemExit(main())
