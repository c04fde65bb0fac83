"""How long a training takes over networks that are far and lossy: time to a held-out loss, from raw data in this folder.

    sudo .venv/bin/python studies/networks.py train link draw tables > tables.md
    sudo .venv/bin/python studies/networks.py link --suites "transformer, 4 hosts" --rows "DDP fp16" "SIDCo(0.01)"

What is learned does not depend on the network. So `train` trains on local workers to the end, with 3 seeds and the best of the
learning rates. `link` lets the same rows make some of these steps between hosts, network namespaces of this machine, and
writes down when each was done. Nothing else may run meanwhile. Both add lines to the file of raw data, and leave out what is
there. `tables` and `draw` read that file alone: a training reaches a loss after so many steps, and these take so long. Steps
that were not made between the hosts take as long as those of the last measured epoch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import around
import hosts
import loss_runs
import markdown
import numpy as np
from loss_runs import SEEDS, WORKERS, Curve, Row, Store, Task

Raw = dict[str, Any]
DATA = Path(__file__).with_suffix(".jsonl")
PICTURE = around.ROOT / "docs" / "evidence" / "networks.png"
NETWORKS = (
    hosts.Network("10gbit"),
    hosts.Network("1gbit"),
    hosts.Network("100mbit", 20.0),
    hosts.Network("100mbit", 50.0, 0.5),
    hosts.Network("10mbit", 20.0),
    hosts.Network("20mbit", 80.0, 1.0),
)
WHERE_GRAINS_COUNT = NETWORKS[2]
FEW = (hosts.Network("1gbit", 1.0), NETWORKS[2])


@dataclass(frozen=True)
class Suite:
    """One model: its task and its rows."""

    task: Task
    rows: dict[str, Row]
    steps: str
    """The options of the steps between hosts."""
    links: dict[str, str]
    """The same for rows whose steps do not all cost the same."""
    slow: str
    """The options of DDP's rows where a dense step takes seconds."""
    grains: tuple[str, ...] = ()
    """What is added to the options of SIDCo(0.01), or to the environment, to exchange in other parts or at other times."""
    networks: tuple[hosts.Network, ...] = NETWORKS
    workers: int = WORKERS
    slots: int = 1
    """Workers on each host."""


DDP = {
    "DDP fp32": Row("--compression none", hook="fp32"),
    "DDP fp16": Row("--compression fp16", hook="fp16"),
    "DDP PowerSGD rank 4": Row("--compression none", hook="PowerSGD 4"),
}
SIDCO = "SIDCo(0.01)"
LOCAL = {every: f"LocalUpdates, TopK(0.03), packed, every {every}" for every in (5, 15)}
SUITES = {
    "transformer": Suite(
        Task(
            "transformer, AdamW",
            "torch_charlm",
            "--width 192 --epochs 8 --epoch-steps 75 --optimizer adamw",
            (0.0005, 0.001, 0.002),
        ),
        DDP
        | {
            "dense averaging, every 5": Row("--compression none --every 5 --ahead 0", hook="DiLoCo 1 0"),
            "DiLoCo, every 15": Row("--compression none --every 15 --ahead 0", hook="DiLoCo 0.7 0.3"),
            **{
                title: Row(f"--compression topk --ratio 0.03 --exchange packed --every {every}")
                for every, title in LOCAL.items()
            },
            SIDCO: Row("--compression sidco --ratio 0.01"),
        },
        "--epochs 2 --epoch-steps 60",
        {
            "dense averaging, every 5": "--epochs 2 --epoch-steps 30",
            "DiLoCo, every 15": "--epochs 2 --epoch-steps 45",
            LOCAL[5]: "--epochs 4 --epoch-steps 50",
            LOCAL[15]: "--epochs 4 --epoch-steps 135",
            SIDCO: "--epochs 6 --epoch-steps 25",
        },
        "--epochs 2 --epoch-steps 8",
        ("--granularity layer", "HOROVOD_CYCLE_TIME=0.1", "HOROVOD_CYCLE_TIME=10"),
    ),
    "CNN": Suite(
        replace(loss_runs.TASKS["digits"], title="CNN, SGD with momentum"),
        DDP | {SIDCO: Row("--compression sidco --ratio 0.01")},
        "--epochs 2",
        {SIDCO: "--epochs 3"},
        "--epochs 2",
    ),
}


COLOURS = ["#999999", "#000000", "#e69f00", "#56b4e9", "#cc79a7", "#009e73", "#0072b2", "#d55e00"]
"""Of the transformer's rows. They all tell apart, for colour-blind people too."""
BETWEEN_REPLICAS = (SIDCO, LOCAL[15])
SHORT = "--width 192 --epochs 8 --epoch-steps 45 --optimizer adamw"


def on_four(suite: Suite, options: str, steps: str) -> Suite:
    """The suite on four hosts in few networks, with other options of the task and of dense steps between the hosts."""
    task = replace(suite.task, title=f"{suite.task.title}, 4 hosts", options=options)
    return replace(suite, task=task, steps=steps, grains=(), networks=FEW, workers=4)


SUITES["transformer, 4 hosts"] = on_four(SUITES["transformer"], SHORT, "--epochs 2 --epoch-steps 30")
SUITES["CNN, 4 hosts"] = on_four(SUITES["CNN"], SUITES["CNN"].task.options, "--epochs 2")
SUITES["HSDP"] = replace(
    SUITES["transformer, 4 hosts"],
    task=replace(SUITES["transformer"].task, title="sharded transformer, AdamW, 2 hosts", options=SHORT),
    rows={
        "HSDP float32": Row("--compression none", hook="HSDP"),
        "HSDP bfloat16": Row("--compression none", hook="HSDP bfloat16"),
        **{f"HSDP, {row}": replace(SUITES["transformer"].rows[row], hook="HSDP") for row in BETWEEN_REPLICAS},
    },
    links={f"HSDP, {row}": SUITES["transformer"].links[row] for row in BETWEEN_REPLICAS},
    slots=2,
)


def known(**where: str) -> list[Raw]:
    """The lines of raw data with these values."""
    lines = DATA.read_text(encoding="utf-8").splitlines() if DATA.exists() else []
    return [raw for raw in map(json.loads, lines) if all(raw.get(name) == value for name, value in where.items())]


def keep(raw: Raw) -> None:
    with DATA.open("a", encoding="utf-8") as file:
        print(json.dumps(raw), file=file)
    print(raw, file=sys.stderr, flush=True)


def train(args: argparse.Namespace, name: str, suite: Suite) -> None:
    """Train each row with each seed, with the best of its learning rates, which is found with the first seed."""
    store = Store(args.output / name, suite.task, args.timeout, suite.rows, suite.workers)
    for row in suite.rows:
        if known(suite=name, row=row, kind="training"):
            continue
        rate, tried = store.tuned(row)
        for seed in SEEDS:
            curve = store.train(row, rate, seed)
            ends = {f"{one:g}": end for one, end in tried.items()}
            told = {"seed": seed, "rate": rate, "tried": ends, "bytes": curve.bytes_per_step}
            told |= {"steps": curve.steps, "losses": [round(one, 4) for one in curve.losses]}
            keep({"kind": "training", "suite": name, "row": row, **told})


def link(args: argparse.Namespace, name: str, suite: Suite) -> None:
    """Make some steps of each row between hosts in each network."""
    store = Store(args.output / name, suite.task, args.timeout, suite.rows, suite.workers)
    for network in suite.networks:
        is_slow = network in NETWORKS[-2:]
        rows = {
            row: (made.options, suite.links.get(row, suite.slow if is_slow else suite.steps))
            for row, made in suite.rows.items()
        }
        if network == WHERE_GRAINS_COUNT and SIDCO in rows:
            plain = suite.rows[SIDCO].options
            grains = {grain: plain if "=" in grain else f"{plain} {grain}" for grain in suite.grains}
            rows |= {grain: (option, suite.links[SIDCO]) for grain, option in grains.items()}
        missing = [row for row in rows if not known(suite=name, row=row, kind="link", network=str(network))]
        if not missing:
            continue
        with hosts.cluster(suite.workers // suite.slots, network) as where:
            for row in missing:
                options, some = rows[row]
                made = Row(f"{options} {some}", hook=suite.rows[row].hook if row in suite.rows else "")
                environment = dict([row.split("=")]) if "=" in row else {}
                curve = store.on_hosts(where, f"{network}-{row}", made, suite.task.rates[0], SEEDS[0], environment)
                seconds = [round(one, 3) for one in curve.seconds]
                told = {"network": str(network), "steps": curve.steps, "seconds": seconds}
                keep({"kind": "link", "suite": name, "row": row, **told})


def per_step(raw: Raw) -> float:
    """Seconds of a step in the last measured epoch."""
    steps, seconds = [0, *raw["steps"]], [0.0, *raw["seconds"]]
    return (seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])


def after(raw: Raw, step: float) -> float:
    """The seconds that the first steps of a training take in a network."""
    steps, seconds = [0, *raw["steps"]], [0.0, *raw["seconds"]]
    return float(np.interp(step, steps, seconds)) + max(step - steps[-1], 0.0) * per_step(raw)


def curves(name: str, row: str) -> list[Curve]:
    """The trainings of a row, one per seed; seconds are unknown."""
    return [Curve(raw["steps"], raw["losses"], [], raw["bytes"]) for raw in known(suite=name, row=row, kind="training")]


def target(name: str) -> float:
    """The held-out loss of the first row after a part of its steps, with the seed where it is largest."""
    return loss_runs.target(curves(name, next(iter(SUITES[name].rows))))


def seconds(name: str, row: str, network: hosts.Network) -> float:
    """The median of the seeds' seconds to the target; infinite where a training does not reach it, or nothing is known."""
    raw = known(suite=name, row=row, kind="link", network=str(network))
    reached = [curve.reached(target(name), curve.steps) for curve in curves(name, row)]
    return statistics.median(after(raw[0], step) if step and raw else math.inf for step in reached)


def written(seconds: float) -> str:
    return f"{seconds:,.0f}" if math.isfinite(seconds) else "not reached"


def tables(_: argparse.Namespace, name: str, suite: Suite) -> None:
    """Print what was learned, the time to the target in each network, and the time of a step, of the rows that are known."""
    rows = {row: one for row, one in suite.rows.items() if known(suite=name, row=row, kind="training")}
    if not rows:
        return
    networks, aim = [str(network) for network in suite.networks], f"{target(name):.3f}"
    print(f"### {suite.task.title}\n")
    trained = learned(name, replace(suite, rows=rows), aim)
    print(f"Trained on {suite.workers} local workers, {suite.task.unit}:\n\n{trained}\n")
    reached = [[row, *(written(seconds(name, row, one)) for one in suite.networks)] for row in rows]
    print(f"Seconds to {aim}, median of the seeds:\n\n{markdown.table(['exchange', *networks], reached)}\n")
    lasting = []
    for row in [*rows, *suite.grains]:
        title = f"{SIDCO}, `{row}`" if row in suite.grains else row
        links = {raw["network"]: f"{1000 * per_step(raw):,.0f}" for raw in known(suite=name, row=row, kind="link")}
        lasting.append([title, *(links.get(network, "") for network in networks)])
    print(f"Milliseconds of a step after the warm-up:\n\n{markdown.table(['exchange', *networks], lasting)}\n")


def learned(name: str, suite: Suite, aim: str) -> str:
    """The table of the trainings on local workers."""
    rows = []
    for row in suite.rows:
        first, made = known(suite=name, row=row, kind="training")[0], curves(name, row)
        tried = ", ".join(f"{end:.3f} ({rate})" for rate, end in first["tried"].items())
        steps = [curve.reached(target(name), curve.steps) or math.inf for curve in made]
        hook, options = suite.rows[row].hook, suite.rows[row].options
        counted = not hook or hook.startswith("DiLoCo") or "--ratio" in options
        sent = f"{made[0].bytes_per_step:,.0f}" if counted else "not counted"
        ends = ", ".join(f"{curve.last:.3f}" for curve in made)
        rows.append([row, f"{first['rate']:g}", tried, ends, ", ".join(map(written, steps)), sent])
    header = ["exchange", "learning rate", "end with each rate, first seed", "end, each seed"]
    return markdown.table([*header, f"steps to {aim}, each seed", "bytes sent per step and worker"], rows)


def draw() -> None:
    """Draw the time to the target over the networks for each model, and below the loss over the bytes of the first one."""
    figure = around.figure(7.5, 11)
    colours = dict(zip(SUITES["transformer"].rows, COLOURS, strict=True))
    *panels, last = figure.subplots(3)
    for panel, name in zip(panels, ("transformer", "CNN"), strict=True):
        labels = [str(network).replace(", ", "\n") for network in NETWORKS]
        for row in SUITES[name].rows:
            medians = [seconds(name, row, network) for network in NETWORKS]
            panel.semilogy(labels, medians, marker="o", linewidth=1.8, label=row, color=colours[row])
        panel.set_ylabel(f"seconds to {target(name):.2f}")
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.set_title(SUITES[name].task.title, loc="left", fontsize=11)
    name, suite = next(iter(SUITES.items()))
    for row in suite.rows:
        made = curves(name, row)
        if row != "DDP PowerSGD rank 4":  # Nobody counts its bytes.
            ends = [curve.last for curve in made]
            last.semilogx([made[0].bytes_per_step] * len(ends), ends, "o", color=colours[row])
    last.set(xlabel="bytes sent per step and worker", ylabel=f"{suite.task.unit}, each seed")
    last.xaxis.set_major_formatter("{x:,.0f}")
    for panel in (*panels, last):
        panel.grid(color="#e5e5e5", linewidth=0.8)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=("train", "link", "draw", "tables"), help="in this order")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=[*SUITES])
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="by default all of the suite")
    parser.add_argument("--output", type=Path, default=Path("networks-output"), help="folder of the runs' logs")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds after which a run is stopped")
    args = parser.parse_args()
    for what in args.what:
        for name in args.suites if what != "draw" else ():
            suite = SUITES[name]
            rows = {row: made for row, made in suite.rows.items() if row in (args.rows or suite.rows)}
            {"train": train, "link": link, "tables": tables}[what](args, name, replace(suite, rows=rows))
        if what == "draw":
            draw()


if __name__ == "__main__":
    main()
