"""Measure what docs/selection.md shows, and write it there, into README.md and into docs/selection.png.

    python benchmarks/selection_page.py [--repetitions 7] [--variants avx512 avx2 baseline] [--json FILE] [--from FILE]

Runs `benchmarks/selection.py` under each condition of the page, one after the other, with every variant of the kernels that
this processor runs: leave the machine alone for half an hour. `--json` keeps the figures; `--from` writes the pages from
kept ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import markdown

from horovod_sparse import kernels

HERE = Path(__file__).resolve().parent
PAGE, README = HERE.parent / "docs" / "selection.md", HERE.parent / "README.md"
MARK = "selection figures"
HEADLINE = (
    "SIDCo, exponential",
    "TopK",
    "DGC",
    "RandomBlock",
    "decompress, 4 workers",
    "torch.topk(x.abs(), k) alone",
    "fp16: cast and back",
)
"""The rows that the README shows."""


class Column(NamedTuple):
    title: str
    size: int
    ratio: float
    threads: int


COLUMNS = (
    Column("units", 25_000_000, 0.001, 1),
    Column("ratio 0.01", 25_000_000, 0.01, 1),
    Column("ratio 0.1", 25_000_000, 0.1, 1),
    Column("2 threads", 25_000_000, 0.001, 2),
    Column("1 M", 1_000_000, 0.001, 1),
    Column("100 M", 100_000_000, 0.001, 1),
)


def measure(variants: list[str], repetitions: int) -> dict[str, Any]:
    """Every column with every variant, and the steps in TensorFlow with the first."""
    rows = ["--rows", "SIDCo, exponential", "TopK", "RandomBlock"]
    tensorflow = _run(["--backend", "tensorflow", "--sizes", "25M", *rows], repetitions)
    columns: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for column in COLUMNS:
        for variant in variants:
            options = ["--sizes", str(column.size), "--ratios", str(column.ratio), "--threads", str(column.threads)]
            first = column is COLUMNS[0] and variant == variants[0]
            options += ["--kernels", variant, *(["--memory"] if first else [])]
            columns[variant].append(_run(options, repetitions))
    return {"columns": columns, "tensorflow": tensorflow}


def _run(options: list[str], repetitions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / "selection.py"), "--repetitions", str(repetitions), "--json", str(file)]
        picture = ["--picture", str(PAGE.with_suffix(".png"))] if "--memory" in options else []
        subprocess.run([*command, *options, *picture], check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return figures


def _units(figures: dict[str, Any]) -> dict[str, float]:
    return {result["title"]: result["units"] for result in figures["results"]}


def machine(figures: dict[str, Any]) -> str:
    """One line."""
    versions = ", ".join(f"{name} {figures[name]}" for name in ("torch", "numpy"))
    sets = ", ".join(figures["instruction_sets"])
    return f"{figures['processor']} ({sets}), {figures['cores']} cores; {versions}."


def table(columns: list[dict[str, Any]]) -> str:
    """A row per compressor, a column per condition."""
    first, *others = columns
    titles = ["25 M elements, ratio 0.001, 1 thread", "units", "quartiles", "at most", "GB/s", "memory"]
    rows = []
    for result in first["results"]:
        quotients = sorted(result["quotients"])
        quartiles = f"{quotients[len(quotients) // 4]:.2f}-{quotients[-1 - len(quotients) // 4]:.2f}"
        seconds = sorted(result["seconds"])[len(result["seconds"]) // 2]
        bar = "" if result["bar"] is None else f"{result['bar']:g}"
        over = "" if result["bar"] is None or result["units"] <= result["bar"] else " (over)"
        memory = "" if result["memory"] is None else f"{100 * result['memory']:.1f} %"
        rate = f"{12e-9 * result['conditions']['size'] / seconds:.0f}"
        cells = [result["title"], f"{result['units']:.2f}{over}", quartiles, bar, rate, memory]
        rows.append([*cells, *(_cell(figures, result["title"]) for figures in others)])
    return markdown.table([*titles, *(column.title for column in COLUMNS[1:])], rows)


def _cell(figures: dict[str, Any], title: str) -> str:
    result = next(result for result in figures["results"] if result["title"] == title)
    over = " (over)" if result["bar"] is not None and result["units"] > result["bar"] else ""
    return f"{result['units']:.2f}{over}"


def tensorflow_table(kept: dict[str, Any]) -> str:
    """A row per compressor: the whole step in eager code, in a tf.function, and in PyTorch."""
    units = _units(kept["tensorflow"])
    places = ("eager code", "a tf.function", "PyTorch")
    names = dict.fromkeys(title.partition(", whole step in ")[0] for title in units)
    rows = [[name, *(f"{units[f'{name}, whole step in {place}']:.2f}" for place in places)] for name in names]
    return markdown.table(["25 M elements, ratio 0.001, 1 thread", *places], rows)


def headline(kept: dict[str, Any]) -> str:
    """For the README: what the most telling rows cost, a column per variant."""
    firsts = {variant: columns[0] for variant, columns in kept["columns"].items()}
    rows = [[title, *(f"{_units(figures)[title]:.2f}" for figures in firsts.values())] for title in HEADLINE]
    shown = markdown.table(["25 M float32, ratio 0.001, one thread", *firsts], rows)
    return f"{shown}\n\n{machine(next(iter(firsts.values())))}"


def replace_between(path: Path, text: str) -> None:
    """Put the text where the page has room for it."""
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(f"<!-- {MARK}: begin -->")
    _, end, after = rest.partition(f"<!-- {MARK}: end -->")
    if not begin or not end:
        raise SystemExit(f"{path} must have <!-- {MARK}: begin --> and <!-- {MARK}: end -->")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--from", type=Path, dest="kept", help="figures that were kept")
    parser.add_argument("--variants", nargs="+", choices=kernels.variants(), default=list(kernels.variants()))
    arguments = parser.parse_args()
    kept = (
        json.loads(arguments.kept.read_text()) if arguments.kept else measure(arguments.variants, arguments.repetitions)
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    figures = [machine(kept["tensorflow"])]
    for variant, columns in kept["columns"].items():
        figures += [f"### With the kernels for {variant}", table(columns)]
    figures += ["### In TensorFlow", tensorflow_table(kept)]
    replace_between(PAGE, "\n\n".join(figures))
    replace_between(README, headline(kept))


if __name__ == "__main__":
    main()
