"""Train one of the examples dense and sparse with several seeds, and set the sparse results beside dense's spread.

    python studies/accuracy.py digits
    python studies/accuracy.py digits --framework tensorflow
    python studies/accuracy.py charlm --rows "dense fp32" "SIDCo 0.01" -- --momentum-correction
    python studies/accuracy.py digits --rows "dense fp32" "RandomBlock 0.01" -- --momentum 0 --lr 0.1

What follows `--` goes to the example. Every run has the same settings but for compression, ratio and seed. Prints one table;
the runs' logs stay in the output folder.
"""

from __future__ import annotations

import argparse

import runs

COMPRESSORS = ("TopK", "SIDCo", "GaussianK", "DGC", "RedSync", "MiCRO", "RandomK", "RandomBlock")
CHOICES = {
    **{f"{name} 0.01": ["--compression", name.lower(), "--ratio", "0.01"] for name in COMPRESSORS},
    "SIDCo 0.01, packed": ["--compression", "sidco", "--ratio", "0.01", "--exchange", "packed"],
    "SIDCo 0.01, balanced": ["--compression", "sidco", "--ratio", "0.01", "--exchange", "balanced"],
    "SIDCo 0.001": ["--compression", "sidco", "--ratio", "0.001"],
    "SIDCo 0.001, packed": ["--compression", "sidco", "--ratio", "0.001", "--exchange", "packed"],
    "SIDCo 0.001, balanced": ["--compression", "sidco", "--ratio", "0.001", "--exchange", "balanced"],
    "TopK 0.001": ["--compression", "topk", "--ratio", "0.001"],
    "DGC 0.001": ["--compression", "dgc", "--ratio", "0.001"],
}
PLAIN = {
    f"{name}({ratio})": ["--compression", name.lower(), "--ratio", ratio]
    for name in ("SIDCo", "TopK", "DGC", "MiCRO")
    for ratio in ("0.01", "0.001")
}
"""The plain line: momentum moves before the selection, the ratio comes down with time, and feedback is detached."""
BARE = ["--warmup", "none", "--momentum-in-optimizer", "--detached", "0"]
CONSTANT = {row: [*options, *BARE] for row, options in CHOICES.items()}
ROWS = runs.DENSE | CONSTANT | PLAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=runs.TASKS)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--framework", choices=runs.demo.FRAMEWORKS, default="torch", help="whose example to train")
    args, passed_on = runs.parse(parser, "accuracy-output")
    task = runs.TASKS[args.task]
    if not runs.script_of(args.task, args.framework).exists():
        parser.error(f"there is no example for {args.task} with {args.framework}")

    results = {row: runs.train(args.task, row, [*ROWS[row], *passed_on], args, args.framework) for row in args.rows}

    steps = next(iter(results.values())).steps
    print(f"\n{args.task}, {args.framework}: {task.unit}, {args.workers} workers, {steps} steps, {args.seeds} seeds\n")
    rows = {(row,): result for row, result in results.items()}
    print(runs.table(["compression"], rows, results.get("dense fp32"), task.better))


if __name__ == "__main__":
    main()
