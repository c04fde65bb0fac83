"""How often the host waits for a device in a step, and how much it launches: counted on the CPU, with kernels interpreted."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.driver import Driver
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter
from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named
from horovod_sparse.kernels.gpu.bucket import selector_for
from horovod_sparse.torch import device, ops
from tests.harness.table import COMPRESSORS, gradients_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
READS = {"tolist", "item", "numpy", "cpu", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__"}
"""Functions of tensors that wait for a device."""
BUCKETS, STEPS = 3, 4
DEFAULT = "sidco-exponential-robust"


class Waits(TorchFunctionMode):
    """Counts what makes the host wait, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.is_paused = Counter[str](), False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
        if (name in READS or is_mask) and not self.is_paused:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Counts the operations that compute or copy, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.is_paused = Counter[str](), False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(one.alias_info and not one.alias_info.is_write for one in function._schema.returns)
        if not is_view and not self.is_paused and "empty" not in function.name():
            self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


class Echo:
    """A transport of workers that all send what this one sends."""

    position, rank = 0, 0

    def __init__(self, world: int) -> None:
        self.world = world

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        message = collective.message
        result = torch.cat([message] * self.world) if collective.kind == "allgather" else message * self.world
        return lambda: result

    def everyone(self, value: Any) -> list[Any]:
        return [value] * self.world


def counted(
    monkeypatch: pytest.MonkeyPatch, compressor: Compressor, world: int = 2, parameters: int = 3
) -> tuple[Counter[str], Counter[str]]:
    """Waits and launches of the last step, of buckets with so many parameters, and a parameter that is reduced dense."""
    monkeypatch.setattr(device, "has_kernels", lambda where: True)
    monkeypatch.setattr(ops, "on_host", lambda x: False)
    shapes = {f"{bucket}.{number}": (600 // parameters,) for bucket in range(BUCKETS) for number in range(parameters)}
    shapes["bias"] = (7,)
    made = [
        Parameter(name, shape, "float32", "device", group=None if name == "bias" else int(name[0]))
        for name, shape in shapes.items()
    ]
    driver = Driver(
        compressor,
        Echo(world),
        lambda: Feedback(
            ops.TorchOps(),
            compressor,
            world=world,
            position=0,
            rank=0,
            device_selector=partial(selector_for, groups=2),
        ),
        kernels="none",
    )
    rng = np.random.default_rng(0)
    driver.extend(made, {name: torch.zeros(shape) for name, shape in shapes.items()})
    waits, launches = Waits(), Launches()
    run = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        if not launches.is_paused:
            launches.counts[self.fn.__name__] += 1
        before, waits.is_paused, launches.is_paused = launches.is_paused, True, True
        run(self, *args, **kwargs)
        waits.is_paused = launches.is_paused = before

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    for _ in range(STEPS):
        gradients = {name: torch.from_numpy(one) for name, one in gradients_of(shapes, rng).items()}
        waits.counts.clear()
        launches.counts.clear()
        with launches, waits:
            driver.begin()
            for name, gradient in gradients.items():
                driver.add(name, gradient)
            driver.complete()
            driver.finish(lambda slots, reduced: reduced.write([(one.offset, gradients[one.name]) for one in slots]))
    return waits.counts, launches.counts


def made(name: str) -> Compressor:
    return next(row for row in COMPRESSORS if row.name == name).make(0.05, min_numel=10)


LAUNCHES = {"topk": 15, DEFAULT: 16, "threshold": 16}
"""Of a bucket, by what selects on its device: 10 or 11 to select, with 4 for the digits of an exact search; one converts what
the device has noted for the host, and two the check's: zeros first; one adds up what has arrived. The copies of two tables
come to them."""
LAUNCHES_IN_ALL = 13
"""Of a step, beside its buckets: one copy for the host, and the dense bucket's."""


@pytest.mark.parametrize(
    "name", [DEFAULT, *(pytest.param(name, marks=pytest.mark.full) for name in LAUNCHES if name != DEFAULT)]
)
def test_the_host_waits_once_in_a_step_and_launches_the_same_number(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever the number of workers and of parameters."""
    seen = [counted(monkeypatch, made(name), world, parameters) for world, parameters in ((2, 3), (8, 3), (2, 6))]
    for waits, launches in seen:
        assert sum(waits.values()) == 1, waits
        assert sum(launches.values()) == BUCKETS * LAUNCHES[name] + LAUNCHES_IN_ALL, launches


WAITS = {
    "topk-packed": 0,
    "randomk": 1,
    "randomblock": 1,
    "topk-union": 8,
    "dgc": 5 + 1 / 3,
    "micro": 6,
    "redsync": 7,
    "gaussiank": 9,
}
"""Of a bucket, beside the one wait of the step, where the host helps: with the gradients that are not finite, with
thresholds, with the number of what a threshold has found."""


@pytest.mark.full
@pytest.mark.parametrize("name", WAITS)
def test_where_the_host_helps_it_waits_for_each_bucket(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    waits, _ = counted(monkeypatch, made(name))
    assert sum(waits.values()) == pytest.approx(1 + BUCKETS * WAITS[name]), waits
