"""Random and largest entries: support, granularity, error feedback, also detached, and momentum.

    python studies/ablation.py
    python studies/ablation.py --ratio 0.1 --seeds 1 --page page.md -- --epochs 10

An ablation in the shape of the random-block paper (https://arxiv.org/abs/2009.09271), on the digits example. Runs that are
compared have the same settings but for compression and seed; what follows `--` goes to the example. Prints two tables and
writes them, with what they show, to `docs/ablation.md`; the runs' logs stay in the output folder.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import around
import runs

COMPRESSORS = {"RandomK": "randomk", "RandomBlock": "randomblock", "TopK": "topk"}
SUPPORTS = ("shared", "per worker")
GRANULARITIES = ("layer", "model")
DETACHED = {f"detached {c}": ["--detached", str(c)] for c in (0.3, 1.0)}
FEEDBACKS = {"on": ["--detached", "0"], "off": ["--no-residual"]}
MOMENTA = {
    "optimizer": [],
    "selection": ["--momentum-correction", "--no-masking"],
    "none": ["--momentum", "0", "--lr", "0.1"],
}
"""Where a run has its momentum of 0.9. Without momentum it has a learning rate of its own."""
DENSE = "dense fp32"
COLUMNS = ["compression", "support", "granularity", "error feedback", "momentum"]
DETACHED_TEXT = (
    "With detached error feedback ([arXiv 2004.05298](https://arxiv.org/abs/2004.05298)) each worker computes its gradient "
    "where a part of its own residual has moved the parameters already (the setting `detached`). "
    "The number is that part. The authors' code has 0.3 in its scripts."
)
FALL = 10
"""Points of accuracy below its best epoch at which a run's end counts as fallen."""
PAGE = around.DOCS / "ablation.md"


class Setting(NamedTuple):
    """A row of the table."""

    compressor: str
    support: str = "-"
    granularity: str = "-"
    feedback: str = "-"
    momentum: str = "optimizer"

    def options(self, ratio: float) -> list[str]:
        """What the example is told."""
        momentum = MOMENTA[self.momentum]
        if self.compressor in runs.DENSE:
            return [*runs.DENSE[self.compressor], *momentum]
        chosen = [
            "--compression",
            COMPRESSORS[self.compressor],
            "--ratio",
            str(ratio),
            "--warmup",
            "none",
            "--granularity",
            self.granularity,
            "--exchange",
            "pairs" if self.support == "per worker" else "union" if self.compressor == "TopK" else "shared",
        ]
        feedback = (FEEDBACKS | DETACHED)[self.feedback]
        return [*chosen, *feedback, *momentum]

    def label(self) -> str:
        return " ".join(part for part in self if part != "-")

    @property
    def dense(self) -> Setting:
        """What it is compared with. Dense training has no selection, so its momentum is in the optimizer."""
        return Setting(DENSE, momentum="none" if self.momentum == "none" else "optimizer")


Results = dict[Setting, runs.Result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--page", type=Path, default=PAGE, help="Markdown file to write")
    args, passed_on = runs.parse(parser, "ablation-output")

    usual = [
        *map(Setting, runs.DENSE),
        *(Setting(*values) for values in product(COMPRESSORS, SUPPORTS, GRANULARITIES, FEEDBACKS)),
    ]
    other = [Setting(name, momentum="none") for name in runs.DENSE]
    chosen = [("RandomBlock", "shared", "layer"), ("RandomBlock", "shared", "model")]
    chosen += [("RandomK", "shared", "model"), ("TopK", "per worker", "model")]
    for momentum, choice, feedback in product(("none", "selection"), chosen, FEEDBACKS | DETACHED):
        other.append(Setting(*choice, feedback, momentum))
    # Error feedback keeps the momentum that is before the selection.
    other = [setting for setting in other if (setting.feedback, setting.momentum) != ("off", "selection")]
    results = {
        setting: runs.train("digits", setting.label(), [*passed_on, *setting.options(args.ratio)], args)
        for setting in [*usual, *other]
    }
    text = page({one: results[one] for one in usual}, {one: results[one] for one in other}, passed_on, args)
    print(text)
    args.page.write_text(text, encoding="utf-8")


def page(usual: Results, other: Results, passed_on: list[str], args: argparse.Namespace) -> str:
    """The page: command, conditions, tables, and what they show."""
    dense, better = usual[Setting(DENSE)], runs.TASKS["digits"].better
    lines = ["# Ablation: support, granularity, error feedback, momentum", "", *conditions(dense, passed_on, args), ""]
    lines += [runs.table(COLUMNS, usual, dense, better), "", *findings(usual), ""]
    lines += ["## Without momentum, and detached error feedback", "", DETACHED_TEXT, ""]
    alone = {one: result for one, result in other.items() if one.momentum == "none"}
    before = {one: result for one, result in other.items() if one.momentum == "selection"}
    lines += [runs.table(COLUMNS, alone, alone[Setting(DENSE, momentum="none")], better), ""]
    lines += ["With momentum before the selection, beside the dense rows of the first table:", ""]
    lines += [runs.table(COLUMNS, before, dense, better), "", *detached_findings(usual | other), ""]
    return "\n".join(lines)


def conditions(dense: runs.Result, passed_on: list[str], args: argparse.Namespace) -> list[str]:
    """How the numbers came about, and what the columns mean."""
    used = dense.settings
    instead = f" (`{shlex.join(passed_on)}` instead of the example's own)" if passed_on else ""
    command = shlex.join(["python", "studies/ablation.py", *sys.argv[1:]])
    return [
        f"Written by `{command}`: `examples/torch_digits.py`, a CNN of {used['parameters']:,} parameters, on "
        f"{args.workers} workers, {args.seeds} seeds, {used['epochs']} epochs of {dense.steps // used['epochs']} steps, "
        f"learning rate {used['lr']} with momentum and 0.1 without, {used['batch_size']} samples per worker and "
        f"step{instead}, ratio {args.ratio}. "
        "Nothing but compression and seed differs between the runs that are compared, and nothing was tuned for one of them. "
        f"Python {platform.python_version()}, PyTorch {version('torch')}, Horovod {version('horovod')}.",
        "",
        '- *Support*: "shared" entries are the same on all workers, and their values go through an allreduce: RandomK and '
        "RandomBlock draw them with one seed, TopK takes the union of what the workers chose (`exchange=Union()`). "
        '"Per worker" entries are each worker\'s own, sent as pairs by an allgather.',
        "- *Granularity*: entries are chosen from each layer by itself, or from the whole model at once. (The default, "
        "buckets, would put this whole model into one.)",
        "- *Error feedback*: what was not sent is added to the next gradient, or forgotten (`residual=False`).",
        "- *Momentum*: 0.9, in the optimizer or before the selection (`MomentumCorrection(0.9, masking=False)`), or none.",
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


def detached_findings(results: Results) -> list[str]:
    """How error feedback and detached error feedback compare, by compressor."""
    lines = []
    better = runs.TASKS["digits"].better
    for compressor, feedback in product(COMPRESSORS, ("on", *DETACHED)):
        rows = part(results, compressor=compressor, feedback=feedback)
        short = {one: runs.shortfall(result, results[one.dense], better) for one, result in rows.items()}
        own = [one for one in rows if one.momentum != "optimizer"]
        if own:
            means = [rows[one].mean for one in own]
            lines.append(
                f"- {compressor}, feedback {feedback}: {min(means):.2f} to {max(means):.2f} %, within dense's spread in "
                f"{sum(short[one] == 0.0 for one in own)} of {len(own)} rows."
            )
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
