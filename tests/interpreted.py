"""Triton, for tests that interpret its kernels: whoever imports this is skipped where it is not installed."""

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: 'make setup' installs it, for the CPU too")
tl = pytest.importorskip("triton.language")
