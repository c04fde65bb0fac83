"""What the benchmarks of training share: running an example with several seeds, and a table beside dense's spread."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import around
import demo
import markdown

DENSE = {"dense fp32": ["--compression", "none"], "dense fp16": ["--compression", "fp16"]}


@dataclass(frozen=True)
class Task:
    field: str
    unit: str
    scale: float
    better: int
    """1 when more is better, -1 when less is."""


TASKS = {
    "digits": Task("accuracy", "held-out accuracy, %", 100.0, 1),
    "lstm": Task("bits_per_character", "held-out bits per character", 1.0, -1),
    "charlm": Task("bits_per_character", "held-out bits per character", 1.0, -1),
    "gpt2": Task("perplexity", "held-out perplexity", 1.0, -1),
}


@dataclass(frozen=True)
class Result:
    """What the runs of one row ended with."""

    values: list[float]
    """One per seed, after the last epoch."""
    best: list[float]
    """Of each run's best epoch."""
    diverged: list[bool]
    """Whether a run ended with NaN or infinity in a gradient; its value is then that of its last whole epoch."""
    bytes_per_step: float
    steps: int
    settings: dict[str, Any]
    """The last run's, from its log."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def parse(parser: argparse.ArgumentParser, output: str) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, with those that `train` reads, and what follows `--`, which goes to the example."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(output), help="folder for logs")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which a run is stopped")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]


def script_of(task: str, framework: str) -> Path:
    """The example that trains a task with a framework; not all do."""
    return around.EXAMPLES / f"{framework}_{task}.py"


def train(task: str, row: str, options: Sequence[str], args: argparse.Namespace, framework: str = "torch") -> Result:
    """Train an example once per seed, with logs named after example, row and seed."""
    script = script_of(task, framework)
    settings = TASKS[task]
    args.output.mkdir(parents=True, exist_ok=True)
    values, best, diverged = [], [], []
    for seed in range(args.seeds):
        stem = f"{script.stem}-{row.replace(' ', '-')}-{seed}"
        log = args.output / f"{stem}.jsonl"
        command = [*options, "--seed", str(seed)]
        diverged.append(diverges(script, command, log, workers=args.workers, timeout=args.timeout))
        epochs = demo.read_epochs(log)
        if not epochs:
            raise SystemExit(f"{row}, seed {seed}: a gradient was not finite before the first evaluation ({log})")
        measured = [settings.scale * epoch[settings.field] for epoch in epochs]
        values.append(measured[-1])
        best.append(max(measured, key=lambda value: settings.better * value))
        print(f"{row}, seed {seed}: {values[-1]:.3f}", file=sys.stderr, flush=True)
    told = json.loads(log.read_text(encoding="utf-8").splitlines()[0])
    return Result(values, best, diverged, epochs[-1]["bytes_per_step"], epochs[-1]["step"], told)


def diverges(script: Path, options: list[str], log: Path, *, workers: int, timeout: float) -> bool:
    """Run an example; whether a gradient that is not finite ended it. Other failures end the benchmark."""
    output = log.with_suffix(".txt")
    command = [*options, "--log-file", str(log)]
    try:
        demo.run_workers(script, command, workers=workers, output=output, timeout=timeout)
    except SystemExit:
        if "FloatingPointError" not in output.read_text(encoding="utf-8", errors="replace"):
            raise
        return True
    return False


def shortfall(result: Result, dense: Result, better: int) -> float:
    """By how much the mean is worse than dense's worst seed; 0 if it is within dense's spread."""
    worst = min(better * value for value in dense.values)
    return max(0.0, worst - better * result.mean)


def table(columns: Sequence[str], results: Mapping[Any, Result], dense: Result | None, better: int) -> str:
    """Markdown: one row per result, whose key fills `columns`."""
    header = [*columns, "mean", "each seed", "bytes sent per step and worker", "within dense's spread"]
    rows = []
    for key, result in results.items():
        within = "unknown"
        if dense is not None:
            short = shortfall(result, dense, better)
            within = f"no, {short:.2f} worse" if short else "yes"
        ends = zip(result.values, result.diverged, strict=True)
        each = ", ".join(f"{value:.2f}" + " (diverged)" * diverged for value, diverged in ends)
        rows.append([*key, f"{result.mean:.2f}", each, f"{result.bytes_per_step:,.0f}", within])
    return markdown.table(header, rows, words=len(header))
