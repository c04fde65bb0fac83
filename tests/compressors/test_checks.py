"""Constructors say what is wrong with an argument, and take everything after `ratio` by keyword."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import pytest

from horovod_sparse.compressors import (
    COMPRESSORS,
    DGC,
    GaussianK,
    MiCRO,
    NoOp,
    RandomBlock,
    RandomK,
    SIDCo,
    Threshold,
    TopK,
)
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.exchange.protocols import Exchange
from horovod_sparse.exchange.shared import Dense, SharedIndices
from horovod_sparse.public import MomentumCorrection, Pairs, Schedule, Union


@dataclass(frozen=True)
class Fixed(Schedule):
    """A user's own schedule, which nobody has checked."""

    highest: float = 1.0
    final: float = 1.0

    def ratio(self, step: int) -> float:
        return self.final


COMMON: list[tuple[dict[str, Any], str]] = [
    *(
        ({"granularity": one}, "'auto', 'layer', 'model' or the bytes of a bucket, an int >= 1")
        for one in ("layers", 0, 2.5)
    ),
    *(({"min_numel": one}, ">= 0") for one in (-1, True)),
    *(({"exclude": one}, "such as ['*.bias']") for one in ("*.bias", ("a", 1))),
    *(({"residual": one}, "True or False") for one in (1, "float64")),
    ({"lr_in_residual": None}, "True or False"),
    *(({"momentum": one}, "in [0, 1)") for one in (1.0, "auto")),
    (
        {"residual": False, "momentum": MomentumCorrection(0.9)},
        "True with momentum=MomentumCorrection(momentum=0.9)",
    ),
    *(({"clip": one}, "> 0") for one in (0.0, "1")),
    *(({"slack": one}, ">= 1") for one in (0.9, math.inf)),
    ({"exchange": "pairs"}, "Pairs('packed')"),
]
"""Settings, of which the first is wrong, and what it must be."""


topk, sidco = partial(TopK, 0.1), partial(SIDCo, 0.1)
OWN: list[tuple[Any, dict[str, Any], str]] = [
    *((SIDCo, {"ratio": one}, "in (0, 1]") for one in (0.0, -0.1, 1.0000001, math.nan, math.inf, None, True, "0.1")),
    (sidco, {"distribution": "laplace"}, "'exponential', 'gamma', 'gpareto'"),
    *((sidco, {"stages": one}, "'auto' or an int in [1, 64]") for one in (0, 65, "many")),
    (sidco, {"adapt": "mode-1"}, "'paper', 'robust'"),
    (partial(GaussianK, 0.1), {"refine": "newton"}, "'paper', 'exact'"),
    (partial(DGC, 0.1), {"sample_ratio": 0.0}, "in (0, 1]"),
    (partial(RandomK, 0.1), {"seed": -1}, ">= 0"),
    (Threshold, {"threshold": -1.0}, ">= 0"),
    *((MomentumCorrection, {"momentum": one}, "in [0, 1)") for one in (1.0, -0.1)),
    (MomentumCorrection, {"masking": None}, "True or False"),
    *((Pairs, {"values": one}, "'float32' or 'packed'") for one in ("bfloat16", "float64")),
    *((topk, {"warmup": one}, "> 0, 'auto' or None") for one in (0.0, "yes", True)),
    (TopK, {"warmup": 1.0, "ratio": Fixed(0.2, 0.1)}, "'auto' with ratio=Fixed(highest=0.2, final=0.1)"),
]


@pytest.mark.parametrize(
    ("make", "settings", "expected"),
    [*((make, *wrong) for wrong in COMMON for make in (topk, sidco, NoOp)), *OWN],
    ids=str,
)
def test_a_wrong_setting_is_named_with_its_value_and_what_it_must_be(
    make: Any, settings: dict[str, Any], expected: str
) -> None:
    name, value = next(iter(settings.items()))
    text = rf"^{name} must be .*{re.escape(expected)}.*, got {re.escape(repr(value))}($|[,:;] )"
    with pytest.raises((ValueError, TypeError), match=text):
        make(**settings)


@pytest.mark.parametrize("name", ["ratio", "momentum", "clip", "warmup"])
def test_a_number_that_is_a_string_is_shown_without_its_quotes(name: str) -> None:
    settings: dict[str, Any] = {"ratio": 0.1, name: "0.5"}
    with pytest.raises(ValueError, match=f"; write {name}=0.5$"):
        TopK(**settings)


@pytest.mark.parametrize("end", ["highest", "final"])
def test_a_schedule_keeps_its_ratios_in_their_range(end: str) -> None:
    with pytest.raises(ValueError, match=rf"^ratio\.{end} must be in \(0, 1\], got 1\.5$"):
        TopK(Fixed(**{end: 1.5}))


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (SIDCo, {"ratio": 0.25, "slack": 1.5, "clip": 2.0, "granularity": 1000, "min_numel": 3, "stages": 2}),
        (TopK, {"ratio": 1, "warmup": 4.0, "residual": True}),
        (DGC, {"ratio": 0.5, "momentum": 0.5, "seed": 3}),
        (Threshold, {"threshold": 0.125, "ratio": 0.5}),
        (RandomBlock, {"ratio": 0.5, "seed": 1}),
    ],
)
def test_numpy_scalars_are_numbers(cls: type[Compressor], settings: dict[str, Any]) -> None:
    """They are kept as Python's, because ranks compare settings by their `repr`."""
    types = {bool: np.bool_, int: np.int64, float: np.float32}
    made = cls(**{name: types[type(value)](value) for name, value in settings.items()})
    assert repr(made) == repr(cls(**settings))
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\], got 1\.5"):
        cls(**{**settings, "ratio": np.float32(1.5)})


@dataclass(eq=False, repr=False, kw_only=True)
class Own(SIDCo):
    """A user's."""

    own: int = 1


ARGUMENTS: dict[type[Compressor], set[str]] = {
    TopK: {"ratio"},
    SIDCo: {"ratio", "distribution", "stages", "adapt"},
    Own: {"ratio", "distribution", "stages", "adapt", "own"},
    DGC: {"ratio", "sample_ratio", "seed"},
    NoOp: set(),
}
"""What classes have beside the settings that are common to all."""


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_every_argument_is_in_the_signature_and_all_after_ratio_by_name(cls: type[Compressor]) -> None:
    parameters = inspect.signature(cls).parameters
    common = {one.name for one in fields(Compressor)} - {"ratio"}
    assert set(parameters) == common | ARGUMENTS[cls]
    assert {one.kind for name, one in parameters.items() if name != "ratio"} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_an_unknown_argument_is_named(cls: type[Compressor]) -> None:
    arguments: dict[str, Any] = dict.fromkeys(ARGUMENTS[cls] & {"ratio"}, 0.1) | {"momentun": None}
    with pytest.raises(TypeError, match="'momentun'"):
        cls(**arguments)


@pytest.mark.parametrize(
    ("ratio", "slack", "numel", "target", "capacity"),
    [
        (0.001, 1.25, 1, 1, 1),
        (0.001, 1.25, 10_000, 10, 13),
        (0.5, 1.0, 3, 1, 1),
        (1.0, 5.0, 7, 7, 7),
        (0.29, 2, 100, 29, 58),
        (3 / 65, 1.0, 65, 3, 3),
    ],
)
def test_k_and_capacity(ratio: float, slack: float, numel: int, target: int, capacity: int) -> None:
    compressor = TopK(ratio, slack=slack)
    assert (compressor.target_count(numel), compressor.message_capacity(numel, target, 1)) == (target, capacity)


@pytest.mark.parametrize(
    "text",
    [
        "SIDCo(ratio=0.001)",
        "SIDCo(ratio=0.01, distribution='gamma', slack=2.0)",
        "SIDCo(ratio=0.01, adapt='paper', slack=24.0)",
        "TopK(ratio=Fixed(highest=0.25, final=0.01), exclude=('*.bias',))",
        "TopK(ratio=0.1, momentum=MomentumCorrection(momentum=0.9))",
        "DGC(ratio=0.1, momentum=MomentumCorrection(momentum=0.5, masking=False))",
        "RandomBlock(ratio=0.1, seed=7, exchange=Pairs(values='packed'))",
        "Threshold(threshold=0.5)",
        "Own(ratio=0.1, own=2)",
        "NoOp()",
    ],
)
def test_repr_has_what_differs_from_the_defaults_and_can_be_read_back(text: str) -> None:
    names = {one.__name__: one for one in (*COMPRESSORS, MomentumCorrection, Own, Fixed, Pairs)}
    made = eval(text, names)
    assert repr(made) == repr(eval(repr(made), names))
    assert sorted(re.findall(r"\w+=[^,()]+", repr(made))) == sorted(re.findall(r"\w+=[^,()]+", text))


def test_repr_tells_what_was_changed_later() -> None:
    """Ranks compare settings by it."""
    compressor = DGC(0.1)
    compressor.residual = False
    assert repr(compressor) == "DGC(ratio=0.1, residual=False)"


def test_a_clip_is_shown_alike_whatever_number_it_was_given_as() -> None:
    """Ranks compare settings by it."""
    assert repr(TopK(0.1, clip=2)) == repr(TopK(0.1, clip=2.0)) == "TopK(ratio=0.1, clip=2.0)"


def test_what_is_off_by_default_and_what_is_on() -> None:
    """Nothing but the compression changes unless it is asked for; momentum correction masks as in the paper."""
    for compressor in (TopK(0.1), DGC(0.1)):
        settings = vars(compressor)
        assert settings["clip"] is settings["momentum"] is compressor.momentum_correction is None
        assert (settings["residual"], settings["lr_in_residual"], settings["warmup"]) == (True, False, "auto")
    assert DGC(0.1, momentum=0.9).momentum == MomentumCorrection(0.9, masking=True)
    assert TopK(0.1, momentum=0.0).momentum is None


EXCHANGES = [Pairs(), Pairs("packed"), Union(), SharedIndices(), Dense()]
ALLOWED: dict[type[Compressor], str] = {
    SIDCo: "pairs packed",
    TopK: "pairs packed union",
    RandomK: "pairs packed shared",
    RandomBlock: "pairs packed shared",
    MiCRO: "union",
    NoOp: "dense",
}
"""The exchanges that algorithms can use, by the first words of their titles."""


@pytest.mark.parametrize("exchange", EXCHANGES, ids=repr)
@pytest.mark.parametrize("cls", ALLOWED)
def test_an_algorithm_refuses_exchanges_that_it_cannot_use(cls: type[Compressor], exchange: Exchange) -> None:
    ratio: dict[str, Any] = {} if cls is NoOp else {"ratio": 0.1}
    if exchange.title.split()[0] in ALLOWED[cls].split():
        assert cls(**ratio, exchange=exchange).exchange is exchange
        return
    such_as, got = re.escape(repr(cls(**ratio).exchange)), re.escape(repr(exchange))
    with pytest.raises(ValueError, match=rf"^exchange must be .* {cls.__name__} .* {such_as}, got {got}"):
        cls(**ratio, exchange=exchange)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=repr)
def test_an_exchange_never_changes_and_copies_are_equal(exchange: Any) -> None:
    assert copy.deepcopy(exchange) == exchange == pickle.loads(pickle.dumps(exchange))
    classes = {type(one).__name__: type(one) for one in EXCHANGES}
    assert repr(eval(repr(exchange), classes)) == repr(exchange)
    with pytest.raises(FrozenInstanceError, match="'values'"):
        exchange.values = "packed"
