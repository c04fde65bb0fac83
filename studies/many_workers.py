"""Up to a thousand workers in one process: what each exchange sends, what is reduced, and the loss beside dense training.

    python studies/many_workers.py train --workers 16 64 --steps 300
    python studies/many_workers.py train --workers 256 --steps 100
    python studies/many_workers.py tables > tables.md
    python studies/many_workers.py draw

Trains a perceptron on scikit-learn's handwritten digits by plain SGD. Each worker draws samples of its own. All methods get
the same samples. `train` adds a line of results to the file of raw data for each run that is not there yet. `tables` and `draw`
read that file alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import around
import markdown
import numpy as np
from numpy.typing import NDArray

import horovod_sparse.numpy as sparse
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.plan import rounds_of
from horovod_sparse.exchange.cost import allreduce_bytes

Array = NDArray[Any]
Row = dict[str, Any]
DATA = Path(__file__).with_suffix(".jsonl")
PICTURE = around.ROOT / "docs" / "evidence" / "scale.png"
SIZES = ((64, 128), (128,), (128, 10), (10,))
"""Shapes of the perceptron's weights and biases."""
ENTRIES = sum(int(np.prod(shape)) for shape in SIZES)
BATCH, RATE = 4, 0.2
METHODS: dict[str, Callable[[float], Compressor]] = {
    "dense float32": lambda ratio: sparse.NoOp(min_numel=0),
    **{
        name: partial(cls, min_numel=0, warmup=None, **settings)
        for name, cls, settings in (
            ("TopK, pairs", sparse.TopK, {}),
            ("TopK, packed pairs", sparse.TopK, {"exchange": sparse.Pairs("packed")}),
            ("TopK, union", sparse.TopK, {"exchange": sparse.Union()}),
            ("MiCRO, union", sparse.MiCRO, {}),
            ("RandomK, shared indices", sparse.RandomK, {}),
            ("SIDCo, pairs", sparse.SIDCo, {}),
            ("GaussianK, pairs", sparse.GaussianK, {}),
            ("DGC, pairs", sparse.DGC, {}),
            ("RedSync, pairs", sparse.RedSync, {}),
        )
    },
}
DRAWN = ("TopK, pairs", "TopK, packed pairs", "MiCRO, union", "RandomK, shared indices")
"""One method of each exchange."""


def parts(flat: Array) -> list[Array]:
    """Views of weights and biases in arrays whose last axis holds a model each."""
    ends = np.cumsum([np.prod(shape) for shape in SIZES])
    split = np.split(flat, ends[:-1], axis=-1)
    return [one.reshape(*flat.shape[:-1], *shape) for one, shape in zip(split, SIZES, strict=True)]


def outputs(weights: Array, images: Array) -> tuple[Array, Array]:
    """The hidden layer, and the probabilities of the digits."""
    first, first_bias, second, second_bias = parts(weights)
    hidden = np.maximum(images @ first + first_bias, 0.0)
    logits = hidden @ second + second_bias
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=-1, keepdims=True)


def gradients(weights: Array, images: Array, digits: Array) -> Array:
    """Every worker's gradient of the cross-entropy; images are (workers, batch, pixels), digits (workers, batch)."""
    hidden, errors = outputs(weights, images)
    errors = (errors - np.eye(10, dtype=np.float32)[digits]) / digits.shape[1]
    below = errors @ parts(weights)[2].T * (hidden > 0.0)
    pieces = (images.swapaxes(1, 2) @ below, below.sum(axis=1), hidden.swapaxes(1, 2) @ errors, errors.sum(axis=1))
    return np.concatenate([one.reshape(len(images), -1) for one in pieces], axis=1)


def train(method: str, number: int, ratio: float, steps: int) -> Row:
    """Train with so many workers; return what is written to the file of raw data."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    rng, draws = np.random.default_rng(0), np.random.default_rng(number)
    pieces = [rng.normal(size=shape) * np.sqrt(2.0 / shape[0]) * (len(shape) > 1) for shape in SIZES]
    weights = np.concatenate([one.reshape(-1) for one in pieces]).astype(np.float32)
    compressor = METHODS[method](ratio)
    workers, entries, norms = sparse.VirtualWorkers(number, compressor), [], []
    for _ in range(steps):
        chosen = draws.integers(len(images), size=(number, BATCH))
        given = gradients(weights, images[chosen], digits[chosen])
        reduced = workers({"model": given})["model"]
        entries.append(int(np.count_nonzero(reduced)))
        norms.append(float(np.linalg.norm(given, axis=1).mean()))
        weights -= np.float32(RATE) * reduced
    probabilities = outputs(weights, images)[1][np.arange(len(digits)), digits]
    mean, k = workers.stats().mean.total, compressor.target_count(ENTRIES)
    residuals = [feedback.stats().last.total.residual_norm for feedback in workers.feedbacks[:16]]
    return {
        "method": method,
        "workers": number,
        "ratio": ratio,
        "steps": steps,
        "k": k,
        "bytes": mean.bytes_sent,
        "count": mean.count,
        "truncated": mean.truncated,
        "entries": statistics.fmean(entries[-max(steps // 3, 1) :]),
        "residual": statistics.fmean(residuals) / norms[-1],
        "loss": float(-np.log(np.maximum(probabilities, 1e-30)).mean()),
    }


def rows() -> list[Row]:
    """The raw data. The bytes that were sent must be those that the exchange's formula says, exactly."""
    known = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()] if DATA.exists() else []
    for row in known:
        formula = leaving(METHODS[row["method"]](row["ratio"]), ENTRIES, row["ratio"], row["workers"])
        if row["bytes"] != formula:
            raise SystemExit(f"{row} is not as the formula says: {formula} bytes")
    return known


def leaving(compressor: Compressor, entries: int, ratio: float, number: int) -> float:
    """The bytes that leave a worker in a step."""
    return sum(one.bytes_sent(number) for one in rounds_of(compressor, entries, ratio, number))


def table(known: Sequence[Row], title: str, cell: Callable[[Row, Row], str]) -> str:
    """One line for each method, one column for each number of workers; `cell` is given a run and dense training beside it."""
    numbers = sorted({row["workers"] for row in known})
    of = {(row["method"], row["workers"]): row for row in known}
    steps = {row["workers"]: row["steps"] for row in known}
    lines = [
        [method, *(cell(of[method, n], of["dense float32", n]) if (method, n) in of else "" for n in numbers)]
        for method in METHODS
        if any((method, n) in of for n in numbers)
    ]
    return f"{title}:\n\n" + markdown.table(["method", *(f"{n:,} workers, {steps[n]} steps" for n in numbers)], lines)


def tables() -> str:
    """All tables of the page."""
    known = rows()
    shown: dict[str, Callable[[Row, Row], str]] = {
        "Bytes that leave a worker in a step (in units of dense float32)": lambda row, _: (
            f"{row['bytes']:,.0f} ({row['bytes'] / allreduce_bytes(4 * ENTRIES, row['workers']):.2f})"
        ),
        "Entries of the reduced gradient / k, in the last third of the steps": lambda row, _: per_k(row, "entries"),
        "Entries that a worker sends / k (that had no room / k)": lambda row, _: (
            f"{per_k(row, 'count')} ({per_k(row, 'truncated')})"
        ),
        "Norm of a worker's residual / norm of its gradient, after the last step": lambda row, _: (
            f"{row['residual']:.1f}"
        ),
        "Loss / loss of dense training with the same samples": lambda row, dense: f"{row['loss'] / dense['loss']:.2f}",
    }
    return "\n\n".join([*(table(known, title, cell) for title, cell in shown.items()), of_large_buckets()])


def per_k(row: Row, field: str) -> str:
    return f"{row[field] / row['k']:.2f}"


def of_large_buckets() -> str:
    """What a bucket of 25 MB sends, by the formulas alone."""
    entries, numbers = 25 * 2**18, (16, 64, 256, 1024)

    def relative(method: str, number: int) -> float:
        return leaving(METHODS[method](0.01), entries, 0.01, number) / allreduce_bytes(4 * entries, number)

    lines = [[method, *(f"{relative(method, n):.3f}" for n in numbers)] for method in METHODS]
    title = f"Bytes of a bucket of {entries:,} entries, by formula, in units of dense float32:"
    return f"{title}\n\n{markdown.table(['method', *(f'{n:,} workers' for n in numbers)], lines)}"


def draw() -> None:
    """Bytes over workers, in units of dense training's."""
    figure = around.figure(7.2, 4.5)
    axes = figure.subplots()
    # Colour-blind people tell them apart.
    axes.set_prop_cycle(color=["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#000000"])
    axes.axhspan(1.0, 1e3, color="#f3dcd6")
    axes.axhline(1.0, color="black", linewidth=2.0)
    known, ends = rows(), {}
    for method in DRAWN:
        sent = {row["workers"]: row["bytes"] for row in known if row["method"] == method}
        numbers = sorted(sent)
        relative = [sent[number] / allreduce_bytes(4 * ENTRIES, number) for number in numbers]
        (line,) = axes.loglog(numbers, relative, marker="o")
        ends[method] = relative[-1], line.get_color()
    height = 0.0
    for method, (end, color) in sorted(ends.items(), key=lambda one: one[1]):
        height = max(end, 1.6 * height)
        axes.text(1200, height, method, color=color, va="center")
    axes.text(16, 9.0, "more than dense float32")
    every = sorted({row["workers"] for row in known})
    axes.set_xticks(every, [f"{n:,}" for n in every])
    axes.minorticks_off()
    axes.set_xlim(14, every[-1] * 20)
    axes.set_ylim(1e-3, 20)
    axes.set_xlabel("workers")
    axes.set_ylabel("bytes that leave a worker / dense float32's")
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "tables", "draw"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--workers", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if args.what == "tables":
        print(tables())
    if args.what == "draw":
        draw()
    # The tables say how many entries had no room.
    warnings.filterwarnings("ignore", message=".*than its message has room for", category=UserWarning)
    for number in args.workers if args.what == "train" else ():
        for method in args.methods:
            if (method, number) not in {(row["method"], row["workers"]) for row in rows()}:
                row = train(method, number, args.ratio, args.steps)
                with DATA.open("a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file)
                print(row, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
