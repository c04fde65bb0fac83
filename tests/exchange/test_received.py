"""The fuzzer of messages, with few messages and with every backend; `sanitize.py` gives a million to the kernels."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.harness.fuzz_messages import damaged, fuzz
from tests.harness.receivers import CASES, GUARD, SENTINEL, WORLD, record
from tests.harness.table import WITH_OPERATIONS


@pytest.mark.parametrize(("messages", "seed"), [(400, 1), pytest.param(2_000, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_damaged_messages_have_one_outcome_everywhere(name: str, messages: int, seed: int) -> None:
    counts = fuzz(name, WITH_OPERATIONS, messages, seed=seed, whole=0.5)
    for what in ("decoded", "refused", "not finite"):
        assert counts[f"{what}, exchanged"] > 0, counts


@pytest.mark.parametrize("numel", [64, pytest.param(7, marks=pytest.mark.full)])
def test_triton_writes_within_bounds_whatever_the_indices_are(numel: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    import torch

    from horovod_sparse.kernels.gpu.message import add_up, scatter

    recorded, random = record("pairs"), Random(numel)
    memory = torch.full((numel + 2 * GUARD,), SENTINEL)
    target = memory[GUARD : GUARD + numel]
    for _ in range(60):
        (gathered, *_), _ = damaged(recorded, random)
        if gathered.shape[1:] != (2,) or gathered.dtype != np.int32:
            continue
        messages = torch.from_numpy(gathered)
        target.zero_()
        scatter[(-(-len(messages) // 16),)](messages, len(messages), float(WORLD), target, numel, CHUNK=16)
        assert (memory[:GUARD] == SENTINEL).all() and (memory[GUARD + numel :] == SENTINEL).all()
        untouched = set(range(numel)) - set(gathered[:, 0].tolist())
        assert (target[sorted(untouched)] == 0).all()
        if len(gathered) % WORLD:
            with pytest.raises(ValueError, match="equal parts"):
                add_up(messages, WORLD, 1.0, numel, torch.float32)
