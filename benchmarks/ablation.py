"""Random and largest entries, shared or per worker, by layer or from the whole model, with and without error feedback.

    python benchmarks/ablation.py
    python benchmarks/ablation.py --ratio 0.1 --seeds 1 --page page.md -- --epochs 10

An ablation in the shape of the random-block paper (https://arxiv.org/abs/2009.09271), on the digits example. Every run has the
same settings but for compression and seed; what follows `--` goes to the example. Prints one table and writes it, with what it
shows, to `docs/ablation.md`; the runs' logs stay in the output folder.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import runs

COMPRESSORS = {"RandomK": "randomk", "RandomBlock": "randomblock", "TopK": "topk"}
SUPPORTS = {"shared": ["--shared"], "per worker": ["--per-worker"]}
GRANULARITIES = ("layer", "model")
FEEDBACKS = {"on": [], "off": ["--no-residual"]}
DENSE = "dense fp32"
COLUMNS = ["compression", "support", "granularity", "error feedback"]
FALL = 10
"""Points of accuracy below its best epoch at which a run's end counts as fallen."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "ablation.md"


class Setting(NamedTuple):
    """A row of the table."""

    compressor: str
    support: str = "-"
    granularity: str = "-"
    feedback: str = "-"

    def options(self, ratio: float) -> list[str]:
        """What the example is told."""
        if self.compressor in runs.DENSE:
            return runs.DENSE[self.compressor]
        chosen = [
            "--compression",
            COMPRESSORS[self.compressor],
            "--ratio",
            str(ratio),
            "--granularity",
            self.granularity,
        ]
        return [*chosen, *SUPPORTS[self.support], *FEEDBACKS[self.feedback]]

    def label(self) -> str:
        return " ".join(part for part in self if part != "-")


Results = Mapping[Setting, runs.Result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--page", type=Path, default=PAGE, help="Markdown file to write")
    args, passed_on = runs.parse(parser, "ablation-output")

    sparse = [Setting(*values) for values in product(COMPRESSORS, SUPPORTS, GRANULARITIES, FEEDBACKS)]
    results = {
        setting: runs.train("digits", setting.label(), [*setting.options(args.ratio), *passed_on], args)
        for setting in [*map(Setting, runs.DENSE), *sparse]
    }
    text = page(results, passed_on, args)
    print(text)
    args.page.write_text(text, encoding="utf-8")


def page(results: Results, passed_on: list[str], args: argparse.Namespace) -> str:
    """The page: command, conditions, table, and what the table shows."""
    dense = results[Setting(DENSE)]
    lines = ["# Ablation: support, granularity, error feedback", "", *conditions(dense, passed_on, args), ""]
    lines += [*runs.table(COLUMNS, results, dense, runs.TASKS["digits"].better), ""]
    return "\n".join([*lines, *findings(results), ""])


def conditions(dense: runs.Result, passed_on: list[str], args: argparse.Namespace) -> list[str]:
    """How the numbers came about, and what the columns mean."""
    used = dense.settings
    instead = f" (`{shlex.join(passed_on)}` instead of the example's own)" if passed_on else ""
    command = shlex.join(["python", "benchmarks/ablation.py", *sys.argv[1:]])
    return [
        f"Written by `{command}`: `examples/torch_digits.py`, a CNN of {used['parameters']:,} parameters, on "
        f"{args.workers} workers, {args.seeds} seeds, {used['epochs']} epochs of {dense.steps // used['epochs']} steps, "
        f"learning rate {used['lr']}, {used['batch_size']} samples per worker and step{instead}, ratio {args.ratio}. "
        "Nothing but compression and seed differs between the runs, and nothing was tuned for one of them. "
        f"Python {platform.python_version()}, PyTorch {version('torch')}, Horovod {version('horovod')}.",
        "",
        '- *Support*: "shared" entries are the same on all workers, and their values go through an allreduce: RandomK and '
        'RandomBlock draw them with one seed, TopK takes the union of what the workers chose (`union=True`). "Per worker" '
        "entries are each worker's own, sent as pairs by an allgather.",
        "- *Granularity*: entries are chosen from each layer by itself, or from the whole model at once. (The default, "
        "buckets, would put this whole model into one.)",
        "- *Error feedback*: what was not sent is added to the next gradient, or forgotten (`residual=False`).",
        "- *Mean* and *each seed*: held-out accuracy in % after the last step, or after the last whole epoch of a run that a "
        "gradient with NaN or infinity ended (\"diverged\"). *Within dense's spread*: the mean is no worse than dense fp32's "
        "worst seed.",
    ]


def findings(results: Results) -> list[str]:
    """Counts and mean differences, computed from the runs; no more than their numbers carry."""
    spread = results[Setting(DENSE)].values
    lines = [
        "What the runs show: mean differences between settings that differ in one thing alone, and their range, in points of "
        f"accuracy. Dense fp32's own seeds are {max(spread) - min(spread):.2f} points apart.",
        "",
    ]
    for compressor in COMPRESSORS:
        own = part(results, compressor=compressor)
        fed = part(own, feedback="on")
        lines.append(
            f"- {compressor}: error feedback on instead of off {difference(own, 'feedback', 'on', 'off')}; with feedback, "
            f"shared instead of per worker {difference(fed, 'support', 'shared', 'per worker')}, "
            f"layer instead of model {difference(fed, 'granularity', 'layer', 'model')}; {fallen(fed)}."
        )
    for feedback in FEEDBACKS:
        reached = within(part(results, feedback=feedback), results[Setting(DENSE)])
        lines.append(f"- Settings within dense's spread with feedback {feedback}: {reached}.")
    return lines


def part(results: Results, **values: str) -> Results:
    """The results of the settings that have these values."""
    return {
        key: result for key, result in results.items() if all(getattr(key, name) == values[name] for name in values)
    }


def difference(results: Results, field: str, first: str, second: str) -> str:
    """Means of the settings with `first` less those of the same settings with `second`: average and range."""
    changes = [
        result.mean - results[setting._replace(**{field: second})].mean
        for setting, result in part(results, **{field: first}).items()
    ]
    return f"{statistics.fmean(changes):+.2f} ({min(changes):+.2f} to {max(changes):+.2f})"


def fallen(results: Results) -> str:
    """In how many runs training was so unstable that the end is far below the best epoch."""
    ends = [pair for result in results.values() for pair in zip(result.best, result.values, strict=True)]
    count = sum(best - value > FALL for best, value in ends)
    return f"{count} of {len(ends)} of these runs end more than {FALL} points below their best epoch"


def within(results: Results, dense: runs.Result) -> str:
    """How many settings are within dense's spread, by compressor."""
    better = runs.TASKS["digits"].better
    counts = []
    for compressor in COMPRESSORS:
        short = [runs.shortfall(result, dense, better) for result in part(results, compressor=compressor).values()]
        counts.append(f"{compressor} {short.count(0.0)} of {len(short)}")
    return ", ".join(counts)


if __name__ == "__main__":
    main()
