"""The pipeline that TensorFlow calls from a graph, in lockstep with the NumPy oracle. Other workers are messages."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backend import ORACLE
from driver import make_pipeline
from table import BACKENDS, gradients

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from horovod.tensorflow import mpi_ops  # noqa: E402

from horovod_sparse.compressors.momentum import Clip, MomentumCorrection  # noqa: E402
from horovod_sparse.core.intake import Arrived  # noqa: E402
from horovod_sparse.core.layout import Layout, Parameter, layouts_of  # noqa: E402
from horovod_sparse.tensorflow import host  # noqa: E402
from horovod_sparse.tensorflow.compressors import SIDCo, TopK  # noqa: E402
from horovod_sparse.tensorflow.host import HostPipeline, Step  # noqa: E402
from horovod_sparse.tensorflow.reducer import Reducer  # noqa: E402

Given = Mapping[str, np.ndarray]
SHAPES = {"a": (40, 10), "b": (300,), "c": (20,)}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize(
    ("chosen", "variable", "threads"),
    [(5, "3", 5), (0, "3", 3), (0, "0", os.cpu_count()), (0, None, os.cpu_count())],
    ids=["chosen", "variable", "variable_0", "nothing"],
)
def test_kernels_use_as_many_threads_as_tensorflow(
    monkeypatch: pytest.MonkeyPatch, chosen: int, variable: str | None, threads: int
) -> None:
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: chosen)
    if variable is None:
        monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    else:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", variable)
    assert host._threads() == threads


# --- two workers that must agree: the pipeline in a graph, and the oracle's ---


class Collectives:
    """Horovod's for one worker: what the others send is given."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.others: list[Any] = []
        """Their messages, by bucket: concatenated in rank order."""
        self.sent: list[Any] = []
        self.dense_names: list[str] = []
        """Of the dense collectives of a step."""

    def allgather(self, message: Any, name: str) -> Any:
        others = self.others[int(name.split(".")[0])] if self.others else tf.zeros([0, 2], tf.int32)
        before = tf.shape(message)[0] * self.position
        self.sent.append(message)
        return tf.concat([others[:before], message, others[before:]], 0)

    def dense(self, tensor: Any, name: str, op: Any, predivide: float) -> Any:
        self.dense_names.append(name)
        return tensor + tensor


class Worker:
    """The pipeline in a graph, and the function that runs its steps."""

    def __init__(self, compressor: Any, shapes: Mapping[str, Sequence[int]], world: int, position: int) -> None:
        self.collectives = Collectives(position)
        self.engine = HostPipeline(compressor, self.collectives, world=world, position=position, rank=position)
        sparse, layouts = parted(compressor, shapes)
        self.dense = [layout.name for layout in layouts]
        self.engine.add_buckets(layouts_of(sparse, compressor))
        self.engine.add_dense(layouts, lambda name: None)
        self.run = tf.function(self._run, autograph=False, reduce_retracing=True)

    def _run(
        self, gradients: dict[str, Any], others: list[Any], frozen: frozenset[str] = frozenset()
    ) -> tuple[dict[str, Any], list[Any]]:
        self.collectives.others, self.collectives.sent, self.collectives.dense_names = others, [], []
        reduced = self.engine.reduce(
            Step(
                buckets=[bucket.layout for bucket in self.engine.buckets],
                gradients={name: gradient for name, gradient in gradients.items() if name not in self.dense},
                dense={name: gradient for name, gradient in gradients.items() if name in self.dense},
                others={},
                dtypes=dict.fromkeys(frozen, tf.float32) | {n: g.dtype for n, g in gradients.items()},
                rate=tf.constant(np.nan, tf.float64),
                scale=tf.constant(np.nan, tf.float64),
                op=mpi_ops.Average,
                predivide=1.0,
                frozen=frozen,
            )
        )
        return reduced, [tf.identity(message) for message in self.collectives.sent]

    def step(
        self, gradients: Given, others: Sequence[np.ndarray] = (), frozen: frozenset[str] = frozenset()
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The reduced gradients and what was sent."""
        given = {name: tf.constant(gradient) for name, gradient in gradients.items()}
        reduced, sent = self.run(given, [tf.constant(o) for o in others], frozen)
        return {name: tensor.numpy() for name, tensor in reduced.items()}, [message.numpy() for message in sent]


class Oracle:
    """The same worker without TensorFlow and without compiled kernels."""

    def __init__(self, compressor: Any, shapes: Mapping[str, Sequence[int]], world: int, position: int) -> None:
        sparse, layouts = parted(compressor, shapes)
        self.engine = make_pipeline(
            ORACLE, compressor, {}, layouts=layouts_of(sparse, compressor), world=world, position=position
        )
        self.engine.add_dense(layouts, lambda name: np.zeros(1, np.float32))
        self.position = position

    def step(
        self, gradients: Given, others: Sequence[np.ndarray] = (), frozen: frozenset[str] = frozenset()
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        pipeline, reduced, sent = self.engine, {}, []
        pipeline.start_step(gradients.values() if pipeline.compressor.holds_back else ())
        for name in frozen:
            pipeline.drop(name)
        for number, bucket in enumerate(pipeline.buckets):
            arrived = [Arrived(name, gradients.get(name)) for name in bucket.slots]
            pipeline.arrive_together(bucket, arrived)
            message = bucket.begin().message.copy()
            sent.append(message)
            elsewhere = others[number] if others else message[:0]
            before = len(message) * self.position
            everyone = np.concatenate([elsewhere[:before], message, elsewhere[before:]])

            def write(slots: Any, result: Any, bucket: Any = bucket) -> None:
                flats = [np.empty(slot.numel, bucket.layout.residual_dtype) for slot in slots]
                result.write([(slot.offset, flat) for slot, flat in zip(slots, flats, strict=True)])
                for slot, flat in zip(slots, flats, strict=True):
                    dtype = gradients[slot.name].dtype if slot.name in gradients else np.float32
                    reduced[slot.name] = flat.reshape(slot.shape).astype(dtype)

            assert pipeline.advance(bucket, everyone, pipeline.divisor, write) is None
        for name in [name for name in gradients if name not in pipeline.bucket_of]:
            wide = "float64" if gradients[name].dtype == np.float64 else "float32"
            clips = pipeline.compressor.clip is not None
            mine = pipeline.intake.clipped(gradients[name], wide) if clips else gradients[name]
            reduced[name] = 2 * mine.astype(gradients[name].dtype)
            pipeline.finish_dense(name, reduced[name])
        pipeline.end_step()
        return reduced, sent


def parted(compressor: Any, shapes: Mapping[str, Sequence[int]]) -> tuple[list[Parameter], list[Layout]]:
    """The parameters in buckets, and the layouts of those that are reduced dense."""
    dtype = compressor.residual_dtype_of(np.zeros(0, np.float32))
    parameters = [Parameter(name, tuple(shape), dtype, "cpu") for name, shape in shapes.items()]
    dense = [p for p in parameters if compressor.leaves_dense(p.name, p.numel)]
    return [p for p in parameters if p not in dense], [Layout.of([(p.name, p.shape)], dtype) for p in dense]


def pair(
    make: Callable[..., Any],
    shapes: Mapping[str, Sequence[int]],
    ratio: float = 0.1,
    world: int = 1,
    position: int = 0,
    **options: Any,
) -> tuple[Worker, Oracle]:
    options = {"min_numel": 0, "warmup": None, **options}
    return Worker(make(ratio, **options), shapes, world, position), Oracle(
        make(ratio, **options), shapes, world, position
    )


def same_step(
    worker: Worker,
    oracle: Oracle,
    given: Given,
    others: Sequence[np.ndarray] = (),
    frozen: frozenset[str] = frozenset(),
) -> dict[str, np.ndarray]:
    """Both workers' step, which must come to the same; what it reduces to."""
    (got, sent), (expected, expected_sent) = (one.step(given, others, frozen) for one in (worker, oracle))
    for mine, message in zip(sent, expected_sent, strict=True):
        np.testing.assert_array_equal(mine, message, strict=True)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_array_equal(got[name], gradient, strict=True, err_msg=name)
    assert_same_state(worker, oracle)
    return got


def assert_same_state(worker: Worker, oracle: Oracle) -> None:
    got, expected = worker.engine.state_dict(), oracle.engine.state_dict()
    for kind in ("residuals", "velocities"):
        assert got[kind].keys() == expected[kind].keys()
        for name, array in expected[kind].items():
            np.testing.assert_array_equal(got[kind][name], array, strict=True, err_msg=name)
    assert got["adaptive"].keys() == expected["adaptive"].keys()
    for name, adaptive in expected["adaptive"].items():
        # The kernels add up in another order.
        numbers = got["adaptive"][name]
        assert numbers.keys() == adaptive.keys()
        assert all(numbers[n] == (pytest.approx(x) if isinstance(x, float) else x) for n, x in adaptive.items()), name


def draw(rng: np.random.Generator, shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, np.ndarray]:
    return {name: gradients("laplace", int(np.prod(shape)), rng).reshape(shape) for name, shape in shapes.items()}


def messages(worker: Worker, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """What one other worker might send; without `rng`, nothing."""
    sent = []
    for bucket in worker.engine.buckets:
        count = 0 if rng is None else rng.integers(0, bucket.capacity + 1)
        indices = np.sort(np.random.default_rng(count).permutation(bucket.numel)[:count])
        values = np.zeros(count, np.float32) if rng is None else rng.normal(size=count).astype(np.float32)
        sent.append(ORACLE.ops.pack(indices, values, bucket.capacity))
    return sent


# --- usual steps ---

SETTINGS: dict[str, dict[str, Any]] = {
    "layer": {"granularity": "layer"},
    "bucket": {"granularity": 3000},
    "model": {"granularity": "model", "position": 1},
    "no-residual": {"residual": False},
    "float64": {"residual": "float64"},
    "capacity": {"slack": 3.0},
    "exclude": {"exclude": ["*c"]},
    "clip": {"clip": 0.7},
    "momentum": {"momentum": MomentumCorrection(0.9), "exclude": ["*c"]},
    "nesterov": {"momentum": MomentumCorrection(0.9, nesterov=True, masking=False), "exclude": ["*c"]},
}


@pytest.mark.parametrize("make", [SIDCo, pytest.param(TopK, marks=pytest.mark.full)])
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_means_what_it_means_to_numpy(make: Any, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    shapes = {"a": (40, 10), "b": (7, 9, 4), "c": (50,)}
    dtypes = {"a": np.float32, "b": np.float16, "c": np.float64}
    worker, oracle = pair(make, shapes, 0.02, **{"world": 2, **options})
    for _ in range(5):
        given = {n: rng.laplace(size=shape).astype(dtypes[n]) for n, shape in shapes.items()}
        same_step(worker, oracle, given, messages(worker, rng))
    mine, expected = worker.engine.stats(), oracle.engine.stats()
    assert mine.steps == expected.steps == 5
    assert vars(mine.mean.total) == pytest.approx(vars(expected.mean.total), nan_ok=True)


# --- memory ---


@pytest.mark.filterwarnings("ignore:.*sent dense")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_compress_keeps_the_largest_entries(dtype: str, traced: bool) -> None:
    compressor = TopK(0.1, min_numel=5, warmup=None)
    run = lambda x: compressor.compress(x)[0]  # noqa: E731
    function = tf.function(run, input_signature=[tf.TensorSpec(None, dtype)]) if traced else run
    tensor = tf.cast(tf.constant(np.random.default_rng(5).laplace(size=(20, 30))), dtype)
    got, flat = function(tensor), tf.cast(tensor, tf.float64).numpy().reshape(-1)
    assert got.dtype == dtype and got.shape == (20, 30)
    expected = np.zeros(600)
    largest = np.argsort(-np.abs(flat), kind="stable")[:60]
    expected[largest] = flat[largest]
    np.testing.assert_array_equal(tf.cast(got, tf.float64).numpy().reshape(-1), expected)
    for left in ([1.0, np.nan] * 10, np.ones(4)):
        np.testing.assert_array_equal(tf.cast(function(tf.constant(left, dtype)), tf.float64).numpy(), left)


def test_reduced_gradients_that_are_kept_do_not_change() -> None:
    rng, (worker, _) = np.random.default_rng(7), pair(TopK, {"p": (1000,)})
    kept = [worker.run({"p": tf.constant(gradients("laplace", 1000, rng))}, [])[0]["p"] for _ in range(4)]
    before = [tensor.numpy().copy() for tensor in kept]
    for _ in range(4):
        worker.step({"p": gradients("laplace", 1000, rng)})
    for tensor, array in zip(kept, before, strict=True):
        np.testing.assert_array_equal(tensor, array)


def test_a_copy_of_the_state_shares_no_memory() -> None:
    worker, _ = pair(TopK, {"p": (100,)})
    before = worker.engine.state_dict()["residuals"]["p"]
    worker.step({"p": np.arange(100, dtype=np.float32)})
    assert not before.any()
    compression = TopK(0.1, warmup=None)
    compression.load_state_dict(pair(TopK, {"p": (100,)})[0].engine.state_dict())
    compression.state_dict()["residuals"]["p"].fill(7)
    assert not compression.state_dict()["residuals"]["p"].any(), "it waits for an optimizer"


# --- gradients that are not finite ---


@pytest.mark.parametrize("not_finite", ["raise", "propagate"])
def test_a_step_with_a_bad_gradient_fails_as_a_whole(not_finite: str) -> None:
    rng = np.random.default_rng(3)
    shapes = {"good": (300,), "bad": (200,)}
    worker, oracle = pair(TopK, shapes, granularity="layer", not_finite=not_finite, world=2)
    same_step(worker, oracle, draw(rng, shapes), messages(worker, rng))
    kept, poisoned = worker.engine.state_dict()["residuals"], draw(rng, shapes)
    poisoned["bad"][17] = np.inf
    others = messages(worker, rng)
    if not_finite == "propagate":
        reduced = same_step(worker, oracle, poisoned, others)
        assert np.isnan(reduced["bad"]).all() and np.isfinite(reduced["good"]).all()
    else:
        for one, error in ((worker, tf.errors.OpError), (oracle, FloatingPointError)):
            with pytest.raises(error, match="rank 0: the gradient of parameter 'bad' holds NaN"):
                one.step(poisoned, others)
        assert_same_state(worker, oracle)
    after = worker.engine.state_dict()["residuals"]
    for name, gradient in poisoned.items():
        expected = kept[name] + np.where(np.isfinite(gradient), gradient, np.float32(0))
        np.testing.assert_array_equal(after[name], expected)
    same_step(worker, oracle, draw(rng, shapes), messages(worker, rng))


# --- clipping ---


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_finite_entries_are_clipped_by_their_norm(scope: str, dtype: str, bad: float | None) -> None:
    rng = np.random.default_rng(0)
    options = {"exclude": ["c"], "not_finite": "propagate", "granularity": "layer"}
    worker, oracle = pair(TopK, SHAPES, world=2, clip=Clip(0.5, scope), **options)
    given = {name: gradient.astype(dtype) for name, gradient in draw(rng).items()}
    if dtype == "float64":
        # The squares of these leave the range of float64, and they that of the residual.
        given["b"][7] = 1e200
    if bad is not None:
        given["a"][3, 4] = bad
    same_step(worker, oracle, given, messages(worker, rng))
    if bad is not None and dtype != "float64":
        kept = worker.engine.state_dict()["residuals"]
        finite = {n: np.where(np.isfinite(g), g, 0).astype(np.float64) for n, g in given.items()}
        norms = {name: np.linalg.norm(gradient) for name, gradient in finite.items()}
        for name in ("a", "b"):
            norm = norms[name] if scope == "layer" else np.linalg.norm(list(norms.values()))
            assert norm > 0.5 * np.sqrt(2)
            expected = finite[name] * (0.5 * np.sqrt(2) / norm)
            np.testing.assert_allclose(kept[name], expected, rtol=1e-6, atol=1e-30)


# --- steps that are given up ---


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("make", [TopK, functools.partial(SIDCo, stages=3, warmup=None)], ids=["topk", "sidco"])
def test_a_step_that_is_given_up_loses_nothing_and_says_nothing_twice(make: Any, number: int) -> None:
    """Another worker's message for one of two buckets is too short, so that the step ends there."""
    rng = np.random.default_rng(2)
    worker, _ = pair(make, SHAPES, world=2, granularity="layer", exclude=["c"])
    silent = messages(worker)
    for _ in range(3):
        worker.step(draw(rng), silent)
    before, lost, given = worker.engine.state_dict(), draw(rng), draw(rng)
    short = [message[:-1] if index == number else message for index, message in enumerate(silent)]
    with pytest.raises(tf.errors.OpError):
        worker.step(lost, short)
    assert worker.engine.stats().steps == 3
    reduced, _ = worker.step(given, silent)
    after = worker.engine.state_dict()
    for name in ("a", "b"):
        # The other worker has sent nothing, and the mean is of both.
        total = 2 * reduced[name] + after["residuals"][name]
        kept = before["residuals"][name]
        assert any((total == start + given[name]).all() for start in (kept, kept + lost[name]))
    assert worker.engine.stats().steps == 4
    assert all(adaptive["step"] == 4 for adaptive in after["adaptive"].values())
    assert not worker.engine._reduced


# --- frozen parameters ---


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("correction", [None, MomentumCorrection(0.9)])
def test_what_waits_for_a_frozen_parameter_is_dropped(granularity: str, correction: Any) -> None:
    rng = np.random.default_rng(3)
    options = {"exclude": ["c"], "momentum": correction}
    worker, oracle = pair(TopK, SHAPES, world=2, granularity=granularity, **options)
    for _ in range(3):
        same_step(worker, oracle, draw(rng), messages(worker, rng))
    given = draw(rng)
    del given["b"]
    assert worker.engine.state_dict()["residuals"]["b"].any()
    for _ in range(2):
        reduced = same_step(worker, oracle, given, messages(worker), frozenset({"b"}))
        assert not reduced["b"].any()
        state = worker.engine.state_dict()
        assert not any(state[part].get("b", np.zeros(1)).any() for part in ("residuals", "velocities"))
        assert state["residuals"]["a"].any()
    same_step(worker, oracle, draw(rng), messages(worker, rng))


# --- many small parameters ---


def test_small_parameters_share_a_message() -> None:
    rng = np.random.default_rng(4)
    shapes = {f"small{number}": (7, 3) for number in range(30)} | {"large": (400_000,), "last": (5,)}
    worker, _ = pair(TopK, shapes, exclude=["*"], momentum=MomentumCorrection(0.5))
    for _ in range(2):
        given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        before = worker.engine.state_dict()["velocities"]
        reduced, _ = worker.step(given)
        for name, gradient in given.items():
            np.testing.assert_array_equal(reduced[name], np.float32(0.5) * before[name] + 2 * gradient)
    assert worker.collectives.dense_names == ["dense.0", "dense.1", "dense.2"]


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_a_sum_that_its_type_cannot_hold_fails_the_step(dtype: Any) -> None:
    backend = next(one for one in BACKENDS if one.name == "tensorflow")
    pipeline: Any = make_pipeline(backend, TopK(0.1, warmup=None), {"p": (2,)})
    pipeline.start_step()
    pipeline._reduced["p"] = [np.array([1.0, 1e6], np.float32)]
    (written,) = pipeline._write_out("p", [dtype], np.zeros(1))
    assert written.dtype == dtype.as_numpy_dtype
    if dtype == tf.float32:
        pipeline.end_step()
        return
    with pytest.raises(FloatingPointError, match="parameter 'p' is finite, but beyond the range of its type"):
        pipeline.end_step()


def test_a_state_that_is_read_after_a_step_that_raised_lacks_nothing() -> None:
    worker = Worker(TopK(0.1, min_numel=0, warmup=None), SHAPES, world=1, position=0)
    pipeline, given = worker.engine, {name: np.full(shape, 3.0, np.float32) for name, shape in SHAPES.items()}
    pipeline.start_step()
    for name, gradient in given.items():
        bucket = pipeline.arrive(name, gradient)
        if bucket is not None:
            bucket.begin()
    # What a step raises between its collectives leaves it so.
    read = Reducer.between_steps(SimpleNamespace(pipeline=pipeline))  # type: ignore[arg-type]
    assert read is not None
    for name, kept in read.state_dict()["residuals"].items():
        np.testing.assert_array_equal(kept, given[name])
