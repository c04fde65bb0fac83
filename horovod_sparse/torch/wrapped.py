"""What stock Horovod keeps in the optimizer that it has wrapped: no other module reads or writes these private attributes.

Above each stands the line of horovod/torch/optimizer.py, release 0.28.1, that it relies on. The tests look for these lines.
"""

from __future__ import annotations

from typing import Any

from horovod.torch import optimizer as stock
from torch import Tensor

OPTIMIZER, ADASUM = stock._DistributedOptimizer, stock._DistributedAdasumOptimizer
"""The classes whose methods `hvd.DistributedOptimizer` copies into a new class."""


class Wrapped:
    """The state of one optimizer that stock Horovod has wrapped."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def made(self) -> type:
        """The class that Horovod has made. The object's own class may derive from that."""
        # stock: def _allreduce_grad_async(self, p):
        return next(one for one in type(self._optimizer).__mro__ if "_allreduce_grad_async" in vars(one))

    @property
    def above(self) -> Any:
        """`super()` of the class that Horovod has made."""
        return super(self.made, self._optimizer)

    @property
    def compression(self) -> Any:
        # stock: self._compression = compression
        return self._optimizer._compression

    # --- parameters ---

    @property
    def names(self) -> dict[Tensor, str]:
        """The names of all parameters, which more may join."""
        # stock: self._parameter_names = {v: k for k, v in sorted(named_parameters)}
        names: dict[Tensor, str] = self._optimizer._parameter_names
        return names

    @property
    def reduced(self) -> set[Tensor]:
        """The parameters that have a hook."""
        # stock: self._requires_update.add(p)
        reduced: set[Tensor] = self._optimizer._requires_update
        return reduced

    @property
    def group_of(self) -> dict[Tensor, tuple[Tensor, ...]]:
        """The group of each parameter; none without `groups`."""
        # stock: self._p_to_group[p] = group
        groups: dict[Tensor, tuple[Tensor, ...]] = self._optimizer._p_to_group
        return groups

    def hook_all(self) -> None:
        """Hook all parameters, as stock Horovod does if there are several workers."""
        # stock: if self.process_set.included() and (size() > 1 or os.environ.get('HOROVOD_ELASTIC') == '1'):
        self._optimizer._register_hooks()

    def hook(self, parameter: Tensor, name: str) -> None:
        """Hook a parameter that stock Horovod would ignore. It forms a group of its own."""
        optimizer: Any = self._optimizer
        self.names.setdefault(parameter, name)
        # stock: self._allreduce_delay = {v: self.backward_passes_per_step
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        # stock: self._groups = groups
        if optimizer._groups is not None:
            self.group_of[parameter] = (parameter,)
        self.reduced.add(parameter)
        # stock: grad_acc = p_tmp.grad_fn.next_functions[0][0]
        node: Any = parameter.expand_as(parameter).grad_fn
        accumulator = node.next_functions[0][0]
        # stock: grad_acc.register_hook(self._make_hook(p))
        accumulator.register_hook(optimizer._make_hook(parameter))
        # stock: self._grad_accs.append(grad_acc)
        optimizer._grad_accs.append(accumulator)

    def unhook_all(self) -> None:
        """Drop the hooks of an optimizer that could not be made."""
        # stock: self._grad_accs = []
        vars(self._optimizer).get("_grad_accs", []).clear()

    # --- a step ---

    def count(self, parameter: Tensor) -> int:
        """Count a backward pass of a parameter. Return how many are left in this step, and note that there was one."""
        optimizer = self._optimizer
        # stock: self._allreduce_delay[p] -= 1
        left: int = optimizer._allreduce_delay[parameter] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        optimizer._allreduce_delay[parameter] = left
        # Only that there is something matters.
        # stock: self._handles[p] = (handle, ctx)
        optimizer._handles[parameter] = None, None
        return left

    @property
    def has_counted(self) -> bool:
        """Whether there was a backward pass since the last reduction."""
        return bool(self._optimizer._handles)

    def begin_again(self) -> None:
        """Count from the beginning: the next step has reduced nothing."""
        optimizer = self._optimizer
        passes = optimizer.backward_passes_per_step
        # stock: self._allreduce_delay[p] = self.backward_passes_per_step
        optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, passes)
        # stock: self._handles.clear()
        optimizer._handles.clear()
        self.is_synchronized = False

    @property
    def is_synchronized(self) -> bool:
        """Whether the gradients of this step are reduced."""
        # stock: self._synchronized = False
        return bool(self._optimizer._synchronized)

    @is_synchronized.setter
    def is_synchronized(self, value: bool) -> None:
        self._optimizer._synchronized = value

    @property
    def synchronizes(self) -> bool:
        """Whether `step` reduces first: not within `skip_synchronize`."""
        # stock: self._should_synchronize = True
        return bool(self._optimizer._should_synchronize)

    @synchronizes.setter
    def synchronizes(self, value: bool) -> None:
        self._optimizer._should_synchronize = value
