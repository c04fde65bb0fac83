"""A gradient that is no longer what backward has handed over is noticed, and one that is left alone is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from horovod_sparse.torch.unchanged import Handed, first_changed


def handed(gradient: Tensor) -> dict[Tensor, Handed]:
    parameter = torch.zeros(gradient.shape, dtype=gradient.dtype)
    parameter.grad = gradient
    return {parameter: Handed.of(gradient)}


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda parameter: parameter.grad.mul_(0.5),
    "an entry": lambda parameter: parameter.grad.view(-1)[3:4].zero_(),
    "another tensor": lambda parameter: setattr(parameter, "grad", parameter.grad.clone()),
    "none": lambda parameter: setattr(parameter, "grad", None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_what_is_left_alone_is_not(
    change: Callable[[Tensor], object], dtype: torch.dtype
) -> None:
    (parameter,) = mine = handed(torch.randn(40, 30).to(dtype))
    others = handed(torch.ones(7)) | handed(torch.zeros(3, 0))
    assert first_changed(others | mine) is None
    change(parameter)
    assert first_changed(others | mine) is parameter


def test_a_change_of_the_memory_that_gradients_share_is_noticed() -> None:
    memory = torch.ones(3000)
    (parameter,) = mine = handed(memory[:1000])
    memory.mul_(2.0)
    assert first_changed(mine) is parameter
