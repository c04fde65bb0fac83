"""Claims of Sparsified SGD with Memory: one entry per step or fewer is enough, the shift matters, workers speed it up.

    python studies/memory_sgd.py
    python studies/memory_sgd.py --products --epochs 10
    python studies/memory_sgd.py --workers 8

The problem and the stepsizes are those of `examples/numpy_logistic.py` (https://arxiv.org/abs/1809.07599). With one worker, an
entry is sent in some steps only: with k < 1 the operator sends one entry with probability k ("ultra-sparsification"), and
the shift is d/k. With `--products` the features are the 2,145 products of two pixels, each image scaled to norm 1, and one
entry per step is compared with dense SGD and QSGD (https://arxiv.org/abs/1610.02132). More workers add up their updates, as in
the paper's parallel algorithm, but in lockstep, in this process. Prints a table.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import markdown
import numpy as np
from numpy_logistic import GAMMA, Problem, load

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.numpy import Pairs, RandomK, TopK, VirtualWorkers
from horovod_sparse.ops.protocol import Array, Ops, Selection

Make = Callable[[int], Any]
"""seed -> None for dense SGD, a compressor, or `QSGD` for one worker."""


class QSGD:
    """Rounds magnitudes to multiples of norm / (2^bits - 1), up or down at random and without bias. It has no memory.

    A message has the norm and the shorter of two codes: sign and level of every entry; or gap, sign and level of the entries
    that are not zero, with gap and level in Elias' gamma code.
    """

    def __init__(self, bits: int, seed: int) -> None:
        self.bits, self.levels = bits, 2**bits - 1
        self.rng = np.random.default_rng((11, seed))
        self.sent: list[float] = []
        """Bits of each message."""

    def __call__(self, gradient: Array) -> Array:
        norm = np.linalg.norm(gradient)
        levels = np.floor(np.abs(gradient) * (self.levels / norm) + self.rng.random(gradient.size))
        at = np.flatnonzero(levels)
        coded = _gamma_code(np.diff(at, prepend=-1)) + _gamma_code(levels[at]) + at.size
        self.sent.append(32 + min(coded, gradient.size * (1 + self.bits)))
        return np.sign(gradient) * levels * (norm / self.levels)


def _gamma_code(numbers: Array) -> float:
    """Bits that Elias' gamma code takes for numbers from 1 on."""
    return float(np.sum(2 * np.floor(np.log2(numbers)) + 1))


class _Sometimes:
    """Sends what the compressor would send, with a probability; in other steps nothing."""

    probability = 1.0

    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: Any) -> Selection:
        selection: Selection = super().select(ops, x, k, capacity, state)  # type: ignore[misc]
        draws = np.random.default_rng((7, state.step, state.place.position))
        return selection if draws.random() < self.probability else Selection(selection.indices[:0], 0)


class SometimesRandomK(_Sometimes, RandomK): ...


class SometimesTopK(_Sometimes, TopK): ...


def sparse(cls: Callable[..., Any], size: int, k: float, seed: int, **chosen: Any) -> Any:
    """A compressor that sends k of `size` entries; the same for all seeds."""
    compression = cls(max(k, 1.0) / size, min_numel=0, lr_in_residual=True, warmup=None, **chosen)
    compression.probability = min(k, 1.0)
    return compression


random_k = partial(sparse, SometimesRandomK, exchange=Pairs())
top_k = partial(sparse, SometimesTopK)


def dense(seed: int) -> None:
    """Dense SGD."""


class Trained(NamedTuple):
    """What all seeds ended with."""

    ends: list[float]
    """Losses in units of the optimum."""
    steps: list[float]
    """Until the target; NaN where it was not reached."""
    sent: float
    """Entries (QSGD: bits) sent per worker and step."""

    @property
    def cells(self) -> list[str]:
        steps = ("not reached" if math.isnan(step) else f"{step:.0f}" for step in self.steps)
        return [", ".join(f"{end:.4f}" for end in self.ends), ", ".join(steps)]


class Study:
    """A problem, and how long it is worked on."""

    def __init__(self, args: argparse.Namespace) -> None:
        problem = load(None)
        if args.products:
            left, right = np.triu_indices(problem.rows.shape[1])
            rows = problem.rows[:, left] * problem.rows[:, right]
            problem = Problem(rows / np.linalg.norm(rows, axis=1, keepdims=True), problem.labels)
        self.problem, self.optimum, self.seeds = problem, problem.optimum(), args.seeds
        self.samples, self.size = problem.rows.shape
        self.updates = args.epochs * self.samples
        """Of all workers together."""
        self.target = args.target * self.optimum
        self.reached = f"steps to {args.target:g} times the optimum"
        self.heads = ["loss / optimum, each seed", f"{self.reached}, each seed"]
        """What `Trained.cells` are."""

    def train(self, make: Make, shift: float, workers: int = 1) -> Trained:
        """Train with all seeds; the stepsizes are `GAMMA / (lambda (t + shift))`, where t counts the updates of all workers."""
        ends, reached, counts = [], [], []
        for seed in range(self.seeds):
            at, values, sent = self._losses(make(seed), shift, workers, seed)
            ends.append(values[-1] / self.optimum)
            reached.append(next((float(t) for t, v in zip(at, values, strict=True) if v <= self.target), math.nan))
            counts.append(sent)
        return Trained(ends, reached, statistics.fmean(counts))

    def _losses(self, compression: Any, shift: float, workers: int, seed: int) -> tuple[list[int], list[float], float]:
        """Steps, the loss of the weighted average after each of them, and what is sent per worker and step."""
        problem, steps = self.problem, self.updates // workers
        together = VirtualWorkers(workers, compression, average=False) if isinstance(compression, Compressor) else None
        rngs = [np.random.default_rng((seed, worker)) for worker in range(workers)]
        weights, average, weight_sum = np.zeros(self.size), np.zeros(self.size), 0.0
        evaluated = set(np.unique(np.geomspace(10, steps, 200).astype(int)).tolist())
        at, values = [], []
        for step in range(steps):
            rate = GAMMA / (problem.regularization * (step * workers + shift))
            chosen = [int(rng.integers(self.samples)) for rng in rngs]
            gradients = np.stack([problem.sample_gradient(weights, sample) for sample in chosen])
            if together is not None:
                total = together({"weights": gradients}, learning_rate=rate)["weights"]
            else:
                total = gradients.sum(axis=0) if compression is None else compression(gradients[0])
            weights -= rate * total
            weight = (shift / workers + step) ** 2
            weight_sum += weight
            average += weight / weight_sum * (weights - average)
            if step + 1 in evaluated:
                at.append(step + 1)
                values.append(problem.objective(average))
        if together is not None:
            return at, values, together.stats().mean.total.count
        return at, values, float(self.size) if compression is None else statistics.fmean(compression.sent)


def fewer_than_one(study: Study) -> None:
    """Print the table of the first claim."""
    print(markdown.table(["method", "k", "entries sent per step", *study.heads], []))
    rows: list[tuple[str, float, Make]] = [("dense SGD", study.size, dense)]
    for name, make in (("random", random_k), ("top", top_k)):
        rows += [(name, k, partial(make, study.size, k)) for k in (1.0, 0.5, 0.25, 0.125)]
    for name, k, made in rows:
        found = study.train(made, 1.0 if made is dense else study.size / k)
        print(markdown.line([name, f"{k:g}", f"{found.sent:.3f}", *found.cells]), flush=True)


def one_entry(study: Study) -> None:
    """Print the table of one entry per step beside dense SGD and QSGD, with and without shift and memory."""
    print(markdown.table(["method", "shift", "bits sent per step", *study.heads, "bits until then, mean"], []))
    size = study.size
    rows: list[tuple[str, float, Make, float]] = [("dense SGD", size, dense, 32)]
    rows += [(f"QSGD, {bits} bits", size, partial(QSGD, bits), 1) for bits in (2, 4, 8)]
    for name, make in (("top-1", top_k), ("random-1", random_k)):
        with_memory = partial(make, size, 1.0)
        rows += [
            (f"{name}, memory", size, with_memory, 64),
            (f"{name}, memory", 1.0, with_memory, 64),
            (f"{name}, no memory", size, partial(with_memory, residual=False), 64),
        ]
    for name, shift, made, bits_each in rows:
        found = study.train(made, shift)
        bits = bits_each * found.sent
        spent = bits * statistics.fmean(found.steps)
        total = "" if math.isnan(spent) else f"{spent:,.0f}"
        print(markdown.line([name, f"{shift:g}", f"{bits:,.0f}", *found.cells, total]), flush=True)


def more_workers(study: Study, most: int) -> None:
    """Print the table of the second claim: steps until the target with 1, 2, 4, ... workers."""
    numbers = [2**power for power in range(10) if 2**power <= most]
    print(f"\n{study.updates} updates of all workers, {study.seeds} seeds\n{study.reached}, median (speed-up)\n")
    print(markdown.table(["method", *(f"{number} workers" for number in numbers)], []))
    size = study.size
    rows: list[tuple[str, float, Make]] = [("dense SGD", 1.0, dense)]
    rows += [("random-1", size, partial(random_k, size, 1.0)), ("top-1", size, partial(top_k, size, 1.0))]
    for name, shift, made in rows:
        medians = [statistics.median(study.train(made, shift, number).steps) for number in numbers]
        print(markdown.line([name, *(f"{one:.0f} ({medians[0] / one:.1f})" for one in medians)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=1.2, help="loss that is to be reached, in units of the optimum")
    parser.add_argument("--products", action="store_true", help="with products of two pixels as features; one worker")
    parser.add_argument("--workers", type=int, default=1, help="the most workers that are compared")
    args = parser.parse_args()
    study = Study(args)
    if args.workers > 1:
        more_workers(study, args.workers)
        return
    samples, size = study.samples, study.size
    print(f"\n{samples} samples, {size} features, 1 worker, {study.updates} steps, {study.seeds} seeds\n")
    (one_entry if args.products else fewer_than_one)(study)


if __name__ == "__main__":
    main()
