"""Draw docs/data-way.svg: the way of the data from gradient to average, on two workers.

    python docs/diagram.py

Plain SVG text, the same bytes in every run; a test draws it again and compares.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).with_name("data-way.svg")

WIDTH, HEIGHT = 860, 636
LINE = 17
"""From one line of text to the next."""
INK, SOFT, PAPER = "#24292f", "#57606a", "#ffffff"


class Box(NamedTuple):
    """A step: a title, where it is in the sources, and what it does."""

    title: str
    source: str
    text: tuple[str, ...]
    fill: str


LOCAL, NETWORK, HOST = "#eaf2fb", "#fdf1e0", "#eef0f2"
OWN_STEPS = (
    Box("gradient", "hook of loss.backward()", ("of one parameter, as soon as it is ready",), HOST),
    Box(
        "accumulate",
        "core/residuals.py, compressors/momentum.py",
        ("residual += gradient, in the parameter's slice", "of its bucket"),
        LOCAL,
    ),
    Box(
        "select",
        "compressors/",
        ("when the bucket is complete: threshold,", "then the indices of what exceeds it"),
        LOCAL,
    ),
    Box(
        "pack",
        "exchange/wire.py",
        ("values leave the residual; one message", "whose length does not depend on the data"),
        LOCAL,
    ),
)
EXCHANGE = Box(
    "exchange",
    "exchange/protocols.py, carried out by Horovod or MPI",
    ("allgather of (index, value) pairs — or allreduce of values where all know the indices —", "or allgather of indices, "
     "then allreduce of all workers' values there; backward goes on meanwhile"),
    NETWORK,
)  # fmt: skip
BACK_STEPS = (
    Box(
        "add up",
        "core/pipeline.py",
        ("every worker's entries, rank by rank,", "divided by the number of workers"),
        LOCAL,
    ),
    Box(
        "reduced gradient", "optimizer.step()", ("in the gradient's own memory; the same", "bits on every worker"), HOST
    ),
)

COLUMNS = (60, 470)
BOX_WIDTH = 330
GAP = 22


def draw() -> str:
    """The picture as text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        "<title>From gradient to average</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{SOFT}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
    ]
    for number, left in enumerate(COLUMNS):
        parts.append(_text(left + BOX_WIDTH / 2, 24, f"worker {number}", size=15, weight="bold", anchor="middle"))
    tops, end = _stack(OWN_STEPS, 40)
    exchange_top = end + GAP
    back_tops, _ = _stack(BACK_STEPS, exchange_top + _height(EXCHANGE) + GAP)
    for left in COLUMNS:
        steps = [*zip(OWN_STEPS, tops, strict=True), *zip(BACK_STEPS, back_tops, strict=True)]
        for box, top in steps:
            parts += _box(box, left, top, BOX_WIDTH)
        middle = left + BOX_WIDTH / 2
        for box, top in steps:
            below = top + _height(box)
            if box is not BACK_STEPS[-1]:
                parts.append(_arrow(f"M{middle:g},{below} L{middle:g},{below + GAP - 1}"))
        parts.append(_arrow(f"M{middle:g},{back_tops[0] - GAP} L{middle:g},{back_tops[0] - 1}"))
    left, right = COLUMNS[0], COLUMNS[1] + BOX_WIDTH
    parts += _box(EXCHANGE, left, exchange_top, right - left)
    parts += _kept(tops)
    return "\n".join([*parts, "</svg>", ""])


def _stack(boxes: tuple[Box, ...], top: int) -> tuple[list[int], int]:
    """Where boxes below each other begin, and where the last one ends."""
    tops = []
    for box in boxes:
        tops.append(top)
        top += _height(box) + GAP
    return tops, top - GAP


def _height(box: Box) -> int:
    return 32 + LINE * len(box.text)


def _box(box: Box, left: int, top: int, width: int) -> list[str]:
    lines = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{_height(box)}" rx="6" fill="{box.fill}" stroke="{SOFT}"/>',
        _text(left + 12, top + 20, box.title, weight="bold"),
        _text(left + width - 12, top + 20, box.source, size=11, color=SOFT, anchor="end"),
    ]
    return lines + [_text(left + 12, top + 20 + LINE * (n + 1), line) for n, line in enumerate(box.text)]


def _kept(tops: list[int]) -> list[str]:
    """What was not sent returns to the residual: beside the first worker's boxes, and the second's."""
    accumulate, pack = tops[1] + _height(OWN_STEPS[1]) // 2, tops[3] + _height(OWN_STEPS[3]) // 2
    middle = (accumulate + pack) // 2
    parts = []
    for start, turn, place, angle in (
        (COLUMNS[0], 24, 16, -90),
        (COLUMNS[1] + BOX_WIDTH, WIDTH - 24, WIDTH - 12, -90),
    ):
        parts.append(_arrow(f"M{start},{pack} L{turn},{pack} L{turn},{accumulate} L{start},{accumulate}"))
        words = _text(place, middle, "not sent: kept for the next step", size=12, color=SOFT, anchor="middle")
        parts.append(f'<g transform="rotate({angle} {place} {middle})">{words}</g>')
    return parts


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#tip)"/>'


def _text(
    x: float, y: float, words: str, *, size: int = 13, color: str = INK, weight: str = "normal", anchor: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
