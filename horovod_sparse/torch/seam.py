"""The one seam to stock Horovod: those of `_DistributedOptimizer`'s methods that move gradients, extended in place.

`hvd.DistributedOptimizer` copies the methods into a new class at each call, so extending them once reaches every later
optimizer, however it was imported. Without one of our compressors an extended method does exactly what the stock method does.
With one, it also avoids defects: stock `zero_grad` has no `set_to_none`, `step` evaluates a closure after the reduction, groups
that are added later are never reduced, and wrappers whose class derives from the optimizer's call themselves without end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod
import horovod.torch as horovod_torch
import torch
from horovod.common import process_sets
from horovod.torch import mpi_ops
from horovod.torch import optimizer as horovod_optimizer
from horovod.torch.elastic.state import TorchState, get_handler_registry, set_handler_registry

from horovod_sparse.core.agreement import check_arguments, check_momentum
from horovod_sparse.core.binding import check_kind, refuse_join
from horovod_sparse.core.stock import check_release, complete_global_set
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.elastic_jobs import SparseStateHandler
from horovod_sparse.torch.horovod import HorovodSource, source_of
from horovod_sparse.torch.parameters import check_memory
from horovod_sparse.torch.source import uncompiled
from horovod_sparse.torch.wrapped import ADASUM, OPTIMIZER, Wrapped


@functools.cache
def install() -> None:
    """Extend stock Horovod; a second call does nothing."""
    check_release(horovod.__version__)
    for name, extend in _EXTENSIONS.items():
        _extend(OPTIMIZER, name, extend)
    _extend(ADASUM, "__init__", _refuse_adasum)
    for module in (horovod_optimizer, horovod_torch):
        _extend(module, "DistributedOptimizer", _distributed_optimizer)
    _extend(TorchState, "reset", _reset)
    set_handler_registry([(torch.optim.Optimizer, SparseStateHandler), *get_handler_registry()])
    # All names of `hvd.join` end here, also those that were imported before.
    _extend(mpi_ops.mpi_lib, "horovod_torch_join", _join)


Method = Callable[..., Any]


def _extend(cls: Any, name: str, extend: Callable[[Any], Method]) -> None:
    stock = vars(cls).get(name)
    method = extend(stock)
    setattr(cls, name, method if stock is None else functools.wraps(stock)(method))


# Each of these takes the stock method and returns its extension.


def _distributed_optimizer(stock: Method) -> Method:
    def extended(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizer must be one of torch.optim, such as torch.optim.SGD(...), got {optimizer!r}; an optimizer of Keras "
                "needs horovod_sparse.tensorflow.keras and a compressor of it"
            )
        return stock(optimizer, *args, **kwargs)

    return extended


def _init(stock: Method) -> Method:
    signature = inspect.signature(stock)

    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs)
        arguments.apply_defaults()
        params, compression, op, groups = (
            arguments.arguments[name] for name in ("params", "compression", "op", "groups")
        )
        # Check before stock Horovod registers its hooks, which would outlive a refused optimizer.
        is_ours = _is_ours(compression, op, groups)
        if is_ours:
            complete_global_set(process_sets, mpi_ops)
            named = arguments.arguments["named_parameters"]
            if named is not None:
                named = arguments.arguments["named_parameters"] = list(named)
            names = {parameter: name for name, parameter in named or ()}
            check_memory({one: names.get(one, "(without a name)") for group in params for one in group["params"]})
            check_momentum(compression, params)
        try:
            stock(*arguments.args, **arguments.kwargs)
            if is_ours:
                self._sparse_source = HorovodSource(self, compression)
        except BaseException:
            # The hooks, of an optimizer that is not there, end with these.
            Wrapped(self).unhook_all()
            raise

    return extended


def _is_ours(compression: Any, op: Any, groups: Any) -> bool:
    """Return whether a compression is one of ours. Raise if it is, but cannot be used with the other arguments."""
    check_kind(compression, TorchCompressor, "horovod_sparse.torch")
    if not isinstance(compression, TorchCompressor):
        return False
    check_arguments(op, mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum, groups, compression)
    return True


def _refuse_adasum(stock: Method) -> Method:
    def extended(self: Any, params: Any, named_parameters: Any, compression: Any, *args: Any, **kwargs: Any) -> None:
        _is_ours(compression, mpi_ops.Adasum, None)
        stock(self, params, named_parameters, compression, *args, **kwargs)

    return extended


def _make_hook(stock: Method) -> Method:
    def extended(self: Any, p: Any) -> Any:
        if not isinstance(Wrapped(self).compression, TorchCompressor):
            return stock(self, p)
        # Stock Horovod makes the hooks before there is a source.
        return uncompiled(lambda *_: self._sparse_source.submit(p))

    return extended


def _add_param_group(stock: None) -> Method:
    def extended(self: Any, param_group: dict[str, Any]) -> None:
        Wrapped(self).above.add_param_group(param_group)
        source = source_of(self)
        if source is not None:
            source.parameters_added()

    return extended


def _if_ours(own: Callable[..., Any]) -> Callable[[Method], Method]:
    """Return what makes the extension: `own(self, source, stock, ...)` if there is a source, else the stock method.

    A library's wrapper, whose class derives from the optimizer's, has no state of its own. The optimizer's is used.
    """

    def extend(stock: Method) -> Method:
        def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
            source = source_of(self)
            if source is None:
                return stock(self, *args, **kwargs)
            if self is not source.optimizer:
                return getattr(source.optimizer, stock.__name__)(*args, **kwargs)
            return own(self, source, stock, *args, **kwargs)

        return extended

    return extend


@_if_ours
def _of_the_optimizer(self: Any, source: HorovodSource, stock: Method, *args: Any, **kwargs: Any) -> Any:
    return stock(self, *args, **kwargs)


@_if_ours
def _synchronize(self: Any, source: HorovodSource, stock: Method) -> None:
    source.synchronize()


@_if_ours
def _step(self: Any, source: HorovodSource, stock: Method, closure: Any = None) -> Any:
    def reduced_closure() -> Any:
        loss = closure()
        if wrapped.synchronizes:
            self.synchronize()
        return loss

    wrapped = source.wrapped
    own_step = wrapped.above.step
    try:
        if closure is not None:
            # The stock method reduces before the closure is evaluated.
            return own_step(reduced_closure)
        if type(self) is wrapped.made:
            return stock(self)
        # The stock method calls itself without end if a class derives from the one that Horovod has made.
        if wrapped.synchronizes:
            self.synchronize()
        return own_step()
    finally:
        wrapped.is_synchronized = False


@_if_ours
def _zero_grad(self: Any, source: HorovodSource, stock: Method, *args: Any, **kwargs: Any) -> None:
    source.end_interrupted()
    if source.wrapped.has_counted:
        raise AssertionError(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(): the gradients are being reduced. Call it before loss.backward()"
        )
    source.wrapped.above.zero_grad(*args, **kwargs)
    # If a step was left out after synchronize(), the next one must still be reduced.
    source.wrapped.is_synchronized = False


@_if_ours
def _load_state_dict(self: Any, source: HorovodSource, stock: Method, *args: Any, **kwargs: Any) -> None:
    wrapped = source.wrapped
    if wrapped.has_counted:
        # Collectives that are under way must finish before the handles are dropped.
        self.synchronize()
    wrapped.is_synchronized, wrapped.synchronizes = False, True
    wrapped.above.load_state_dict(*args, **kwargs)
    source.settings_changed()


def _reset(stock: None) -> Method:
    def extended(self: Any) -> None:
        super(TorchState, self).reset()
        for handler in self._handlers.values():
            if isinstance(handler, SparseStateHandler):
                handler.reset()

    return extended


def _join(stock: Method) -> Method:
    def extended(*args: Any) -> Any:
        refuse_join()
        return stock(*args)

    return extended


_EXTENSIONS: dict[str, Callable[[Any], Method]] = {
    "__init__": _init,
    "_make_hook": _make_hook,
    "set_backward_passes_per_step": _of_the_optimizer,
    "synchronize": _synchronize,
    "skip_synchronize": _of_the_optimizer,
    "step": _step,
    "zero_grad": _zero_grad,
    "add_param_group": _add_param_group,
    "load_state_dict": _load_state_dict,
}
