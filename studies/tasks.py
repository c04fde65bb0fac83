"""Small tasks on which studies train many workers, and the log of what was trained. Task "gpt2" needs Transformers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import around  # noqa: F401  it finds the modules of the examples
import flights
import mnist
import text
import torch
import torch.nn.functional as F
import torch_charlm
import torch_digits
import torch_lstm
import words
from torch import Tensor, nn
from torch.utils.data import TensorDataset

DENSE, SGD, ADAMW = "dense", "sgd", "adamw"


@dataclass(frozen=True)
class Text:
    """Next characters of the standard library's sources. A worker sees a part of the text."""

    limit: int = 400_000
    batch: int = 4
    context: int = 32

    def split(self, number: int) -> tuple[list[Tensor], Tensor]:
        """The part of each worker, and what is held out."""
        corpus = text.read_corpus(self.limit)
        boundary = int(0.95 * len(corpus))
        return list(corpus[:boundary].tensor_split(number)), corpus[boundary:]

    def draw(self, part: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return text.sample(part, self.batch, self.context, generator)

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())

    def evaluate(self, model: nn.Module, held_out: Tensor) -> float:
        return text.bits_per_character(model, held_out, self.context)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits under noise, so that no model learns them by heart: a worker sees a part of the images."""

    batch: int = 16
    noise: float = 0.5

    def split(self, number: int) -> tuple[list[TensorDataset], TensorDataset]:
        train, held_out = torch_digits.load_data()
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        return [TensorDataset(*train[part]) for part in order.tensor_split(number)], held_out

    def draw(self, part: TensorDataset, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = part[torch.randint(len(part), (self.batch,), generator=generator)]
        return x + self.noise * torch.randn(x.shape, generator=generator), y

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, held_out: TensorDataset) -> float:
        """Mean cross-entropy, each image under ten noises."""
        generator = torch.Generator().manual_seed(0)
        x, y = (tensor.repeat(10, *[1] * (tensor.dim() - 1)) for tensor in held_out.tensors)
        return self.loss(model(x + self.noise * torch.randn(x.shape, generator=generator)), y).item()


@dataclass(frozen=True)
class Task:
    """A model, what it learns, and the learning rates of SGD and of AdamW."""

    make: Callable[[], nn.Module]
    data: Any
    rates: dict[str, tuple[float, ...]]


class GPT2(nn.Module):
    """A new GPT-2 of Hugging Face Transformers for characters."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel  # the other tasks do without

        sizes = {"n_positions": context, "n_embd": width, "n_layer": layers, "n_head": heads}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tokens = {"vocab_size": text.CHARACTERS, "bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(**sizes, **dropout, **tokens, use_cache=False)
        # The same function as GPT-2's, in one operation.
        config.activation_function = "gelu_pytorch_tanh"
        self.model = GPT2LMHeadModel(config)
        # Transformers would make one in every pass, which takes longer than the pass.
        self.mask = torch.full((1, 1, context, context), -math.inf).triu(1)

    def forward(self, characters: Tensor) -> Tensor:
        return self.model(characters, attention_mask=self.mask.expand(len(characters), -1, -1, -1)).logits


TASKS = {
    "charlm": Task(lambda: torch_charlm.CharLM(32, 64, 2, 4), Text(), {SGD: (0.2,), ADAMW: (0.002,)}),
    "lstm": Task(lambda: torch_lstm.CharLSTM(128, 1), Text(), {SGD: (0.5, 2.0), ADAMW: (0.004,)}),
    "cnn": Task(lambda: torch_digits.make_model(16), Digits(), {SGD: (0.03,), ADAMW: (0.002,)}),
    "gpt2": Task(lambda: GPT2(32, 64, 2, 4), Text(), {SGD: (0.2,), ADAMW: (0.002,)}),
    "words": Task(lambda: words.Pronouncer(128, 4, 2), words.Words(), {ADAMW: (0.002,)}),
    "flights": Task(lambda: flights.Delay(256), flights.Delays(), {SGD: (0.1,), ADAMW: (0.002,)}),
    "mnist": Task(lambda: mnist.make_model(16), mnist.Mnist(), {SGD: (0.05,), ADAMW: (0.002,)}),
}
"""Models smaller than the examples' own; then models of real data, which pip downloads."""


def rate_at(step: int, steps: int, rate: float) -> float:
    """A learning rate that rises over a tenth of the steps and then falls."""
    return rate * min((step + 1) / (0.1 * steps), max(1.0 - step / steps, 0.02))


class Log:
    """The results of all runs, in a file. What is there is not run again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.known: dict[str, dict[str, float]] = dict(json.loads(line) for line in lines)

    def run(self, title: str, train: Callable[[], dict[str, float]]) -> dict[str, float]:
        if title not in self.known:
            self.known[title] = train()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([title, self.known[title]]) + "\n")
        return self.known[title]


CELLS = ["loss", "beside dense, %", "each seed, %", "dense exchanges"]


def cells(results: list[dict[str, float]], dense: list[float]) -> list[str]:
    """Of the runs with all seeds: their mean loss, how far they are above dense training with their seeds, their exchanges."""
    losses = [result["loss"] for result in results]
    beside = [100.0 * (mine / theirs - 1.0) for mine, theirs in zip(losses, dense, strict=True)]
    loss, percent, exchanges = map(statistics.fmean, (losses, beside, [one["exchanges"] for one in results]))
    return [f"{loss:.3f}", f"{percent:+.1f}", ", ".join(f"{one:+.1f}" for one in beside), f"{exchanges:.0f}"]
