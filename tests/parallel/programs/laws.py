"""Scenarios: each program of the table trains as with dense averages at ratio 1, and on equal replicas at a small ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horovod_sparse.torch import SIDCo, TopK

from ..common import digest, everyone
from ..scenario import Scenario
from . import errors, gradients, optimizers, pairs, parts, stages, steps
from .table import PROGRAMS, Program, Way

_SOURCES = (steps, pairs, gradients, optimizers, parts, stages, errors)
"""They fill the table."""

ALL = [
    Way("SIDCo", partial(SIDCo, 1.0, min_numel=0), hooked=True),
    Way("TopK", partial(TopK, 1.0, min_numel=0)),
    Way("TopK by layer", partial(TopK, 1.0, min_numel=0, granularity="layer")),
]
FEW = [
    Way("SIDCo", partial(SIDCo, 0.02, min_numel=0, warmup=None), hooked=True),
    Way("TopK by layer", partial(TopK, 0.05, granularity="layer", warmup=None)),
]


def _tensors(module: nn.Module, *, shared: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers; `shared` leaves out what may differ between ranks."""
    return {name: tensor for name, tensor in module.state_dict().items() if not (shared and name.startswith("local."))}


def _differences(mine: nn.Module, reference: nn.Module) -> Iterator[str]:
    expected = _tensors(reference)
    for name, tensor in _tensors(mine).items():
        if not torch.allclose(tensor, expected[name], rtol=1e-4, atol=1e-6, equal_nan=True):
            largest = float((tensor - expected[name]).abs().max())
            yield f"{name} differs by {largest:.2g} of {float(expected[name].abs().max()):.2g}"


def _collect(ways: Sequence[Way], problems_of: Callable[[Way], list[str]]) -> None:
    """Run in each way, and say of all of them what was wrong on any rank."""
    found = []
    for way in ways:
        problems = [one for rank in everyone(problems_of(way)) for one in rank]
        if problems:
            found.append(f"{way.name}: {'; '.join(dict.fromkeys(problems))}")
    assert not found, "\n".join(found)


def ratio_one_is_dense(one: Program, ways: Sequence[Way] = ALL) -> None:
    reference = one.run(one.reference)
    _collect(ways, lambda way: [*_differences(one.run(way), reference)])


def replicas_are_equal(one: Program, ways: Sequence[Way] = FEW) -> None:
    def problems(way: Way) -> list[str]:
        tensors = _tensors(one.run(way), shared=True)
        # One NaN is as good as another.
        digests = {name: digest([tensor.nan_to_num(nan=12345.0)]) for name, tensor in tensors.items()}
        here = [f"{name} differs between ranks" for name in tensors if len({d[name] for d in everyone(digests)}) > 1]
        if all(bool(tensor.isfinite().all()) for tensor in tensors.values()) != one.finite:
            here.append("not finite" if one.finite else "finite")
        return here

    _collect(ways, problems)


def _mark(law: Any) -> None:
    law.scenarios = [
        Scenario(f"{law.__name__}[{name}]", law, (one,), one.launches, one.quick) for name, one in PROGRAMS.items()
    ]


_mark(ratio_one_is_dense)
_mark(replicas_are_equal)
