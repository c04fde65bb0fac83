"""What `time_to_loss.py` trains: tasks, rows, and their runs, whose logs are kept, so that none is repeated."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import around
import hosts
import numpy as np
import runs

WORKERS = 2
SEEDS = (0, 1, 2)
DENSE = "dense fp32"
MOST_RATES = 6
"""Learning rates that are tried for one row."""
TARGET_PART = 0.8
"""The target is the held-out loss that dense fp32 has after this part of its steps, with the seed where it is largest."""


@dataclass(frozen=True)
class Task:
    """An example with its size and length, and the learning rates that every row tries."""

    title: str
    example: str
    options: str
    rates: tuple[float, ...]
    """For momentum 0.9; each is twice the one before."""
    rows: tuple[str, ...] = ()
    """Names of its rows beside dense fp32; empty for all but those of local updates."""
    field: str = "bits_per_character"
    """The held-out loss in the example's log."""
    unit: str = "held-out bits per character"


LOCAL = ("DiLoCo", "local TopK 0.01", "local TopK 0.03", "local TopK 0.1")
LONG = "--width 192 --epochs 8 --epoch-steps 750 --optimizer adamw"
TASKS = {
    "charlm": Task("transformer", "torch_charlm", "--width 192 --epochs 8 --epoch-steps 75", (0.0125, 0.025, 0.05)),
    "lstm": Task("LSTM", "torch_lstm", "--epochs 8 --epoch-steps 50", (0.5, 1.0, 2.0)),
    "digits": Task(
        "CNN",
        "torch_digits",
        "--width 64 --epochs 12",
        (0.015, 0.03, 0.06),
        field="held_out_loss",
        unit="held-out loss, nats",
    ),
    "adamw": Task("transformer with AdamW", "torch_charlm", LONG, (0.00025, 0.0005, 0.001), LOCAL),
}


@dataclass(frozen=True)
class Row:
    """A way to exchange gradients."""

    options: str
    hook: str = ""
    """DDP's communication hook, HSDP or DiLoCo (`loss_ddp.py`); empty with Horovod."""
    rate_factor: float = 1.0
    """10 without momentum: with momentum 0.9 a gradient moves the parameters ten times as far as the learning rate says."""


CONSTANT = "--warmup none --ahead 0"
EVERY = f"{CONSTANT} --every 30"


def _sparse(compression: str, ratio: str) -> Row:
    return Row(f"--compression {compression} --ratio {ratio} {CONSTANT} --momentum-correction")


MEMORY = f"--compression topk --ratio 0.01 {CONSTANT} --lr-in-residual --momentum 0"
ROWS = {
    DENSE: Row("--compression none"),
    "dense fp16": Row("--compression fp16"),
    "dense fp16 no momentum": Row("--compression fp16 --momentum 0", rate_factor=10.0),
    "DDP PowerSGD rank 4": Row("--compression none", hook="PowerSGD 4"),
    "SIDCo 0.01": _sparse("sidco", "0.01"),
    "SIDCo 0.001": _sparse("sidco", "0.001"),
    "TopK 0.01": _sparse("topk", "0.01"),
    "DGC 0.01": _sparse("dgc", "0.01"),
    "GaussianK 0.01": _sparse("gaussiank", "0.01"),
    "MiCRO 0.01": _sparse("micro", "0.01"),
    "RandomBlock 0.01": _sparse("randomblock", "0.01"),
    "Mem-SGD 0.01": Row(MEMORY, rate_factor=10.0),
    "DiLoCo": Row(f"--compression none {EVERY}", hook="DiLoCo 0.7 0.9"),
    **{f"local TopK {r}": Row(f"--compression topk {EVERY} --ratio {r}") for r in ("0.01", "0.03", "0.1")},
}
"""Sparse rows have momentum before the selection, except Mem-SGD, Sparsified SGD with Memory, which has none. Dense training
also has rows without momentum: masking weakens momentum, and what a row wins by that is no merit of its exchange."""
RACE = {
    "dense fp16": ROWS["dense fp16"],
    "DDP fp16": Row("--compression fp16", hook="fp16"),
    "DDP PowerSGD rank 4": ROWS["DDP PowerSGD rank 4"],
    **{f"SIDCo({ratio})": Row(f"--compression sidco --ratio {ratio}") for ratio in ("0.01", "0.001")},
    "SIDCo(0.01), ahead": Row("--compression sidco --ratio 0.01 --ahead 0.5"),
}
"""The plain line, `compression.ahead`, and what they compete with."""


def rows_of(task: str) -> list[str]:
    """The names of a task's rows."""
    chosen = TASKS[task].rows
    return [name for name in ROWS if name == DENSE or (name in chosen if chosen else name not in LOCAL)]


@dataclass(frozen=True)
class Curve:
    """The held-out loss of one training run."""

    steps: list[int]
    losses: list[float]
    seconds: list[float]
    """Spent on all steps until each evaluation, without evaluations."""
    bytes_per_step: float

    @property
    def last(self) -> float:
        """The loss at the end; infinite if training has diverged."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf

    def reached(self, target: float, at: Sequence[float]) -> float | None:
        """Where `at`, such as steps or seconds, the loss first is at `target`, between evaluations by a straight line."""
        for number, loss in enumerate(self.losses):
            if loss <= target:
                if number == 0:
                    return at[0]
                before = self.losses[number - 1]
                part = (before - target) / (before - loss)
                return at[number - 1] + part * (at[number] - at[number - 1])
        return None


def target(dense: Sequence[Curve]) -> float:
    """The largest loss that these trainings have after a part of their steps."""
    at = TARGET_PART * dense[0].steps[-1]
    return max(float(np.interp(at, curve.steps, curve.losses)) for curve in dense)


class Store:
    """The training runs of a task. Those that are not there are made when they are asked for.

    Args:
        folder: of all tasks.
        timeout: seconds after which a run is stopped.
        rows: the ways to exchange gradients, by name.
        number: of workers, in every run.
    """

    def __init__(self, folder: Path, task: Task, timeout: float, rows: Mapping[str, Row], number: int = 2) -> None:
        self.task, self.rows = task, rows
        self._folder = runs.Folder(folder, number, timeout)

    def train(self, name: str, rate: float, seed: int) -> Curve:
        """The curve of one training run on local workers."""
        return self._run(f"{name}-{rate:g}-{seed}", self.rows[name], rate, seed)

    def tuned(self, name: str) -> tuple[float, dict[float, float]]:
        """The rate with the smallest loss at the end of the first seed's run, and the losses of all rates that were tried.

        While the best rate is the smallest or the largest of those, the next one is tried, too.
        """
        losses = {rate: self.train(name, rate, SEEDS[0]).last for rate in self.task.rates}
        while True:
            best = min(losses, key=losses.__getitem__)
            beyond = {min(losses): best / 2.0, max(losses): best * 2.0}.get(best)
            if beyond is None or len(losses) == MOST_RATES:
                return best, dict(sorted(losses.items()))
            losses[beyond] = self.train(name, beyond, SEEDS[0]).last

    def curves(self, name: str) -> list[Curve]:
        """One per seed, at the best rate."""
        rate, _ = self.tuned(name)
        return [self.train(name, rate, seed) for seed in SEEDS]

    def target(self) -> float:
        """The loss that all rows must reach. All seeds of the first row, which is dense, do."""
        return target(self.curves(next(iter(self.rows))))

    def on_hosts(
        self, where: hosts.Cluster, name: str, row: Row, rate: float, seed: int, environment: Mapping[str, str] = {}
    ) -> Curve:
        """A run on hosts, which share the workers; the name says which network joins them."""

        def launch(script: Path, options: list[str]) -> None:
            os.environ.update(runs.demo.worker_environment())
            settings = ["env", *map("=".join, environment.items())]
            command = ["timeout", f"{self._folder.timeout:g}", *settings, sys.executable, str(script), *options]
            slots, rings = self._folder.workers // len(where.hosts), len(where.hosts) > 2
            if hosts.run(where, "mpirun", slots, command, rings=rings):
                raise SystemExit(f"{shlex.join(command)} failed on the hosts, or took too long")

        return self._run(f"{name}-{seed}", row, rate, seed, launch)

    def _run(self, name: str, row: Row, rate: float, seed: int, launch: runs.Launch | None = None) -> Curve:
        rest = ["--lr", f"{rate * row.rate_factor:g}", "--seed", str(seed)]
        options = [*self.task.options.split(), *row.options.split(), *rest]
        script = around.EXAMPLES / f"{self.task.example}.py"
        if row.hook:
            script, options = Path(__file__).with_name("loss_ddp.py"), [self.task.example, row.hook, *options]
        epochs = self._folder.train(name, script, options, launch)
        return Curve(
            [epoch["step"] for epoch in epochs],
            [epoch[self.task.field] for epoch in epochs],
            list(itertools.accumulate(epoch["seconds"] for epoch in epochs)),
            epochs[-1]["bytes_per_step"],
        )
