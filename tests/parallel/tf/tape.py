"""Scenarios: gradient tapes, eager and in `tf.function`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import horovod_sparse.numpy as reference
import horovod_sparse.tensorflow.keras as hvd_keras
from horovod_sparse.exchange.protocols import Collective, Exchange, Exchanging, Round, Sender
from horovod_sparse.exchange.received import summed
from horovod_sparse.numpy import SparseAllreduce, Union
from horovod_sparse.tensorflow import MomentumCorrection, NoOp, RandomBlock, SIDCo, TopK
from horovod_sparse.tensorflow.host import HostDriver
from tests.harness.stairs import Halving, dense_until

from ..scenario import TF_2, TF_4, TF_GLOO_2, TF_SETS_4, scenario, warned
from .common import (
    COMPRESSORS,
    MakeCompression,
    assert_identical,
    everyone,
    normals,
    raised,
    reduce,
    reduced,
    selected,
    tape_gradient,
    variables,
)
from .keras3 import BATCH, EXCHANGES, LOSS, data, small_model

SHAPES = {"first": (40, 50), "second": (3000,), "third": (20, 5, 9), "small": (30,)}
SETTINGS: dict[str, Any] = {"granularity": 16_000}


@dataclass(frozen=True)
class OfOne(Exchange):
    """A user's own exchange: one worker chooses the entries, another one in each step, and all values are summed there."""

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [Round("allreduce", capacity), Round("allreduce", capacity + 17, "float32")]

    def collectives(self, bucket: Sender) -> Exchanging:
        message = bucket.ops.pack_indices(bucket.select().indices, [], bucket.capacity)
        if bucket.position != bucket.step % bucket.world:
            message[:] = 0
        message = yield Collective("allreduce", message)
        indices = bucket.ops.union(message, 1, 0, bucket.numel)
        assert indices is not None
        return (yield from summed(bucket, indices, bucket.capacity, bucket.step))


POLICIES: dict[str, MakeCompression] = {
    "own-exchange": lambda **settings: TopK(0.01, warmup=None, exchange=OfOne(), **settings),
    "warm-up-shared": lambda **settings: RandomBlock(0.01, warmup=2.0, **settings),
    "warm-up-union": lambda **settings: TopK(0.01, exchange=Union(), warmup=2.0, **settings),
    "schedule": lambda **settings: SIDCo(Halving(0.25, 0.01), **settings),
    "momentum": lambda **settings: TopK(0.01, momentum=MomentumCorrection(0.9), warmup=None, **settings),
    "unmasked": lambda **settings: TopK(
        0.01, momentum=MomentumCorrection(0.9, masking=False), exclude=["third"], warmup=None, **settings
    ),
    "clipped": lambda **settings: TopK(0.01, clip=0.5, warmup=None, **settings),
    "no-residual": lambda **settings: TopK(0.01, residual=False, warmup=None, **settings),
    "slack": lambda **settings: SIDCo(0.01, slack=3.0, warmup=None, **settings),
    "layer": lambda **settings: TopK(0.01, warmup=None, **{**settings, "granularity": "layer"}),
    "model": lambda **settings: TopK(0.01, warmup=None, **{**settings, "granularity": "model"}),
}


def oracle(compression: Any) -> SparseAllreduce:
    """The NumPy path with the same settings."""
    cls = getattr(reference, type(compression).__name__)
    other = cls.__new__(cls)
    vars(other).update({name: value for name, value in vars(compression).items() if not name.startswith("_")})
    return SparseAllreduce(MPI.COMM_WORLD, other)


def gradients_of(step: int) -> dict[str, np.ndarray]:
    """This rank's, of `SHAPES`."""
    return {name: normals(shape, step=step, rank=hvd.rank()) for name, shape in SHAPES.items()}


def graph_reducer(compression: Any, weights: dict[str, tf.Variable], **arguments: Any) -> Any:
    """`reduced`, as a traced function of the gradients."""

    @tf.function
    def function(gradients: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return reduced(compression, weights, gradients, **arguments)

    return function


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in arrays.items()}


def assert_lockstep(compression: Any, steps: int) -> None:
    """Eager and in a function that is traced once it gives what NumPy gives, to the last bit."""
    expect = oracle(compression)
    weights = variables(SHAPES)
    function, kept = graph_reducer(compression, weights), []
    for step in range(steps):
        gradients = gradients_of(step)
        expected = expect(gradients)
        if step % 2:
            got = reduce(compression, weights, gradients)
        else:
            got = function(tensors(gradients))
            kept.append((got, expected))
        np.testing.assert_equal(got, expected, f"step {step}")
        assert_identical(list(got.values()))
    for got, expected in kept:
        np.testing.assert_equal(got, expected, "memory was used again too early")
    assert function.experimental_get_tracing_count() == 1
    assert compression.stats().steps == steps
    theirs, mine = expect.stats().mean.total, compression.stats().mean.total
    assert (theirs.count, theirs.bytes_sent) == (mine.count, mine.bytes_sent) and mine.bytes_sent > 0


_EACH = {name: COMPRESSORS[name] for name in EXCHANGES}
"""One compressor for each exchange: the code that selects is NumPy's own."""


# The oracle needs MPI.
@scenario(TF_2, TF_4, cases={name: (make,) for name, make in (_EACH | POLICIES).items()})
def tensorflow_gives_what_numpy_gives(make: MakeCompression) -> None:
    assert_lockstep(make(**SETTINGS), 8)


@scenario(TF_SETS_4, quick=False)
def a_process_set_reduces_for_itself() -> None:
    even = hvd.add_process_set([0, 2])
    try:
        weights = variables(SHAPES)
        gradients = gradients_of(0)
        everyones = everyone(gradients)
        got = reduce(NoOp(min_numel=0), weights, gradients, process_set=even)
        for name in SHAPES:
            members = (everyones[0], everyones[2])
            expected = np.mean([one[name] for one in members], axis=0) if hvd.rank() in (0, 2) else gradients[name]
            np.testing.assert_allclose(got[name], expected, rtol=1e-6)
    finally:
        hvd.remove_process_set(even)


@scenario(TF_2, cases={"list": (True,), "number": (False,)})
def groups_are_buckets(as_list: bool) -> None:
    weights = variables(SHAPES)
    groups = [[weights["first"], weights["third"]], [weights["second"]]] if as_list else 2
    compression = TopK(0.01, warmup=None)
    function = graph_reducer(compression, weights, groups=groups)
    for step in range(3):
        function(tensors(gradients_of(step)))
    buckets = [{*bucket.slots} for bucket in compression.source.driver.feedback.compressed]
    expected = [{"first", "third"}, {"second"}] if as_list else [{"first", "second"}, {"third"}]
    assert sorted(map(sorted, buckets)) == sorted(map(sorted, expected)), buckets


@scenario(TF_2, cases={"bucket": ("model", ["second"]), "layer": ("layer", ["second"]), "all": ("model", [*SHAPES])})
def what_waits_for_a_variable_without_gradient_waits_on(granularity: Any, without: list[str]) -> None:
    """Whether its gradient is None, or it is not among the variables, also if none is left."""
    weights = variables(SHAPES)
    compression = TopK(0.05, granularity=granularity, warmup=None)
    given = {name: gradient for name, gradient in gradients_of(0).items() if name not in without}
    assert reduce(compression, weights, given).keys() == given.keys()
    reduce(compression, weights, gradients_of(1))
    for step, some in ((2, weights), (3, {name: weights[name] for name in given})):
        kept = compression.state_dict()["residuals"]
        gradients = gradients_of(step)
        got = reduce(compression, some, {name: gradients[name] for name in given})
        assert got.keys() == given.keys()
        after = compression.state_dict()["residuals"]
        assert kept["second"].any()
        for name, residual in kept.items():
            # Nothing waits of a variable that is reduced dense.
            assert np.array_equal(residual, after[name]) == (name in without or not residual.any()), name
    # With the next gradient it goes on.
    got = reduce(compression, weights, gradients_of(4))
    left = compression.state_dict()["residuals"]["second"]
    sent = sum(everyone(after["second"] + gradients_of(4)["second"] - left))
    np.testing.assert_allclose(got["second"], sent / hvd.size(), rtol=1e-5, atol=1e-6)
    assert_identical(list(got.values()))


@scenario(TF_2)
def a_gradient_that_one_rank_alone_lacks_is_an_error() -> None:
    """As with stock Horovod, which waits for it: a variable would step on the others alone."""
    weights = variables(SHAPES)
    compression = TopK(0.05, granularity="model", warmup=None)
    reduce(compression, weights, gradients_of(0))
    gradients = gradients_of(1)
    if hvd.rank() == 1:
        del gradients["second"]
        message = raised(tf.errors.OpError, lambda: reduce(compression, weights, gradients))
        assert "rank 1: variable 'second' must have a gradient" in message, message
    else:
        reduce(compression, weights, gradients)


@scenario(TF_2, TF_4, cases={"graph": (True,), "eager": (False,)})
def a_gradient_that_is_not_finite_is_not_finite_anywhere(graph: bool) -> None:
    """The parameters of its bucket are NaN, and the step has never been."""
    weights = variables(SHAPES)
    compression = TopK(0.05, warmup=None, **SETTINGS)
    function: Any = partial(reduced, compression, weights)
    function = tf.function(function) if graph else function
    function(tensors(gradients_of(0)))
    (bucket,) = (set(one.slots) for one in compression.source.driver.feedback.buckets if "first" in one.slots)
    kept = compression.state_dict()
    bad = gradients_of(1)
    if hvd.rank() == 1:
        bad["first"][3, 3] = np.nan
    texts: list[str] = []
    for _ in range(2):
        found: dict[str, Any] = {}
        texts += warned(lambda found=found: found.update(function(tensors(bad))))
        for name, one in found.items():
            assert np.isnan(one).all() if name in bucket else np.isfinite(one).all(), name
        after = compression.state_dict()
        for name, residual in kept["residuals"].items():
            np.testing.assert_allclose(after["residuals"][name], residual, atol=1e-6)
        np.testing.assert_equal(after["adaptive"], kept["adaptive"])
    assert compression.stats().steps == 1
    named = "'first' on rank 1" if hvd.rank() == 1 else "on another rank"
    assert len(texts) == 1 and named in texts[0], texts
    assert_identical(list(function(tensors(gradients_of(2))).values()))


@scenario(TF_2, TF_GLOO_2, cases={"tape": (True,), "keras": (False,)})
def nothing_is_traced_again_in_an_eager_step(tape: bool) -> None:
    """Neither where gradients are None."""
    compression = TopK(0.05, warmup=2.0)
    model, sgd = small_model(), keras.optimizers.SGD(0.05)
    optimizer = sgd if tape else hvd_keras.DistributedOptimizer(sgd, compression=compression)
    frozen = keras.Variable(np.zeros(400, np.float32), name="frozen")
    everything = [*model.trainable_variables, frozen]

    def step(number: int) -> None:
        inputs, labels = data([number])
        with tf.GradientTape() as plain:
            loss = LOSS(labels, model(inputs)) + (0.0 if number else tf.reduce_sum(frozen.value))
        one = hvd.DistributedGradientTape(plain, compression=compression) if tape else plain
        optimizer.apply(one.gradient(loss, [variable.value for variable in everything]), everything)

    counts = []
    # It is called while a function is traced.
    with patch.object(HostDriver, "reduce", autospec=True, side_effect=HostDriver.reduce) as traced:
        for number in range(30):
            step(number)
            counts.append(traced.call_count)
    assert counts[0] == 1 and counts[1:] == [2] * 29, counts


def _train(model: keras.Model, compression: Any, *, graph: bool) -> Any:
    """Train for a few steps, with batches of three sizes; return the step, which is a traced function if `graph`."""

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        found = tape_gradient(lambda: LOSS(y, model(x, training=True)), model.trainable_variables, compression)
        for weight, gradient in zip(model.trainable_variables, found, strict=True):
            weight.assign_sub(0.05 * gradient)

    function = tf.function(step) if graph else step
    for number in range(15):
        function(*(tf.constant(array[: BATCH - number % 3]) for array in data([number])))
    return function


@scenario(TF_2, TF_4)
def a_retraced_function_keeps_the_residuals() -> None:
    """Of Keras variables: steps that are not traced give the same."""
    models = [small_model(), small_model()]
    for model, graph in zip(models, (True, False), strict=True):
        compression = TopK(0.01, warmup=None)
        function = _train(model, compression, graph=graph)
        assert not graph or function.experimental_get_tracing_count() == 3
        assert_identical(model.trainable_variables)
        assert compression.stats().steps == 15
        assert compression.state_dict()["residuals"].keys() == {one.path for one in model.trainable_variables}
    for mine, theirs in zip(*(model.trainable_variables for model in models), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-6)


@scenario(TF_2)
def a_compressor_of_every_step_is_warned_of() -> None:
    """Once: it takes its residuals along."""
    weights = variables(SHAPES)
    seen = warned(lambda: [reduce(TopK(0.04, warmup=None), weights, gradients_of(number)) for number in range(12)])
    seen = [text for text in seen if "outside of the step" in text]
    assert len(seen) == 1 and "TopK(0.04" in seen[0].replace("ratio=", ""), seen


@scenario(TF_2)
def layers_can_join_later() -> None:
    """Between others, also in a function that is traced again because of it. The dense steps of what joins begin then."""
    early, shapes = ("first", "third"), {name: SHAPES[name] for name in ("first", "second", "third")}
    compression = TopK(0.05, granularity="layer", warmup=2.0)
    function = graph_reducer(compression, variables(shapes))

    def step(number: int, names: Sequence[str], dense: Sequence[str] = ()) -> None:
        given = [{name: normals(shapes[name], step=number, rank=rank) for name in names} for rank in range(2)]
        got = function(tensors(given[hvd.rank()]))
        for name in dense:
            np.testing.assert_array_equal(got[name], (given[0][name] + given[1][name]) / 2, err_msg=name)

    step(0, early, dense=early)
    for number in range(1, 4):
        step(number, early)
    kept = compression.state_dict()["residuals"]["first"]
    step(4, [*shapes], dense=["second"])
    state = compression.state_dict()["residuals"]
    assert kept.any() and not np.array_equal(state["first"], kept)
    assert state.keys() == {"first", "second", "third"} and not state["second"].any()
    for number in (5, 6, 7):
        step(number, [*shapes])
    assert compression.state_dict()["residuals"]["second"].any()


@scenario(TF_2)
def two_tapes_share_a_compression() -> None:
    """A generator and a discriminator, each with its own variables."""
    one, other = variables({"a": (600,)}), variables({"b": (700,)})
    compression = TopK(0.05, warmup=None)
    for step in range(3):
        for weights in (one, other):
            gradients = {name: normals(v.shape, step=step, rank=hvd.rank()) for name, v in weights.items()}
            reduce(compression, weights, gradients)
    assert compression.state_dict()["residuals"].keys() == {"a", "b"}
    assert compression.stats().steps == 3


@scenario(TF_2)
def misuse_is_refused() -> None:
    weights = variables(SHAPES)
    gradients = gradients_of(0)
    compression = TopK(0.05, warmup=None)
    reduce(compression, weights, gradients)
    message = raised(ValueError, lambda: reduce(compression, weights, gradients, op=hvd.Sum))
    assert "op must be the same" in message and "got hvd.Sum after hvd.Average" in message, message
    for make, arguments, text in (
        (TopK, {"op": hvd.Adasum}, "must be hvd.Average or hvd.Sum"),
        (partial(TopK, lr_in_residual=True), {}, "lr_in_residual must be False"),
    ):
        assert text in raised(ValueError, partial(reduce, make(0.1, warmup=None), weights, gradients, **arguments))
    for other, text in ((TopK, "must be an instance"), ("TopK", "of horovod_sparse.tensorflow")):
        assert text in raised(TypeError, partial(reduce, other, weights, gradients))
    spectrum = variables({"spectrum": (400,)}, tf.complex64)
    message = raised(ValueError, lambda: reduce(TopK(0.1, warmup=None), spectrum, {"spectrum": np.ones(400)}))
    assert "variable 'spectrum' must be of a floating-point type, got complex64" in message
    # A compression serves tapes or one optimizer.
    of_an_optimizer = TopK(0.05, warmup=None)
    hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=of_an_optimizer)
    distribute = partial(hvd.DistributedOptimizer, keras.optimizers.SGD(0.1), compression=compression)
    for refused in (partial(reduce, of_an_optimizer, weights, gradients), distribute):
        assert "compression must serve one optimizer" in raised(ValueError, refused)
    old = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    message = raised(ValueError, lambda: hvd.DistributedOptimizer(old, compression=TopK(0.05, warmup=None)))
    assert "optimizer must be one of Keras 3 with a sparsifier" in message, message
    hvd.DistributedOptimizer(old)
    traced = tf.function(lambda: reduced(TopK(0.1, warmup=None), weights, gradients))
    assert "make it once, outside" in raised(RuntimeError, traced)
    step = tf.function(lambda: reduce(compression, weights, gradients), jit_compile=True)
    plain = tf.function(lambda: reduce(compression, weights, gradients))
    outer = tf.function(lambda: plain(), jit_compile=True)
    for compiled in (step, outer):
        message = raised(ValueError, compiled)
        assert "jit_compile must be False in tf.function" in message, message
    tf.config.run_functions_eagerly(True)
    try:
        message = raised(RuntimeError, lambda: reduce(compression, weights, gradients))
    finally:
        tf.config.run_functions_eagerly(False)
    assert "tf.config.run_functions_eagerly must be False" in message
    # Whatever was refused, the ranks are still in step.
    assert_identical(list(reduce(compression, weights, gradients_of(1)).values()))


@scenario(TF_2, TF_4)
def ranks_that_differ_raise() -> None:
    weights = variables(SHAPES)
    ratio = 0.01 if hvd.rank() else 0.02
    message = raised(ValueError, lambda: reduce(TopK(ratio, warmup=None), weights, gradients_of(0)))
    assert "ratio=0.01" in message and "ratio=0.02" in message
    mine = variables({"a": (300 + hvd.rank(),)})
    gradients = {"a": np.ones(300 + hvd.rank(), np.float32)}
    assert "'parameters'" in raised(ValueError, lambda: reduce(TopK(0.1, warmup=None), mine, gradients))
    op = hvd.Sum if hvd.rank() else hvd.Average
    message = raised(ValueError, lambda: reduce(TopK(0.1, warmup=None), weights, gradients_of(0), op=op))
    assert "hvd.Sum" in message and "hvd.Average" in message


@scenario(TF_2, TF_4)
def compressors_of_one_rank_alone_do_not_matter() -> None:
    """Whether they are never used, or used where the other ranks use another one, which raises on all."""
    weights = variables(SHAPES)
    if hvd.rank() == 1:
        for _ in range(3):
            hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=TopK(0.05, warmup=None))
    assert_lockstep(TopK(0.05, warmup=None, **SETTINGS), 2)
    mine, others = TopK(0.05, warmup=None), TopK(0.05, warmup=None)
    reduce(mine, weights, gradients_of(0))
    # On rank 0 a variable joins that the compression has not seen.
    joining = mine, variables({"joining": (400,)}), {"joining": np.ones(400, np.float32)}
    message = raised(ValueError, lambda: reduce(*((others, weights, gradients_of(0)) if hvd.rank() else joining)))
    assert "'optimizer'" in message, message
    assert_lockstep(TopK(0.05, warmup=None, **SETTINGS), 2)


@scenario(
    TF_2,
    cases={
        **{name: (COMPRESSORS[name],) for name in ("SIDCo", "MiCRO", "DGC")},
        # There is no residual, but momentum.
        "dense": (partial(TopK, 0.05, momentum=MomentumCorrection(0.9), exclude=["*"], warmup=None),),
    },
)
def training_goes_on_from_a_state(make: MakeCompression) -> None:
    compression, weights = make(**SETTINGS), variables(SHAPES)
    for step in range(5):
        reduce(compression, weights, gradients_of(step))
    state = copy.deepcopy(compression.state_dict())
    expected = [reduce(compression, weights, gradients_of(step)) for step in (5, 6)]
    before_first, while_running = make(**SETTINGS), make(**SETTINGS)
    function = graph_reducer(while_running, weights)
    function(tensors(gradients_of(9)))
    for one in (before_first, while_running, compression):
        one.load_state_dict(state)
    for number, step in enumerate((5, 6)):
        for other in (before_first, compression):
            np.testing.assert_equal(reduce(other, weights, gradients_of(step)), expected[number])
        np.testing.assert_equal(function(tensors(gradients_of(step))), expected[number])


@scenario(TF_2)
def a_plain_allreduce_is_right() -> None:
    x = tf.constant(normals((40, 50), step=0, rank=hvd.rank()))
    chosen = everyone(selected(x.numpy().reshape(-1), 20))
    allreduce = partial(hvd.allreduce, compression=TopK(0.01, warmup=None), name="plain", op=hvd.Sum)
    for run in (allreduce, tf.function(lambda x: allreduce(x))):
        np.testing.assert_allclose(run(x).numpy().reshape(-1), np.sum(chosen, axis=0), rtol=1e-6)


@scenario(TF_2)
def variables_with_the_same_name_are_told_apart() -> None:
    weights = [tf.Variable(tf.zeros(400), name="w"), tf.Variable(tf.zeros(500), name="w")]
    compression = TopK(0.1, warmup=None)
    tape_gradient(lambda: tf.reduce_sum(weights[0]) + tf.reduce_sum(weights[1]), weights, compression)
    assert {n: a.shape for n, a in compression.state_dict()["residuals"].items()} == {"w": (400,), "w_1": (500,)}


@scenario(TF_2)
def all_buckets_are_begun_before_any_is_waited_for() -> None:
    """Small variables share a message."""
    shapes = SHAPES | {f"small{number}": (7, 3) for number in range(30)}
    compression, weights = TopK(0.05, granularity="layer", warmup=None), variables(shapes)
    function = graph_reducer(compression, weights)
    graph = function.get_concrete_function({name: tf.ones(shape) for name, shape in shapes.items()}).graph
    calls = [op for op in graph.get_operations() if op.type in ("PyFunc", "EagerPyFunc")]
    collectives = {op for op in graph.get_operations() if op.type in ("HorovodAllgather", "HorovodAllreduce")}
    assert Counter(op.type for op in collectives) == {"HorovodAllgather": 3, "HorovodAllreduce": 1}

    def waits_for_a_collective(op: Any) -> bool:
        seen, left = set(), [op]
        while left:
            one = left.pop()
            if one in collectives:
                return True
            if one not in seen:
                seen.add(one)
                left += [tensor.op for tensor in one.inputs] + list(one.control_inputs)
        return False

    # One call starts the step, one begins each bucket.
    assert sum(not waits_for_a_collective(op) for op in calls) == 1 + 4


@scenario(TF_2)
def what_is_not_needed_is_freed() -> None:
    compression, weights = TopK(0.05, warmup=None), variables(SHAPES)
    function = graph_reducer(compression, weights)
    function(tensors(gradients_of(0)))
    reduce(compression, weights, gradients_of(1))
    engine = weakref.ref(compression.source.driver)
    assert engine() is not None
    del compression, function
    gc.collect()
    assert engine() is None


def _incomplete(state: dict[str, Any]) -> dict[str, Any]:
    del state["residuals"]["first"], state["adaptive"]["first"]
    return state


def _of_another_shape(state: dict[str, Any]) -> dict[str, Any]:
    state["residuals"]["first"] = state["residuals"]["first"].reshape(-1)
    return state


@scenario(
    TF_2,
    cases={
        "pairs": (partial(TopK, 0.05),),
        "union": (partial(TopK, 0.05, exchange=Union()),),
        "shared": (partial(RandomBlock, 0.05),),
    },
)
def warm_ups_that_are_dense_until_different_steps_raise_on_all(make: MakeCompression) -> None:
    weights, compression = variables(SHAPES), dense_until(3, make, hvd.size)(**SETTINGS)
    for number in range(2):
        reduce(compression, weights, gradients_of(number))
    state = compression.state_dict()
    reduce(compression, weights, gradients_of(2))
    if hvd.rank() == 1:
        compression.load_state_dict(state)
    message = raised(tf.errors.OpError, lambda: reduce(compression, weights, gradients_of(3)))
    assert "Mismatched" in message, message
    compression.load_state_dict(state)
    for number in range(2, 6):
        assert_identical(list(reduce(compression, weights, gradients_of(number)).values()))


@scenario(
    TF_2,
    TF_4,
    cases={"incomplete": (_incomplete, "'first'"), "of another shape": (_of_another_shape, "of another shape")},
)
def a_wrong_state_on_one_rank_raises_on_all(spoil: Callable[[dict[str, Any]], dict[str, Any]], missing: str) -> None:
    weights = variables(SHAPES)
    trained = TopK(0.05, warmup=None)
    reduce(trained, weights, gradients_of(0))
    state = trained.state_dict()
    compression = TopK(0.05, warmup=None)
    compression.load_state_dict(spoil(copy.deepcopy(state)) if hvd.rank() == 1 else state)
    message = raised(ValueError, lambda: reduce(compression, weights, gradients_of(1)))
    assert missing in message and "problem" in message
    # Nothing was planned, and what was right still waits.
    if hvd.rank() == 1:
        compression.load_state_dict(state)
    expected, got = (reduce(one, weights, gradients_of(1)) for one in (trained, compression))
    np.testing.assert_equal(got, expected)
    assert_identical(list(got.values()))


@scenario(TF_2)
def embeddings_may_have_other_gradients_in_every_step() -> None:
    """Sparse or dense, on one rank or on all, or none at all, whatever else is in that rank's graph."""
    table = tf.Variable(tf.zeros((50, 20)), name="table")
    kept = TopK(1.0, warmup=None)

    def step(kind: str, compression: Any = kept, **arguments: Any) -> Any:
        def loss() -> tf.Tensor:
            if kind != "sparse":
                return tf.reduce_sum(table) if kind == "dense" else tf.constant(0.0)
            if hvd.rank():
                tf.gather(table, [3])
            return tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 7]))

        return tape_gradient(loss, [table], compression, op=hvd.Sum, **arguments)[0]

    for kinds in [("sparse", "sparse"), ("dense", "sparse"), ("dense", "dense"), ("none", "none")]:
        if kinds == ("none", "none"):
            assert step("none") is None
            continue
        expected = np.zeros((50, 20), np.float32)
        for kind in kinds:
            expected += 1.0 if kind == "dense" else 0.0
            expected[[1, 7]] += 1.0 if kind == "sparse" else 0.0
        np.testing.assert_array_equal(tf.convert_to_tensor(step(kinds[hvd.rank()])).numpy(), expected)
    assert isinstance(step("sparse"), tf.IndexedSlices)
    assert isinstance(step("sparse", TopK(1.0, warmup=None), sparse_as_dense=True), tf.Tensor)
    momentum = TopK(0.01, momentum=0.9, warmup=None)
    assert "sparse_as_dense must be True" in raised(ValueError, lambda: step("sparse", momentum))


@scenario(TF_2)
def constant_gradients_are_reduced_in_every_step() -> None:
    """Though TensorFlow could work them out when it optimises the graph, on the one rank that has them."""
    weights = variables({"big": (400,), "small": (20,), "table": (50, 20)})
    big, small, table = sources = list(weights.values())
    compression = NoOp()

    def gradients(scale: float) -> Any:
        def loss() -> Any:
            return scale * (tf.reduce_sum(big) + tf.reduce_sum(small) + tf.reduce_sum(tf.gather(table, [3])))

        return tape_gradient(loss, sources, compression)

    constant = tf.function(lambda: gradients(1.0))
    for step in range(4):
        *dense, slices = gradients(float(step)) if hvd.rank() else constant()
        for one in (*dense, tf.convert_to_tensor(slices)[3]):
            np.testing.assert_array_equal(one, np.full(one.shape, (1.0 + step) / 2))


@scenario(TF_2)
def sources_may_be_a_single_variable_but_nothing_else() -> None:
    weight = tf.Variable(tf.zeros(500), name="w")

    def gradient(sources: Any) -> Any:
        return tape_gradient(lambda: tf.reduce_sum(weight * (hvd.rank() + 1.0)), sources, NoOp())

    np.testing.assert_allclose(gradient(weight).numpy(), 1.5)
    np.testing.assert_allclose(gradient([weight])[0].numpy(), 1.5)
    assert "sources must be variables" in raised(TypeError, lambda: gradient([tf.constant(1.0)]))


@scenario(TF_2)
def local_sources_may_be_keras_variables() -> None:
    model = small_model()
    x, y = (tf.constant(array) for array in data([0]))
    with tf.GradientTape(persistent=True) as plain:
        loss = LOSS(y, model(x))
    expected = plain.gradient(loss, [weight.value for weight in model.trainable_variables])
    tape = hvd.DistributedGradientTape(plain, compression=NoOp(min_numel=0), scale_local_gradients=False)
    tape.register_local_source(model.trainable_variables[0])
    local, others = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    np.testing.assert_allclose(local[0][1].numpy(), expected[0].numpy(), rtol=1e-6)
    assert len(local) == 1 and len(others) == len(expected) - 1
    assert_identical([gradient.numpy() for _, gradient in others])
