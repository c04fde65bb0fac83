"""What is outside of this folder: the modules of `examples` and `benchmarks`, which can be imported after this one."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES), str(ROOT / "benchmarks")]
