"""Ratios that change with the step."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_sparse.compressors.schedules import warmup


def test_warm_up_of_deep_gradient_compression() -> None:
    schedule = warmup(0.25, 0.25**5, 8)
    assert [schedule.ratio(step) for step in range(0, 12, 2)] == pytest.approx(
        [0.25, 0.0625, 0.015625, 0.00390625, 0.0009765625, 0.0009765625]
    )
    assert [schedule.ratio(step) for step in (0, 1)] == [0.25, 0.25], "in stairs"
    assert (schedule.highest, schedule.final) == (0.25, 0.25**5)


def test_few_message_shapes() -> None:
    schedule = warmup(0.25, 0.001, 1000, stairs=3)
    assert len({schedule.ratio(step) for step in range(1200)}) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0.0}, r"start must be in \(0, 1\], got 0.0"),
        ({"end": 1.5}, r"end must be in \(0, 1\], got 1.5"),
        ({"steps": 0}, "steps must be an int >= 1, got 0"),
        ({"stairs": 2.0}, "stairs must be an int >= 1, got 2.0"),
        ({"start": "0.25"}, r"start must be in \(0, 1\], got '0.25', a string; write start=0.25"),
        (
            {"start": 0.001, "end": 0.25},
            r"end must be at most start=0.001, got 0.25.*write warmup\(0.25, 0.001, steps=",
        ),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        warmup(**{"start": 0.25, "end": 0.01, "steps": 4, **arguments})
