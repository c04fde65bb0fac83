"""Random and largest entries: support, granularity, error feedback, also with parameters moved ahead, and momentum.

    python studies/ablation.py -- --epochs 8
    python studies/ablation.py --ratio 0.1 --seeds 1 -- --epochs 10

An ablation in the shape of the random-block paper (https://arxiv.org/abs/2009.09271), on the digits example. Runs that are
compared have the same settings but for compression and seed; what follows `--` goes to the example. Prints three tables; the
runs' logs stay in the output folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import runs

COMPRESSORS = {"RandomK": "randomk", "RandomBlock": "randomblock", "TopK": "topk"}
SUPPORTS = ("shared", "per worker")
GRANULARITIES = ("layer", "model")
AHEAD = {f"ahead {c}": ["--ahead", str(c)] for c in (0.3, 1.0)}
FEEDBACKS = {"on": ["--ahead", "0"], "off": ["--no-residual"]}
MOMENTA = {
    "optimizer": [],
    "selection": ["--momentum-correction", "--no-masking"],
    "none": ["--momentum", "0", "--lr", "0.1"],
}
"""Where a run has its momentum of 0.9. Without momentum it has a learning rate of its own."""
COLUMNS = ["compression", "support", "granularity", "error feedback", "momentum"]


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
        exchange = "pairs" if self.support == "per worker" else "union" if self.compressor == "TopK" else "shared"
        chosen = ["--compression", COMPRESSORS[self.compressor], "--ratio", str(ratio), "--warmup", "none"]
        chosen += ["--granularity", self.granularity, "--exchange", exchange]
        return [*chosen, *(FEEDBACKS | AHEAD)[self.feedback], *momentum]

    def label(self) -> str:
        return " ".join(part for part in self if part != "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, default=0.01)
    args, passed_on = runs.parse(parser, "ablation-output")

    def compare(title: str, settings: Sequence[Setting], dense: runs.Result | None = None) -> runs.Result:
        """Print a table of these settings beside dense training: the first of them, unless it is given."""
        found = {
            one: runs.train("digits", one.label(), [*passed_on, *one.options(args.ratio)], args) for one in settings
        }
        dense = dense or found[settings[0]]
        print(f"{title}:\n\n{runs.table(COLUMNS, found, dense, runs.TASKS['digits'].better)}\n", flush=True)
        return dense

    usual = [Setting(*values) for values in product(COMPRESSORS, SUPPORTS, GRANULARITIES, FEEDBACKS)]
    dense = compare("Momentum in the optimizer", [*map(Setting, runs.DENSE), *usual])
    chosen = [("RandomBlock", "shared", "layer"), ("RandomBlock", "shared", "model")]
    chosen += [("RandomK", "shared", "model"), ("TopK", "per worker", "model")]
    alone = [Setting(*choice, feedback, "none") for choice, feedback in product(chosen, FEEDBACKS | AHEAD)]
    compare("Without momentum", [*(Setting(name, momentum="none") for name in runs.DENSE), *alone])
    # Without error feedback nothing would keep the momentum that is before the selection.
    before = [Setting(*choice, feedback, "selection") for choice, feedback in product(chosen, ("on", *AHEAD))]
    compare("Momentum before the selection", before, dense)


if __name__ == "__main__":
    main()
