"""Elastic jobs: residuals follow `hvd.elastic.TensorFlowState` and `TensorFlowKerasState` of Horovod.

`seam` replaces their methods, and `run`. This also corrects what keeps them from working with TensorFlow 2 and Keras 3:

- `TensorFlowState` broadcasts its variables when it is made, while other workers wait elsewhere, and never again.
- `TensorFlowKerasState` calls `optimizer.variables()`, which is no function in Keras 3.
- `run` takes errors that are not Horovod's for the end of the training.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import global_process_set
from horovod.tensorflow import elastic as stock_elastic
from horovod.tensorflow import mpi_ops
from numpy.typing import NDArray

from horovod_sparse.core.elastic import WorkersBefore
from horovod_sparse.core.state import holds_anything
from horovod_sparse.tensorflow.compressors import TensorflowCompressor
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.names import plain
from horovod_sparse.tensorflow.reducer import Reducer
from horovod_sparse.tensorflow.wrappers import broadcast_variables

_MODULES = ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")
"""Modules that offer `elastic.run`. Those that are not imported yet will import it from the first."""

Method = Callable[..., Any]


class Workers(WorkersBefore):
    """The workers of a TensorFlow job."""

    def __init__(self) -> None:
        super().__init__()
        self._collectives = Collectives(global_process_set)

    def rank(self) -> int:
        return int(mpi_ops.rank())

    def gather(self, value: object, name: str) -> list[Any]:
        return self._collectives.gather_json(value, name)

    def broadcast(self, array: NDArray[Any], name: str) -> NDArray[Any]:
        return self._collectives.from_first(array, name)

    def zeros(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return np.zeros(shape, np.float32)

    def norm(self, array: NDArray[Any]) -> float:
        return float(np.linalg.norm(array))


class Follower:
    """Lets the residuals of one compressor follow a state."""

    def __init__(self, compression: TensorflowCompressor) -> None:
        compression.follow(self)
        self.compression = compression
        self.told: Mapping[str, Any] | None = None
        """What the first worker has told this one when they met last. See `Reducer.told`."""
        self._workers = Workers()
        self._kept: Mapping[str, Any] = compression.state_dict()

    @property
    def _reducer(self) -> Reducer | None:
        server = self.compression.server
        return server if isinstance(server, Reducer) else None

    def save(self) -> None:
        self._kept = self.compression.state_dict()

    def commit(self) -> None:
        """Let all workers know the norms of what has just been saved. Blocks."""
        self._workers.commit(self._kept)

    def restore(self) -> None:
        if self._reducer is not None:
            # Horovod may be down: nothing may wait for it.
            self._reducer.restore(self._kept)

    def reset(self) -> None:
        """Continue with the workers that there are now."""
        if self._reducer is not None:
            self._reducer.change_workers()

    def sync(self) -> None:
        """Come to the step of the first worker. Blocks."""
        reducer, compression = self._reducer, self.compression
        mine = reducer.told() if reducer is not None and self._workers.rank() == 0 else None
        self.told = self._workers.gather(mine, "told")[0]
        if self.told is not None and reducer is not None:
            reducer.adopt(self.told)
        state = self._workers.align(compression.state_dict())
        if state is not None and holds_anything(state):
            compression.load_state_dict(state)
        self.save()


@contextlib.contextmanager
def _errors_of_horovod() -> Iterator[None]:
    """Raise HorovodInternalError, from which an elastic job recovers, in place of what TensorFlow raises for Horovod."""
    try:
        yield
    except tf.errors.OpError as error:
        if "Horovod" in str(error.message):
            raise HorovodInternalError(f"a collective failed: {error.message}") from error
        raise


def _followers_of(state: Any) -> list[Follower]:
    found: list[Follower] = vars(state).get("_sparse_followers", [])
    return found


# Each of these takes the stock method or function and returns its replacement.


def _init(stock: Method) -> Method:
    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: value for name, value in kwargs.items() if isinstance(value, TensorflowCompressor)}
        kwargs = {name: value for name, value in kwargs.items() if name not in given}
        # Python sets these before stock methods save anything.
        vars(self).update(given)
        if given and isinstance(self, stock_elastic.TensorFlowState):
            _init_eagerly(self, *args, **kwargs)
        else:
            stock(self, *args, **kwargs)
        compressions = {id(one): one for one in (*given.values(), getattr(_distributed(self), "compression", None))}
        self._sparse_followers = [Follower(one) for one in compressions.values() if one is not None]

    return extended


def _init_eagerly(state: Any, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
    """Do what `TensorFlowState` does in TensorFlow 2, without a broadcast that other workers do not take part in."""
    state.variables = [plain(variable) for variable in variables or stock_elastic._global_variables()]
    state.session = None
    state._eval_fn, state._assign_fn = state._to_numpy, state._assign_var
    state._save_model()
    ObjectState.__init__(state, bcast_object=stock_elastic.broadcast_object, get_rank=mpi_ops.rank, **kwargs)


def _distributed(state: Any) -> Any:
    """Return the `DistributedApply` of a state's Keras 3 optimizer; None if there is none."""
    optimizer = vars(state).get("optimizer")
    return None if optimizer is None else vars(optimizer).get("apply")


def _save(stock: Method) -> Method:
    def extended(self: Any) -> None:
        stock(self)
        for follower in _followers_of(self):
            follower.save()

    return extended


def _commit(stock: Method) -> Method:
    def extended(self: Any) -> None:
        self.save()
        for follower in _followers_of(self):
            follower.commit()
        self.check_host_updates()

    return extended


def _restore(stock: Method) -> Method:
    def extended(self: Any) -> None:
        for follower in _followers_of(self):
            follower.restore()
        stock(self)

    return extended


def _reset(stock: Method) -> Method:
    def extended(self: Any) -> None:
        stock(self)
        for follower in _followers_of(self):
            follower.reset()
        distributed = _distributed(self)
        if distributed is not None:
            distributed.begin_again()

    return extended


def _sync(stock: Method) -> Method:
    def extended(self: Any) -> None:
        followers = _followers_of(self)
        if not followers:
            stock(self)
            return
        with _errors_of_horovod():
            if isinstance(self, stock_elastic.TensorFlowState):
                broadcast_variables(self.variables, root_rank=0)
            stock(self)
            for follower in followers:
                follower.sync()

    return extended


# --- Keras 3 ---


def _is_keras_3(optimizer: Any) -> bool:
    return not callable(optimizer.variables)


def _keras_variables(state: Any) -> list[Any]:
    """Return the variables of a model and of its optimizer. Those of random generators are each worker's own."""
    if not state.optimizer.built:
        # All workers must have the same variables, also one that is new.
        state.optimizer.build(state.model.trainable_variables)
    return [plain(variable) for variable in (*state.model.weights, *state.optimizer.variables)]


def _save_model(stock: Method) -> Method:
    def extended(self: Any) -> None:
        if not _is_keras_3(self.optimizer):
            stock(self)
            return
        self._saved_model_state = [variable.numpy() for variable in _keras_variables(self)]

    return extended


def _load_model(stock: Method) -> Method:
    def extended(self: Any) -> None:
        if not _is_keras_3(self.optimizer):
            stock(self)
            return
        for variable, value in zip(_keras_variables(self), self._saved_model_state, strict=True):
            variable.assign(value)

    return extended


def _broadcast_model(stock: Method) -> Method:
    def extended(model: Any, optimizer: Any, backend: Any) -> None:
        if not _is_keras_3(optimizer):
            stock(model, optimizer, backend)
            return
        broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)

    return extended


# --- the loop ---


def _run(stock: Method) -> Method:
    def extended(func: Method) -> Method:
        @functools.wraps(func)
        def trained(state: Any, *args: Any, **kwargs: Any) -> Any:
            with _errors_of_horovod():
                return func(state, *args, **kwargs)

        elastic: Method = run_fn(trained, stock_elastic._reset)
        return elastic

    return extended


_TENSORFLOW, _KERAS = stock_elastic.TensorFlowState, stock_elastic.TensorFlowKerasState
_METHODS = {"save": _save, "commit": _commit, "restore": _restore, "reset": _reset, "sync": _sync}
EXTENSIONS: list[tuple[Any, str, tuple[str, ...], Callable[[Any], Any]]] = [
    (_TENSORFLOW, "__init__", ("self", "variables", "session", "kwargs"), _init),
    (_KERAS, "__init__", ("self", "model", "optimizer", "backend", "kwargs"), _init),
    *((state, name, ("self",), extend) for state in (_TENSORFLOW, _KERAS) for name, extend in _METHODS.items()),
    (_KERAS, "_save_model", ("self",), _save_model),
    (_KERAS, "_load_model", ("self",), _load_model),
    (stock_elastic, "_broadcast_model", ("model", "optimizer", "backend"), _broadcast_model),
    *(
        (sys.modules[f"{name}.elastic"], "run", ("func",), _run)
        for name in _MODULES
        if f"{name}.elastic" in sys.modules
    ),
]
"""Class or module, name, the parameters that the extension relies on, and what makes it."""
