"""Detached error feedback: gradients at parameters that part of this rank's residual has moved already. No Horovod."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from horovod_sparse.torch.parameters import is_sharded, local_part
from horovod_sparse.torch.uncompiled import uncompiled

_log = logging.getLogger("horovod_sparse")


Waiting = tuple[Tensor, Tensor, float]
"""A parameter, its residual, and what makes that an update: eta, or 1/s if it holds updates (`Lengths`)."""


class Detached:
    """Moves the parameters of an optimizer while gradients are computed.

    From a forward pass in training until the end of backward they are `x - c eta e`, with the coefficient c in (0, 1] and
    this rank's residual e (https://arxiv.org/abs/2004.05298), which `waiting` returns between two steps. Steps, evaluations
    and `state_dict` see x, bit by bit. The model is the outermost module that has some of the parameters.
    """

    def __init__(
        self, coefficient: float, parameters: Iterable[Tensor], waiting: Callable[[], Sequence[Waiting]]
    ) -> None:
        self._coefficient = coefficient
        self._waiting = waiting
        self._moved: dict[Tensor, tuple[Tensor, int]] = {}
        """The values of the parameters that have been moved, and their versions."""
        self._memory: dict[Tensor, Tensor] = {}
        """A second copy of each. It is kept from step to step, because memory that is new takes longer."""
        self._parameters = frozenset(parameters)
        for other in [*_living]:
            if not self._parameters.isdisjoint(other._parameters):
                # What waits there will never be sent, now that another one serves these parameters.
                other.restore()
                other.stop("a newer optimizer has these parameters")
        _living.add(self)
        self._not_found = {*self._parameters}
        self._known = WeakSet[nn.Module]()
        """Modules that need not be looked at again."""
        self._search = register_module_forward_pre_hook(_Hook(self, Detached._look))
        finalize(self, self._search.remove)

    @uncompiled
    def _look(self, module: nn.Module) -> None:
        """Take a module in training for the model, if it has parameters that no other has."""
        if module in self._known or not module.training or not torch.is_grad_enabled():
            return
        self._known.update(module.modules())
        found = self._not_found.intersection(module.parameters())
        if not found:
            return
        self._not_found -= found
        # Before that of `fully_shard`, which gathers parameters.
        module.register_forward_pre_hook(_Hook(self, Detached._enter), prepend=True)
        module.register_forward_hook(_Hook(self, Detached._leave), always_call=True)
        # PyTorch has no types for this method.
        parts: Iterable[Any] = module.modules()
        for part in parts:
            # Of a model in `DistributedDataParallel`, the one within is saved.
            part.register_state_dict_pre_hook(_Hook(self, lambda detached, _: detached.restore()))
        self._enter(module)
        if not self._not_found:
            self._search.remove()

    @uncompiled
    def _enter(self, module: nn.Module) -> None:
        """Move the parameters before a forward pass in training, and restore them before any other."""
        if not (module.training and torch.is_grad_enabled()):
            self.restore()
            return
        if self._written():
            # An interrupted pass has left them moved, and a state was loaded since.
            self.restore()
        if self._coefficient and not self._moved:
            self._move()

    @uncompiled
    def _leave(self, module: nn.Module) -> None:
        """Stop if the model itself has written to its parameters while they were moved: that is nothing to keep."""
        for parameter in self._written():
            self._moved[parameter] = self._moved[parameter][0], parameter._version
            self.stop("the model writes to its parameters in its forward pass")

    def _written(self) -> list[Tensor]:
        """Return the parameters that somebody has written to since they were moved."""
        return [parameter for parameter, (_, version) in self._moved.items() if parameter._version != version]

    @torch.no_grad()
    def _move(self) -> None:
        for parameter, residual, unit in self._waiting():
            # Through `data`, autograd takes no notice: the graph of a pass that goes on stays valid.
            value = local_part(parameter.data)
            other, part = self._memory.get(parameter), self._coefficient * unit
            if other is None:
                other = self._memory[parameter] = torch.empty_like(value)
            if _is_replaced(parameter):
                self._moved[parameter] = value, parameter._version
                parameter.data = torch.sub(value, residual, alpha=part, out=other)
            else:
                # CUDA graphs, cuDNN and `fully_shard` remember where parameters are.
                self._moved[parameter] = other.copy_(value), parameter._version
                value.sub_(residual, alpha=part)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters back what they were, or what somebody has written to them since."""
        for parameter, (value, version) in [*self._moved.items()]:
            if parameter._version != version:
                value.copy_(local_part(parameter.data))
            if _is_replaced(parameter):
                parameter.data = value
            else:
                local_part(parameter.data).copy_(value)
            # Last: until here this can be done again.
            del self._moved[parameter]

    def stop(self, why: str) -> None:
        """Never move parameters again."""
        if self._coefficient:
            _log.info("detached error feedback is off, because %s", why)
        self._coefficient = 0.0


def _is_replaced(parameter: Tensor) -> bool:
    """Return whether a parameter moves by taking other memory, which is faster."""
    return parameter.is_cpu and not is_sharded(parameter)


_living = WeakSet[Detached]()
"""Of those of the same parameters, only the last one moves them."""


class _Hook:
    """A hook of a module. It does nothing once its `Detached` is gone, and a copy of the module has none."""

    def __init__(self, detached: Detached, call: Callable[[Detached, nn.Module], None]) -> None:
        self._detached, self._call = ref(detached), call

    def __call__(self, module: nn.Module, *_: object) -> None:
        detached = self._detached()
        if detached is not None:
            self._call(detached, module)

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *_: object) -> None: ...
