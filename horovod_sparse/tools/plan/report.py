"""What the command `plan` prints and draws. Imports no framework."""

from __future__ import annotations

from pathlib import Path

from horovod_sparse.tools.plan.methods import (
    DENSE16,
    DENSE32,
    METHODS,
    MOST_WORKERS,
    PAIRS,
    Method,
    break_even_ratio,
    break_even_workers,
    fastest,
)
from horovod_sparse.tools.plan.network import Network

LEFT_OUT = """\
Left out: the time to select and to add up, what backward hides of the communication, and waiting
for slow workers. All collectives are taken to be rings. The methods do not train equally well."""
_DRAWN = [2 ** (step / 4) for step in range(4, 41)]
"""Numbers of workers in the picture, before rounding: from 2 to 1024."""


def text(where: Network, parameters: int, ratio: float, world: int) -> str:
    """Return the whole report."""
    fast = fastest(where, parameters, ratio, world)
    lines = [heading(where, parameters, ratio, world), "", *table(where, parameters, ratio, world), ""]
    lines += break_even(where, parameters, ratio, world)
    lines.append(f"Fastest: {fast.title}, compression={_argument(fast, ratio)}")
    if not fast.by_size:
        largest = [method for method in METHODS if method.by_size]
        fast = fastest(where, parameters, ratio, world, largest)
        lines.append(f"Fastest that does not choose at random: {fast.title}, compression={_argument(fast, ratio)}")
    return "\n".join([*lines, LEFT_OUT])


def heading(where: Network, parameters: int, ratio: float, world: int) -> str:
    """Return what is predicted for."""
    return (
        f"{parameters:,} parameters, ratio {ratio:g}, {world:,} workers\n"
        f"{where.bandwidth / 1e6:,.1f} MB/s each way ({8e-9 * where.bandwidth:.3g} gbit), {1e6 * where.latency:.3g} us per "
        f"message, {1e3 * where.wait:.3g} ms until a collective starts"
    )


def table(where: Network, parameters: int, ratio: float, world: int) -> list[str]:
    """Return one line for each method, under a line of titles."""
    rows = [("method", "bytes per step", "predicted ms", "dense fp16 / it", "compression=")]
    dense = DENSE16.seconds(where, parameters, ratio, world)
    for method in METHODS:
        seconds = method.seconds(where, parameters, ratio, world)
        sent = f"{method.bytes_sent(parameters, ratio, world):,.0f}"
        rows.append((method.title, sent, f"{1e3 * seconds:,.2f}", f"{dense / seconds:,.2f}", _argument(method, ratio)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([title.ljust(widths[0]), *map(str.rjust, numbers, widths[1:]), argument])
        for title, *numbers, argument in rows
    ]


def break_even(where: Network, parameters: int, ratio: float, world: int) -> list[str]:
    """Return up to which ratio, and up to how many workers, pairs are faster than dense exchanges."""
    lines = []
    for dense in (DENSE16, DENSE32):
        most_ratio = break_even_ratio(where, parameters, world, PAIRS, dense)
        most_workers = break_even_workers(where, parameters, ratio, PAIRS, dense)
        by_ratio = f"up to ratio {most_ratio:.3g}" if most_ratio else "at no ratio"
        lines.append(
            f"Pairs beat {dense.title} {by_ratio} with {world:,} workers; with ratio {ratio:g} {_up_to(most_workers)}."
        )
    return lines


def _up_to(workers: int) -> str:
    if workers >= MOST_WORKERS:
        return "with any number of them"
    return f"up to {workers:,} workers" if workers else "with no number of them"


def _argument(method: Method, ratio: float) -> str:
    return method.argument.format(ratio=repr(ratio))


def draw(where: Network, parameters: int, ratio: float, world: int, path: Path) -> None:
    """Draw the predicted time against the number of workers. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    worlds = sorted({round(number) for number in _DRAWN} | {world})
    for number, method in enumerate(METHODS):
        times = [1e3 * method.seconds(where, parameters, ratio, workers) for workers in worlds]
        # Thinner lines on thicker ones: all are visible where several methods take the same time.
        ax.plot(worlds, times, linewidth=5.0 - 0.6 * number, label=method.title)
    ax.axvline(world, color="0.6", linestyle=":", label=f"{world} workers")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("workers")
    ax.set_ylabel("predicted communication per step, ms")
    ax.set_title(heading(where, parameters, ratio, world), fontsize=9)
    ax.legend()
    figure.savefig(path, dpi=120, format="png")
