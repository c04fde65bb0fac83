"""Planning: every parameter in exactly one slot, buckets within their limits, the same whatever the ranks do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.compressors import NoOp, RandomK, TopK
from horovod_sparse.compressors.base import BUCKET_BYTES
from horovod_sparse.core.layout import Parameter
from horovod_sparse.core.plan import layouts_of
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.union import Union

PARAMETERS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 40), max_size=3).map(tuple),
        st.sampled_from(("float32", "float64")),
        st.sampled_from(("cpu", "cuda:0")),
        st.sampled_from((None, 0, 1)),
    ),
    max_size=30,
).map(lambda rows: [Parameter(f"p{number}", *row) for number, row in enumerate(rows)])


@given(parameters=PARAMETERS, bucket_bytes=st.integers(1, 10_000))
def test_every_parameter_has_one_slot_and_buckets_are_uniform(parameters: list[Parameter], bucket_bytes: int) -> None:
    by_name = {parameter.name: parameter for parameter in parameters}
    for granularity in ("layer", bucket_bytes, "model"):
        layouts = layouts_of(parameters, TopK(0.1, granularity=granularity, warmup=None))
        slots = [slot for layout in layouts for slot in layout.slots]
        assert sorted(slot.name for slot in slots) == sorted(by_name)
        assert len({layout.name for layout in layouts}) == len(layouts)
        for layout in layouts:
            members = [by_name[slot.name] for slot in layout.slots]
            assert len({(member.residual_dtype, member.kind, member.group) for member in members}) == 1
            offset = 0
            for slot, member in zip(layout.slots, members, strict=True):
                assert (slot.offset, slot.numel, slot.shape) == (offset, member.numel, member.shape)
                offset += slot.numel
            assert layout.numel == offset
            itemsize = 8 if layout.residual_dtype == "float64" else 4
            if members[0].group is None and granularity == bucket_bytes and len(members) > 1:
                assert itemsize * layout.numel <= bucket_bytes
            if members[0].group is None and granularity == "layer":
                assert len(members) == 1
        if granularity == "model":
            kinds = {(parameter.residual_dtype, parameter.kind, parameter.group) for parameter in parameters}
            assert len(layouts) == len(kinds)


@pytest.mark.parametrize(
    ("mebibytes", "buckets"),
    [(60, [24, 24, 12]), (120, [48, 48, 24]), (480, [192, 192, 96]), (800, [256, 256, 256, 32])],
)
def test_buckets_on_a_device_are_larger(mebibytes: int, buckets: list[int]) -> None:
    """Two fifths of the model, from 25 to 256 MiB. In the host's memory they have up to 25 MiB."""
    for on_device, expected in (
        (True, buckets),
        (False, [24] * (mebibytes // 24) + [mebibytes % 24] * (mebibytes % 24 > 0)),
    ):
        parameters = [
            Parameter(f"p{number}", (2**20,), "float32", "cpu", on_device=on_device) for number in range(mebibytes // 4)
        ]
        layouts = layouts_of(parameters, TopK(0.001, warmup=None))
        assert [layout.numel * 4 // 2**20 for layout in layouts] == expected


def test_buckets_fill_from_the_last_parameter() -> None:
    parameters = [Parameter(name, (10,), "float32", "cpu") for name in "abcde"]
    layouts = layouts_of(parameters, TopK(0.1, granularity=80, warmup=None))
    assert [[slot.name for slot in layout.slots] for layout in layouts] == [["e", "d"], ["c", "b"], ["a"]]


# --- limits: small ones stand for those of 2^31 ---


@pytest.mark.parametrize("group", [None, 0])
def test_what_exceeds_the_largest_bucket_becomes_several(monkeypatch: pytest.MonkeyPatch, group: int | None) -> None:
    monkeypatch.setattr(wire, "MAX_BUCKET", 25)
    parameters = [
        Parameter(name, (size,), "float32", "cpu", group) for name, size in zip("abcd", (10, 15, 1, 25), strict=True)
    ]
    compressor = TopK(0.1, granularity=BUCKET_BYTES if group == 0 else "model", min_numel=0, warmup=None)
    layouts = layouts_of(parameters, compressor, 4)
    assert [[slot.name for slot in layout.slots] for layout in layouts] == [["d"], ["c", "b"], ["a"]]


@pytest.mark.parametrize(
    ("make", "world", "buckets"),
    [
        *((make, world, world) for make in (TopK, partial(TopK, exchange=Union())) for world in (1, 2, 4)),
        (RandomK, 4, 1),
        (lambda ratio, **settings: NoOp(**settings), 4, 1),
    ],
)
def test_too_much_to_gather_is_split(monkeypatch: pytest.MonkeyPatch, make: Any, world: int, buckets: int) -> None:
    """The last two gather nothing."""
    monkeypatch.setattr(wire, "MAX_GATHERED", 2 * 40)
    compressor = make(0.5, granularity="model", min_numel=0, warmup=None)
    layouts = layouts_of([Parameter(name, (20,), "float32", "cpu") for name in "abcd"], compressor, world)
    assert len(layouts) == buckets


def test_a_parameter_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BUCKET", 25)
    parameters = [Parameter("a", (26,), "float32", "cpu"), Parameter("b", (5,), "float32", "cpu")]
    with pytest.raises(ValueError, match=r"bucket 'a' has 26 elements, expected at most 25 .* split it into several"):
        layouts_of(parameters, TopK(0.1, granularity="model", warmup=None), 2)
    monkeypatch.setattr(wire, "MAX_GATHERED", 20)
    with pytest.raises(ValueError, match=r"bucket 'b' gathers 24 int32 from 4 workers, .* lower ratio"):
        layouts_of(parameters[1:], TopK(0.6, warmup=None), 4)
