"""What a rank computes for each exchange: the costs that a plan with network="measured" takes into account.

    python benchmarks/costs.py [--ratio 0.001]

Each number is the median of several measurements, on arrays of NumPy and of PyTorch, with one thread.
"""

from __future__ import annotations

import argparse
import statistics

import machine
import numpy as np
import torch

from horovod_sparse import compressors
from horovod_sparse.core.costs import measured_costs
from horovod_sparse.core.selector import no_device
from horovod_sparse.exchange.planner import Costs
from horovod_sparse.numpy.compiled import host_ops
from horovod_sparse.torch.compiled import tensor_ops

TIMES = 7
COLUMNS = (
    "select, ns per entry",
    "row, ns",
    "compact row, ns",
    "half, ns per entry",
    "balanced, ns per entry",
    "owned row, ns",
)
"""The titles of `Costs`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, default=0.001)
    ratio = parser.parse_args().ratio
    torch.set_num_threads(1)
    print(machine.describe())
    columns = "arrays", "compressor", *COLUMNS
    print(f"| {' | '.join(columns)} |\n|---|---|{'---:|' * len(COLUMNS)}")
    for title, ops, like in (("NumPy", host_ops(1), np.zeros(1)), ("PyTorch", tensor_ops(), torch.zeros(1))):
        for make in (compressors.SIDCo, compressors.TopK, compressors.GaussianK):
            found = [measured_costs(ops, make(ratio), like, no_device) for _ in range(TIMES)]
            costs = Costs(*map(statistics.median, zip(*found, strict=True)))
            print(f"| {title} | {make.__name__} | " + " | ".join(f"{1e9 * cost:.2f}" for cost in costs) + " |")


if __name__ == "__main__":
    main()
