"""Claims of Sparsified SGD with Memory: one entry per step or fewer is enough, the shift matters, workers speed it up.

    python studies/memory_sgd.py
    python studies/memory_sgd.py --products --epochs 10
    mpirun -np 8 python -m mpi4py studies/memory_sgd.py

The problem and the stepsizes are those of `examples/numpy_logistic.py` (https://arxiv.org/abs/1809.07599). With one worker, an
entry is sent in some steps only: with k < 1 the operator sends one entry with probability k ("ultra-sparsification"), and
the shift is d/k. With `--products` the features are the 2,145 products of two pixels, each image scaled to norm 1, and one
entry per step is compared with dense SGD and QSGD (https://arxiv.org/abs/1610.02132), with and without shift and memory. With
more workers, all add up their updates, `x - sum_w comp(m_w + eta g_w)`, as in the paper's parallel algorithm, but in
lockstep. The speed-up is in steps: the workers share this machine's cores, so times would mean little. Prints a table.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import markdown
import numpy as np
from mpi4py import MPI
from numpy_logistic import GAMMA, Problem, load

from horovod_sparse.numpy import Pairs, RandomK, SparseAllreduce, TopK
from horovod_sparse.ops.protocol import Array, Ops, Selection

WORLD = MPI.COMM_WORLD
Make = Callable[..., Any]


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


def random_k(size: int, k: float, **chosen: Any) -> Any:
    compression = SometimesRandomK(
        max(k, 1.0) / size, exchange=Pairs(), min_numel=0, lr_in_residual=True, warmup=None, **chosen
    )
    compression.probability = min(k, 1.0)
    return compression


def top_k(size: int, k: float, **chosen: Any) -> Any:
    compression = SometimesTopK(max(k, 1.0) / size, min_numel=0, lr_in_residual=True, warmup=None, **chosen)
    compression.probability = min(k, 1.0)
    return compression


def _made(make: Callable[..., Any], size: int, seed: int, **chosen: Any) -> Any:
    return make(size, 1.0, **chosen)


def losses(
    problem: Problem, compression: Any, shift: float, updates: int, comm: Any, seed: int
) -> tuple[list[int], list[float], float]:
    """Steps, the loss of the weighted average after each of them, and entries (QSGD: bits) sent per worker and step.

    Args:
        compression: None for dense SGD, a compressor, or `QSGD` for one worker.
        shift: a of the stepsizes `GAMMA / (lambda (t + a))`, where t counts the updates of all workers.
        updates: of all workers together.
    """
    size, workers = problem.rows.shape[1], comm.Get_size()
    dense = compression is None or isinstance(compression, QSGD)
    allreduce = None if dense else SparseAllreduce(comm, compression, average=False)
    rng = np.random.default_rng((seed, comm.Get_rank()))
    weights, average, weight_sum = np.zeros(size), np.zeros(size), 0.0
    steps = updates // workers
    evaluated = set(np.unique(np.geomspace(10, steps, 200).astype(int)).tolist())
    at, values = [], []
    for step in range(steps):
        rate = GAMMA / (problem.regularization * (step * workers + shift))
        gradient = problem.sample_gradient(weights, int(rng.integers(len(problem.labels))))
        if allreduce is not None:
            total = allreduce({"weights": gradient}, learning_rate=rate)["weights"]
        else:
            total = comm.allreduce(gradient if compression is None else compression(gradient))
        weights -= rate * total
        weight = (shift / workers + step) ** 2
        weight_sum += weight
        average += weight / weight_sum * (weights - average)
        if step + 1 in evaluated:
            at.append(step + 1)
            values.append(problem.objective(average))
    if allreduce is not None:
        return at, values, allreduce.stats().mean.total.count
    return at, values, float(size) if compression is None else statistics.fmean(compression.sent)


def first(at: list[int], values: list[float], target: float) -> float:
    """The first step that was evaluated at which the loss is at the target; NaN if there is none."""
    return next((float(step) for step, value in zip(at, values, strict=True) if value <= target), float("nan"))


def fewer_than_one(problem: Problem, optimum: float, args: argparse.Namespace) -> None:
    """Print the table of the first claim. Only the first worker works."""
    size = problem.rows.shape[1]
    print(markdown.table(["method", "k", "entries sent per step", "loss / optimum, each seed", reached(args)], []))
    rows: list[tuple[str, float, Make | None]] = [("dense SGD", size, None)]
    rows += [(name, k, make) for name, make in (("random", random_k), ("top", top_k)) for k in (1.0, 0.5, 0.25, 0.125)]
    for name, k, make in rows:
        made = [None if make is None else make(size, k) for _ in range(args.seeds)]
        ends, steps, sent = alone(problem, optimum, made, 1.0 if make is None else size / k, args)
        print(markdown.line([name, f"{k:g}", f"{sent:.3f}", ends, listed(steps)]), flush=True)


def one_entry(problem: Problem, optimum: float, args: argparse.Namespace) -> None:
    """Print the table of one entry per step beside dense SGD and QSGD, with and without shift and memory."""
    size = problem.rows.shape[1]
    header = ["method", "shift", "bits sent per step", "loss / optimum, each seed", reached(args)]
    print(markdown.table([*header, "bits until then, mean"], []))
    rows: list[tuple[str, float, Callable[[int], Any], float]] = [("dense SGD", size, lambda seed: None, 32)]
    for bits in (2, 4, 8):
        rows.append((f"QSGD, {bits} bits", size, partial(QSGD, bits), 1))
    for name, make in (("top-1", top_k), ("random-1", random_k)):
        rows += [
            (f"{name}, memory", size, partial(_made, make, size), 64),
            (f"{name}, memory", 1.0, partial(_made, make, size), 64),
            (f"{name}, no memory", size, partial(_made, make, size, residual=False), 64),
        ]
    for name, shift, compression, bits_each in rows:
        ends, steps, sent = alone(problem, optimum, [compression(seed) for seed in range(args.seeds)], shift, args)
        spent = bits_each * sent * statistics.fmean(steps)
        total = "" if math.isnan(spent) else f"{spent:,.0f}"
        print(markdown.line([name, f"{shift:g}", f"{bits_each * sent:,.0f}", ends, listed(steps), total]), flush=True)


def alone(
    problem: Problem, optimum: float, compressions: Sequence[Any], shift: float, args: argparse.Namespace
) -> tuple[str, list[float], float]:
    """Of one worker: the ends in units of the optimum, the steps to the target, and the mean of what a step sends."""
    ends, steps, counts = [], [], []
    for seed, compression in enumerate(compressions):
        updates = args.epochs * len(problem.labels)
        at, values, sent = losses(problem, compression, shift, updates, MPI.COMM_SELF, seed)
        ends.append(f"{values[-1] / optimum:.4f}")
        steps.append(first(at, values, args.target * optimum))
        counts.append(sent)
    return ", ".join(ends), steps, statistics.fmean(counts)


def reached(args: argparse.Namespace) -> str:
    return f"steps to {args.target:g} times the optimum, each seed"


def listed(steps: Sequence[float]) -> str:
    return ", ".join("not reached" if math.isnan(step) else f"{step:.0f}" for step in steps)


def more_workers(problem: Problem, optimum: float, args: argparse.Namespace) -> None:
    """Print the table of the second claim: steps until the target with 1, 2, 4, ... workers."""
    size, updates = problem.rows.shape[1], args.epochs * len(problem.labels)
    numbers = [2**power for power in range(10) if 2**power <= WORLD.Get_size()]
    rank = WORLD.Get_rank()
    if rank == 0:
        print(f"\n{updates} updates of all workers, {args.seeds} seeds")
        print(f"steps to {args.target:g} times the optimum, median (speed-up)\n")
        print(markdown.table(["method", *(f"{number} workers" for number in numbers)], []))
    for name, k, make in (("dense SGD", size, None), ("random-1", 1.0, random_k), ("top-1", 1.0, top_k)):
        medians = []
        for number in numbers:
            comm = WORLD.Split(0 if rank < number else 1, rank)
            steps = []
            if rank < number:
                for seed in range(args.seeds):
                    shift = 1.0 if make is None else size / k
                    compression = None if make is None else make(size, k)
                    at, values, _ = losses(problem, compression, shift, updates, comm, seed)
                    steps.append(first(at, values, args.target * optimum))
                medians.append(statistics.median(steps))
            WORLD.Barrier()
            comm.Free()
        if rank == 0:
            cells = [f"{median:.0f} ({medians[0] / median:.1f})" for median in medians]
            print(markdown.line([name, *cells]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=1.2, help="loss that is to be reached, in units of the optimum")
    parser.add_argument("--products", action="store_true", help="with products of two pixels as features; one worker")
    args = parser.parse_args()
    problem = load(None)
    if args.products:
        left, right = np.triu_indices(problem.rows.shape[1])
        rows = problem.rows[:, left] * problem.rows[:, right]
        problem = Problem(rows / np.linalg.norm(rows, axis=1, keepdims=True), problem.labels)
    optimum = problem.optimum()
    if WORLD.Get_size() > 1:
        more_workers(problem, optimum, args)
        return
    samples, size = problem.rows.shape
    print(f"\n{samples} samples, {size} features, 1 worker, {args.epochs * samples} steps, {args.seeds} seeds\n")
    (one_entry if args.products else fewer_than_one)(problem, optimum, args)


if __name__ == "__main__":
    main()
