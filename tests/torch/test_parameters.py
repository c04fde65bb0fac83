"""What ranks compare of their parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from horovod_sparse.torch import parameters

Change = Callable[[torch.Tensor], torch.Tensor]
PART = 2**20
"""Numbers of 4 bytes that are added up at a time."""
CHANGES: dict[str, Change] = {
    "signs": torch.neg,
    "order": lambda values: values.flip(0),
    "parts": lambda values: torch.cat([values[PART : 2 * PART], values[:PART], values[2 * PART :]]),
    "one": lambda values: torch.cat([values[:-99], values[-99:-98] * 1.01, values[-98:]]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_sums_tell_values_apart(dtype: torch.dtype, change: Change) -> None:
    values = torch.randn(2 * PART + 331, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert parameters.sums([values.clone()]) == parameters.sums([values]) != parameters.sums([change(values)])
