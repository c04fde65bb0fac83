"""How long every compressor's step takes, in units of what error feedback costs at least: `residual.add_(gradient)`.

    python benchmarks/selection.py [--sizes 25M] [--memory] [--bars] [--markdown] [--json FILE] [--picture FILE]

All rows of `horovod_sparse.tools.bench`, of which `horovod-sparse bench` runs some. Times one worker's whole step but for the
collectives: the gradient is taken in, entries are selected, packed, and taken out of the residual; and, in a row of its own,
what comes after the collective. Rows take turns, with the unit before and after each. Fails when a selection is not what the
NumPy oracle selects, and with --bars when a row takes longer than it may.
"""

from __future__ import annotations

import argparse

from horovod_sparse.tools import bench


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    bench.add_arguments(parser, sizes=(25_000_000,), repetitions=15, everything=True)
    return bench.run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
