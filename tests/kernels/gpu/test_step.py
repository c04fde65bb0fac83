"""How often the host waits for a device in a step, and how much it launches: counted on the CPU, with kernels interpreted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from horovod_sparse.compressors import DGC, SIDCo
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.driver import Driver
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter, Slot
from horovod_sparse.core.plan import planned
from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named, Reduced
from horovod_sparse.kernels.gpu.bucket import selector_for
from horovod_sparse.torch import device, ops
from tests.harness.table import COMPRESSORS, gradients_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
READS = {"tolist", "item", "numpy", "cpu", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__"}
"""Functions of tensors that wait for a device."""
BUCKETS, STEPS = 3, 3
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
        result = function(*args, **(kwargs or {}))
        is_nothing = isinstance(result, torch.Tensor) and not result.numel()
        name = function.name()
        if not (is_view or is_nothing or self.is_paused or "empty" in name or "view" in name):
            self.counts[name] += 1
        return result


class Echo:
    """A transport of workers that all send what this one sends."""

    position, rank = 0, 0

    def __init__(self, world: int) -> None:
        self.world, self.launches = world, Launches()

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        self.launches.is_paused, message = True, collective.message
        result = torch.cat([message] * self.world) if collective.kind == "allgather" else message * self.world
        self.launches.is_paused = False
        return lambda: result

    def everyone(self, value: Any) -> list[Any]:
        return [value] * self.world


def driver_of(compressor: Compressor, shapes: Mapping[str, tuple[int, ...]], transport: Echo) -> Driver:
    """A driver with a bucket for all parameters whose names begin with the same number."""
    parameters = [
        Parameter(name, shape, "float32", "device", int(name[0]) if name[0].isdigit() else None)
        for name, shape in shapes.items()
    ]
    where: Any = {"world": transport.world, "position": 0, "rank": 0}
    where["device_selector"] = partial(selector_for, groups=2)
    driver = Driver(compressor, transport, lambda: Feedback(ops.TorchOps(), compressor, **where), kernels="none")
    driver.extend(parameters, {name: torch.zeros(shape) for name, shape in shapes.items()})
    return driver


def counted(compressor: Compressor, world: int = 2, parameters: int = 3) -> tuple[Counter[str], Counter[str]]:
    """Waits and launches of the last step, of buckets with so many parameters, and a parameter that is reduced dense."""
    shapes = {f"{bucket}.{number}": (600 // parameters,) for bucket in range(BUCKETS) for number in range(parameters)}
    shapes["bias"] = (7,)
    rng, transport, waits = np.random.default_rng(0), Echo(world), Waits()
    launches, run = transport.launches, GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        launches.counts[self.fn.__name__] += 1
        waits.is_paused = launches.is_paused = True
        run(self, *args, **kwargs)
        waits.is_paused = launches.is_paused = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "has_kernels", lambda where: True)
        patch.setattr(ops, "on_host", lambda x: False)
        patch.setattr(GridExecutor, "__call__", launch)
        driver = driver_of(compressor, shapes, transport)
        for _ in range(STEPS):
            gradients = {name: torch.from_numpy(one) for name, one in gradients_of(shapes, rng).items()}
            write = partial(write_to, gradients)
            waits.counts.clear()
            launches.counts.clear()
            with launches, waits:
                driver.begin()
                for name, gradient in gradients.items():
                    driver.add(name, gradient)
                driver.complete()
                driver.finish(write)
    return waits.counts, launches.counts


def write_to(gradients: dict[str, torch.Tensor], slots: Sequence[Slot], reduced: Reduced) -> None:
    reduced.write([(one.offset, gradients[one.name]) for one in slots])


def made(name: str) -> Compressor:
    return next(row for row in COMPRESSORS if row.name == name).make(0.05, min_numel=10)


LAUNCHES = {
    "topk": 14,
    DEFAULT: 15,
    "threshold": 15,
    "redsync": 15,
    "gaussiank": 15,
    "dgc": 17,
    "randomk-own": 7,
    "topk-packed": 20,
    "randomk": 6,
    "randomblock": 6,
    "topk-union": 19,
    "micro": 22,
}
"""Of a bucket, by what selects on its device: one takes in the gradients, 9 or 10 select (4 of them for the digits of an exact
search), 2 take a sample, or 2 take out what was drawn; 2 check what has arrived, one adds that up, and one copies what the host
is told. Messages are packed by 3, and unpacked by 3. Without indices the message is written by what takes out, and what has
arrived becomes pairs by one.

With a union one makes the message of indices, 4 check and merge all, one takes the values out and writes their message, and one
more than with pairs writes the result; MiCRO finds by 2 what it proposes. The copies of two tables of addresses, and of indices
that were drawn, come to them on a GPU.
"""
DENSE_LAUNCHES = 7
"""Of a bucket in a dense step: gradients come in, NaN is looked for, the message is made, and the mean is written."""
LAUNCHES_IN_ALL = 8
"""Of a step, beside its buckets: the dense bucket, and the copy to the host."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * (one != DEFAULT)) for one in LAUNCHES])
def test_the_host_waits_once_in_a_step_and_launches_the_same_number(name: str) -> None:
    """Whatever the number of workers and of parameters."""
    for world, parameters in ((2, 3), (8, 6)):
        waits, launches = counted(made(name), world, parameters)
        assert sum(waits.values()) == 1, waits
        assert sum(launches.values()) == BUCKETS * LAUNCHES[name] + LAUNCHES_IN_ALL, launches


def test_the_host_waits_once_with_momentum() -> None:
    """Although the velocity becomes zero where entries are sent."""
    waits, _ = counted(DGC(0.05, momentum=0.9, warmup=None, min_numel=10))
    assert sum(waits.values()) == 1, waits


def test_the_host_waits_once_in_a_dense_step_of_the_warm_up() -> None:
    for parameters in (3, 6):
        waits, launches = counted(SIDCo(0.01, min_numel=10), 2, parameters)
        assert sum(waits.values()) == 1, waits
        assert sum(launches.values()) == DENSE_LAUNCHES * (BUCKETS + 1) + 1, launches


def block(width: int, inner: int) -> list[tuple[int, ...]]:
    """The parameters of a layer of a transformer, with their biases."""
    matrices: list[tuple[int, ...]] = [(3 * width, width), (width, width), (inner, width), (width, inner)]
    return [*matrices, *((rows,) for rows, _ in matrices), *[(width,)] * 4]


GPT2: list[tuple[int, ...]] = [(50_257, 768), (1024, 768), *block(768, 3072) * 12]


@pytest.mark.parametrize(
    ("shapes", "name", "most"),
    [
        pytest.param(GPT2, DEFAULT, 60, id="124 M"),
        pytest.param(GPT2, "topk-union", 75, id="124 M, union"),
        pytest.param(GPT2, "micro", 80, id="124 M, MiCRO"),
        pytest.param([(32_000, 2048), *block(2048, 8192) * 20], DEFAULT, 400, id="1.1 B"),
    ],
)
def test_a_large_model_takes_few_launches(shapes: list[tuple[int, ...]], name: str, most: int) -> None:
    """By what a bucket takes, with the copies of its tables."""
    parameters = [Parameter(f"p{n}", shape, "float32", "cuda:0", on_device=True) for n, shape in enumerate(shapes)]
    buckets = planned(parameters, made(name), 8)
    assert not any(bucket.is_dense for bucket in buckets)
    assert len(buckets) * (LAUNCHES[name] + 2) + LAUNCHES_IN_ALL <= most


MOST_WAITS = 7


@pytest.mark.full
@pytest.mark.parametrize("name", ["sidco-exponential-paper", "gaussiank-paper"])
def test_where_the_host_helps_it_waits_for_each_bucket(name: str) -> None:
    """With the gradients that are not finite, with thresholds, with the number of what a threshold has found."""
    waits, _ = counted(made(name))
    assert sum(waits.values()) <= 1 + BUCKETS * MOST_WAITS, waits
