"""Python in a process of its own. Imports no framework."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def is_from(module: ModuleType, found: Any) -> bool:
    """Whether this is a function that a module defines."""
    return inspect.isfunction(found) and found.__code__.co_filename == module.__file__


def python(
    *arguments: object, cwd: Path = ROOT, limit: float = 120.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of the tests, and keep what it prints."""
    command = [sys.executable, *map(str, arguments)]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=limit, check=False)
