"""Reduces the gradients of a wrapped optimizer whose compression is one of ours.

Hooks give a reducer gradients while backward goes on, and never wait for another rank. `synchronize` waits, once. It reduces
whole steps: the first, before which the ranks compare their settings, one after a step that was given up, and every step of a
compressor that must see all gradients first. Where updates are exchanged, it follows the optimizer's own (`movement.Updates`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor
from torch.autograd import Variable

from horovod_sparse.core.agreement import (
    check_dampening,
    check_momentum,
    check_sparse,
    compare,
    exchanges_updates,
    is_elastic,
    op_name,
    warn_of_values,
)
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.core.state import empty_state
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.elastic_jobs import align
from horovod_sparse.torch.exchange import Collectives, empty_sparse
from horovod_sparse.torch.movement import are_finite
from horovod_sparse.torch.parameters import check_memory, check_real, description, sums
from horovod_sparse.torch.step import Step
from horovod_sparse.torch.store import WITH_SCALER, Routes, TensorReducer
from horovod_sparse.torch.unchanged import first_changed, hand_over
from horovod_sparse.torch.uncompiled import uncompiled

_agreed: Counter[tuple[int, ...]] = Counter()
"""How many optimizers have agreed so far, by process set. Each optimizer gets a number, which is part of its collectives'
names. An optimizer that only one rank has made does not count. The key includes the ranks because Horovod gives the number
of a removed set to the next one that is added."""


def reducer_of(optimizer: Any) -> Reducer | None:
    """Return the reducer of an optimizer, also if a library has wrapped it; None if there is none."""
    return getattr(optimizer, "_sparse_reducer", None)


class Reducer(TensorReducer):
    """Reduces the gradients of one `hvd.DistributedOptimizer`, whose arguments the seam has checked."""

    _transport: Collectives

    def __init__(self, optimizer: Any, compressor: TorchCompressor, own_step: Callable[..., Any]) -> None:
        super().__init__(compressor)
        self.optimizer = optimizer
        self._process_set = optimizer.process_set
        self._groups, self._sparse_as_dense = optimizer._p_to_group, optimizer.sparse_as_dense
        self.active = self._process_set.included() and compresses(self._process_set.size())
        updates = exchanges_updates(compressor, optimizer.param_groups)
        self.serve(own_step, optimizer._parameter_names, updates=updates)
        self._forget_workers()
        self._passes: dict[int, weakref.ref[object]] = {}
        """What PyTorch calls at the end of a backward pass, by its number. PyTorch drops that of an interrupted pass."""
        optimizer.register_step_pre_hook(self._note_step)
        if self.active and mpi_ops.size() == 1 and not is_elastic():
            # Stock Horovod registers no hooks for a single worker.
            optimizer._register_hooks()

    def _forget_workers(self) -> None:
        """Forget all that was agreed on with other workers, and everything that depends on their number."""
        self._transport = Collectives(self._process_set)
        self._routes, self.sparse = Routes(), ()
        self.pipeline = None

    def begin_again(self, state: Mapping[str, Any] | None) -> None:
        """Continue with `state` when the workers of an elastic job have changed. Never waits for other ranks."""
        self.give_up()
        self._forget_workers()
        self._frozen.clear()
        super().load_compression_state(empty_state() if state is None else state)

    def is_scaled_by(self, scaler: torch.amp.GradScaler) -> bool:
        """Return whether a scaler is this optimizer's. The first that is about to unscale is, if nothing was reduced yet."""
        if self.updates is not None:
            return False
        if self.pipeline is None and self.scaler is None and not self.optimizer._synchronized:
            self.scale_with(scaler)
        return self.scaler is scaler

    # --- gradients in: called from hooks, never waits for another rank ---

    def _note_backward(self, parameter: Tensor) -> None:
        """Note that a gradient comes from the backward pass that goes on. Give up a step that an earlier one has not ended."""
        number, gradient = torch._C._current_graph_task_id(), parameter.grad
        # Compiled passes have no number.
        if number >= 0 and number not in self._passes:
            handed = self._step.handed.get(parameter)
            # If the gradient was added to the one that was handed over, stock Horovod raises.
            if handed is None or handed.gradient is not gradient:
                self.end_interrupted()
                parameter.grad = gradient

            def ended() -> None:
                self._passes.pop(number, None)
                self.restore_moved()

            self._passes[number] = weakref.ref(ended)
            Variable._execution_engine.queue_callback(ended)

    def _note_step(self, *arguments: Any) -> None:
        # Without synchronize the step has not ended: stock Horovod refuses that in zero_grad.
        self._step.ending = bool(self._step.handed) and self.optimizer._should_synchronize

    def end_interrupted(self) -> None:
        """Give up a step of which backward, or `step` of the optimizer, has ended with an exception."""
        if self._step.ending or any(held() is None for held in self._passes.values()):
            self._passes.clear()
            self._give_up_step()

    def update_failed(self, error: BaseException) -> None:
        """Give up the step in which `step` of the optimizer has raised. Other ranks may have made it."""
        if self.optimizer._handles:
            self._give_up_step()
        elif self.optimizer._synchronized and not isinstance(error, FloatingPointError):
            self._transport.take_back_step(self._transport.steps - 1)

    def submit(self, parameter: Tensor) -> None:
        """Record what backward has made. After the step's last pass, take the gradient at once unless it is held back."""
        if self.active:
            self._note_backward(parameter)
        optimizer = self.optimizer
        left = optimizer._allreduce_delay[parameter] - 1
        if left < 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        assert parameter.grad is not None and not parameter.grad.requires_grad
        optimizer._allreduce_delay[parameter] = left
        # As stock hooks do. Only that there is something matters.
        optimizer._handles[parameter] = None, None
        if left or not self.active or self.updates is not None:
            return
        # Gradients are on only if backward makes a graph of its own. PyTorch's context takes longer than a small gradient.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            try:
                self._step.handed[parameter] = hand_over(parameter.grad)
                held_back = self.pipeline is None or self.compressor.holds_back or self._transport.given_up
                name = None if held_back else self._routes.names.get(parameter)
                if name is not None:
                    self._begin_step()
                    self._take(parameter, name)
            except BaseException:
                self._give_up_step()
                raise

    def _take_sparse(self, parameter: Tensor) -> None:
        trained = parameter.grad is not None and parameter.requires_grad
        gradient = parameter.grad if trained else empty_sparse(parameter.shape, parameter)
        assert gradient is not None
        op = mpi_ops.Average if self._averages else mpi_ops.Sum
        self._step.sparse[parameter] = self._transport.start_sparse(gradient, self._routes.names[parameter], op)

    @property
    def _averages(self) -> bool:
        return self.updates is not None or bool(self.optimizer.op == mpi_ops.Average)

    def _target(self, parameter: Tensor) -> Tensor | None:
        if not parameter.requires_grad:
            return None
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty_like(parameter)
        return parameter.grad

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            return None
        return gradient.to_dense() if gradient.is_sparse else gradient

    # --- reduced gradients out ---

    def synchronize(self) -> None:
        """Do as `reduce`. Where updates are exchanged, the gradients stay as they are."""
        self.restore_moved()
        if self.updates is None:
            self.reduce()
            return
        self._restore_hooks()
        self.optimizer._synchronized = True

    def step_alone(self, step: Callable[[], Any]) -> Any:
        """Do as the base says. As with stock Horovod, what this worker has not used has gradients of zeros, and so a state."""
        takes_sparse = isinstance(self.optimizer, torch.optim.SparseAdam)
        for one in self._reduced():
            if one.grad is None and one.requires_grad:
                one.grad = empty_sparse(one.shape, one) if takes_sparse else torch.zeros_like(one)
        return super().step_alone(step)

    def _reduce_updates(self, drifts: dict[Tensor, Tensor]) -> None:
        self.optimizer._synchronized = False
        self.grown(drifts)
        self.reduce()

    @uncompiled
    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all gradients and leave the results in `.grad`. A second call does nothing as long as these are there."""
        optimizer = self.optimizer
        if optimizer._synchronized and not optimizer._handles:
            there = (one.grad for one in self._reduced() if one.grad is not None)
            if any(one.is_sparse or one.any() for one in there):
                return
        if self.active:
            try:
                self._prepare()
                if self.pipeline is not None:
                    self._transport.clear_up()
                    self._complete()
                    self._end_sparse(self.pipeline)
            except BaseException:
                self._give_up_step()
                if self._transport.told:
                    # The rank that has told this one waits for it now, and goes on with the same step as this one.
                    self._transport.clear_up()
                raise
        steps = self._transport.steps
        try:
            self._transport.end_step()
            self._step = Step()
            self._restore_hooks()
            optimizer._synchronized = True
            if self.pipeline is not None:
                self._end_step(self.pipeline)
        except FloatingPointError:
            raise
        except BaseException:
            self._give_up_step()
            self._transport.take_back_step(steps)
            raise
        if self.pipeline is not None and self.scaler is None:
            self.note_reduced()

    def _prepare(self) -> None:
        """Agree on new parameters."""
        try:
            self.check_unchanged()
            self._adopt()
            if len(self._routes.names) < len(self.optimizer._requires_update):
                self._extend_routes()
        except BaseException:
            self.give_up()
            raise

    def _end_sparse(self, pipeline: Pipeline) -> None:
        for parameter, wait in self._step.sparse.items():
            reduced = wait()
            if not pipeline.ops.all_finite(reduced._values()):
                pipeline.note_not_finite(f"parameter {self._routes.names[parameter]!r}")
            if parameter.requires_grad:
                parameter.grad = reduced
        for parameter in self._routes.sparse_as_dense:
            # The gradient is sparse on all ranks or dense on all, whatever a rank has: optimizers round the two differently.
            if parameter.requires_grad:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_sparse()

    def _restore_hooks(self) -> None:
        """Reset the counts of stock hooks to what they were before backward, also for a process set of one worker."""
        optimizer = self.optimizer
        passes = optimizer.backward_passes_per_step
        optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, passes)
        optimizer._handles.clear()

    def give_up(self) -> None:
        """Give up a step that all ranks reduce now: the others wait for this one's part, also if none has begun."""
        self._give_up_step()
        # Before the first agreement there is nothing that could tell them.
        self._transport.given_up = self.pipeline is not None

    def _give_up_step(self) -> None:
        """Forget the step that has begun, so that the next can begin. Never waits for other ranks.

        Collectives that are under way are kept, and ended before anything else is started. Gradients that were taken are in
        the residuals or in messages. They are removed from `.grad`, so that none is taken twice.
        Gradients that waited to be taken together stay in `.grad`.
        """
        step, self._step = self._step, Step()
        if step.begun:
            self._transport.given_up = True
        gone = step.taken - step.waiting
        for parameter, name in self._routes.names.items() if gone else ():
            if name in gone and parameter.requires_grad:
                parameter.grad = None
        if self.pipeline is not None:
            self.pipeline.abort()
        self._restore_hooks()
        self.optimizer._synchronized = False

    @uncompiled
    def check_not_left_out(self) -> None:
        """Give up the step and raise RuntimeError if a GradScaler seems to have left it out on this rank alone."""
        self.check_unchanged()
        if not are_finite([one.gradient for one in self._step.handed.values() if one.gradient is not None]):
            self._give_up_step()
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: optimizer.step() was left out after loss.backward(), and a gradient holds NaN or "
                f"infinity: other ranks may have stepped. {WITH_SCALER}"
            )

    def check_unchanged(self) -> None:
        """Give up the step and raise RuntimeError if a gradient was changed after it had been handed over."""
        changed = first_changed(self._step.handed)
        if changed is None:
            return
        name = self.optimizer._parameter_names[changed]
        self._give_up_step()
        raise RuntimeError(
            f"rank {mpi_ops.rank()}: the gradient of parameter {name!r} was changed after backward "
            "had handed it over, and the change would be lost. Change reduced gradients: call "
            "optimizer.synchronize(), change them, and step with optimizer.skip_synchronize(); or local ones, with "
            "parameter.register_hook(). To clip, pass clip=... to the compressor, which clips before the selection. If a "
            "library clips or measures gradients (Lightning, Accelerate, Transformers), docs/libraries.md shows where to call "
            f"optimizer.synchronize() before it does. {WITH_SCALER}"
        )

    def parameters_added(self) -> None:
        """Take in a group of parameters that was added to the optimizer."""
        self.settings_changed()
        if self.active:
            self._adopt()

    def settings_changed(self) -> None:
        """Check the optimizer's settings, which may have changed."""
        if self.momentum is not None:
            check_dampening(self.optimizer.param_groups)
        else:
            check_momentum(self.compressor, self.optimizer.param_groups)

    @torch.enable_grad()
    def _adopt(self) -> None:
        """Hook parameters that stock Horovod would ignore: those of added groups, and those that require gradients only now."""
        optimizer = self.optimizer
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in optimizer._requires_update:
                    name = optimizer._parameter_names.setdefault(parameter, f"allreduce.noname.{number}.{position}")
                    check_memory({parameter: name})
                    optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
                    if optimizer._groups is not None:
                        optimizer._p_to_group[parameter] = (parameter,)
                    optimizer._requires_update.add(parameter)
                    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                    accumulator.register_hook(optimizer._make_hook(parameter))
                    optimizer._grad_accs.append(accumulator)

    def _reduced(self) -> dict[Tensor, str]:
        """Return the parameters that are reduced, with their names, in the order of the optimizer."""
        optimizer = self.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {one: optimizer._parameter_names[one] for one in parameters if one in optimizer._requires_update}

    def _extend_routes(self) -> None:
        new = {one: name for one, name in self._reduced().items() if one not in self._routes.names}
        found = self._agree(new)
        sparse_as_dense = self._sparse_as_dense
        if found and not sparse_as_dense and self.momentum is not None and self.pipeline is None:
            # Their gradients get no momentum before the selection, so that all of it stays in the optimizer.
            self.momentum = None
            self.compressor.move_momentum(0.0, nesterov=False)
        check_sparse(found, self.compressor, sparse_as_dense=sparse_as_dense, rank=mpi_ops.rank())
        if is_elastic() and self.pipeline is None:
            self.deferred = align(self.deferred)
        self._extend(new, found)

    def _agree(self, new: Mapping[Tensor, str]) -> set[str]:
        """Compare settings and `new` parameters on all ranks. Return which have sparse gradients on some rank. Blocks."""
        optimizer, process_set, number = self.optimizer, self._process_set, self._transport.number
        names = optimizer._parameter_names
        known_sparse = () if self.deferred is None or self.updates is not None else self.deferred.get("sparse", ())
        mine = {
            **description(self.compressor, new, optimizer.param_groups),
            "optimizer": "new" if number is None else str(number),
            "op": op_name(optimizer.op, mpi_ops.Average, mpi_ops.Sum),
            "sparse_as_dense": str(bool(optimizer.sparse_as_dense)),
            "groups": [str([names[p] for p in group]) for group in dict.fromkeys(optimizer._p_to_group.values())],
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
        everyone = self._transport.everyone([mine, sparse, _agreed[key], sums(new)], "agree")
        compare(mine, [theirs for theirs, *_ in everyone], mpi_ops.rank())
        values = [theirs for *_, theirs in everyone]
        remedy = "call hvd.broadcast_parameters first"
        warn_of_values([*new.values()], values, process_set.rank(), mpi_ops.rank(), remedy)
        check_real(new)
        if number is None:
            number = self._transport.number = max(agreed for _, _, agreed, *_ in everyone)
            # The next optimizer gets another one.
            _agreed[key] = number + 1
        return {name for _, names, *_ in everyone for name in names}

    # --- statistics and state: see `Store` ---

    def state_dict(self) -> dict[str, Any]:
        self.end_interrupted()
        if self._step.begun:
            raise RuntimeError(
                f"rank {mpi_ops.rank()}: state_dict must be called between two steps, got a call after loss.backward(), when "
                "the residuals lack what is on its way; call optimizer.step() first"
            )
        return super().state_dict()

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        if self.pipeline is None and self.active:
            # Find a wrong state when it is loaded, not in the middle of the first step.
            self._check(state, self._reduced(), state.get("sparse", ()))
        super().load_compression_state(state)
        self._begin_afresh()

    def reset(self) -> None:
        super().reset()
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Give up a step that has begun, because all residuals were replaced, and forget which parameters are frozen."""
        if self._step.begun:
            self._give_up_step()
        self._frozen.clear()
