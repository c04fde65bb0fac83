"""How near gradients in training are to the distributions that SIDCo and Gaussian-k fit to them.

    python studies/distributions.py [--steps 1200] [--points 12] [--seeds 2] [--output FOLDER]

Trains three examples' models (CNN, LSTM, transformer) on two workers in this process: dense, and by TopK with error feedback
at each ratio. At some steps it takes the first worker's accumulated gradient (residual plus gradient; without feedback the
gradient alone) and fits every distribution to its magnitudes with the library's own fits, in one stage and in several. It
also compares what top-k leaves behind with the two bounds on it. Writes a page with tables and pictures, and all as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import around
import distributions_pictures as pictures
import distributions_report as report
import machine
import numpy as np
import torch
from build_up import Training
from distributions_fits import RAW, Gradient, Snapshot, contraction, qualities
from estimation_data import RECORDED
from tqdm import tqdm

from horovod_sparse.compressors import NoOp, TopK

WORKERS = 2


def snapshot(training: Training, task: str, kind: str, seed: int, ratios: list[float]) -> tuple[Snapshot, Gradient]:
    """What there is to find of the first worker's accumulated gradient, and this gradient."""
    bucket = training.pipelines[0].buckets[0]
    x = bucket.buffer.numpy().copy()
    slot = max(bucket.layout.slots, key=lambda slot: slot.numel)
    not_zero = x[x != 0].astype(np.float64)
    centred = not_zero - not_zero.mean()
    kurtosis = float((centred**4).mean() / (centred**2).mean() ** 2 - 3.0)
    layer = qualities(x[slot.offset : slot.offset + slot.numel], ratios)
    return Snapshot(
        task, kind, seed, training.steps, len(x), 1.0 - len(not_zero) / len(x), kurtosis, qualities(x, ratios), layer,
        *contraction(x),
    ), x  # fmt: skip


def train(task: str, kind: str, seed: int, args: argparse.Namespace) -> Iterator[tuple[Snapshot, Gradient]]:
    """Train one model, and look at its gradients at some steps."""
    points = {round(step) for step in np.geomspace(args.first, args.steps, args.points)}
    ratios = args.ratios if kind == RAW else [float(kind)]
    training = Training(
        lambda ratio, threshold: NoOp(granularity="model") if kind == RAW else TopK(ratio, granularity="model", warmup=None),
        task, ratios[0], WORKERS, seed,
    )  # fmt: skip
    for _ in range(args.steps):
        training.accumulate()
        if training.steps in points:
            yield snapshot(training, task, kind, seed, ratios)
        training.finish()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(RECORDED), default=list(RECORDED), metavar="TASK")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.01, 0.001], help="of TopK with feedback")
    parser.add_argument("--steps", type=int, default=1200, help="of every training run")
    parser.add_argument("--first", type=int, default=10, help="the first step that is looked at")
    parser.add_argument(
        "--points", type=int, default=12, help="steps that are looked at, evenly on a logarithmic scale"
    )
    parser.add_argument("--seeds", type=int, default=2, help="training runs of each kind")
    parser.add_argument("--output", type=Path, default=Path("distributions-output"), help="folder for a JSON file")
    parser.add_argument("--docs", type=Path, default=around.DOCS, help="folder for the page and its pictures")
    args = parser.parse_args()
    if not 1 <= args.first <= args.steps:
        parser.error(f"--first must be in [1, --steps], got {args.first} of {args.steps} steps")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    started = time.process_time()
    kinds = [RAW, *(f"{ratio:g}" for ratio in args.ratios)]
    snapshots: list[Snapshot] = []
    last: dict[tuple[str, str], Gradient] = {}
    runs = [(task, kind, seed) for task in args.tasks for kind in kinds for seed in range(args.seeds)]
    for task, kind, seed in tqdm(runs, file=sys.stderr):
        for found, x in train(task, kind, seed, args):
            snapshots.append(found)
            if seed == 0:
                last[task, kind] = x
    conditions = {
        "command": shlex.join(["python", "studies/distributions.py", *sys.argv[1:]]),
        "processor": machine.describe(),
        "torch": torch.__version__,
        "processor_seconds": time.process_time() - started,
        **{name: getattr(args, name) for name in ("steps", "first", "points", "seeds")},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    everything = {**conditions, "snapshots": [asdict(one) for one in snapshots]}
    (args.output / "distributions.json").write_text(json.dumps(everything) + "\n", encoding="utf-8")
    pictures.draw(snapshots, last, args.docs)
    text = report.page(snapshots, conditions)
    (args.docs / "distributions.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
