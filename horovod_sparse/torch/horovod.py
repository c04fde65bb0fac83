"""The gradients of a wrapped optimizer whose compression is one of ours.

Hooks hand gradients over while backward goes on, and never wait for another rank. `synchronize` waits, once. It reduces
whole steps: the first, before which the ranks compare their settings, and every step of a compressor that must see all
gradients first.

Tested by tests/parallel/usage.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor
from torch.autograd import Variable
from torch.utils.weak import TensorWeakRef

from horovod_sparse.core.agreement import check_momentum, check_sparse, compare, is_elastic, op_name, warn_of_values
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.state import empty_state
from horovod_sparse.core.step import Step, Wait
from horovod_sparse.exchange.protocols import Reduced
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.elastic_jobs import align
from horovod_sparse.torch.exchange import Collectives, empty_sparse, spoiled_sparse
from horovod_sparse.torch.parameters import check_memory, check_real, description, sums
from horovod_sparse.torch.source import TensorSource, uncompiled
from horovod_sparse.torch.unchanged import Handed, first_changed
from horovod_sparse.torch.wrapped import Wrapped

_agreed: Counter[tuple[int, ...]] = Counter()
"""How many optimizers have agreed so far, by process set. Each optimizer gets a number, which is part of its collectives'
names. An optimizer that only one rank has made does not count. The key includes the ranks because Horovod gives the number
of a removed set to the next one that is added."""


def source_of(optimizer: Any) -> HorovodSource | None:
    """Return the source of an optimizer, also if a library has wrapped it; None if there is none."""
    return getattr(optimizer, "_sparse_source", None)


class HorovodSource(TensorSource):
    """The gradients of one `hvd.DistributedOptimizer`, whose arguments the seam has checked."""

    def __init__(self, optimizer: Any, compressor: TorchCompressor) -> None:
        self._process_set = process_set = optimizer.process_set
        self._collectives = Collectives(process_set)
        active = process_set.included() and compresses(process_set.size())
        super().__init__(compressor, self._collectives, active=active, optimizer=optimizer)
        self.wrapped = Wrapped(optimizer)
        """What stock Horovod keeps in the optimizer."""
        self.synchronize = uncompiled(self._synchronize)
        self._sparse: dict[Tensor, str] = {}
        """Embeddings whose sparse gradients Horovod reduces, with their names."""
        self._sparse_as_dense: set[Tensor] = set()
        """Parameters whose reduced gradients become sparse tensors again on every rank."""
        self._waits: dict[Tensor, Wait] = {}
        """What waits for this step's sparse gradients."""
        self._handed: dict[Tensor, Handed] = {}
        """The gradients that backward has handed over in this step."""
        self._passes: dict[int, weakref.ref[object]] = {}
        """What PyTorch calls at the end of a backward pass, by its number. PyTorch drops that of an interrupted pass."""
        self._reduced: dict[Tensor, TensorWeakRef] = {}
        """The gradients that the last reduction has left in `.grad`."""
        if self.active and mpi_ops.size() == 1 and not is_elastic():
            # Stock Horovod registers no hooks for a single worker.
            self.wrapped.hook_all()

    def begin_again(self, state: Mapping[str, Any] | None) -> None:
        """Continue with `state` when the workers of an elastic job have changed. Never waits for other ranks."""
        self.drop_step()
        self._collectives = Collectives(self._process_set)
        self.driver.meet(self._collectives)
        self.names.clear()
        self._sparse.clear()
        self._sparse_as_dense.clear()
        self.driver.defer(empty_state() if state is None else state)

    def drop_step(self) -> None:
        """Forget the step that has begun, on this rank alone."""
        self.driver.drop()
        self._forget()

    # --- gradients in: called from hooks, never waits for another rank unless backward was interrupted ---

    def _note_backward(self, parameter: Tensor) -> None:
        """Note that a gradient comes from the backward pass that goes on. Give up a step that an earlier one has not ended."""
        number = torch._C._current_graph_task_id()
        # Compiled passes have no number.
        if number < 0 or number in self._passes:
            return
        handed = self._handed.get(parameter)
        # If the gradient was added to the one that was handed over, stock Horovod raises.
        if handed is None or handed.gradient is not parameter.grad:
            self.end_interrupted()

        def ended() -> None:
            self._passes.pop(number, None)

        self._passes[number] = weakref.ref(ended)
        Variable._execution_engine.queue_callback(ended)

    def end_interrupted(self) -> None:
        """Give up a step of which a backward pass has ended with an exception."""
        if any(held() is None for held in self._passes.values()):
            self._passes.clear()
            self.give_up()

    def submit(self, parameter: Tensor) -> None:
        """Record what backward has made. After the step's last pass, take the gradient at once, but for the first step."""
        if self.active:
            self._note_backward(parameter)
        assert parameter.grad is not None and not parameter.grad.requires_grad
        if self.wrapped.count(parameter) or not self.active:
            return
        # Gradients are on only if backward makes a graph of its own. PyTorch's context takes longer than a small gradient.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            self._handed[parameter] = Handed.of(parameter.grad)
            if self.driver.feedback is None:
                return
            if parameter in self.names:
                self.begin()
                self.add(parameter)
            elif parameter in self._sparse:
                self.begin()
                self._add_sparse(parameter)

    def _add_sparse(self, parameter: Tensor) -> None:
        gradient = parameter.grad if self._is_new(parameter) else None
        self._start_sparse(parameter, empty_sparse(parameter.shape, parameter) if gradient is None else gradient)

    def _start_sparse(self, parameter: Tensor, gradient: Tensor) -> None:
        op = mpi_ops.Average if self.averages else mpi_ops.Sum
        self._waits[parameter] = self._collectives.start_sparse(gradient, self._sparse[parameter], op)

    def add_rest(self) -> None:
        super().add_rest()
        for parameter in self._sparse:
            if parameter not in self._waits:
                self._add_sparse(parameter)

    @property
    def averages(self) -> bool:
        return bool(self.optimizer.op == mpi_ops.Average)

    def _is_new(self, parameter: Tensor) -> bool:
        """Return whether a gradient is there that backward, or the user, has made since the last reduction."""
        if parameter.grad is None or not parameter.requires_grad:
            return False
        return parameter in self._handed or self._is_given(parameter)

    def _is_given(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient is another tensor than the one that the last reduction has left."""
        reduced = self._reduced.get(parameter)
        return parameter.grad is not None and (reduced is None or reduced() is not parameter.grad)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None or not self._is_new(parameter):
            return None
        return gradient.to_dense() if gradient.is_sparse else gradient

    def write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        for slot in slots:
            parameter = self.parameters[slot.name]
            if parameter.grad is None or parameter.grad.is_sparse:
                # As stock Horovod does. Optimizers leave out parameters without a gradient.
                parameter.grad = torch.zeros_like(parameter)
            self.memory[parameter] = parameter.grad
        super().write(slots, reduced)

    # --- reduced gradients out ---

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Reduce all gradients and leave the results in `.grad`. A second call does nothing as long as these are there."""
        if self.wrapped.is_synchronized and not self.wrapped.has_counted and self._holds_reduced():
            return
        try:
            if self.active:
                self._prepare()
            if self.driver.feedback is not None:
                self._reduce()
        finally:
            self.drop_step()
        self.wrapped.is_synchronized = True

    def _holds_reduced(self) -> bool:
        """Return whether what the last reduction has left is there: `model.zero_grad()` drops it, or zeros it, on all ranks."""
        there = [one.grad for one, reduced in self._reduced.items() if one.grad is not None and reduced() is one.grad]
        return not self._reduced or any(one.is_sparse or bool(one.any()) for one in there)

    def _prepare(self) -> None:
        """Take what has not been taken, after the ranks have agreed on new parameters. If this raises, the others are told.

        After an interrupted backward pass this rank takes part with the gradients that it has, as with a dense average.
        """
        try:
            self._passes.clear()
            self.check_unchanged()
            self._adopt()
            if len(self.names) + len(self._sparse) < len(self.wrapped.reduced):
                self._meet()
            if self.driver.feedback is not None:
                self.add_rest()
        except BaseException:
            if self.driver.feedback is not None:
                # Now all ranks reduce: the others wait for this one's part, also if none has begun.
                self.begin()
            self.give_up()
            raise

    def _reduce(self) -> None:
        """End all exchanges, and write the reduced gradients."""
        stale = {parameter: parameter.grad for parameter in self.names if self._is_stale(parameter)}
        before = {parameter: gradient.clone() for parameter, gradient in stale.items() if gradient is not None}
        self._end_sparse(self.driver.complete())
        self.driver.finish(self.write)
        for parameter, gradient in before.items():
            # As with a dense average, what no rank has used in this step keeps what it had.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad.copy_(gradient)
        for parameter in self._sparse_as_dense:
            # The gradient is sparse on all ranks or dense on all, whatever a rank has: optimizers round the two differently.
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse()
        reduced = [*self.names, *self._sparse]
        self._reduced = {one: TensorWeakRef(one.grad) for one in reduced if one.grad is not None}

    def _end_sparse(self, step: Step) -> None:
        """Wait for the sparse gradients, too. If one is not finite, the step fails."""
        ops = step.feedback.ops
        for parameter, wait in self._waits.items():
            mine: Any = parameter.grad if self._is_new(parameter) else None
            reduced: Any = wait()
            if not ops.all_finite(reduced._values()):
                is_mine = mine is not None and not ops.all_finite(mine._values())
                step.fail([self._sparse[parameter]] if is_mine else ())
            parameter.grad = reduced

    def _is_stale(self, parameter: Tensor) -> bool:
        """Return whether a parameter has a gradient of an earlier step, and none of this one."""
        return parameter.grad is not None and not parameter.grad.is_sparse and not self._is_new(parameter)

    def _forget(self) -> None:
        """Forget what backward has handed over. Reset the counts of stock hooks, also for a process set of one worker."""
        self._handed, self._waits, self.memory = {}, {}, {}
        self.wrapped.begin_again()

    def give_up(self) -> None:
        step = self.driver.step
        if step is not None and not step.feedback.is_broken:
            for parameter in self._sparse:
                if parameter not in self._waits:
                    # All ranks see that it is not finite.
                    self._start_sparse(parameter, spoiled_sparse(parameter.shape, parameter))
                    step.given_up = True
                    step.fail()
            for wait in self._waits.values():
                wait()
        super().give_up()
        self._forget()

    def settle(self, call: str) -> None:
        if self.driver.step is not None and call in ("state_dict", "rescale"):
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: {call} must be called between two steps, got a call after loss.backward(), when "
                "the residuals lack what is on its way; call optimizer.step() first"
            )
        super().settle(call)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a gradient was changed after it had been handed over."""
        changed = first_changed(self._handed)
        if changed is None:
            return
        name = self.wrapped.names[changed]
        raise RuntimeError(
            f"rank {mpi_ops.rank()}: the gradient of parameter {name!r} was changed after backward "
            "had handed it over, and the change would be lost. Change reduced gradients: call "
            "optimizer.synchronize(), change them, and step with optimizer.skip_synchronize(); or local ones, with "
            "parameter.register_hook(). If a library clips, unscales or measures gradients (GradScaler, Lightning, Accelerate, "
            "Transformers), docs/libraries.md shows where to call optimizer.synchronize() before it does"
        )

    def parameters_added(self) -> None:
        """Take in a group of parameters that was added to the optimizer."""
        self.settings_changed()
        if self.active:
            self._adopt()

    def settings_changed(self) -> None:
        """Check the optimizer's settings, which may have changed."""
        check_momentum(self.compressor, self.optimizer.param_groups)

    @torch.enable_grad()
    def _adopt(self) -> None:
        """Hook parameters that stock Horovod would ignore: those of added groups, and those that require gradients only now."""
        for number, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self.wrapped.reduced:
                    name = self.wrapped.names.get(parameter, f"allreduce.noname.{number}.{position}")
                    check_memory({parameter: name})
                    self.wrapped.hook(parameter, name)

    def _meet(self) -> None:
        """Agree with the other ranks on parameters that are new, and make their buckets. Blocks."""
        driver, groups = self.driver, self.wrapped.group_of
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        waiting = self.wrapped.reduced.difference(self.names, self._sparse)
        new = {one: self.wrapped.names[one] for one in parameters if one in waiting}
        found = self._agree(new)
        sparse_as_dense = self.optimizer.sparse_as_dense
        check_sparse(found, self.compressor, sparse_as_dense=sparse_as_dense, rank=mpi_ops.rank())
        if is_elastic() and driver.feedback is None:
            driver.deferred = align(driver.deferred)
        sparse = {one: name for one, name in new.items() if name in found}
        if sparse_as_dense:
            self.extend(new, groups)
            self._sparse_as_dense |= sparse.keys()
        else:
            self.extend({one: name for one, name in new.items() if name not in found}, groups)
            self._sparse |= sparse
            driver.sparse = [*self._sparse.values()]

    def _agree(self, new: Mapping[Tensor, str]) -> set[str]:
        """Compare settings and `new` parameters on all ranks. Return which have sparse gradients on some rank. Blocks."""
        optimizer, process_set, number = self.optimizer, self._process_set, self._collectives.number
        names = self.wrapped.names
        known_sparse = () if self.driver.deferred is None else self.driver.deferred.get("sparse", ())
        mine = {
            **description(self.compressor, new, optimizer.param_groups),
            "optimizer": "new" if number is None else str(number),
            "op": op_name(optimizer.op, mpi_ops.Average, mpi_ops.Sum),
            "sparse_as_dense": str(bool(optimizer.sparse_as_dense)),
            "groups": [str([names[p] for p in group]) for group in dict.fromkeys(self.wrapped.group_of.values())],
            "backward_passes_per_step": str(optimizer.backward_passes_per_step),
        }
        sparse = [
            name
            for parameter, name in new.items()
            if name in known_sparse or (parameter.grad is not None and parameter.grad.is_sparse)
        ]
        key = (process_set.process_set_id, *process_set.ranks)
        # Before the first agreement an optimizer has no number, so the collective's name cannot contain it. The description
        # that is compared does.
        everyone = self._collectives.everyone([mine, sparse, _agreed[key], sums(new)], "agree")
        compare(mine, [theirs for theirs, *_ in everyone], mpi_ops.rank())
        values = [theirs for *_, theirs in everyone]
        remedy = "call hvd.broadcast_parameters first"
        warn_of_values([*new.values()], values, process_set.rank(), mpi_ops.rank(), remedy)
        check_real(new)
        if number is None:
            number = self._collectives.number = max(agreed for _, _, agreed, *_ in everyone)
            # The next optimizer gets another one.
            _agreed[key] = number + 1
        return {name for _, names, *_ in everyone for name in names}
