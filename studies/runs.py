"""Training runs of the examples. Their logs are kept: a run is not repeated while its log is there."""

from __future__ import annotations

import argparse
import statistics
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import around
import demo
import markdown

DENSE = {"dense fp32": ["--compression", "none"], "dense fp16": ["--compression", "fp16"]}
Launch = Callable[[Path, list[str]], object]
"""Runs a script with these options."""


@dataclass(frozen=True)
class Folder:
    """Where logs are kept, and how the runs are made that are not there."""

    path: Path
    workers: int
    timeout: float
    """Seconds after which a run is stopped."""

    def train(
        self, name: str, script: Path, options: Sequence[str], launch: Launch | None = None
    ) -> list[dict[str, Any]]:
        """Return the epochs of a run of an example, on local workers unless it is launched otherwise."""
        checksum = zlib.crc32(" ".join([script.name, *options]).encode())
        log = self.path / f"{script.stem}-{name.replace(' ', '-')}-{checksum:08x}.jsonl"
        if not log.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            unfinished = log.with_suffix(".new")
            (launch or self._locally)(script, [*options, "--log-file", str(unfinished)])
            unfinished.replace(log)
        return demo.read_epochs(log)

    def _locally(self, script: Path, options: list[str]) -> None:
        output = Path(options[-1]).with_suffix(".txt")
        demo.run_workers(script, options, workers=self.workers, output=output, timeout=self.timeout)


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
    """One per seed, after the last whole epoch."""
    bytes_per_step: float
    steps: int


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
    """Train an example once per seed."""
    script, settings = script_of(task, framework), TASKS[task]
    folder = Folder(args.output, args.workers, args.timeout)
    values = []
    for seed in range(args.seeds):
        epochs = folder.train(f"{row}-{seed}", script, [*options, "--seed", str(seed)])
        values.append(settings.scale * epochs[-1][settings.field])
        print(f"{row}, seed {seed}: {values[-1]:.3f}", file=sys.stderr, flush=True)
    return Result(values, epochs[-1]["bytes_per_step"], epochs[-1]["step"])


def table(columns: Sequence[str], results: Mapping[Any, Result], dense: Result | None, better: int) -> str:
    """Markdown: one row per result, whose key fills `columns`, beside dense's spread."""
    header = [*columns, "mean", "each seed", "bytes sent per step and worker", "within dense's spread"]
    rows = []
    for key, result in results.items():
        within, mean = "unknown", statistics.fmean(result.values)
        if dense is not None:
            # By how much the mean is worse than dense's worst seed.
            short = min(better * value for value in dense.values) - better * mean
            within = f"no, {short:.2f} worse" if short > 0.0 else "yes"
        each = ", ".join(f"{value:.2f}" for value in result.values)
        rows.append([*key, f"{mean:.2f}", each, f"{result.bytes_per_step:,.0f}", within])
    return markdown.table(header, rows, words=len(header))
