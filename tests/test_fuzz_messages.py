"""The fuzzer of messages, with few messages and with every backend; `sanitize.py` gives a million to the kernels."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fuzz_messages import damaged, fuzz
from receivers import CASES, GUARD, SENTINEL, WORLD, record
from table import ORACLE, WITH_OPERATIONS

from horovod_sparse.exchange import protocols, wire


@pytest.mark.parametrize("messages", [400, pytest.param(20_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_damaged_messages_have_one_outcome_everywhere(name: str, messages: int) -> None:
    counts = fuzz(name, WITH_OPERATIONS, messages, seed=1, whole=0.5)
    for what in ("decoded", "refused", "not finite"):
        assert counts[f"{what}, exchanged"] > 0, counts


def test_the_fuzzer_notices_what_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "check_result", lambda *arguments: None)
    for name in ("pairs", "indices", "values"):
        with pytest.raises(Exception, match=r".") as raised:
            fuzz(name, [ORACLE], 2000, seed=1, whole=1.0)
        assert f"case {name!r}, seed 1" in raised.value.__notes__[0]


def test_the_fuzzer_notices_what_is_written_beyond_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assembler = type(ORACLE.ops).assembler

    def broken(self: Any, messages: Any, used: list[int], divisor: float) -> Any:
        write = assembler(self, messages, used, divisor)

        def assemble(targets: Any) -> None:
            write(targets)
            memory = targets[0][1].base
            if memory is not None:
                memory[-1] = 0

        return assemble

    monkeypatch.setattr(type(ORACLE.ops), "assembler", broken)
    with pytest.raises(AssertionError, match="beyond the parts"):
        fuzz("pairs", [ORACLE], 200, seed=1, whole=1.0)


@pytest.mark.parametrize("numel", [64, pytest.param(7, marks=pytest.mark.full)])
def test_triton_writes_within_bounds_whatever_the_indices_are(numel: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    import torch

    from horovod_sparse.kernels.gpu.message import scatter
    from horovod_sparse.kernels.gpu.messages import add_up

    recorded, random = record(CASES["pairs"]), Random(numel)
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


def test_a_long_damaged_message_is_read_only_up_to_its_first_flaw() -> None:
    seen = []

    class Counting(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            seen.append(len(self))
            return super().tolist()

    indices = np.full(2**20, wire.PADDING, np.int32)
    indices[2**16 + 3] = 5
    bucket: Any = SimpleNamespace(ops=ORACLE.ops, name="p", numel=10, rank=0)
    with pytest.raises(RuntimeError, match="row 65539 has index 5 after padding"):
        protocols.rows_of(bucket, np.stack([indices, indices], axis=1).view(Counting), 1)
    assert [rows for rows in seen if rows > 1] == [2**16, 2**16]
