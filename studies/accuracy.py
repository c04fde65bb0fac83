"""Train one of the examples dense and sparse with several seeds, and set the sparse results beside dense's spread.

    python studies/accuracy.py digits
    python studies/accuracy.py digits --framework tensorflow
    python studies/accuracy.py charlm --rows "dense fp32" "SIDCo 0.01" -- --momentum-correction
    python studies/accuracy.py digits --rows "dense fp32" "RandomBlock 0.01" -- --momentum 0 --lr 0.1
    python studies/accuracy.py digits --rows "dense fp32" "SIDCo(0.01)" --compression mine:RMSThreshold

What follows `--` goes to the example. Every run has the same settings but for compression, ratio and seed. Prints one table;
the runs' logs stay in the output folder.
"""

from __future__ import annotations

import argparse

import runs
from own import own_class

COMPRESSORS = ("TopK", "SIDCo", "GaussianK", "DGC", "RedSync", "MiCRO", "RandomK", "RandomBlock")
RATIOS = ("0.01", "0.001")
BARE = ["--warmup", "none", "--ahead", "0"]


def sparse(name: str, ratio: str, *options: str) -> list[str]:
    return ["--compression", name.lower(), "--ratio", ratio, *options]


CONSTANT = {
    **{f"{name} 0.01": sparse(name, "0.01", *BARE) for name in COMPRESSORS},
    **{f"{name} 0.001": sparse(name, "0.001", *BARE) for name in ("SIDCo", "TopK", "DGC")},
}
PLAIN = {f"{name}({ratio})": sparse(name, ratio) for name in ("SIDCo", "TopK", "DGC", "MiCRO") for ratio in RATIOS}
"""The plain line: the ratio comes down with time, and momentum stays in the optimizer."""
EXPLICIT = {
    **{f"SIDCo({ratio}), ahead": sparse("SIDCo", ratio, "--ahead", "0.5") for ratio in RATIOS},
    **{f"SIDCo({ratio}), local updates": sparse("SIDCo", ratio, "--every", "1") for ratio in RATIOS},
}
"""One line more: `compression.ahead`, or `LocalUpdates` in every step and ahead, for AdamW."""
ROWS = runs.DENSE | CONSTANT | PLAIN | EXPLICIT


def own_rows(text: str) -> dict[str, list[str]]:
    """The rows of a compressor of one's own, `module:Class`."""
    name = own_class(text).__name__
    return {f"{name}({ratio})": ["--compression", text, "--ratio", ratio] for ratio in RATIOS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=runs.TASKS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--framework", choices=runs.demo.FRAMEWORKS, default="torch", help="whose example to train")
    text = "a compressor of one's own, module:Class: two more rows"
    parser.add_argument("--compression", type=own_rows, default={}, metavar="CLASS", help=text)
    args, passed_on = runs.parse(parser, "accuracy-output")
    task = runs.TASKS[args.task]
    if not runs.script_of(args.task, args.framework).exists():
        parser.error(f"there is no example for {args.task} with {args.framework}")

    rows = {row: ROWS[row] for row in args.rows} | args.compression
    results = {
        row: runs.train(args.task, row, [*options, *passed_on], args, args.framework) for row, options in rows.items()
    }

    steps = next(iter(results.values())).steps
    print(f"\n{args.task}, {args.framework}: {task.unit}, {args.workers} workers, {steps} steps, {args.seeds} seeds\n")
    named = {(row,): result for row, result in results.items()}
    print(runs.table(["compression"], named, results.get("dense fp32"), task.better))


if __name__ == "__main__":
    main()
