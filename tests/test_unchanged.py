"""Gradients that are changed after they were handed over are noticed, whatever changes them, and others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from horovod_sparse.torch import unchanged
from horovod_sparse.torch.unchanged import first_changed, hand_over

SHAPE = (4, 30, 5, 7)


def _gradient(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def _late(position: int) -> Tensor:
    """Zero nearly everywhere, as the gradients of embeddings are."""
    gradient = torch.zeros(200_000)
    gradient[position : position + 3] = 2.0
    return gradient


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": _gradient,
    "float16": lambda: _gradient(torch.float16),
    "bfloat16": lambda: _gradient(torch.bfloat16),
    "float64": lambda: _gradient(torch.float64),
    "complex64": lambda: _gradient(torch.complex64),
    "channels_last": lambda: _gradient().contiguous(memory_format=torch.channels_last),
    "transposed": lambda: _gradient().transpose(0, 2),
    "strided": lambda: _gradient()[:, ::2],
    "scalar": lambda: torch.tensor(3.0),
    "one": lambda: torch.ones(1),
    "view": lambda: _gradient().view(-1)[100:600],
    "nan": lambda: torch.full((50,), float("nan")).index_fill_(0, torch.tensor([0]), 1.0),
    "first_entry": lambda: _late(0),
    "late_entry": lambda: _late(123_457),
    "last_entry": lambda: _late(199_999),
    "sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.ones(2, 8), (40, 8), check_invariants=True),
}
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in_place": lambda gradient: gradient.mul_(0.5),
    "data": lambda gradient: gradient.data.mul_(0.5),
    "unscaled": lambda gradient: torch._amp_foreach_non_finite_check_and_unscale_(
        [gradient], torch.zeros(1), torch.full((1,), 0.5)
    ),
}
PAIRS = [
    (kind, change)
    for kind in GRADIENTS
    for change in CHANGES
    # GradScaler knows no complex gradients.
    if (kind, change) != ("complex64", "unscaled")
]
ON_DEVICE = [(kind, "data") for kind in GRADIENTS if "entry" not in kind]
"""There a sample is compared, which may lack the only entry that is not zero."""


def _dense(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _handed(gradient: Tensor | None) -> tuple[Tensor, dict[Tensor, unchanged.Handed]]:
    like = torch.zeros(1) if gradient is None else gradient
    parameter = torch.zeros(like.shape, dtype=like.dtype)
    parameter.grad = gradient
    return parameter, {parameter: hand_over(gradient)}


@pytest.fixture(params=["host", "device"])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU, and as on another device, where the host must not wait."""
    if request.param == "device":
        monkeypatch.setattr(unchanged, "on_host", lambda flat: False)


@pytest.mark.parametrize(
    ("_place", "kind", "change"),
    [*(("host", *pair) for pair in PAIRS), *(("device", *pair) for pair in ON_DEVICE)],
    indirect=["_place"],
)
@pytest.mark.usefixtures("_place")
def test_every_change_is_noticed_and_what_is_left_alone_is_not(kind: str, change: str) -> None:
    parameter, handed = _handed(GRADIENTS[kind]())
    _, others = _handed(_gradient())
    assert parameter.grad is not None and first_changed(others | handed) is None
    CHANGES[change](_dense(parameter.grad))
    assert first_changed(others | handed) is parameter


@pytest.mark.usefixtures("_place")
def test_without_a_sample_the_version_alone_shows_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy could not read the memory of a device."""
    parameter, handed = _handed(_gradient())
    monkeypatch.setattr(unchanged, "_numbers", lambda flat: pytest.fail("the host reads the gradient"))
    handed = {parameter: handed[parameter]._replace(sample=b"")}
    assert first_changed(handed) is None
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
    assert first_changed(handed) is parameter


@pytest.mark.usefixtures("_place")
def test_another_tensor_is_a_change_and_none_stays_none() -> None:
    for shape in ((0,), (3, 0, 4)):
        assert first_changed(_handed(torch.zeros(shape))[1]) is None
    parameter, handed = _handed(_gradient())
    parameter.grad = _gradient()
    assert first_changed(handed) is parameter
    parameter, handed = _handed(None)
    assert first_changed(handed) is None
    parameter.grad = torch.ones(1)
    assert first_changed(handed) is parameter


@pytest.mark.usefixtures("_place")
def test_gradients_in_one_memory_are_told_apart() -> None:
    """They share a version: writing to one, as backward does, must not look like a change of the other."""
    memory = _gradient().view(-1)
    first, handed_first = _handed(memory[:1000])
    _, handed_second = _handed(memory[1000:3000])
    memory[:1000].mul_(2.0)
    assert first_changed(handed_second) is None
    assert first_changed(handed_second | handed_first) is first
