"""The fuzzer of messages, with few messages and with every backend; `sanitize.py` gives a million to the kernels."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from tests.harness.backend import ORACLE
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
def test_triton_finds_what_is_damaged_and_writes_within_bounds(numel: int) -> None:
    """What is added up of damaged messages is of no use, but nothing else is written. No message is mistaken for a good one."""
    pytest.importorskip("triton", reason="Triton is not installed")
    import torch

    from horovod_sparse.kernels.gpu.message import assemble, rows_in_use

    recorded, random = record("pairs"), Random(numel)
    memory, outcomes = torch.full((numel + 2 * GUARD,), SENTINEL), Counter[str]()
    target = memory[GUARD : GUARD + numel]
    for _ in range(60):
        gathered = np.concatenate(recorded.messages) if random.random() < 0.5 else damaged(recorded, random)[0][0]
        if gathered.shape[1:] != (2,) or gathered.dtype != np.int32 or not len(gathered):
            # Refused before (`Sending.receive`).
            continue
        messages = torch.from_numpy(gathered)
        if len(gathered) % WORLD:
            for call in (
                lambda messages=messages: assemble([(0, target)], messages, WORLD, 1.0),
                lambda messages=messages: rows_in_use(messages, WORLD, numel),
            ):
                with pytest.raises(ValueError, match=f"must have {WORLD} equal parts, got {len(messages)} rows"):
                    call()
            continue
        used = rows_in_use(messages, WORLD, numel).tolist()
        assert used == ORACLE.ops.rows_in_use(gathered, WORLD, numel).tolist()
        indices = torch.from_numpy(gathered[:, 0].copy())
        assert used == rows_in_use(indices, WORLD, numel).tolist()
        assemble([(0, target)], messages, WORLD, float(WORLD))
        assert (memory[:GUARD] == SENTINEL).all() and (memory[GUARD + numel :] == SENTINEL).all()
        outcomes["good" if min(used) >= 0 else "bad"] += 1
        if min(used) >= 0:
            expected = np.zeros(numel, np.float32)
            ORACLE.ops.assemble([(0, expected)], gathered, used, float(WORLD))
            np.testing.assert_array_equal(target.numpy(), expected)
    assert outcomes["bad"] > 0 and (numel < 64 or outcomes["good"] > 0), outcomes
