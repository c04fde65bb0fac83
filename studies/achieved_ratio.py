"""How close SIDCo comes to the ratio it was asked for, in real training with error feedback, on the two examples.

    mpirun -np 2 python studies/achieved_ratio.py [--json FILE]

Trains each example for 200 steps per distribution and ratio with the examples' own models, data and learning rates, and reads
achieved/asked count of every step from `compression.stats()`. Prints mean and 5-95 % range over the steps 20 to 200; fails when
a mean is more than 20 % off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
import torch_charlm
import torch_digits
from text import read_corpus, sample
from torch import Tensor, nn

from horovod_sparse.compressors.sidco import Distribution
from horovod_sparse.torch import SIDCo

STEPS, FIRST = 200, 20
TOLERANCE = 0.2
RATIOS = (0.1, 0.01, 0.001)
DISTRIBUTIONS: tuple[Distribution, ...] = ("exponential", "gamma", "gpareto")


def digits() -> tuple[nn.Module, float, Iterator[Tensor]]:
    """Model, learning rate, and the losses of one batch after the other."""
    model = torch_digits.make_model()
    x, y = torch_digits.load_data()[0].tensors
    generator = torch.Generator().manual_seed(hvd.rank())

    def losses() -> Iterator[Tensor]:
        while True:
            batch = torch.randint(len(x), (16,), generator=generator)
            yield F.cross_entropy(model(x[batch]), y[batch])

    return model, 0.03, losses()


def charlm() -> tuple[nn.Module, float, Iterator[Tensor]]:
    model = torch_charlm.CharLM(context=64, width=256, layers=4, heads=4)
    text = read_corpus(2_000_000)
    generator = torch.Generator().manual_seed(hvd.rank())

    def losses() -> Iterator[Tensor]:
        while True:
            x, y = sample(text, 4, 64, generator)
            yield F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return model, 0.05, losses()


def achieved(task: Callable[[], tuple[nn.Module, float, Iterator[Tensor]]], compression: SIDCo) -> list[float]:
    """Achieved/asked count of every step, over all buckets."""
    torch.manual_seed(0)
    model, lr, losses = task()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    quotients = []
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 60)
        optimizer.zero_grad()
        next(losses).backward()
        optimizer.step()
        total = compression.stats().last.total
        quotients.append(total.count / total.target)
    return quotients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--adapt", choices=["paper", "robust"], default="robust")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if hvd.rank() == 0:
        print(
            f"{'gradients':9} {'distribution':12} {'ratio':>6} {'achieved/asked':>14} {'5 %':>6} {'95 %':>6}",
            flush=True,
        )
    for task in (digits, charlm):
        for distribution in DISTRIBUTIONS:
            for ratio in RATIOS:
                mine = achieved(task, SIDCo(ratio, distribution=distribution, adapt=args.adapt, warmup=None))[
                    FIRST - 1 :
                ]
                quotients = np.concatenate(hvd.allgather_object(mine, name="quotients"))
                low, high = np.percentile(quotients, (5, 95))
                row = {"gradients": task.__name__, "distribution": distribution, "ratio": ratio,
                       "mean": float(quotients.mean()), "p5": float(low), "p95": float(high)}  # fmt: skip
                rows.append(row)
                if hvd.rank() == 0:
                    print(
                        f"{task.__name__:9} {distribution:12} {ratio:6} {row['mean']:14.3f} {low:6.2f} {high:6.2f}",
                        flush=True,
                    )
    worst = max(abs(row["mean"] - 1) for row in rows)
    if hvd.rank() == 0:
        print(f"furthest from 1: {worst:.3f} ({hvd.size()} workers, adapt={args.adapt!r}, steps {FIRST} to {STEPS})")
        if args.json:
            args.json.write_text(
                json.dumps({"workers": hvd.size(), "adapt": args.adapt, "rows": rows}, indent=1) + "\n"
            )
    if worst > TOLERANCE:
        raise SystemExit(f"achieved/asked count must be within {TOLERANCE:.0%} of 1 on average, got {worst:.3f} off")


if __name__ == "__main__":
    main()
