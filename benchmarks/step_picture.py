"""Draw Horovod's own timeline of a training step, below what the worker computes meanwhile. PyTorch only; needs matplotlib.

    sudo .venv/bin/python benchmarks/hosts.py --hosts 2 --rate 1gbit -- .venv/bin/python benchmarks/step_picture.py \
        --model linear --width 1024 --layers 24 --batch-size 16 --rows "SIDCo 0.001" --picture docs/step.png

Takes the options of step_time.py, and draws one row of it (`--rows`): the first step of all, and a step of the median length.
"Waiting for all" begins when the first worker is ready, which may be another one than the one whose computation is shown.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from step_contenders import MODELS
from step_time import Contender, make, parse

import horovod_sparse.torch as hvd

COLORS = {
    "forward": "#9a9a9a",
    "backward": "#5a5a5a",
    "update": "#c9c9c9",
    "waiting for all": "#cfe2f3",
    "on its way": "#3b7dd8",
}


class Span(NamedTuple):
    """From when to when something lasted, in milliseconds since the step began."""

    what: str
    begin: float
    end: float


Times = tuple[float, float, float, float]
"""When forward, backward and the update began, and when the update ended, in milliseconds since the epoch."""


def watched_step(contender: Contender, batch: Any) -> Times:
    """One step of this worker."""
    hvd.barrier()
    contender.optimizer.zero_grad()
    begun = time.time()
    loss = contender.task.loss(contender.model, batch)
    middle = time.time()
    loss.backward()
    last = time.time()
    contender.optimizer.step()
    return 1000 * begun, 1000 * middle, 1000 * last, 1000 * time.time()


def read(path: Path) -> dict[str, list[Span]]:
    """What Horovod has written: for each tensor its activities, one after the other, in milliseconds since the epoch."""
    names, begun, spans, start = {}, defaultdict(list), defaultdict(list), 0.0
    for event in json.loads(path.read_text(encoding="utf-8")):
        kind, tensor = event["ph"], event["pid"]
        if event.get("name") == "process_name":
            start = event["args"].get("start_time_since_epoch_in_micros", start)
            names[tensor] = event["args"].get("name", "")
        elif kind == "B":
            begun[tensor].append(event)
        elif kind == "E" and begun[tensor]:
            first = begun[tensor].pop()
            # What is within another activity is a part of it.
            if not begun[tensor]:
                what = "waiting for all" if first["name"].startswith("NEGOTIATE") else "on its way"
                spans[names[tensor]].append(Span(what, (start + first["ts"]) / 1000, (start + event["ts"]) / 1000))
    return spans


def rows_of(step: Times, spans: Mapping[str, Sequence[Span]]) -> list[tuple[str, list[Span]]]:
    """The rows of a picture: this worker, then the tensors in the order in which they were exchanged."""
    times = [moment - step[0] for moment in step]
    activities = zip(("forward", "backward", "update"), times[:-1], times[1:], strict=True)
    exchanged = []
    for name, whole in spans.items():
        here = [Span(what, begin - step[0], end - step[0]) for what, begin, end in whole]
        here = [span for span in here if 0 <= span.begin < times[-1]]
        if here and not name.startswith("barrier"):
            exchanged.append((_kind(name), here))
    exchanged.sort(key=lambda row: row[1][0].begin)
    return [("worker 0", [Span(*one) for one in activities]), *exchanged]


def _kind(name: str) -> str:
    return "agreement" if "agree" in name else "bucket" if "horovod_sparse" in name else "dense"


def draw(panels: Iterable[tuple[str, list[tuple[str, list[Span]]]]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = list(panels)
    heights = [len(rows) for _, rows in panels]
    figure = Figure(figsize=(9, 1.6 + 0.24 * sum(heights)))
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
    for (name, rows), axis in zip(panels, axes[:, 0], strict=True):
        for number, (_, spans) in enumerate(rows):
            for span in spans:
                axis.barh(number, span.end - span.begin, left=span.begin, height=0.8, color=COLORS[span.what])
        axis.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("ms since the step began")
        axis.xaxis.grid(True, color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
    patches = [Patch(color=color) for color in COLORS.values()]
    figure.legend(patches, COLORS, loc="lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    arguments = sys.argv[1:]
    if "--picture" not in arguments or "--rows" not in arguments:
        raise SystemExit("give --rows ROW, one row of step_time.py, and --picture FILE")
    place = arguments.index("--picture")
    picture = Path(arguments[place + 1]).resolve()
    args = parse(arguments[:place] + arguments[place + 2 :])
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.init()
    task = MODELS[args.model](args)
    contender = make(args.rows[0], args.rows[0], task, {"granularity": args.granularity})
    generator = torch.Generator().manual_seed(hvd.rank())
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder, "timeline.json")
        hvd.start_timeline(str(timeline))
        steps = [watched_step(contender, task.batch(generator)) for _ in range(args.rounds)]
        hvd.barrier()
        hvd.stop_timeline()
        if hvd.rank() != 0:
            return
        spans = read(timeline)
    lengths = [step[-1] - step[0] for step in steps[1:]]
    middle = 1 + lengths.index(statistics.median_low(lengths))
    panels = [(f"step {number}", rows_of(steps[number], spans)) for number in (0, middle)]
    for name, rows in panels:
        (_, (_, backward, update)), *exchanged = rows
        sent = [span for _, row in exchanged for span in row if span.what == "on its way"]
        first, last = min(span.begin for span in sent), max(span.end for span in sent)
        print(
            f"{name}: backward {backward.begin:.1f} to {backward.end:.1f} ms, collectives on their way {first:.1f} to "
            f"{last:.1f} ms, the step ends at {update.end:.1f} ms"
        )
    draw(panels, f"{contender.name}, {task.title}, {hvd.size()} workers\n{machine.describe()}", picture)
    print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
