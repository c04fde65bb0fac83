"""The pure-graph path of TensorFlow, in lockstep with the NumPy path, in this process: other workers are messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from table import DEGENERATE, KINDS, SCALES_WITHOUT_SQUARES, gradients

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow", reason="Horovod was built without TensorFlow", exc_type=ImportError)

from horovod.tensorflow import mpi_ops  # noqa: E402

from horovod_sparse.compressors.momentum import MomentumCorrection  # noqa: E402
from horovod_sparse.compressors.schedules import warmup  # noqa: E402
from horovod_sparse.core.layout import Layout, Parameter, Slot, plan  # noqa: E402
from horovod_sparse.exchange import protocols  # noqa: E402
from horovod_sparse.exchange.wire import NOT_FINITE, PADDING  # noqa: E402
from horovod_sparse.kernels.pool import BufferPool  # noqa: E402
from horovod_sparse.numpy.ops import NumpyOps  # noqa: E402
from horovod_sparse.tensorflow.compressors import (  # noqa: E402
    DGC,
    GaussianK,
    MiCRO,
    NoOp,
    RandomBlock,
    RandomK,
    RedSync,
    SIDCo,
    Threshold,
    TopK,
)
from horovod_sparse.tensorflow.graph_engine.pipeline import GraphPipeline  # noqa: E402
from horovod_sparse.tensorflow.host import HostPipeline  # noqa: E402
from horovod_sparse.tensorflow.step import Step  # noqa: E402

Make = Callable[..., Any]

ROWS: dict[str, Make] = {
    "topk": TopK,
    **{
        f"sidco-{distribution}-{adapt}-{stages}": functools.partial(
            SIDCo, distribution=distribution, adapt=adapt, stages=stages
        )
        for distribution in ("exponential", "gpareto")
        for adapt in ("paper", "robust")
        for stages in (1, 3)
    },
    "sidco-guarded-3": functools.partial(SIDCo, adapt="guarded", stages=3),
    "gaussiank": GaussianK,
    "gaussiank-paper": functools.partial(GaussianK, refine="paper"),
    "redsync-trim": RedSync,
    "redsync-bisect": functools.partial(RedSync, method="bisect"),
    "threshold": lambda ratio, **settings: Threshold(-np.log(ratio), ratio=ratio, **settings),
}
QUICK = ("topk", "sidco-exponential-robust-3", "sidco-gpareto-robust-3", "sidco-gpareto-paper-1")
QUICK += ("gaussiank", "redsync-bisect", "threshold")
"""Every operation of the graph is in one of them; to trace a graph takes long."""


def only_full(holds: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.full] if holds else []


for_all = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=only_full(name not in QUICK)) for name, make in ROWS.items()]
)

SETTINGS: dict[str, dict[str, Any]] = {
    "layer": {"granularity": "layer"},
    "bucket": {"granularity": "bucket", "bucket_bytes": 3000},
    "model": {"granularity": "model"},
    "no-residual": {"residual": False},
    "float64": {"residual_dtype": "float64"},
    "capacity": {"slack": 3.0},
    "exclude": {"exclude": ["*c"]},
    "clip": {"clip_norm": 0.7},
    "momentum": {"momentum_correction": MomentumCorrection(0.9), "exclude": ["*c"]},
    "nesterov": {"momentum_correction": MomentumCorrection(0.9, nesterov=True, masking=False), "exclude": ["*c"]},
}

TINY = float(np.finfo(np.float32).tiny)


class Collectives:
    """Horovod's for one worker: what the others send is given."""

    def __init__(self, world: int, position: int) -> None:
        self.world = world
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
    """An engine and the function that runs its steps."""

    def __init__(
        self, engine: type, compressor: Any, shapes: Mapping[str, Sequence[int]], world: int = 1, position: int = 0
    ) -> None:
        self.compressor = compressor
        self.collectives = Collectives(world, position)
        self.engine = engine(compressor, self.collectives, world=world, position=position, rank=position)
        dtype = compressor.residual_dtype or "float32"
        parameters = [Parameter(name, tuple(shape), dtype, "cpu") for name, shape in shapes.items()]
        self.dense = [p for p in parameters if compressor.leaves_dense(p.name, p.numel)]
        self.engine.add_buckets(plan([p for p in parameters if p not in self.dense], compressor))
        layouts = [Layout((Slot(p.name, 0, p.numel, p.shape),), dtype) for p in self.dense]
        self.engine.add_dense(layouts, lambda name: None)
        self.run = tf.function(self._run, autograph=False, reduce_retracing=True)

    def _run(
        self, gradients: dict[str, Any], others: list[Any], frozen: frozenset[str] = frozenset()
    ) -> tuple[dict[str, Any], list[Any]]:
        self.collectives.others, self.collectives.sent, self.collectives.dense_names = others, [], []
        dense = {p.name for p in self.dense}
        reduced = self.engine.reduce(
            Step(
                buckets=[bucket.layout for bucket in self.engine.buckets],
                gradients={name: gradient for name, gradient in gradients.items() if name not in dense},
                dense={name: gradient for name, gradient in gradients.items() if name in dense},
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
        self,
        gradients: Mapping[str, np.ndarray],
        others: Sequence[np.ndarray] = (),
        frozen: frozenset[str] = frozenset(),
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The reduced gradients and what was sent."""
        given = {name: tf.constant(gradient) for name, gradient in gradients.items()}
        reduced, sent = self.run(given, [tf.constant(o) for o in others], frozen)
        return {name: tensor.numpy() for name, tensor in reduced.items()}, [message.numpy() for message in sent]

    def state(self) -> dict[str, Any]:
        return self.engine.state_dict()


def pair(make: Make, shapes: Mapping[str, Sequence[int]], ratio: float = 0.1, **options: Any) -> tuple[Worker, Worker]:
    """A worker of each path; `world` and `position` are the workers', everything else the compressor's."""
    place = {name: options.pop(name) for name in ("world", "position") if name in options}
    options = {"min_numel": 0, **options}
    graph = Worker(GraphPipeline, make(ratio, graph=True, **options), shapes, **place)
    return graph, Worker(HostPipeline, make(ratio, **options), shapes, **place)


def same_step(
    graph: Worker,
    host: Worker,
    gradients: Mapping[str, np.ndarray],
    others: Sequence[np.ndarray] = (),
    frozen: frozenset[str] = frozenset(),
) -> dict[str, np.ndarray]:
    """Both paths' step, which must come to the same; what it reduces to."""
    (got, sent), (expected, expected_sent) = (worker.step(gradients, others, frozen) for worker in (graph, host))
    for mine, one in zip(sent, expected_sent, strict=True):
        np.testing.assert_array_equal(mine, one, strict=True)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_array_equal(got[name], gradient, strict=True, err_msg=name)
    assert_same_state(graph.state(), host.state())
    return got


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("residuals", "velocities"):
        assert got[kind].keys() == expected[kind].keys()
        for name, array in expected[kind].items():
            np.testing.assert_array_equal(got[kind][name], array, strict=True, err_msg=name)
    assert got["adaptive"].keys() == expected["adaptive"].keys()
    for name, adaptive in expected["adaptive"].items():
        # Sums are added up in another order.
        numbers = got["adaptive"][name]
        assert numbers.keys() == adaptive.keys()
        assert all(numbers[n] == (pytest.approx(x) if isinstance(x, float) else x) for n, x in adaptive.items()), name


def other_messages(worker: Worker, rng: np.random.Generator) -> list[np.ndarray]:
    """What the other workers might send."""
    ops, world = NumpyOps(), worker.collectives.world
    messages = []
    for bucket in worker.engine.buckets:
        numel, room = bucket.layout.numel, bucket.capacity
        parts = []
        for _ in range(world - 1):
            indices = np.sort(rng.permutation(numel)[: rng.integers(0, room + 1)])
            parts.append(ops.pack(indices, rng.normal(size=indices.size).astype(np.float32), room))
        messages.append(np.concatenate(parts) if parts else np.zeros((0, 2), np.int32))
    return messages


@functools.cache
def kept_pair(make: Make, sizes: tuple[int, ...], ratio: float, **options: Any) -> tuple[Worker, Worker]:
    """Made once, with a bucket for each size: to trace a bucket takes longer than many of its steps."""
    return pair(make, {str(size): (size,) for size in sizes}, ratio, granularity="layer", **options)


def renewed(workers: tuple[Worker, Worker]) -> tuple[Worker, Worker]:
    """As before their first step."""
    for worker in workers:
        worker.engine.reset()
    return workers


@for_all
def test_every_kind_of_gradient_is_reduced_as_by_numpy(make: Make) -> None:
    """Another worker's messages beside the own ones."""
    rng = np.random.default_rng(0)
    for kind in KINDS:
        graph, host = renewed(kept_pair(make, (2000,), 0.01, world=3, position=1))
        for _ in range(6):
            same_step(graph, host, {"2000": gradients(kind, 2000, rng)}, other_messages(graph, rng))
        mine, others = graph.engine.stats(), host.engine.stats()
        assert mine.steps == others.steps == 6
        for got, expected in zip(
            (*mine.last.buckets, *mine.mean.buckets), (*others.last.buckets, *others.mean.buckets), strict=True
        ):
            for name in vars(expected):
                value = getattr(expected, name)
                assert getattr(got, name) == (value if name == "name" else pytest.approx(value, nan_ok=True)), name


SIZES = tuple(sorted({gradient.size for gradient in DEGENERATE.values()}))
SMALL = [
    pytest.param(1, 1.0, "float32", marks=pytest.mark.full),
    (7, 0.5, "float64"),
    pytest.param(60, 0.1, "float32", marks=pytest.mark.full),
    pytest.param(200, 0.01, "float32", marks=pytest.mark.full),
]


@for_all
def test_degenerate_gradients_are_reduced_as_by_numpy(make: Make) -> None:
    """TensorFlow takes denormal numbers for zeros; so does NumPy when TensorFlow calls it."""
    for degenerate in DEGENERATE.values():
        graph, host = renewed(kept_pair(make, SIZES, 0.02))
        for step in range(4):
            scaled = degenerate * np.float32(1.0 if step == 0 else 0.01)
            given = {str(size): np.zeros(size, np.float32) for size in SIZES}
            given[str(degenerate.size)] = np.where(np.abs(scaled) < TINY, 0, scaled)
            same_step(graph, host, given)


@pytest.mark.parametrize(
    "name", ["sidco-exponential-robust-3", "sidco-gpareto-robust-3", "gaussiank", "redsync-bisect"]
)
def test_scales_without_squares_are_reduced_as_by_numpy(name: str) -> None:
    rng = np.random.default_rng(7)
    graph, host = pair(ROWS[name], {"p": (500,)}, 0.1, residual_dtype="float64")
    for scale in SCALES_WITHOUT_SQUARES:
        for worker in (graph, host):
            worker.engine.reset()
        for _ in range(4):
            same_step(graph, host, {"p": rng.laplace(size=500) * scale})


@for_all
def test_denormal_entries_count_as_zero(make: Make) -> None:
    gradient = np.full(50, 1e-40, np.float32)
    gradient[[3, 9]] = -2.0, 1.0
    graph, _ = pair(make, {"p": (50,)}, 0.04)
    reduced = graph.step({"p": gradient})[0]["p"]
    assert set(np.flatnonzero(np.abs(reduced) > TINY)) <= {3, 9}
    assert not (np.abs(np.delete(graph.state()["residuals"]["p"], [3, 9])) >= TINY).any()


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "name",
    [
        "sidco-exponential-robust-3",
        pytest.param("topk", marks=pytest.mark.full),
        pytest.param("threshold", marks=pytest.mark.full),
    ],
)
def test_every_setting_means_what_it_means_to_numpy(name: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    shapes = {"a": (40, 10), "b": (7, 9, 4), "c": (50,)}
    graph, host = pair(ROWS[name], shapes, 0.02, world=2, **options)
    for _ in range(5):
        dtypes = {"a": np.float32, "b": np.float16, "c": np.float64}
        given = {n: rng.laplace(size=shape).astype(dtypes[n]) for n, shape in shapes.items()}
        same_step(graph, host, given, other_messages(graph, rng))


# Far enough from denormal numbers that no difference of two is one.
FINITE = st.floats(-(2.0**100), 2.0**100, width=32).map(lambda x: 0.0 if abs(x) < 2.0**-60 else x)


@for_all
@pytest.mark.parametrize(("size", "ratio", "dtype"), SMALL)
@given(data=st.data())
def test_whatever_the_gradient_it_is_reduced_as_by_numpy(
    make: Make, size: int, ratio: float, dtype: str, data: st.DataObject
) -> None:
    graph, host = renewed(kept_pair(make, (size,), ratio, residual_dtype=dtype))
    for gradient in data.draw(st.lists(npst.arrays(np.float32, size, elements=FINITE), min_size=1, max_size=3)):
        same_step(graph, host, {str(size): gradient})


@pytest.mark.parametrize("name", ["sidco-exponential-robust-3", "sidco-gpareto-robust-3"])
def test_a_stage_that_leaves_no_more_than_k_entries_is_the_last(name: str) -> None:
    for parts in ({1.0: 29, 1e30: 5}, {0.1: 48, 4.0: 10, 100.0: 2}, {0.1: 48, 8.0: 8, 100.0: 4}):
        given = np.repeat(np.array(list(parts), np.float32), list(parts.values()))
        graph, host = renewed(kept_pair(ROWS[name], (60,), 0.1, residual_dtype="float32"))
        same_step(graph, host, {"60": np.pad(given, (0, 60 - given.size))})


def test_what_has_no_room_waits() -> None:
    graph, host = pair(lambda ratio, **options: Threshold(0.5, ratio=ratio, **options), {"p": (100,)}, 0.05, slack=2.0)
    gradient = np.arange(100, dtype=np.float32)
    sent = same_step(graph, host, {"p": gradient})["p"]
    assert np.flatnonzero(sent).tolist() == list(range(90, 100))
    assert graph.engine.stats().last.total.truncated == 89


# --- state ---


@pytest.mark.parametrize("name", ["topk", "sidco-gpareto-robust-3", "gaussiank"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_state_continues_in_either_path(name: str, swap: bool) -> None:
    rng = np.random.default_rng(2)
    options = {"momentum_correction": MomentumCorrection(0.5), "exclude": ["*c"]}
    shapes = {"a": (30, 20), "b": (400,), "c": (20,)}
    draw = lambda: {n: gradients("student", int(np.prod(s)), rng).reshape(s) for n, s in shapes.items()}  # noqa: E731
    first, second = pair(ROWS[name], shapes, granularity="layer", **options)[:: -1 if swap else 1]
    for _ in range(4):
        first.step(draw())
    state = first.state()
    second.engine.load_state_dict(state)
    assert_same_state(second.state(), state)
    for _ in range(3):
        given = draw()
        expected, got = first.step(given)[0], second.step(given)[0]
        for n, reduced in expected.items():
            np.testing.assert_array_equal(got[n], reduced)
        assert_same_state(second.state(), first.state())
    kept = first.state()["residuals"]
    for worker in (first, second):
        worker.engine.rescale(2.0)
    # Cuts and thresholds are in the residual's unit.
    assert_same_state(second.state(), first.state())
    for n, residual in second.state()["residuals"].items():
        np.testing.assert_array_equal(residual, kept[n] * 2)
    second.engine.reset()
    fresh = pair(ROWS[name], shapes, granularity="layer", **options)[0]
    assert_same_state(second.state(), fresh.state())
    assert second.engine.stats().steps == 0


def test_the_state_of_another_algorithm_is_refused() -> None:
    graph, _ = pair(TopK, {"p": (100,)})
    other, _ = pair(GaussianK, {"p": (100,)})
    with pytest.raises(ValueError, match="another algorithm saved it"):
        graph.engine.load_state_dict(other.state())


def test_a_copy_of_the_state_shares_no_memory() -> None:
    graph, _ = pair(TopK, {"p": (100,)})
    before = graph.state()["residuals"]["p"]
    graph.step({"p": np.arange(100, dtype=np.float32)})
    assert not before.any()


def test_a_state_that_waits_for_an_optimizer_is_a_copy() -> None:
    state = pair(TopK, {"p": (100,)})[0].state()
    compression = TopK(0.1)
    compression.load_state_dict(state)
    for handed_over in (state, compression.state_dict()):
        handed_over["residuals"]["p"].fill(7)
        assert not compression.state_dict()["residuals"]["p"].any()


# --- memory ---


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tensorflow_takes_reduced_gradients_without_a_copy(dtype: str) -> None:
    arrays = [BufferPool().lend(numel, dtype) for numel in (1, 1000, 100_003)]
    take = tf.function(lambda: tf.numpy_function(lambda: arrays, [], [dtype] * len(arrays)), autograph=False)
    for array, tensor in zip(arrays, take(), strict=True):
        array.fill(2)
        np.testing.assert_array_equal(tensor, array)


def test_reduced_gradients_that_are_kept_do_not_change() -> None:
    rng = np.random.default_rng(7)
    for worker in pair(TopK, {"p": (1000,)}):
        kept = [worker.run({"p": tf.constant(gradients("laplace", 1000, rng))}, [])[0]["p"] for _ in range(4)]
        before = [tensor.numpy().copy() for tensor in kept]
        for _ in range(4):
            worker.step({"p": gradients("laplace", 1000, rng)})
        for tensor, array in zip(kept, before, strict=True):
            np.testing.assert_array_equal(tensor, array)


# --- gradients that are not finite ---


@pytest.mark.parametrize(
    ("make", "not_finite"),
    [
        pytest.param(make, how, id=f"{name}-{how}", marks=only_full(name not in quick))
        for how, quick in (("raise", QUICK), ("propagate", ("topk",)))
        for name, make in ROWS.items()
    ],
)
def test_a_step_with_a_bad_gradient_fails_as_a_whole(make: Make, not_finite: str) -> None:
    rng = np.random.default_rng(3)
    shapes = {"good": (300,), "bad": (200,)}
    graph, host = pair(make, shapes, granularity="layer", not_finite=not_finite, world=2)

    def draw() -> dict[str, np.ndarray]:
        return {name: gradients("laplace", *shape, rng) for name, shape in shapes.items()}

    same_step(graph, host, draw(), other_messages(graph, rng))
    kept, poisoned = graph.state()["residuals"], draw()
    poisoned["bad"][17] = np.inf
    if not_finite == "propagate":
        reduced = same_step(graph, host, poisoned, other_messages(graph, rng))
        assert np.isnan(reduced["bad"]).all() and np.isfinite(reduced["good"]).all()
    else:
        others = other_messages(graph, rng)
        with pytest.raises(tf.errors.InvalidArgumentError, match="rank 0: the gradient of parameter bad holds NaN"):
            graph.step(poisoned, others)
        with pytest.raises(Exception, match="parameter 'bad' holds NaN"):
            host.step(poisoned, others)
        assert_same_state(graph.state(), host.state())
    after = graph.state()["residuals"]
    for name, gradient in poisoned.items():
        np.testing.assert_array_equal(
            after[name], kept[name] + np.where(np.isfinite(gradient), gradient, np.float32(0))
        )
    same_step(graph, host, draw(), other_messages(graph, rng))


def test_a_bad_gradient_of_another_rank_or_of_a_dense_parameter_fails_the_step_too() -> None:
    rng = np.random.default_rng(4)
    graph, host = pair(
        TopK, {"p": (300,), "q": (10,)}, exclude=["q"], world=2, momentum_correction=MomentumCorrection()
    )

    def draw() -> dict[str, np.ndarray]:
        return {"p": gradients("laplace", 300, rng), "q": gradients("laplace", 10, rng)}

    same_step(graph, host, draw(), other_messages(graph, rng))
    given, others = draw(), other_messages(graph, rng)
    others[0][:] = PADDING, 0
    others[0][0, 0] = NOT_FINITE
    cause = "some parameter in bucket .?p.? of another rank"
    for poisoned, expected in ((given, cause), ({**given, "q": given["q"] * np.float32(np.nan)}, "parameter .?q.?")):
        for worker in (graph, host):
            with pytest.raises(Exception, match=f"{expected}.* holds NaN"):
                worker.step(poisoned, others if poisoned is given else other_messages(graph, np.random.default_rng(5)))
        assert_same_state(graph.state(), host.state())
    same_step(graph, host, draw(), other_messages(graph, rng))


def test_a_velocity_of_a_dense_parameter_that_overflows_fails_the_step_and_stays_finite() -> None:
    graph, host = pair(
        TopK, {"p": (300,), "q": (3,)}, exclude=["q"], momentum_correction=MomentumCorrection(nesterov=False)
    )
    largest = np.finfo(np.float32).max
    given = {"p": np.ones(300, np.float32), "q": np.array([0.4, -0.4, 0.1], np.float32) * largest}
    same_step(graph, host, given)
    for worker in (graph, host):
        with pytest.raises(Exception, match=r"parameter .?q.? holds NaN or infinity, or overflows"):
            worker.step(given)
    assert_same_state(graph.state(), host.state())
    np.testing.assert_array_equal(host.state()["velocities"]["q"][:2], [largest, -largest])


@pytest.mark.parametrize(
    "indices",
    [[300], [2**31 - 1], [3, 3], [3, 2], [3, PADDING, 5], [PADDING, 5], [-3], [3, -3], [3, NOT_FINITE]],
    ids=str,
)
def test_damaged_messages_are_refused(indices: list[int]) -> None:
    graph, _ = pair(TopK, {"p": (300,)}, world=2)
    others = other_messages(graph, np.random.default_rng(0))
    others[0][:] = PADDING, 0
    others[0][: len(indices), 0] = indices
    with pytest.raises(tf.errors.InvalidArgumentError, match="the message of worker 1 for bucket p is damaged"):
        graph.step({"p": np.ones(300, np.float32)}, others)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have 60 rows together"):
        graph.step({"p": np.ones(300, np.float32)}, [others[0][:-1]])


# --- what cannot be done is refused when it is asked for ---


class Shared(TopK):
    """The selection is known, and the exchange is not."""

    exchange = property(lambda self: protocols.shared_indices)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "graph": (lambda: TopK(0.1, graph=1), "graph must be True or False, got 1"),
    "union": (lambda: TopK(0.1, union=True, graph=True), "union must not be True"),
    "micro": (lambda: MiCRO(0.1, graph=True), "compression must not be 'MiCRO'"),
    "randomk": (lambda: RandomK(0.1, graph=True), "compression must not be 'RandomK'"),
    "randomblock": (lambda: RandomBlock(0.1, graph=True), "compression must not be 'RandomBlock'"),
    "dgc": (lambda: DGC(0.1, graph=True), "compression must not be 'DGC'"),
    "noop": (lambda: NoOp(graph=True), "compression must not be 'NoOp'"),
    "auto": (lambda: SIDCo(0.1, graph=True), "stages must not be 'auto'.*use stages=3"),
    "gamma": (lambda: SIDCo(0.1, stages=3, distribution="gamma", graph=True), "distribution must not be 'gamma'"),
    "schedule": (lambda: TopK(warmup(0.1, end=0.01, steps=5), graph=True), "ratio must not be .*use a number"),
    "dense-steps": (lambda: TopK(0.1, dense_steps=2, graph=True), "dense_steps must not be 2"),
    "values": (lambda: TopK(0.1, values="bfloat16", graph=True), "values must not be 'bfloat16'"),
    "balanced": (lambda: TopK(0.1, balanced=True, graph=True), "balanced must not be True.*use balanced=False"),
    "hierarchical": (
        lambda: TopK(0.1, hierarchical=2, graph=True),
        "hierarchical must not be 2.*use hierarchical=False",
    ),
    "exchange": (lambda: Shared(0.1, graph=True), "union must not be True.*the graph exchanges pairs only"),
    "discardable": (lambda: TopK(0.1, discardable=True, graph=True), "discardable must not be True.*leave graph=False"),
    "learning-rate": (lambda: TopK(0.1, lr_in_residual=True, graph=True), "lr_in_residual must not be True"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_selection_of_the_users_own_is_refused() -> None:
    class Own(TopK):
        def select(self, *args: Any) -> Any:
            return super().select(*args)

    with pytest.raises(ValueError, match="compression must not be 'Own'"):
        Own(0.1, graph=True)


def test_ranks_compare_the_path() -> None:
    assert TopK(0.1, graph=True).settings()["graph"] is True
    assert "graph=False" in repr(TopK(0.1))


# --- TensorFlow operations alone ---


def operations(graph: Any) -> set[str]:
    """The types of all operations of a function and of those that it calls."""
    definition = graph.as_graph_def(add_shapes=False)
    functions = definition.library.function
    return {node.op for node in definition.node} | {node.op for f in functions for node in f.node_def}


PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc", "NumpyFunction"}


@for_all
def test_no_graph_calls_python(make: Make) -> None:
    graph, host = pair(make, {"p": (300,), "q": (20,)}, exclude=["q"], clip_norm=1.0)
    given = {"p": tf.zeros(300), "q": tf.zeros(20)}
    assert not operations(graph.run.get_concrete_function(given, [], frozenset()).graph) & PYTHON
    assert operations(host.run.get_concrete_function(given, [], frozenset()).graph) & PYTHON
    compress = tf.function(lambda x: graph.compressor.compress(x)[0])
    with pytest.warns(UserWarning, match="sent dense"):
        assert not operations(compress.get_concrete_function(tf.zeros(500)).graph) & PYTHON


@for_all
@pytest.mark.filterwarnings("ignore:.*sent dense")
def test_compress_selects_what_numpy_does(make: Make) -> None:
    graph, host = make(0.1, graph=True, min_numel=5), make(0.1, min_numel=5)
    rng = np.random.default_rng(5)
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        tensor = tf.cast(tf.constant(rng.laplace(size=(20, 30))), dtype)
        got, context = graph.compress(tensor)
        assert context is None and got.dtype == dtype and got.shape == (20, 30)
        np.testing.assert_array_equal(got.numpy(), host.compress(tensor)[0].numpy())
    for left in (tf.constant([1.0, np.nan] * 10), tf.ones(4), tf.range(20)):
        np.testing.assert_array_equal(graph.compress(left)[0].numpy(), left.numpy())


@pytest.mark.filterwarnings("ignore:.*sent dense")
def test_compress_needs_a_known_shape() -> None:
    compression = TopK(0.1, graph=True)
    function = tf.function(lambda x: compression.compress(x)[0], input_signature=[tf.TensorSpec([None])])
    with pytest.raises(ValueError, match="tensor must have a known shape"):
        function(tf.zeros(500))


def test_gradients_may_be_jitted_and_then_reduced() -> None:
    graph, host = pair(ROWS["sidco-exponential-robust-3"], {"p": (400,)})
    gradient = tf.function(lambda x: x * tf.abs(x), jit_compile=True)
    reduce = tf.function(lambda x: graph.run({"p": gradient(x)}, [])[0]["p"])
    given = gradients("laplace", 400, np.random.default_rng(6))
    expected = host.step({"p": gradient(tf.constant(given)).numpy()})[0]["p"]
    np.testing.assert_array_equal(reduce(tf.constant(given)).numpy(), expected)
