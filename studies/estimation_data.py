"""The gradients that studies look at: of examples' models in training, and of known distributions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import numpy as np
import torch
import torch.nn.functional as F
import torch_charlm
import torch_digits
import torch_lstm
from numpy.typing import NDArray
from text import read_corpus, sample
from torch import Tensor, nn

from horovod_sparse.compressors.base import Compressor

Array = NDArray[Any]
Stream = Iterator[Array]
"""One flat gradient per worker, step by step, without end."""
Batch = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""(worker, its generator) -> its next batch, inputs and targets."""


@dataclass(frozen=True)
class Task:
    """What one of the examples trains, on several workers."""

    model: nn.Module
    losses: list[Callable[[], Tensor]]
    """Every worker's loss of its next batch."""
    rate: Callable[[int], float]
    """Learning rate of a step, counted from 1."""


# The examples' own defaults are in their option parsers; here once more: batch, learning rate, warm-up, steps in all.
DIGITS_BATCH, DIGITS_RATE = 16, 0.03
TEXT_BATCH, TEXT_WARMUP, TEXT_STEPS = 4, 60, 1200
CHARLM_RATE, LSTM_RATE, LSTM_CONTEXT = 0.05, 0.5, 32
# Smaller than the examples' models, for about as many entries as the other kinds of data have.
CHARLM_CONTEXT = 64
CHARLM = (CHARLM_CONTEXT, 64, 2, 4)
"""Context, width, layers and heads."""
LSTM_WIDTH, LSTM_LAYERS = 128, 1
CHARACTERS_READ = 2_000_000
MOMENTUM = 0.9


def _digits(workers: int, seed: int) -> Task:
    model = torch_digits.make_model()
    images, labels = torch_digits.load_data()[0].tensors

    def batch(worker: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = images[worker::workers], labels[worker::workers]
        chosen = torch.randint(len(x), (DIGITS_BATCH,), generator=generator)
        return x[chosen], y[chosen]

    warmup = torch_digits.WARMUP_EPOCHS * max(1, len(images) // (workers * DIGITS_BATCH))
    return Task(model, _losses(model, batch, workers, seed), lambda t: DIGITS_RATE * min(1.0, t / warmup))


def _text(make: Callable[[], nn.Module], context: int, most: float, workers: int, seed: int) -> Task:
    """A model that continues text; `most` is the largest learning rate."""
    model = make()
    shards = read_corpus(CHARACTERS_READ).tensor_split(workers)

    def batch(worker: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return sample(shards[worker], TEXT_BATCH, context, generator)

    def rate(t: int) -> float:
        return most * min(t / TEXT_WARMUP, max(1 - t / TEXT_STEPS, 0.02))

    return Task(model, _losses(model, batch, workers, seed), rate)


def _losses(model: nn.Module, batch: Batch, workers: int, seed: int) -> list[Callable[[], Tensor]]:
    """Every worker's loss of its next batch."""

    def loss(worker: int, generator: torch.Generator) -> Tensor:
        x, y = batch(worker, generator)
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return [partial(loss, worker, torch.Generator().manual_seed(seed + worker)) for worker in range(workers)]


class Training:
    """One model of an example that some workers train, each on data of its own."""

    def __init__(self, kind: str, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._task = RECORDED[kind](workers, seed)
        self._parameters = list(self._task.model.parameters())
        self._optimizer = torch.optim.SGD(self._parameters, lr=self._task.rate(1), momentum=MOMENTUM)
        self._steps = 0

    def gradients(self) -> list[Tensor]:
        """Every worker's next gradient, by parameter: gradients[parameter][worker]."""
        each = [torch.autograd.grad(loss(), self._parameters) for loss in self._task.losses]
        return [torch.stack(mine) for mine in zip(*each, strict=True)]

    def step(self, reduced: Iterable[Tensor]) -> None:
        """Update the model with what the gradients were reduced to, by parameter."""
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.rate(self._steps)
        for parameter, gradient in zip(self._parameters, reduced, strict=True):
            parameter.grad = gradient
        self._optimizer.step()


def _recorded(kind: str, workers: int, seed: int, skipped: int) -> Stream:
    """Every worker's gradients while the model is trained on their average, dense; the first steps are not given out."""
    training = Training(kind, workers, seed)
    for step in itertools.count(1):
        gradients = training.gradients()
        training.step(one.mean(0) for one in gradients)
        if step > skipped:
            # From the last parameter to the first, as buckets are filled, and without those that are reduced dense.
            parts = [one.flatten(1) for one in reversed(gradients) if one[0].numel() >= Compressor.min_numel]
            yield torch.cat(parts, dim=1).numpy()


def _synthetic(kind: str, workers: int, size: int, seed: int) -> Stream:
    rng = np.random.default_rng([seed, list(SYNTHETIC).index(kind)])
    while True:
        yield np.stack([SYNTHETIC[kind](rng, size).astype(np.float32) for _ in range(workers)])


def _signed(rng: np.random.Generator, magnitudes: Array) -> Array:
    """Magnitudes with random signs."""
    return magnitudes * (rng.integers(0, 2, len(magnitudes)) * 2.0 - 1.0)


MOSTLY_ZERO = "99 % zero"
SYNTHETIC: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "Laplace": lambda rng, size: rng.laplace(size=size),
    "Gaussian": lambda rng, size: rng.normal(size=size),
    "Gamma 0.5": lambda rng, size: _signed(rng, rng.gamma(0.5, size=size)),
    "Student-t 4": lambda rng, size: rng.standard_t(4, size=size),
    "Pareto 0.3": lambda rng, size: _signed(rng, (rng.uniform(size=size) ** -0.3 - 1.0) / 0.3),
    "one outlier": lambda rng, size: np.where(np.arange(size) == rng.integers(size), 1e6, rng.laplace(size=size)),
    MOSTLY_ZERO: lambda rng, size: np.where(rng.uniform(size=size) < 0.01, rng.laplace(size=size), 0.0),
}
RECORDED: dict[str, Callable[[int, int], Task]] = {
    "digits": _digits,
    "lstm": partial(_text, lambda: torch_lstm.CharLSTM(LSTM_WIDTH, LSTM_LAYERS), LSTM_CONTEXT, LSTM_RATE),
    "charlm": partial(_text, lambda: torch_charlm.CharLM(*CHARLM), CHARLM_CONTEXT, CHARLM_RATE),
}
KINDS = (*RECORDED, *SYNTHETIC)


def stream(kind: str, *, workers: int, size: int, seed: int, skipped: int) -> Stream:
    """The gradients of one kind of data; `size` is for synthetic ones, `skipped` steps of training for recorded ones."""
    return _recorded(kind, workers, seed, skipped) if kind in RECORDED else _synthetic(kind, workers, size, seed)
