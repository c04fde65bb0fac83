"""Memory of a worker per parameter, dense and sparse: what stays after a step, and the most within one.

    python benchmarks/memory.py

Starts two workers for each row (`mpirun`), which train linear layers on few samples, so that activations are small. Prints, of
the first worker, resident bytes per parameter after the last step, and the highest since its start. Linux alone tells both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import markdown
import torch
from torch import nn

import horovod_sparse.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import demo

Make = Callable[[nn.Module], Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


def distributed(optimizer: Callable[[nn.Module], Any], compression: Callable[[], Any]) -> Make:
    return lambda model: hvd.DistributedOptimizer(
        optimizer(model), named_parameters=model.named_parameters(), compression=compression()
    )


def dense() -> Any:
    return hvd.Compression.none


def sparse() -> Any:
    return hvd.SIDCo(0.01, warmup=None)


ROWS: dict[str, Make] = {
    "SGD, dense": distributed(sgd, dense),
    "SGD, SIDCo(0.01)": distributed(sgd, sparse),
    "SGD, SIDCo(0.01), dense steps of the warm-up": distributed(sgd, lambda: hvd.SIDCo(0.01)),
    "AdamW, dense": distributed(adamw, dense),
    "AdamW, SIDCo(0.01)": distributed(adamw, sparse),
    "AdamW, LocalUpdates, SIDCo(0.01)": lambda model: hvd.LocalUpdates(adamw(model), model, sparse()),
}
STEPS = 6
BEGUN = "bytes per parameter:"


def resident(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def work(row: str, layers: int) -> None:
    """Train one row, and print what the first worker takes."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begun = resident("VmRSS")
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))
    optimizer = ROWS[row](model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, 2048)).square().mean().backward()
        optimizer.step()
    if hvd.rank() == 0:
        numel = sum(parameter.numel() for parameter in model.parameters())
        print(BEGUN, *((resident(field) - begun) / numel for field in ("VmRSS", "VmHWM")), flush=True)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12, help="of 4.2 M parameters each")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        work(args.row, args.layers)
        return
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            output = Path(folder, "output.txt")
            options = ["--row", row, "--layers", str(args.layers)]
            demo.run_workers(Path(__file__), options, workers=2, output=output, timeout=600.0)
            line = next(one for one in output.read_text(encoding="utf-8").splitlines() if one.startswith(BEGUN))
            found[row] = [float(one) for one in line.removeprefix(BEGUN).split()]
    print(
        f"{4.2 * args.layers:.0f} M parameters, {STEPS} steps, 2 workers\n{machine.describe()}, {torch.__version__}\n"
    )
    beside = {row: next(found[one] for one in found if one.split(",")[0] == row.split(",")[0]) for row in found}
    rows = [
        [row, f"{after:.1f}", f"{after - beside[row][0]:+.1f}", f"{most:.1f}", f"{most - beside[row][1]:+.1f}"]
        for row, (after, most) in found.items()
    ]
    print(markdown.table(["bytes per parameter", "after a step", "beside dense", "at most", "beside dense"], rows))


if __name__ == "__main__":
    main()
