"""Train one of the examples dense and sparse with several seeds, and set the sparse results beside dense's spread.

    python benchmarks/accuracy.py digits
    python benchmarks/accuracy.py charlm -- --epochs 20

What follows `--` goes to the example. Every run has the same settings but for compression, ratio and seed. Prints one table;
the runs' logs stay in the output folder.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import demo

ROWS = {
    "dense fp32": ["--compression", "none"],
    "dense fp16": ["--compression", "fp16"],
    "TopK 0.01": ["--compression", "topk", "--ratio", "0.01"],
    "SIDCo 0.01": ["--compression", "sidco", "--ratio", "0.01"],
    "SIDCo 0.001": ["--compression", "sidco", "--ratio", "0.001"],
}


@dataclass(frozen=True)
class Task:
    script: str
    field: str
    unit: str
    scale: float
    better: int
    """1 when more is better, -1 when less is."""


TASKS = {
    "digits": Task("torch_digits.py", "accuracy", "held-out accuracy, %", 100.0, 1),
    "charlm": Task("torch_charlm.py", "bits_per_character", "held-out bits per character", 1.0, -1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--output", type=Path, default=Path("accuracy-output"), help="folder for logs")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds after which a run is stopped")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, passed_on = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    task = TASKS[args.task]
    args.output.mkdir(parents=True, exist_ok=True)

    results: dict[str, list[float]] = {}
    sent: dict[str, float] = {}
    steps = 0
    for row in args.rows:
        results[row] = []
        for seed in range(args.seeds):
            stem = args.output / f"{args.task}-{row.replace(' ', '-')}-{seed}"
            log = stem.with_suffix(f"{stem.suffix}.jsonl")
            options = [*ROWS[row], "--seed", str(seed), "--log-file", str(log), *passed_on]
            output = stem.with_suffix(f"{stem.suffix}.txt")
            demo.run_workers(EXAMPLES / task.script, options, workers=args.workers, output=output, timeout=args.timeout)
            last = demo.read_epochs(log)[-1]
            results[row].append(task.scale * last[task.field])
            sent[row], steps = last["bytes_per_step"], last["step"]
            print(f"{row}, seed {seed}: {results[row][-1]:.3f}", file=sys.stderr, flush=True)

    print(f"\n{args.task}: {task.unit}, {args.workers} workers, {steps} steps, {args.seeds} seeds\n")
    print("| compression | mean | each seed | bytes sent per step and worker | within dense's spread |")
    print("|---|---|---|---|---|")
    dense = results.get("dense fp32")
    for row, values in results.items():
        mean = statistics.fmean(values)
        each = ", ".join(f"{value:.2f}" for value in values)
        worst = min(dense, key=lambda value: task.better * value) if dense else mean
        within = "yes" if task.better * mean >= task.better * worst else f"no, {abs(mean - worst):.2f} worse"
        print(f"| {row} | {mean:.2f} | {each} | {sent[row]:,.0f} | {within if dense else 'unknown'} |")


if __name__ == "__main__":
    main()
