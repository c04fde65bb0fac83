"""Python in a process of its own. Imports no framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(
    *arguments: object, cwd: Path = ROOT, limit: float = 120.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of the tests, and keep what it prints."""
    command = [sys.executable, *map(str, arguments)]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=limit, check=False)
