"""What `time_to_loss.py` trains and times: tasks, rows, and runs that are kept in files, so that none is repeated."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import around
import hosts
import machine
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
    options: tuple[str, ...]
    field: str
    """The held-out loss in the example's log."""
    unit: str
    rates: tuple[float, ...]
    """For momentum 0.9; each is twice the one before."""
    short: tuple[str, ...]
    """Options of a run that only times steps; the steps of its second epoch are timed."""
    rows: tuple[str, ...] = ()
    """Names of its rows beside dense fp32; empty for all but those of local updates."""


TASKS = {
    "charlm": Task(
        "transformer",
        "torch_charlm",
        ("--width", "192", "--epochs", "8", "--epoch-steps", "75"),
        "bits_per_character",
        "held-out bits per character",
        (0.0125, 0.025, 0.05),
        ("--epochs", "2", "--epoch-steps", "25"),
    ),
    "lstm": Task(
        "LSTM",
        "torch_lstm",
        ("--epochs", "8", "--epoch-steps", "50"),
        "bits_per_character",
        "held-out bits per character",
        (0.5, 1.0, 2.0),
        ("--epochs", "2", "--epoch-steps", "25"),
    ),
    "digits": Task(
        "CNN",
        "torch_digits",
        ("--width", "64", "--epochs", "12"),
        "held_out_loss",
        "held-out loss, nats",
        (0.015, 0.03, 0.06),
        ("--epochs", "2"),
    ),
    "adamw": Task(
        "transformer with AdamW",
        "torch_charlm",
        ("--width", "192", "--epochs", "8", "--epoch-steps", "750", "--optimizer", "adamw"),
        "bits_per_character",
        "held-out bits per character",
        (0.00025, 0.0005, 0.001),
        ("--epochs", "2", "--epoch-steps", "60"),
        ("DiLoCo", "local TopK 0.01", "local TopK 0.03", "local TopK 0.1"),
    ),
}


@dataclass(frozen=True)
class Row:
    """A way to exchange gradients."""

    options: tuple[str, ...]
    hook: str = ""
    """DDP's communication hook; empty with Horovod."""
    rate_factor: float = 1.0
    """10 without momentum: with momentum 0.9 a gradient moves the parameters ten times as far as the learning rate says."""
    same_curve: str = ""
    """The row whose loss over steps this one has, too: it is not trained again."""


NO_MOMENTUM = ("--momentum", "0")
CONSTANT = ("--warmup", "none", "--detached", "0")


def _sparse(compression: str, ratio: str, *options: str) -> Row:
    return Row(("--compression", compression, "--ratio", ratio, *CONSTANT, "--momentum-correction", *options))


def _local(compression: str, *options: str) -> Row:
    return Row(("--compression", compression, *CONSTANT, "--every", "30", *options))


ROWS = {
    DENSE: Row(("--compression", "none")),
    "dense fp16": Row(("--compression", "fp16")),
    "dense fp16 no momentum": Row(("--compression", "fp16", *NO_MOMENTUM), rate_factor=10.0),
    "DDP fp16": Row(("--compression", "fp16"), hook="fp16", same_curve="dense fp16"),
    "DDP fp16 no momentum": Row(
        ("--compression", "fp16", *NO_MOMENTUM), hook="fp16", rate_factor=10.0, same_curve="dense fp16 no momentum"
    ),
    "DDP PowerSGD rank 4": Row(("--compression", "none"), hook="PowerSGD 4"),
    "SIDCo 0.01": _sparse("sidco", "0.01"),
    "SIDCo 0.01 bfloat16": _sparse("sidco", "0.01", "--exchange", "bfloat16"),
    "SIDCo 0.01 float16": _sparse("sidco", "0.01", "--exchange", "float16"),
    "SIDCo 0.001": _sparse("sidco", "0.001"),
    "TopK 0.01": _sparse("topk", "0.01"),
    "DGC 0.01": _sparse("dgc", "0.01"),
    "GaussianK 0.01": _sparse("gaussiank", "0.01"),
    "MiCRO 0.01": _sparse("micro", "0.01"),
    "RandomBlock 0.01": _sparse("randomblock", "0.01"),
    "Mem-SGD 0.01": Row(
        ("--compression", "topk", "--ratio", "0.01", *CONSTANT, "--lr-in-residual", *NO_MOMENTUM), rate_factor=10.0
    ),
    "DiLoCo": _local("none", "--outer-lr", "0.7", "--outer-momentum", "0.9"),
    "local TopK 0.01": _local("topk", "--ratio", "0.01"),
    "local TopK 0.03": _local("topk", "--ratio", "0.03"),
    "local TopK 0.1": _local("topk", "--ratio", "0.1"),
}
"""Sparse rows have momentum before the selection, except Mem-SGD, Sparsified SGD with Memory, which has none. Dense training
also has rows without momentum: masking weakens momentum, and what a row wins by that is no merit of its exchange."""
DENSE_ROWS = (DENSE, "dense fp16", "dense fp16 no momentum", "DDP fp16", "DDP fp16 no momentum")
LOCAL = TASKS["adamw"].rows


_PLAIN = {f"SIDCo({ratio})": Row(("--compression", "sidco", "--ratio", ratio)) for ratio in ("0.01", "0.001")}
RACE = {name: ROWS[name] for name in ("dense fp16", "DDP fp16", "DDP PowerSGD rank 4")} | _PLAIN
"""The plain line, and what it competes with."""


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
    step_seconds: float
    """Median of the steps between the last two evaluations."""
    diverged: bool
    """Whether a gradient with NaN or infinity ended the run."""
    bytes_per_step: float
    parameters: int

    @property
    def last(self) -> float:
        """The loss at the end; infinite if the run came to no end."""
        good = self.losses and not self.diverged and math.isfinite(self.losses[-1])
        return self.losses[-1] if good else math.inf

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


@dataclass(frozen=True)
class Timing:
    """The median time of a step of one short run on hosts."""

    seconds: float
    bytes_per_step: float
    machine: str


class MissingRunError(Exception):
    """A training run that is needed is not there."""


class Store:
    """The folder of a task's results: one JSON file per run.

    Args:
        folder: of all tasks.
        trains: whether training runs that are missing are made; if not, they raise `MissingRunError`.
        timeout: seconds after which a run is stopped.
    """

    def __init__(self, folder: Path, task: str, *, trains: bool, timeout: float) -> None:
        self.folder = folder / task
        self.folder.mkdir(parents=True, exist_ok=True)
        self.task = TASKS[task]
        self._trains = trains
        self._timeout = timeout

    # --- training, on local workers ---

    def train(self, name: str, rate: float, seed: int) -> Curve:
        """The curve of one training run."""
        script, options = self._program(name, self._options(name, rate, seed))
        path = self._path("curve", name, f"rate{rate:g}", f"seed{seed}")
        command = [script.name, *options]
        kept = _read(path, command)
        if kept is None:
            if not self._trains:
                raise MissingRunError(f"{name} is not trained with rate {rate:g} and seed {seed}")
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "log.jsonl")
                diverged = runs.diverges(script, options, log, workers=WORKERS, timeout=self._timeout)
                kept = _write(path, command, self._curve(log, diverged=diverged))
        return Curve(**kept)

    def tuned(self, name: str) -> tuple[float, dict[float, float]]:
        """The rate with the smallest loss at the end of the first seed's run, and the losses of all rates that were tried.

        While the best rate is the smallest or the largest of those, the next one is tried, too.
        """
        losses = {rate: self.train(_trained(name), rate, SEEDS[0]).last for rate in self.task.rates}
        while True:
            best = min(losses, key=losses.__getitem__)
            beyond = {min(losses): best / 2.0, max(losses): best * 2.0}.get(best)
            if beyond is None or len(losses) == MOST_RATES:
                return best, dict(sorted(losses.items()))
            losses[beyond] = self.train(_trained(name), beyond, SEEDS[0]).last

    def curves(self, name: str) -> list[Curve]:
        """One per seed, at the best rate."""
        rate, _ = self.tuned(name)
        return [self.train(_trained(name), rate, seed) for seed in SEEDS]

    def target(self) -> float:
        """The loss that all rows must reach. All seeds of dense fp32 do."""
        curves = self.curves(DENSE)
        at = TARGET_PART * curves[0].steps[-1]
        return max(float(np.interp(at, curve.steps, curve.losses)) for curve in curves)

    # --- on hosts, one worker on each ---

    def time(self, where: hosts.Cluster, network: str, name: str, number: int) -> Timing:
        """Time the steps of a short run."""
        rate, _ = self.tuned(name)
        script, options = self._program(name, [*self._options(name, rate, number), *self.task.short])
        path, command = self._path("step", network, name, number), [script.name, *options]
        kept = _read(path, command)
        if kept is None:
            curve = self._train_on(where, script, options)
            kept = _write(path, command, Timing(curve.step_seconds, curve.bytes_per_step, machine.describe()))
        return Timing(**kept)

    def whole(self, where: hosts.Cluster, network: str, name: str, rate: float, seed: int) -> Curve:
        """A run from beginning to end."""
        script, options = self._program(name, self._options(name, rate, seed))
        path, command = self._path("whole", network, name, seed), [script.name, *options]
        kept = _read(path, command) or _write(path, command, self._train_on(where, script, options))
        return Curve(**kept)

    def timings(self, network: str, name: str) -> list[Timing]:
        """The times of a row's steps that have been measured."""
        return [
            Timing(**_result(path)) for path in sorted(self.folder.glob(self._path("step", network, name, "*").name))
        ]

    def step_seconds(self, network: str, name: str) -> float | None:
        """The median of a row's runs; None if there is none."""
        timings = self.timings(network, name)
        return statistics.median(timing.seconds for timing in timings) if timings else None

    def networks(self) -> list[str]:
        """The networks on which steps were timed."""
        return sorted({path.name.split("_")[1] for path in self.folder.glob("step_*.json")})

    # --- programs, files ---

    def _program(self, name: str, options: Sequence[str]) -> tuple[Path, list[str]]:
        """The script that trains a row, and its options."""
        row = {**ROWS, **RACE}[name]
        if row.hook:
            return Path(__file__).with_name("loss_ddp.py"), [self.task.example, row.hook, *row.options, *options]
        return around.EXAMPLES / f"{self.task.example}.py", [*row.options, *options]

    def _options(self, name: str, rate: float, seed: int) -> list[str]:
        """Of a whole training run."""
        return [*self.task.options, "--lr", f"{rate * {**ROWS, **RACE}[name].rate_factor:g}", "--seed", str(seed)]

    def _train_on(self, where: hosts.Cluster, script: Path, options: Sequence[str]) -> Curve:
        os.environ.update(runs.demo.worker_environment())
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log.jsonl")
            command = [sys.executable, str(script), *options, "--log-file", str(log)]
            if hosts.run(where, "mpirun", 1, ["timeout", f"{self._timeout:g}", *command]):
                raise SystemExit(f"{shlex.join(command)} failed on the hosts, or took longer than {self._timeout:g} s")
            return self._curve(log, diverged=False)

    def _curve(self, log: Path, *, diverged: bool) -> Curve:
        settings = json.loads(log.read_text(encoding="utf-8").splitlines()[0])
        epochs = runs.demo.read_epochs(log)
        return Curve(
            [epoch["step"] for epoch in epochs],
            [epoch[self.task.field] for epoch in epochs],
            list(itertools.accumulate(epoch["seconds"] for epoch in epochs)),
            epochs[-1]["step_seconds"] if epochs else math.nan,
            diverged,
            epochs[-1]["bytes_per_step"] if epochs else math.nan,
            settings["parameters"],
        )

    def _path(self, *words: object) -> Path:
        return self.folder / f"{'_'.join(str(word).replace(' ', '-') for word in words)}.json"


def _trained(name: str) -> str:
    """The row whose training runs are those of a row."""
    return ROWS[name].same_curve or name


def _read(path: Path, command: Sequence[str]) -> dict[str, Any] | None:
    """What a run with this command has left, if it is there."""
    if not path.exists() or json.loads(path.read_text(encoding="utf-8"))["command"] != list(command):
        return None
    return _result(path)


def _result(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["result"]
    return result


def _write(path: Path, command: Sequence[str], result: Curve | Timing) -> dict[str, Any]:
    fields = asdict(result)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps({"command": list(command), "result": fields}) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return fields
