"""How whole steps scale from two hosts to more: the part of a step that is computation. Needs root.

    sudo .venv/bin/python benchmarks/scaling.py --hosts 2 4 8 --rate 1gbit --picture docs/scaling.png

Every number of hosts is a run of `step_time.py`, one worker on each host. Hosts are network namespaces of this machine, and the
workers share its processors, so computation alone takes longer with more of them. What counts is its part of the step.
What follows `--` goes to `step_time.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import hosts
import machine
import markdown

ALONE = "none: computation alone"
ROWS = (
    "dense fp16",
    "DDP fp16",
    "DDP PowerSGD rank 4",
    "SIDCo 0.01",
    "SIDCo 0.01 bfloat16",
    "SIDCo 0.01 balanced",
    "SIDCo 0.001",
    "MiCRO 0.01",
)
MODEL = ("--model", "linear", "--width", "512", "--layers", "24", "--batch-size", "16", "--rounds", "15")
COLORS = ("#6b6b6b", "#b08d57", "#000000", "#009e73", "#3b7dd8", "#7fb2f0", "#c2410c", "#7a5195", "#ef9b20")
Steps = dict[str, dict[int, tuple[float, float, float]]]
"""Row -> number of hosts -> quartiles in milliseconds."""


def measure(numbers: list[int], rate: str, options: list[str]) -> Steps:
    """Run `step_time.py` on each number of hosts."""
    steps: Steps = {}
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder, hosts.cluster(number, rate) as where:
            log = Path(folder, "log.json")
            script = str(Path(__file__).with_name("step_time.py"))
            command = [sys.executable, script, *options, "--rows", *ROWS, "--log-file", str(log)]
            if hosts.run(where, "mpirun", 1, command, rings=number > 2):
                raise SystemExit(f"step_time.py failed on {number} hosts")
            for name, quartiles in json.loads(log.read_text(encoding="utf-8")).items():
                steps.setdefault(name, {})[number] = tuple(quartiles)
    return steps


def table(steps: Steps, numbers: list[int]) -> str:
    """Markdown: each step, and the part of it that is computation."""
    header = [f"{number} hosts: {what}" for what in ("step, ms", "computation") for number in numbers]
    rows = []
    for name, row in steps.items():
        spent = [f"{row[number][1]:.1f} ({row[number][0]:.1f}–{row[number][2]:.1f})" for number in numbers]
        parts = [f"{steps[ALONE][number][1] / row[number][1]:.0%}" for number in numbers]
        rows.append([name, *spent, *parts])
    return markdown.table(["exchange", *header], rows)


def draw(steps: Steps, numbers: list[int], rate: str, picture: Path) -> None:
    """One curve for each row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    rows = [name for name in steps if name != ALONE]
    for name, color in zip(rows, COLORS, strict=True):
        parts = [steps[ALONE][number][1] / steps[name][number][1] for number in numbers]
        axes.plot(numbers, parts, color=color, linewidth=1.8, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("hosts")
    axes.set_title(f"The part of a step that is computation, {rate}", loc="left", fontsize=11)
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rate", default="1gbit", help="of every host's network card, as tc writes it")
    parser.add_argument("--picture", type=Path, help="PNG to draw")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :] or [*MODEL]
    reason = hosts.missing()
    if reason:
        raise SystemExit(f"no hosts can be made here: {reason}")
    steps = measure(args.hosts, args.rate, options)
    print(f"{args.rate}, step_time.py {' '.join(options)}\n{machine.describe()}\n\n{table(steps, args.hosts)}")
    if args.picture is not None:
        draw(steps, args.hosts, args.rate, args.picture)


if __name__ == "__main__":
    main()
