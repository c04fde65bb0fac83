"""Logistic regression with one entry of the gradient per step: memory is what makes it converge.

    python examples/numpy_logistic.py
    mpirun -np 4 python -m mpi4py examples/numpy_logistic.py

L2-regularised logistic regression by stochastic gradient descent on NumPy arrays, the experiment of Sparsified SGD with
Memory (https://arxiv.org/abs/1809.07599): dense SGD, top-k and random-k with and without memory, and top-k without the shift
of the stepsizes. The data are scikit-learn's handwritten digits (odd or even), or any file in LIBSVM's format with two
classes (--data rcv1_test.binary). Prints a table and draws the distance from the optimum over the steps.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from mpi4py import MPI
from numpy.typing import NDArray
from scipy import optimize, sparse, special
from sklearn.datasets import load_digits, load_svmlight_file
from tqdm import tqdm

from horovod_sparse.numpy import RandomK, SparseAllreduce, TopK

Array = NDArray[np.float64]
COMM = MPI.COMM_WORLD
GAMMA = 2.0  # The stepsize is GAMMA / (lambda (t + shift)).
# Of the curves, in the order of `methods`: blue for the largest entries, orange for random ones, lighter with more of them.
COLORS = ("#000000", "#0072b2", "#d55e00", "#56b4e9", "#e69f00", "#a9d6f5", "#f3d08a", "#009e73", "#cc79a7", "#888888")


@dataclass(frozen=True)
class Problem:
    """min_w mean(log(1 + exp(-y x.w))) + lambda/2 ||w||^2, with lambda = 1/n."""

    rows: Any
    labels: Array
    """-1 or 1."""

    @property
    def regularization(self) -> float:
        return 1.0 / len(self.labels)

    def objective(self, weights: Array) -> float:
        losses = np.logaddexp(0.0, -self.labels * (self.rows @ weights))
        return float(losses.mean() + self.regularization / 2 * weights @ weights)

    def gradient(self, weights: Array) -> Array:
        slopes = -self.labels * special.expit(-self.labels * (self.rows @ weights))
        return np.asarray(slopes @ self.rows) / len(self.labels) + self.regularization * weights

    def sample_gradient(self, weights: Array, number: int) -> Array:
        """Of one row: unbiased for the whole."""
        row = self.rows[number]
        row = row.toarray().reshape(-1) if sparse.issparse(row) else row
        label = self.labels[number]
        return np.asarray(-label * special.expit(-label * (row @ weights)) * row + self.regularization * weights)

    def optimum(self) -> float:
        start = np.zeros(self.rows.shape[1])
        options = {"maxiter": 5000, "gtol": 1e-9, "ftol": 1e-15}
        return float(
            optimize.minimize(self.objective, start, jac=self.gradient, method="L-BFGS-B", options=options).fun
        )


@dataclass(frozen=True)
class Method:
    """One line of the table."""

    name: str
    compression: Any
    """None for dense SGD."""
    shift: float
    """a, of the stepsizes."""
    steps: list[int] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)


def load(path: Path | None) -> Problem:
    if path is None:
        images, digits = load_digits(return_X_y=True)
        rows = np.hstack((images / 16.0, np.ones((len(images), 1))))
        return Problem(rows, np.where(digits % 2 == 1, 1.0, -1.0))
    rows, labels = load_svmlight_file(str(path))
    return Problem(rows.tocsr(), np.where(labels > 0, 1.0, -1.0))


def methods(size: int, shift_factor: float) -> Iterator[Method]:
    # min_numel=0: the whole model is one small vector. As in the paper, the learning rate is inside the memory, and the number
    # of entries is the same in all steps.
    common: dict[str, Any] = {"min_numel": 0, "warmup": None, "lr_in_residual": True}
    yield Method("dense SGD", None, 1.0)
    for k in (1, 2, 3):
        shift = shift_factor * size / k
        yield Method(f"top-{k}, memory", TopK(k / size, **common), shift)
        yield Method(f"random-{k}, memory", RandomK(k / size, **common), shift)
    yield Method("top-1, memory, no shift", TopK(1 / size, **common), 1.0)
    shift = shift_factor * size
    yield Method("top-1, no memory", TopK(1 / size, residual=False, **common), shift)
    yield Method("random-1, no memory", RandomK(1 / size, residual=False, **common), shift)


def run(problem: Problem, method: Method, optimum: float, args: argparse.Namespace) -> None:
    """SGD with batch 1 on every worker; notes the distance of the weighted average of the iterates from the optimum."""
    size = problem.rows.shape[1]
    allreduce = SparseAllreduce(COMM, method.compression) if method.compression is not None else None
    rng = np.random.default_rng((args.seed, COMM.Get_rank()))
    weights = np.zeros(size)
    average = np.zeros(size)
    total = 0.0
    count = args.epochs * len(problem.labels)
    evaluated = set(np.unique(np.geomspace(10, count, 40).astype(int)))
    for step in tqdm(range(count), desc=method.name, disable=COMM.Get_rank() != 0, leave=False, mininterval=1.0):
        rate = GAMMA / (problem.regularization * (step + method.shift))
        gradient = problem.sample_gradient(weights, int(rng.integers(len(problem.labels))))
        if allreduce is not None:
            mean = allreduce({"weights": gradient}, learning_rate=rate)["weights"]
        else:
            mean = COMM.allreduce(gradient) / COMM.Get_size()
        weights -= rate * mean
        # The weight of step t is (shift + t)^2, as in theorem 2.4.
        weight = (method.shift + step) ** 2
        total += weight
        average += weight / total * (weights - average)
        if step + 1 in evaluated:
            method.steps.append(step + 1)
            method.distances.append(problem.objective(average) - optimum)


def draw(done: list[Method], path: Path) -> None:
    # Readable where the picture is 600 pixels wide, and colours that colour-blind people tell apart.
    plt.rcParams["font.size"] = 12
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.set_prop_cycle(color=COLORS)
    for method in done:
        dashed = "no memory" in method.name or "no shift" in method.name
        axes.loglog(method.steps, method.distances, "--" if dashed else "-", label=method.name)
    axes.set_xlabel("steps")
    axes.set_ylabel("objective of the average, above the optimum")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=10, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="file in LIBSVM's format with two classes; without it the digits")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--shift-factor", type=float, default=1.0, help="shift of the stepsizes, in units of d/k")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("logistic.png"))
    args = parser.parse_args()
    problem = load(args.data)
    optimum = problem.optimum()
    size = problem.rows.shape[1]
    done = []
    for method in methods(size, args.shift_factor):
        started = time.perf_counter()
        run(problem, method, optimum, args)
        done.append(method)
        if COMM.Get_rank() == 0:
            tqdm.write(f"{method.name}: {method.distances[-1]:.2e} after {time.perf_counter() - started:.1f} s")
    if COMM.Get_rank() != 0:
        return
    print(f"\n{len(problem.labels)} samples, {size} features, {COMM.Get_size()} workers, {done[0].steps[-1]} steps")
    print(
        "\n| method | entries sent per step and worker | objective above the optimum | times dense SGD's |\n|---|---|---|---|"
    )
    for method in done:
        sent = size if method.compression is None else method.compression.target_count(size)
        last = method.distances[-1]
        times = last / done[0].distances[-1] if math.isfinite(last) else math.inf
        print(f"| {method.name} | {sent} | {last:.2e} | {times:.2f} |")
    draw(done, args.picture)
    print(f"\npicture: {args.picture}")


if __name__ == "__main__":
    main()
