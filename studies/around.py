"""What is outside of this folder: modules of `examples` and `benchmarks`, which can be imported after this one; pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES), str(ROOT / "benchmarks")]


def figure(width: float, height: float) -> Any:
    """An empty picture of so many inches, readable where a page shows it 600 pixels wide."""
    from matplotlib import figure, rcParams

    rcParams["font.size"] = 12
    return figure.Figure(figsize=(width, height), layout="constrained")
