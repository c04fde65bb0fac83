"""Tests that interpret Triton's kernels. All are skipped where Triton is not installed."""

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: 'make setup' installs it, for the CPU too")
tl = pytest.importorskip("triton.language")
