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
    (
        {"granularity": "layers"},
        "granularity must be 'auto', 'layer', 'model' or the bytes of a bucket, an int >= 1, got 'layers'",
    ),
    ({"granularity": 0}, "granularity must be 'auto', 'layer', 'model' or the bytes of a bucket, an int >= 1, got 0"),
    (
        {"granularity": 2.5},
        "granularity must be 'auto', 'layer', 'model' or the bytes of a bucket, an int >= 1, got 2.5",
    ),
    ({"min_numel": -1}, "min_numel must be >= 0, got -1"),
    ({"min_numel": True}, "min_numel must be an int >= 0, got True"),
    ({"exclude": "*.bias"}, "exclude must be a list of patterns such as ['*.bias'], got '*.bias'"),
    ({"exclude": ["a", 1]}, "exclude must be a list of patterns such as ['*.bias'], got ('a', 1)"),
    ({"residual": 1}, "residual must be True or False, got 1"),
    ({"residual": "float64"}, "residual must be True or False, got 'float64'"),
    ({"lr_in_residual": None}, "lr_in_residual must be True or False, got None"),
    ({"momentum": 1.0}, "momentum must be in [0, 1), a MomentumCorrection or None, got 1.0"),
    (
        {"momentum": "auto"},
        "momentum must be in [0, 1), a MomentumCorrection or None, got 'auto', a string; write momentum=auto",
    ),
    (
        {"momentum": MomentumCorrection(0.9), "residual": False},
        "residual must be True with momentum=MomentumCorrection(momentum=0.9), got False: velocities are kept in it",
    ),
    ({"clip": 0.0}, "clip must be a finite norm > 0 or None, got 0.0"),
    ({"clip": "1"}, "clip must be a finite norm > 0 or None, got '1', a string; write clip=1"),
    ({"slack": 0.9}, "slack must be a finite multiple of k, >= 1, got 0.9"),
    ({"slack": math.inf}, "slack must be a finite multiple of k, >= 1, got inf"),
    ({"exchange": "pairs"}, "exchange must be an Exchange, such as Pairs('packed'), or None, got 'pairs'"),
]


topk, sidco = partial(TopK, 0.1), partial(SIDCo, 0.1)
OWN: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (SIDCo, {"ratio": ratio}, f"ratio must be in (0, 1], got {ratio!r}")
        for ratio in (0.0, -0.1, 1.0000001, math.nan, math.inf, None, True)
    ),
    (SIDCo, {"ratio": "0.1"}, "ratio must be in (0, 1], got '0.1', a string; write ratio=0.1"),
    (SIDCo, {"ratio": Fixed(highest=1.5, final=0.1)}, "ratio.highest must be in (0, 1], got 1.5"),
    (SIDCo, {"ratio": Fixed(highest=0.5, final=0.0)}, "ratio.final must be in (0, 1], got 0.0"),
    (
        sidco,
        {"distribution": "laplace"},
        "distribution must be one of 'exponential', 'gamma', 'gpareto', got 'laplace'",
    ),
    (sidco, {"stages": 0}, "stages must be 'auto' or an int in [1, 64], got 0"),
    (sidco, {"stages": 65}, "stages must be 'auto' or an int in [1, 64], got 65"),
    (sidco, {"stages": "many"}, "stages must be 'auto' or an int in [1, 64], got 'many'"),
    (sidco, {"adapt": "mode-1"}, "adapt must be one of 'paper', 'robust', got 'mode-1'"),
    (GaussianK, {"ratio": 0.1, "refine": "newton"}, "refine must be one of 'paper', 'exact', got 'newton'"),
    (DGC, {"ratio": 0.1, "sample_ratio": 0.0}, "sample_ratio must be in (0, 1], got 0.0"),
    (RandomK, {"ratio": 0.1, "seed": -1}, "seed must be >= 0, got -1"),
    (Threshold, {"threshold": -1.0}, "threshold must be a finite magnitude >= 0, got -1.0"),
    (MomentumCorrection, {"momentum": 1.0}, "momentum must be in [0, 1), got 1.0"),
    (MomentumCorrection, {"momentum": -0.1}, "momentum must be in [0, 1), got -0.1"),
    (MomentumCorrection, {"masking": None}, "masking must be True or False, got None"),
    (Pairs, {"values": "bfloat16"}, "values must be 'float32' or 'packed', got 'bfloat16'"),
    (Pairs, {"values": "float64"}, "values must be 'float32' or 'packed', got 'float64'"),
    (topk, {"warmup": 0.0}, "warmup must be a finite number > 0, 'auto' or None, got 0.0"),
    (
        topk,
        {"warmup": "yes"},
        "warmup must be a finite number > 0, 'auto' or None, got 'yes', a string; write warmup=yes",
    ),
    (topk, {"warmup": True}, "warmup must be a finite number > 0, 'auto' or None, got True"),
    (
        TopK,
        {"ratio": Fixed(0.2, 0.1), "warmup": 1.0},
        "warmup must be None or 'auto' with ratio=Fixed(highest=0.2, final=0.1), which changes by itself, got 1.0; put it "
        "into the schedule, or give a number as ratio",
    ),
]


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [*((make, *wrong) for wrong in COMMON for make in (topk, sidco, NoOp)), *OWN],
    ids=str,
)
def test_wrong_settings(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        make(**settings)
    assert str(error.value) == message


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
    with pytest.raises(ValueError, match="ratio must be in"):
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
    text = (
        f"exchange must be one that {cls.__name__} can use, such as {cls(**ratio).exchange!r}, got {exchange!r}; leave"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        cls(**ratio, exchange=exchange)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=repr)
def test_an_exchange_never_changes_and_copies_are_equal(exchange: Any) -> None:
    assert copy.deepcopy(exchange) == exchange == pickle.loads(pickle.dumps(exchange))
    classes = {type(one).__name__: type(one) for one in EXCHANGES}
    assert repr(eval(repr(exchange), classes)) == repr(exchange)
    with pytest.raises(FrozenInstanceError):
        exchange.values = "packed"
