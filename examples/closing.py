"""The table at the end of the demonstration and of the examples for real work. Imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One run, as its last epoch found it."""

    label: str
    ratio: float
    held_out: str
    bytes_per_step: float
    """Sent by one worker."""
    step_seconds: float


def closing_table(rows: Sequence[Row], fp32_bytes: float, held_out: str = "accuracy") -> str:
    """All runs, with their bytes against those that a worker sends of dense float32 gradients."""
    width = max(12, *(len(row.label) for row in rows))
    layout = f"{{:<{width}}} {{:>8}} {{:>{max(9, len(held_out))}}} {{:>15}} {{:>12}} {{:>12}}"
    lines = [
        layout.format("compression", "ratio", held_out, "bytes sent per", "times fewer", "median step"),
        layout.format("", "sent", "held out", "step and worker", "than fp32", "ms"),
    ]
    lines.append("-" * len(lines[0]))
    for row in rows:
        # One worker sends nothing.
        fewer = f"{fp32_bytes / row.bytes_per_step:.1f}" if row.bytes_per_step else "-"
        lines.append(
            layout.format(
                row.label,
                f"{row.ratio:.5f}",
                row.held_out,
                f"{row.bytes_per_step:,.0f}",
                fewer,
                f"{1000 * row.step_seconds:.1f}",
            )
        )
    return "\n".join(lines)
