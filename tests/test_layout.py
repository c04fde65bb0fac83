"""Planning: every parameter in exactly one slot, buckets within their limits, the same whatever the ranks do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.compressors.topk import TopK
from horovod_sparse.core.layout import Parameter, plan

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
    for granularity in ("layer", "bucket", "model"):
        layouts = plan(parameters, TopK(0.1, granularity=granularity, bucket_bytes=bucket_bytes))
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
            if members[0].group is None and granularity == "bucket" and len(members) > 1:
                assert itemsize * layout.numel <= bucket_bytes
            if members[0].group is None and granularity == "layer":
                assert len(members) == 1
        if granularity == "model":
            kinds = {(parameter.residual_dtype, parameter.kind, parameter.group) for parameter in parameters}
            assert len(layouts) == len(kinds)


def test_buckets_fill_from_the_last_parameter() -> None:
    parameters = [Parameter(name, (10,), "float32", "cpu") for name in "abcde"]
    layouts = plan(parameters, TopK(0.1, bucket_bytes=80))
    assert [[slot.name for slot in layout.slots] for layout in layouts] == [["e", "d"], ["c", "b"], ["a"]]
