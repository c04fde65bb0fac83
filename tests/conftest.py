"""What must be so before any test module is imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# Triton's kernels are interpreted, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    # Where `make setup` puts it.
    sys.path.append(str(Path(sys.prefix, "triton")))

try:
    # Before TensorFlow: in the other order the process crashes.
    if "tensorflow" not in sys.modules:
        import_module("triton")
except ImportError as error:
    raise ImportError("the tests need Triton, for the CPU too: run 'make setup', which installs it") from error
