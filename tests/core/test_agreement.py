"""What is said of an optimizer that is in sight: advice, or that momentum would be applied twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from horovod_sparse.compressors import DGC, TopK
from horovod_sparse.core.agreement import advice, check_momentum

WITHOUT = {"SGD", "ASGD", "LBFGS"}
"""All that do not."""


def of_torch() -> Iterator[tuple[str, list[Mapping[str, object]]]]:
    torch = pytest.importorskip("torch")
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            yield name, cls([torch.nn.Parameter(torch.ones(2, 2))]).param_groups


def of_keras() -> Iterator[tuple[str, list[Mapping[str, object]]]]:
    keras = pytest.importorskip("keras")
    for name, cls in vars(keras.optimizers).items():
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer) and "Optimizer" not in name:
            yield name, [cls().get_config()]


@pytest.mark.parametrize("optimizers", [of_torch, of_keras])
def test_an_optimizer_that_divides_by_the_size_of_the_gradient_is_named(optimizers: Any) -> None:
    found = dict(optimizers())
    assert {"SGD", "Adam", "AdamW", "Adafactor", "RMSprop"} <= found.keys()
    without = {name for name, groups in found.items() if not advice(name, groups)}
    assert without == WITHOUT & found.keys()
    for name in found.keys() - without:
        text = advice(name, found[name])
        assert text.startswith(f"{name} ") and "LocalUpdates(optimizer, model, compression)" in text


def test_momentum_is_applied_once() -> None:
    for compressor in (TopK(0.1), DGC(0.1), TopK(0.1, momentum=0.0)):
        check_momentum(compressor, [{"momentum": 0.9}])
    for groups in ([{"lr": 0.1}], [{"momentum": 0}], [{"momentum": None}]):
        check_momentum(TopK(0.1, momentum=0.9), groups)
    with pytest.raises(ValueError, match=r"optimizer must have momentum=0 with MomentumCorrection.*got momentum=0.5"):
        check_momentum(TopK(0.1, momentum=0.9), [{"momentum": 0.0}, {"momentum": 0.5}])
