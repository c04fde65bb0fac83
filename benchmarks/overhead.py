"""What a step takes in Python: for each parameter, and for each bucket, beside the work on their entries. One process.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --parameters 50 1000 --elements 300 20000

A model in `DistributedDataParallel`, with SIDCo(0.01) as its communication hook; only the hook is timed. With one worker
messages travel nowhere. In "cold" steps other memory is read before the hook runs, as a matrix product does. Prints one
table. "A parameter, us" is what the hook takes longer than with one parameter of as many entries in all, by the number of
parameters. "A bucket, us" is what it takes with one parameter of few entries.
"""

# The annotations are no strings here: DDP compares those of a hook with its own classes.
import os
import statistics
import time
from typing import Any

import machine
import markdown
import torch
import torch.distributed as dist
from step_contenders import Many
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import SIDCo, comm_hook

STEPS, SETTLING = 60, 20
FEW = 300
"""Entries of a bucket whose entries cost nothing."""
CACHES = 2**24
"""Numbers that fill the caches of a processor."""


class Timed:
    """A communication hook that notes how long it takes."""

    def __init__(self, cold: bool) -> None:
        self.other = torch.ones(CACHES if cold else 1)
        self.seconds: list[float] = []

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.other.sum()
        began = time.perf_counter()
        future = comm_hook(state, bucket)
        self.seconds.append(time.perf_counter() - began)
        return future


def microseconds(parameters: int, elements: int, cold: bool) -> float:
    """The median time of the hook in a step of a model with so many parameters of so many elements."""
    timed = Timed(cold)
    model = DistributedDataParallel(Many(parameters, elements), bucket_cap_mb=1 << 20)
    model.register_comm_hook(SIDCo(0.01, warmup=None, granularity="model"), timed.hook)
    steps = []
    for _ in range(SETTLING + STEPS):
        timed.seconds.clear()
        model.zero_grad()
        model(torch.randn(parameters * elements)).backward()
        steps.append(sum(timed.seconds))
    return 1e6 * statistics.median(steps[SETTLING:])


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--elements", type=int, nargs="+", default=[300, 20_000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HOROVOD_SPARSE_FORCE"] = "1"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for cold in (False, True):
        bucket = microseconds(1, FEW, cold)
        for number in args.parameters:
            for elements in args.elements:
                whole, one = microseconds(number, elements, cold), microseconds(1, number * elements, cold)
                each = f"{(whole - one) / number:.1f}"
                rows.append(["cold" if cold else "warm", str(number), f"{elements:,}", each, f"{bucket:.0f}"])
    print(f"{machine.describe()}, one thread\n")
    print(markdown.table(["caches", "parameters", "elements of each", "a parameter, us", "a bucket, us"], rows, 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
