"""`studies/memory_sgd.py`: QSGD, with which it compares. In a process of its own, since the benchmark initialises MPI."""

from __future__ import annotations

import subprocess
import sys

import pytest
from parallel.launch import REPOSITORY

LAWS = """
import sys
sys.path.insert(0, "benchmarks")
import numpy as np
from memory_sgd import QSGD, _gamma_code

bits, draws = int(sys.argv[1]), 4000
rng = np.random.default_rng(0)
gradient = rng.normal(size=50) * rng.exponential(size=50)
qsgd = QSGD(bits, seed=0)
rounded = np.array([qsgd(gradient) for _ in range(draws)])
step = np.linalg.norm(gradient) / (2**bits - 1)
# Levels within one step of the entry, of its sign, and right on average (five standard errors).
assert np.allclose(rounded / step, np.round(rounded / step))
assert np.abs(rounded - gradient).max() <= step * (1 + 1e-12)
assert (rounded * gradient >= 0).all()
assert np.abs(rounded.mean(0) - gradient).max() <= 5 * step / 2 / np.sqrt(draws)
# No message is longer than a norm, and sign and level of every entry.
assert len(qsgd.sent) == draws and 32 < max(qsgd.sent) <= 32 + 50 * (1 + bits)
# The gamma code of n has 2 floor(log2 n) + 1 bits.
assert _gamma_code(np.array([1, 2, 3, 4, 8])) == 1 + 3 + 3 + 5 + 7
# One entry in the third place: gap 3, sign, the largest level.
one = QSGD(bits, seed=0)
assert one(np.eye(50)[2]).tolist() == np.eye(50)[2].tolist()
assert one.sent == [32 + min(3 + 1 + 2 * (bits - 1) + 1, 50 * (1 + bits))]
"""


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_rounds_without_bias_and_counts_its_bits(bits: int) -> None:
    command = [sys.executable, "-c", LAWS, str(bits)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
