"""What lasts of a worker, and its steps: state, statistics, and what they refuse."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from horovod_sparse.compressors import MiCRO, SIDCo, Threshold, TopK
from horovod_sparse.compressors.base import BUCKET_BYTES
from horovod_sparse.core.driver import log_start
from horovod_sparse.core.layout import Slot
from horovod_sparse.exchange.protocols import Entries, Reduced
from horovod_sparse.torch.compressors import TopK as TorchTopK
from horovod_sparse.torch.ddp import DDPSource
from horovod_sparse.torch.ops import TorchOps
from tests.harness.table import BACKENDS, COMPRESSORS, ORACLE, Backend, Row, gradients, gradients_of
from tests.harness.worker import Worker
from tests.harness.workers import end_step, exchange_all, make_worker, make_workers, send, take_step

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)
SHAPES = {"weight": (30, 40), "kernel": (500,), "head": (7, 11)}


def worker_of(backend: Backend, compressor: Any) -> Worker:
    return make_worker(backend, compressor, SHAPES)


def step(backend: Backend, worker: Worker, seed: int) -> None:
    take_step(backend, [worker], [gradients_of(SHAPES, np.random.default_rng(seed))])


def _changed(state: Any, part: str, **changed: Any) -> Any:
    return {**state, part: {**state[part], **changed}}


def _without(state: Any, part: str, name: str) -> Any:
    return {**state, part: {one: value for one, value in state[part].items() if one != name}}


def _residual(value: Any, dtype: Any = np.float32) -> Any:
    return lambda state: _changed(state, "residuals", head=np.full((7, 11), value, dtype))


def _adaptive(name: str, value: Any) -> Any:
    return lambda state: _changed(state, "adaptive", head={**state["adaptive"]["head"], name: value})


DAMAGES: dict[str, tuple[Any, str]] = {
    "not a dict": (lambda state: None, "must"),
    "another version": (lambda state: {**state, "version": 1}, "state must have version 3, got 1"),
    "a part is None": (lambda state: {**state, "velocities": None}, "must"),
    "a part is missing": (lambda state: {p: value for p, value in state.items() if p != "learning_rates"}, "must"),
    "a residual is missing": (lambda state: _without(state, "residuals", "head"), r"one of them lacks \['head'\]"),
    "a residual more": (lambda state: _changed(state, "residuals", more=np.zeros(3)), r"one of them lacks \['more'\]"),
    "another shape": (
        lambda state: _changed(state, "residuals", head=np.zeros(77, np.float32)),
        r"of another shape \(got, expected\): {'head': \(\(77,\), \(7, 11\)\)}",
    ),
    "a velocity more": (
        lambda state: _changed(state, "velocities", head=np.zeros((7, 11), np.float32)),
        r"velocities must be .*; missing: \[\], unexpected: \['head'\].* and the same momentum",
    ),
    "NaN": (_residual(np.nan), "must"),
    "infinity": (_residual(np.inf), "must"),
    "complex": (_residual(1j, np.complex64), "must"),
    "boolean": (_residual(True, np.bool_), "must"),
    "integers": (_residual(1, np.int64), "must"),
    "text": (lambda state: _changed(state, "residuals", head="text"), "must"),
    "a rate of NaN": (lambda state: {**state, "learning_rates": {"head": math.nan}}, "must"),
    "a rate of nothing": (lambda state: {**state, "learning_rates": {"else": 0.1}}, "must"),
    "a rate that is true": (lambda state: {**state, "learning_rates": {"head": True}}, "must"),
    "sparse": (lambda state: {**state, "sparse": [1]}, "must"),
    "no adaptive state": (
        lambda state: _without(state, "adaptive", "head"),
        r"state\['adaptive'\] must name the same parameters",
    ),
    "another algorithm": (
        lambda state: _changed(state, "adaptive", head={}),
        "adaptive state must be like .*another algorithm",
    ),
    **{
        f"{name}={value!r}": (_adaptive(name, value), "must")
        for name, values in {
            "step": (-1, 1.5, True, None, 10**30),
            "aim": (math.nan, math.inf, -1.0, 0.0, 1e9, 1, None, "1"),
            "cut": (math.nan, -1.0, 0.0, 1, None),
            "stages": (0, -3, 10**9, 2.0, True, None),
            "windows_seen": (-1, 0.5, None),
            "window": (None, [math.nan], [-1.0], [1.0] * 5, ["x"], [None], 3.0),
            "errors": (
                None,
                [[1, 2]],
                [[2, 0.1, 1], [2, 0.2, 1]],
                [[0, 0.1, 1]],
                [[10**9, 0.1, 1]],
                [[1, math.nan, 1]],
                [[1, 0.1, -1]],
                [3],
            ),
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one.name in ("numpy", "torch")], ids=str)
@pytest.mark.parametrize(("damage", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(backend: Backend, damage: Any, expected: str) -> None:
    worker = worker_of(backend, SIDCo(0.1, warmup=None))
    for seed in range(7):
        step(backend, worker, seed)
    before = worker.state_dict()
    with pytest.raises(ValueError, match=expected):
        worker.load_state_dict(damage(worker.state_dict()))
    after = worker.state_dict()
    assert after["adaptive"] == before["adaptive"]
    for parameter, residual in before["residuals"].items():
        np.testing.assert_array_equal(backend.numpy(after["residuals"][parameter]), backend.numpy(residual))


@pytest.mark.parametrize("row", COMPRESSORS, ids=str)
def test_damaged_numbers_of_every_algorithm_are_refused(row: Row) -> None:
    worker = make_worker(ORACLE, row.make(0.1), {"p": (300,)})
    rng = np.random.default_rng(0)
    for _ in range(3):
        send(ORACLE, worker, gradients("laplace", 300, rng))
    state = worker.state_dict()
    for name, value in state["adaptive"]["p"].items():
        for damaged in (math.nan, -math.inf, None, "text", [None]) if not isinstance(value, list) else (None, [None]):
            with pytest.raises(ValueError, match="adaptive state must"):
                worker.load_state_dict({**state, "adaptive": {"p": {**state["adaptive"]["p"], name: damaged}}})
    worker.load_state_dict(state)


@pytest.mark.parametrize(("slack", "first"), [(60.0, 100), (1.0, 5)], ids=["some have no room", "most have no room"])
def test_truncation_that_lasts_is_said_once(slack: float, first: int) -> None:
    worker = make_worker(ORACLE, Threshold(0.1, ratio=0.01, slack=slack), {"p": (1000,)})
    rng = np.random.default_rng(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # These steps are forgotten with the other statistics.
        for _ in range(2):
            worker.reset()
            for _ in range(first - 1):
                send(ORACLE, worker, gradients("laplace", 1000, rng))
        assert not caught
        for _ in range(50):
            send(ORACLE, worker, gradients("laplace", 1000, rng))
    assert len(caught) == 1
    said = str(caught[0].message)
    assert f"for {first} steps more entries of bucket 'p' qualified than its message has room for" in said
    assert f"room for {10 * slack:g})" in said and "or, with Threshold, the threshold" in said


@on_every_backend
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_what_a_parameter_has_kept_waits_while_it_has_no_gradient(backend: Backend, momentum: float | None) -> None:
    """Nothing of it is sent, and it goes on with the next gradient as if no step had been between."""
    compressor = TopK(0.1, granularity="model", momentum=momentum, warmup=None)
    worker = worker_of(backend, compressor)
    for seed in (2, 3, 0):
        step(backend, worker, seed)

    def kept(of: Worker, part: str = "residuals") -> np.ndarray:
        return np.array(backend.numpy(of.state_dict()[part]["kernel"]))

    residual, velocity = kept(worker), kept(worker, "velocities") if momentum else None
    assert residual.any()
    for seed in (4, 5):
        given = {**gradients_of(SHAPES, np.random.default_rng(seed)), "kernel": None}
        (result,) = take_step(backend, [worker], [given])
        assert all(not values.any() for _, values in result["kernel"] or ())
        np.testing.assert_array_equal(kept(worker), residual)
        assert not backend.numpy(worker.residuals.views["kernel"]).any()
        if velocity is not None:
            np.testing.assert_array_equal(kept(worker, "velocities"), velocity)
    # What was set aside is a part of the state, has its unit, and is loaded.
    worker.rescale(2.0)
    np.testing.assert_array_equal(kept(worker), 2 * residual)
    loaded = worker_of(backend, compressor)
    loaded.load_state_dict(worker.state_dict())
    before = worker.state_dict()
    for one in (worker, loaded):
        step(backend, one, 6)
    for name in SHAPES:
        mine, theirs = (backend.numpy(one.state_dict()["residuals"][name]) for one in (worker, loaded))
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(kept(worker), 2 * residual)
    for use in (lambda: worker.load_state_dict(before), worker.reset):
        take_step(backend, [worker], [{**dict.fromkeys(SHAPES), "head": np.ones((7, 11), np.float32)}])
        use()
        expected = np.zeros(500) if use == worker.reset else backend.numpy(before["residuals"]["kernel"])
        np.testing.assert_array_equal(kept(worker), expected)
        np.testing.assert_array_equal(backend.numpy(worker.residuals.views["kernel"]), expected)


@on_every_backend
def test_what_others_send_of_a_parameter_without_gradient_has_the_unit_of_its_rate(backend: Backend) -> None:
    """Replicas would part."""
    workers = make_workers(backend, TopK(1.0, lr_in_residual=True, warmup=None), {"p": (300,)}, 2)
    gradient = gradients("laplace", 300, np.random.default_rng(0))
    mine, theirs = take_step(backend, workers, [{"p": None}, {"p": gradient}], 0.25)
    np.testing.assert_equal(mine, theirs)
    np.testing.assert_array_equal((mine["p"] or [])[1][1], gradient)


@on_every_backend
def test_a_state_that_is_loaded_ends_what_had_begun(backend: Backend) -> None:
    worker = worker_of(backend, TopK(0.1, warmup=None))
    state = worker.state_dict()
    uses: list[Any] = [lambda: worker.load_state_dict(state), worker.reset, worker.start_step]
    for seed, use in enumerate(uses):
        worker.arrive("kernel", backend.array(np.ones(500, np.float32)))
        use()
        step(backend, worker, seed)


@on_every_backend
def test_memory_is_one_residual(backend: Backend) -> None:
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    for granularity in ("layer", BUCKET_BYTES, "model"):
        worker = worker_of(backend, TopK(0.1, granularity=granularity, warmup=None))
        assert sum(bucket.buffer.nbytes for bucket in worker.buckets) == 4 * elements


@on_every_backend
def test_statistics_are_true(backend: Backend) -> None:
    """Of each bucket: what it has sent is in `test_machine`, and how many bytes in `tests/tools/test_plan.py`."""
    worker = worker_of(backend, TopK(0.1, granularity="layer", slack=1.5, warmup=None))
    for seed in range(4):
        step(backend, worker, seed)
    stats = worker.stats()
    assert stats.steps == 4
    residual = np.concatenate([backend.numpy(r).reshape(-1) for r in worker.state_dict()["residuals"].values()])
    for snapshot in (stats.last, stats.mean):
        for one in snapshot.buckets:
            size = math.prod(SHAPES[one.name])
            assert (one.numel, one.target, one.ratio) == (size, size // 10, one.count / size) and one.count > 0
        for field in ("numel", "target", "count", "truncated", "bytes_sent"):
            assert getattr(snapshot.total, field) == sum(getattr(one, field) for one in snapshot.buckets)
        assert snapshot.total.residual_norm == pytest.approx(np.linalg.norm(residual), rel=1e-6)
    # What is printed: buckets and total with entries, target, sent, ratio, truncated, bytes.
    lines = [line.replace(",", "").split() for line in str(stats).splitlines()]
    assert lines[0][:4] == ["mean", "of", "4", "steps"]
    assert lines[1][:5] == ["bucket", "entries", "target", "sent", "ratio"]
    printed = {name: [float(number) for number in numbers] for name, *numbers in lines[2:-1]}
    for one in (*stats.mean.buckets, stats.mean.total):
        entries, target, sent, ratio, truncated, sent_bytes = printed.pop(one.name)
        assert ratio == pytest.approx(one.ratio, rel=0.005)
        known = [one.numel, one.target, one.count, one.truncated, one.bytes_sent]
        np.testing.assert_allclose([entries, target, sent, truncated, sent_bytes], known, atol=0.5, rtol=0)
    assert not printed


@on_every_backend
def test_overflow_is_counted_and_stays_in_the_residual(backend: Backend) -> None:
    """A one-stage fit of a light tail overestimates; the room ends at k."""
    compressor = SIDCo(0.01, stages=1, distribution="gpareto", slack=1.0, warmup=None)
    worker = make_worker(backend, compressor, {"p": (100_000,)})
    bucket = worker.buckets[0]
    gradient = gradients("gaussian", 100_000, np.random.default_rng(0))
    sent = send(backend, worker, gradient).indices
    total = worker.stats().last.total
    assert total.count == sent.size == 1000 and total.truncated > 100
    above = np.count_nonzero(np.abs(gradient) > np.float32(total.threshold))
    assert total.truncated == above - 1000
    assert np.count_nonzero(np.abs(backend.numpy(bucket.buffer)) > np.float32(total.threshold)) == total.truncated


@on_every_backend
def test_a_gradient_arrives_once_per_step(backend: Backend) -> None:
    """Whatever its bucket has reached, until the step has ended."""
    worker = worker_of(backend, TopK(0.1, granularity="layer", warmup=None))

    def arrives_twice() -> None:
        with pytest.raises(RuntimeError, match="'head' arrived twice"):
            worker.arrive("head", None)

    for _ in range(2):
        bucket = worker.arrive("head", None)
        assert bucket is not None
        arrives_twice()
        message = bucket.begin().message
        arrives_twice()
        worker.advance(bucket, message)
        arrives_twice()
        end_step(worker)


def told(workers: list[Worker], bad: dict[int, list[str]], gone: int | None = None) -> Any:
    """What all ranks say at the end of a step: which gradients are not finite, and who gives it up."""
    said = [{"rank": rank, "given up": rank == gone, "bad": bad.get(rank, [])} for rank in range(len(workers))]

    def everyone(mine: Any) -> Any:
        assert mine == said[mine["rank"]]
        return said

    return everyone


@on_every_backend
def test_gradients_that_are_not_finite_are_warned_of_once_by_name_and_rank(backend: Backend) -> None:
    workers = make_workers(backend, TopK(0.1, granularity="layer", warmup=None), {"p": (300,), "q": (300,)}, workers=2)
    fine, bad = np.ones(300, np.float32), np.full(300, np.nan, np.float32)
    everyone = told(workers, {1: ["q"]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            given = [[backend.array(one) for one in arrays] for arrays in ((fine, fine), (fine, bad))]
            for worker, arrays in zip(workers, given, strict=True):
                for name, gradient in zip("pq", arrays, strict=True):
                    worker.arrive(name, gradient)
            exchange_all(backend, workers)
            assert [bool(worker.begun.bad()) for worker in workers] == [False, True]
            for worker in workers:
                worker.end_step(lambda *_: None, everyone)
    said = [str(one.message) for one in caught]
    assert [text.partition(" holds")[0] for text in said] == [
        f"horovod_sparse: rank {rank}: the gradient of 'q' on rank 1" for rank in range(2)
    ]
    # Nobody else is asked: each tells what it knows.
    alone = make_workers(backend, TopK(0.1, warmup=None), {"q": (300,)}, workers=2)
    with (
        pytest.warns(UserWarning, match="rank 0: the gradient of a parameter on another rank holds"),
        pytest.warns(UserWarning, match="rank 1: the gradient of 'q' on rank 1 holds"),
    ):
        take_step(backend, alone, [{"q": fine}, {"q": bad}])


@on_every_backend
def test_who_gives_a_step_up_is_named_and_all_go_on(backend: Backend) -> None:
    """`spoil` may come when nothing has arrived yet, or something."""
    workers = make_workers(backend, MiCRO(0.1, granularity="layer", warmup=None), SHAPES, workers=3)
    given = [gradients_of(SHAPES, np.random.default_rng(rank)) for rank in range(3)]
    take_step(backend, workers, given)
    before = [worker.state_dict() for worker in workers]
    for has_arrived in (0, 2):
        kept = [{name: backend.array(one) for name, one in arrays.items()} for arrays in given]
        for rank, (worker, arrays) in enumerate(zip(workers, kept, strict=True)):
            for number, bucket in enumerate(worker.buckets):
                if rank != 1 or number < has_arrived:
                    worker.arrive(bucket.name, arrays[bucket.name])
                else:
                    assert worker.spoil(bucket) is worker.sending(bucket)
        exchange_all(backend, workers)
        everyone = told(workers, {}, gone=1)
        for rank, worker in enumerate(workers):
            if rank == 1:
                worker.end_step(lambda *_: pytest.fail("nothing is to be written"), everyone)
            else:
                with pytest.raises(
                    RuntimeError, match=f"^rank {rank}: rank 1 has given up this step after an exception"
                ):
                    worker.end_step(lambda *_: pytest.fail("nothing is to be written"), everyone)
            assert worker.step is None
        for worker, was in zip(workers, before, strict=True):
            state = worker.state_dict()
            assert state["adaptive"] == was["adaptive"]
            for name, residual in was["residuals"].items():
                mine, theirs = backend.numpy(state["residuals"][name]), backend.numpy(residual)
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    assert all(parts for result in take_step(backend, workers, given) for parts in result.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_that_the_type_of_gradients_cannot_hold_become_infinite(dtype: torch.dtype) -> None:
    """As those of a dense average do. bfloat16 has the range of float32."""
    slots = [Slot("p", 0, 20, (20,)), Slot("q", 20, 20, (4, 5))]
    gradients = [torch.zeros(slot.shape, dtype=dtype) for slot in slots]
    sums = Entries(None, torch.tensor([1.0, 1e6]).repeat_interleave(20))
    source = DDPSource(TorchTopK(0.1), Mock(world=2), {})
    source._tensors = dict(zip("pq", gradients, strict=True))
    source._gradients = {one: one for one in gradients}
    source.write(slots, Reduced(TorchOps(), sums, 1.0, {}))
    assert [bool(one.isfinite().all()) for one in gradients] == [True, dtype != torch.float16]


@on_every_backend
def test_a_dense_step_compares_the_step_alone(backend: Backend) -> None:
    """Workers that have been in sparse steps begin a dense one if more join them: each has a state of its own."""
    workers = make_workers(backend, SIDCo(0.1, warmup=2.0), {"p": (1000,)}, workers=3)
    given, buckets = 3 * [{"p": np.ones(1000, np.float32)}], [worker.buckets[0] for worker in workers]
    for rank, bucket in enumerate(buckets):
        bucket.state.cut = 1.0 + rank
    take_step(backend, workers, given)
    assert all(bucket.is_dense for bucket in buckets)
    buckets[1].state.step += 1
    with pytest.raises(RuntimeError, match="rank 0: the ranks disagree on the state of bucket 'p'"):
        take_step(backend, workers, given)


@pytest.mark.parametrize(
    ("settings", "world", "times"),
    [
        ({}, 1, None),
        ({}, 9, None),
        ({}, 11, "1.1"),
        ({"warmup": 1.0}, 32, "3.2"),
    ],
)
def test_an_exchange_that_sends_more_than_dense_is_warned_of(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], world: int, times: str | None
) -> None:
    compressor = TopK(0.1, **{"warmup": None, **settings})
    log_start(make_worker(ORACLE, compressor, {"p": (100, 100)}, world=world), "none")
    told = [f"{compressor!r} with {world} workers sends {times} times as many bytes as a dense allreduce of float32"]
    assert [text.partition(";")[0] for text in caplog.messages] == (told if times else [])


def test_the_first_line_of_the_log_ends_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "horovod_sparse")
    for position in range(2):
        worker = make_worker(ORACLE, TopK(0.01, warmup=None), {"p": (500,)}, world=2, position=position)
        for advice in ("", "Write another line"):
            log_start(worker, "none", advice)
    line = "TopK 0.01: 1 buckets, 500 entries, 0 parameters dense, kernels none"
    assert caplog.messages == [line, f"{line}. Write another line"]
