"""Tables and picture of what `time_to_loss.py` has trained and timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loss_runs import DENSE, DENSE_ROWS, ROWS, SEEDS, TARGET_PART, WORKERS, Curve, MissingRunError, Store, Task
from markdown import table

POWER_SGD = "DDP PowerSGD rank 4"
COLORS = {
    "dense fp32": "#6b6b6b",
    "dense fp16": "#b08d57",
    "dense fp16 no momentum": "#d9b44a",
    "DDP fp16": "#000000",
    "DDP fp16 no momentum": "#5b4636",
    POWER_SGD: "#009e73",
    "SIDCo 0.01": "#3b7dd8",
    "SIDCo 0.01 bfloat16": "#7fb2f0",
    "SIDCo 0.01 float16": "#1f4e9c",
    "SIDCo 0.001": "#c2410c",
    "TopK 0.01": "#56b4e9",
    "DGC 0.01": "#cc79a7",
    "GaussianK 0.01": "#7a5195",
    "MiCRO 0.01": "#ef9b20",
    "RandomBlock 0.01": "#9bb83c",
    "Mem-SGD 0.01": "#a0522d",
    "DiLoCo": "#444444",
    "local TopK 0.01": "#2a9d8f",
    "local TopK 0.03": "#e76f51",
    "local TopK 0.1": "#264653",
}


@dataclass(frozen=True)
class Result:
    """What is known of one row."""

    rate: float
    tried: dict[float, float]
    curves: list[Curve]
    steps: list[float | None]
    """Until the target, for each seed; None where it is not reached."""

    @property
    def mean_steps(self) -> float | None:
        """None unless all seeds reach the target."""
        reached = [steps for steps in self.steps if steps is not None]
        return statistics.fmean(reached) if len(reached) == len(self.steps) else None


Results = Mapping[str, Result]


def results(store: Store, rows: Sequence[str]) -> tuple[Results, list[str]]:
    """What is known of dense fp32 and the rows, and the names of those that are not trained."""
    target = store.target()
    found, missing = {}, []
    for name in [name for name in ROWS if name in (DENSE, *rows)]:
        try:
            curves, (rate, tried) = store.curves(name), store.tuned(name)
        except MissingRunError:
            missing.append(name)
            continue
        found[name] = Result(rate, tried, curves, [curve.reached(target, curve.steps) for curve in curves])
    return found, missing


def page(store: Store, results: Results, target: float) -> str:
    """All tables, in Markdown."""
    dense = results[DENSE].curves[0]
    task = store.task
    run = (
        f"{task.title}, {dense.parameters:,} parameters, {WORKERS} workers, {dense.steps[-1]} steps, {len(SEEDS)} seeds "
        f"(`examples/{task.example}.py {' '.join(task.options)}`). "
    )
    rates = (
        f"Each row tries the learning rates {numbers(task.rates)}, and the next ones while its best is the smallest or the "
        "largest."
    )
    if task.rows:
        return "\n".join([f"{run}{rates} The losses are {task.unit}.", "", local_table(results)])
    lines = [
        f"{run}The target, {target:.3f} {task.unit}, is what {DENSE} "
        f"has after {TARGET_PART:.0%} of its steps with the seed where it is largest. "
        f"{rates} Rows without momentum, of which Mem-SGD is one, try ten times these. The other sparse rows have momentum "
        "before the selection. DDP fp16 is not trained: it has the losses of dense fp16.",
        "",
        curve_table(results),
    ]
    for network in store.networks():
        lines += ["", f"Two hosts at {network}:", "", time_table(store, results, network)]
    return "\n".join(lines)


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "diverged"


def curve_table(results: Results) -> str:
    """Learning rate, loss at the end, steps to the target."""
    header = ["exchange", "learning rate", "end with each rate, one seed", "end, each seed"]
    header += ["steps to the target, each seed", "mean"]
    rows = []
    for name, result in results.items():
        if ROWS[name].same_curve:
            continue
        factor = ROWS[name].rate_factor
        ends = ", ".join(loss(curve.last) for curve in result.curves)
        steps = ", ".join("not reached" if steps is None else f"{steps:.0f}" for steps in result.steps)
        mean = "not reached" if result.mean_steps is None else f"{result.mean_steps:.0f}"
        tried = ", ".join(f"{loss(end)} ({factor * rate:g})" for rate, end in result.tried.items())
        rows.append([name, f"{factor * result.rate:g}", tried, ends, steps, mean])
    return table(header, rows)


def local_table(results: Results) -> str:
    """Learning rate, loss at the end, and bytes, beside those of dense training."""
    header = ["exchange", "learning rate", "end with each rate, one seed", "end, each seed", "mean", "mean / dense's"]
    header += ["bytes sent per step and worker", "dense's / it"]
    dense = statistics.fmean(curve.last for curve in results[DENSE].curves)
    dense_bytes = results[DENSE].curves[0].bytes_per_step
    rows = []
    for name, result in results.items():
        ends = [curve.last for curve in result.curves]
        sent = statistics.fmean(curve.bytes_per_step for curve in result.curves)
        tried = ", ".join(f"{loss(end)} ({rate:g})" for rate, end in result.tried.items())
        cells = [name, f"{result.rate:g}", tried, ", ".join(map(loss, ends)), loss(statistics.fmean(ends))]
        rows.append([*cells, f"{statistics.fmean(ends) / dense:.3f}", f"{sent:,.0f}", f"{dense_bytes / sent:,.0f}"])
    return table(header, rows)


def time_table(store: Store, results: Results, network: str) -> str:
    """Step time, time to the target, and how many times as long the best dense row and PowerSGD take."""
    seconds = {name: store.step_seconds(network, name) for name in results}
    times = {name: to_target(result, seconds[name]) for name, result in results.items()}
    dense = [time for name, time in times.items() if name in DENSE_ROWS and time is not None]
    best = min(dense) if dense else None
    header = ["exchange", "step, ms: median of runs (range)", "bytes sent per step and worker", "steps to the target"]
    header += ["time to the target, s", "best dense's / it", "PowerSGD's / it"]
    rows = []
    for name, result in results.items():
        timings = store.timings(network, name)
        if not timings:
            continue
        spent = [1e3 * timing.seconds for timing in timings]
        sent = "not counted" if ROWS[name].hook else f"{timings[0].bytes_per_step:,.0f}"
        steps = "not reached" if result.mean_steps is None else f"{result.mean_steps:.0f}"
        time = times[name]
        cells = [name, f"{statistics.median(spent):.1f} ({min(spent):.1f}–{max(spent):.1f})", sent, steps]
        cells += [f"{time:.1f}" if time else "–", quotient(best, time), quotient(times.get(POWER_SGD), time)]
        rows.append(cells)
    machines = {timing.machine for name in results for timing in store.timings(network, name)}
    return "\n".join([table(header, rows), "", *sorted(machines)])


def race_table(runs: Mapping[str, Sequence[Curve]], target: float) -> str:
    """Time to the target, loss at the end, and bytes of whole runs."""
    times = {name: [curve.reached(target, curve.seconds) for curve in curves] for name, curves in runs.items()}
    medians = {name: statistics.median(time or math.inf for time in reached) for name, reached in times.items()}
    best = min(medians[name] for name in runs if "dense" in name or "DDP" in name)
    header = ["exchange", "time to the target, s: median (each seed)", "best other's / it", "end: mean (each seed)"]
    header += ["bytes sent per step and worker"]
    rows = []
    for name, curves in runs.items():
        each = ", ".join(f"{time:.1f}" if time else "not reached" for time in times[name])
        ends = [curve.last for curve in curves]
        sent = (
            "not counted"
            if name.startswith("DDP")
            else f"{statistics.fmean(one.bytes_per_step for one in curves):,.0f}"
        )
        end = f"{loss(statistics.fmean(ends))} ({', '.join(map(loss, ends))})"
        rows.append([name, f"{medians[name]:.1f} ({each})", quotient(best, medians[name]), end, sent])
    return table(header, rows)


def draw_race(runs: Mapping[str, Sequence[Curve]], target: float, task: Task, network: str, picture: Path) -> None:
    """Held-out loss over the seconds of whole runs, mean of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    for name, curves in runs.items():
        seconds, losses = (np.mean([getattr(one, what) for one in curves], axis=0) for what in ("seconds", "losses"))
        panel.plot(seconds, losses, linewidth=1.8, marker="o", markersize=3, label=name)
    panel.axhline(target, color="#000000", linewidth=0.8, linestyle=":")
    panel.set(xlabel="seconds of training", ylabel=task.unit)
    panel.set_title(
        f"{task.title}, {WORKERS} hosts at {network}, the learning rate of dense training", loc="left", fontsize=11
    )
    panel.grid(color="#e5e5e5", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(picture, dpi=120)


def to_target(result: Result, step_seconds: float | None) -> float | None:
    if step_seconds is None or result.mean_steps is None:
        return None
    return step_seconds * result.mean_steps


def quotient(reference: float | None, time: float | None) -> str:
    return f"{reference / time:.2f}" if reference and time else "–"


def draw(store: Store, results: Results, target: float, picture: Path) -> None:
    """Held-out loss over time, mean of the seeds: one panel per network.

    The axis ends where dense fp32 begins, so that a row that does not train does not flatten the others.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    networks = store.networks()
    if not networks:
        raise SystemExit("no step times are there, so there is no picture: run `time` first")
    figure = Figure(figsize=(8 * len(networks) + 2, 4.8), layout="constrained")
    axes = figure.subplots(1, len(networks), sharey=True, squeeze=False)
    whole = [one for one in results.values() if not any(math.isinf(curve.last) for curve in one.curves)]
    top = 1.1 * max(np.mean([curve.losses for curve in results[DENSE].curves], axis=0))
    bottom = 0.95 * min(np.mean([curve.losses for curve in one.curves], axis=0).min() for one in whole)
    for panel, network in zip(axes[0], networks, strict=True):
        for name, result in results.items():
            step = store.step_seconds(network, name)
            if step is None or any(math.isinf(curve.last) for curve in result.curves):
                continue
            mean = np.mean([curve.losses for curve in result.curves], axis=0)
            seconds = [step * number for number in result.curves[0].steps]
            label = f"{name} (above)" if min(mean) > top else name
            panel.plot(seconds, mean, color=COLORS[name], linewidth=1.8, marker="o", markersize=2.5, label=label)
        panel.axhline(target, color="#000000", linewidth=0.8, linestyle=":")
        panel.set_xscale("log")
        panel.set_yscale("log" if top > 10 * bottom else "linear")
        panel.set_ylim(bottom, top)
        for axis in (panel.xaxis, panel.yaxis)[: 1 + (top > 10 * bottom)]:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("seconds of training (log scale)")
        panel.set_title(f"{store.task.title}, {WORKERS} hosts at {network}", loc="left", fontsize=11)
        panel.grid(color="#e5e5e5", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(store.task.unit)
    axes[0][-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(picture, dpi=150)
