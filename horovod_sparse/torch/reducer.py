"""Reduces the gradients of a wrapped optimizer whose compression is one of ours.

There is one `Reducer` per optimizer. Hooks give it gradients while backward goes on, and never wait for another rank (on a
GPU, buckets that have no selector do wait for the device). `synchronize` waits, once.
Some steps are held back, and reduced as a whole in `synchronize`:

- The first step. The ranks compare their settings before it: a difference raises on all of them instead of hanging, and all
  of them learn which embeddings have sparse gradients.
- A step that follows a step that was given up.
- Every step, if the compressor must see every gradient first.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import Tensor

from horovod_sparse.core.binding import compresses, stats_of
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.pipeline import Arrived, Pipeline, check_discardable
from horovod_sparse.core.state import check_state, empty_state, holds_anything, rescale_state
from horovod_sparse.core.statistics import Stats
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.torch.agreement import agree, agree_on_states, check_momentum
from horovod_sparse.torch.compiled import tensor_ops
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.exchange import Collectives, empty_sparse
from horovod_sparse.torch.gradients import gradient_of, write_dense_parts, write_reduced
from horovod_sparse.torch.handover import Handed, first_changed, hand_over, without_sample
from horovod_sparse.torch.routes import Dense, Routes, wire_dtype

_TOGETHER = 2**18
"""Bytes of gradients that are taken together; a processor's cache holds as many."""

Wait = Callable[[], Tensor]
"""A function that waits for a collective and returns its result."""


@dataclass
class _Waiting:
    """Gradients of a bucket that will be taken together."""

    arrived: list[Arrived] = field(default_factory=list)
    nbytes: int = 0


@dataclass
class _Step:
    """What this rank has done in a step so far."""

    handed: dict[Tensor, Handed] = field(default_factory=dict)
    """The gradients that backward has handed over, by parameter."""
    begun: bool = False
    """True once gradients are being taken: they are in residuals, or on their way."""
    taken: set[Tensor] = field(default_factory=set)
    """Parameters that have been taken, with a gradient or without one."""
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    """The gradients that wait to be taken together, by bucket."""
    exchanges: dict[str, Wait] = field(default_factory=dict)
    """The functions that wait for the first collective, by bucket."""
    arrived: Counter[str] = field(default_factory=Counter)
    """How many of the parameters that are reduced dense together have been taken, by the name of their `Dense`."""
    dense: list[tuple[Dense, Tensor, Wait]] = field(default_factory=list)
    sparse: dict[Tensor, Wait] = field(default_factory=dict)
    learning_rates: dict[Tensor, float] = field(default_factory=dict)
    """The learning rates by parameter, looked up when first needed."""


class Reducer:
    """Reduces the gradients of one `hvd.DistributedOptimizer`.

    Args:
        optimizer: the wrapped optimizer, fully constructed.
        compressor: the optimizer's `compression`, already checked by `check_arguments` and `check_momentum`.
    """

    def __init__(self, optimizer: Any, compressor: TorchCompressor) -> None:
        compressor.bind(self)
        self.compressor = compressor
        self.pipeline: Pipeline | None = None
        self._optimizer = optimizer
        self._ops = tensor_ops()
        self._process_set = optimizer.process_set
        self._number: int | None = None
        """The optimizer's number, the same on every rank; None before the first agreement."""
        self._collectives = Collectives(optimizer.op, optimizer.gradient_predivide_factor, self._process_set)
        self._routes = Routes(optimizer, compressor)
        self._step = _Step()
        self._frozen: set[Tensor] = set()
        """Parameters that are not trained at the moment. They keep no residual and no velocity."""
        self._pending_state: Mapping[str, Any] | None = None
        self.active = self._activate()

    def _activate(self) -> bool:
        if not self._process_set.included() or not compresses(self._process_set.size()):
            return False
        if mpi_ops.size() == 1:
            # Stock Horovod registers no hooks for a single worker.
            self._optimizer._register_hooks()
        return True

    def _name(self, what: str) -> str:
        """Return the full name of a collective."""
        return f"horovod_sparse.{self._process_set.process_set_id}.{self._number}.{what}"

    # --- gradients in: called from hooks, never waits for another rank ---

    def submit(self, parameter: Tensor) -> None:
        """Record a gradient that is ready, and take it at once unless the step is held back."""
        if not self.active:
            return
        if torch.is_grad_enabled():
            # Backward makes a graph of its own. Otherwise there is no context, which would take longer than a small gradient.
            with torch.no_grad():
                self._submit(parameter)
        else:
            self._submit(parameter)

    def _submit(self, parameter: Tensor) -> None:
        try:
            self._step.handed[parameter] = hand_over(parameter.grad)
            if not self._holds_back and parameter in self._routes.names:
                self._begin_step()
                self._take(parameter)
        except BaseException:
            self._give_up_step()
            raise

    @property
    def _holds_back(self) -> bool:
        return self.pipeline is None or self.compressor.holds_back or self._collectives.given_up

    def _begin_step(self) -> None:
        if self._step.begun:
            return
        self._step.begun = True
        assert self.pipeline is not None
        self._drop_frozen(self.pipeline)
        self.pipeline.start_step(self._gradients())

    def _drop_frozen(self, pipeline: Pipeline) -> None:
        frozen = {parameter for parameter in self._routes.names if not parameter.requires_grad}
        for parameter in frozen - self._frozen - self._routes.sparse:
            pipeline.drop(self._routes.names[parameter])
        self._frozen = frozen

    def _gradients(self) -> Iterator[Tensor]:
        """Yield all gradients that this rank has, except sparse ones."""
        for parameter in self._routes.names:
            gradient = None if parameter in self._routes.sparse else gradient_of(parameter)
            if gradient is not None:
                yield gradient

    def _take(self, parameter: Tensor) -> None:
        """Give a gradient to the pipeline, or start its reduction. Gradients reduced together start with the last one."""
        step, pipeline, routes = self._step, self.pipeline, self._routes
        assert pipeline is not None
        step.taken.add(parameter)
        together = routes.dense.get(parameter)
        if together is not None:
            step.arrived[together.name] += 1
            if step.arrived[together.name] == len(together.parameters):
                message = self._dense_message(together, pipeline)
                if parameter in step.handed and message is parameter.grad:
                    step.handed[parameter] = without_sample(step.handed[parameter])
                wait = self._collectives.start("dense", message, self._name(together.name))
                step.dense.append((together, message, wait))
        elif parameter in routes.sparse:
            trained = parameter.grad is not None and parameter.requires_grad
            gradient = parameter.grad if trained else empty_sparse(parameter.shape, parameter)
            assert gradient is not None
            step.sparse[parameter] = self._collectives.start("sparse", gradient, self._name(routes.names[parameter]))
        else:
            name = routes.names[parameter]
            self._collect(
                pipeline,
                pipeline.bucket_of(name),
                Arrived(name, gradient_of(parameter), self._learning_rate(parameter)),
            )

    def _collect(self, pipeline: Pipeline, bucket: Bucket, arrived: Arrived) -> None:
        """Give the pipeline a bucket's gradients: large ones at once, while they are in the caches, small ones together."""
        waiting = self._step.waiting.get(bucket.name)
        if waiting is None:
            waiting = self._step.waiting[bucket.name] = _Waiting()
        waiting.arrived.append(arrived)
        if arrived.gradient is not None:
            waiting.nbytes += arrived.gradient.nbytes
        if waiting.nbytes < _TOGETHER and len(waiting.arrived) < len(bucket.missing):
            return
        del self._step.waiting[bucket.name]
        if pipeline.arrive_together(bucket, waiting.arrived) is not None:
            self._step.exchanges[bucket.name] = self._start(bucket, pipeline.begin(bucket))

    def _start(self, bucket: Bucket, collective: Collective) -> Wait:
        return self._collectives.start(
            collective.kind, collective.message, self._name(f"{bucket.name}.{bucket.rounds}")
        )

    def _learning_rate(self, parameter: Tensor) -> float | None:
        if not self.compressor.lr_in_residual:
            return None
        rates = self._step.learning_rates
        if not rates:
            groups = self._optimizer.param_groups
            rates.update((member, float(group["lr"])) for group in groups for member in group["params"])
        return rates[parameter]

    def _dense_message(self, together: Dense, pipeline: Pipeline) -> Tensor:
        """Return the gradients, one after the other. A large one stays in its own memory if possible, and is reduced there."""
        gradients: list[Tensor] = []
        for parameter in together.parameters:
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            if self.compressor.clip_norm is not None:
                gradient = pipeline.preparation.clipped(
                    gradient, "float64" if gradient.dtype == torch.float64 else "float32"
                )
            gradients.append(gradient)
        wire = wire_dtype(gradients[0])
        if together.layout.numel >= self.compressor.min_numel and len(gradients) == 1:
            return gradients[0].to(wire).contiguous()
        return torch.cat([gradient if gradient.dim() == 1 else gradient.reshape(-1) for gradient in gradients]).to(wire)

    # --- reduced gradients out ---

    def synchronize(self) -> None:
        """Reduce all gradients and leave the results in `.grad`. A second call without new gradients does nothing."""
        optimizer = self._optimizer
        if optimizer._synchronized and not optimizer._handles:
            return
        if self.active:
            try:
                self._reduce()
            except BaseException:
                self._give_up_step()
                raise
        self._step = _Step()
        self._collectives.end_step()
        self._restore_hooks()
        optimizer._synchronized = True
        if self.pipeline is not None:
            self.pipeline.end_step()

    @torch.no_grad()
    def _reduce(self) -> None:
        self.check_unchanged()
        self._routes.adopt()
        if not self._routes.complete:
            self._extend_routes()
        if self.pipeline is None:
            # There is nothing to reduce.
            return
        self._collectives.clear_up(self._name("given_up"))
        self._begin_step()
        for parameter in self._routes.names:
            if parameter not in self._step.taken:
                self._take(parameter)
        self._finish(self.pipeline)

    def _restore_hooks(self) -> None:
        """Reset the counts of stock hooks to what they were before backward, also for a process set of one worker."""
        optimizer = self._optimizer
        for parameter in optimizer._allreduce_delay:
            optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        for group in optimizer._group_counts:
            optimizer._group_counts[group] = 0
        optimizer._handles.clear()

    def _give_up_step(self) -> None:
        """Forget the step that has begun, so that the next can begin. Never waits for other ranks.

        Collectives that are under way are kept, and ended before anything else is started. Gradients that were taken are in
        the residuals, or are being reduced in their own memory. They are removed from `.grad`, so that none is taken twice.
        Gradients that waited to be taken together stay in `.grad`.
        """
        step, self._step = self._step, _Step()
        if step.begun:
            self._collectives.given_up = True
        waiting = {arrived.name for together in step.waiting.values() for arrived in together.arrived}
        for parameter in step.taken:
            if parameter.requires_grad and self._routes.names[parameter] not in waiting:
                parameter.grad = None
        if self.pipeline is not None:
            self.pipeline.abort()
        self._restore_hooks()
        self._optimizer._synchronized = False

    def check_unchanged(self) -> None:
        """Give up the step and raise RuntimeError if a gradient was changed after it had been handed over."""
        changed = first_changed(self._step.handed)
        if changed is None:
            return
        name = self._optimizer._parameter_names[changed]
        self._give_up_step()
        raise RuntimeError(
            f"rank {mpi_ops.rank()}: the gradient of parameter {name!r} was changed after backward "
            "had handed it over, and the change would be lost. Change reduced gradients: call "
            "optimizer.synchronize(), change them (with torch.amp.GradScaler: scaler.unscale_(optimizer)), and step with "
            "optimizer.skip_synchronize(); or local ones, with parameter.register_hook()"
        )

    def check_not_left_out(self) -> None:
        """Give up the step and raise RuntimeError if a GradScaler seems to have left it out on this rank alone."""
        self.check_unchanged()
        for parameter, (gradient, *_) in self._step.handed.items():
            if gradient is not None and not self._ops.all_finite(
                gradient._values() if gradient.is_sparse else gradient
            ):
                name = self._optimizer._parameter_names[parameter]
                self._give_up_step()
                raise RuntimeError(
                    f"rank {mpi_ops.rank()}: optimizer.step() was left out after loss.backward(), and the gradient of "
                    f"parameter {name!r} holds NaN or infinity: other ranks may have stepped. With torch.amp.GradScaler call "
                    "optimizer.synchronize(), then scaler.unscale_(optimizer), and scaler.step(optimizer) within "
                    "optimizer.skip_synchronize(), so that all ranks leave out the same steps"
                )

    def _finish(self, pipeline: Pipeline) -> None:
        divisor = float(pipeline.world) if self._optimizer.op == mpi_ops.Average else 1.0
        # The order is the same on every rank, so that all have started the same collectives if one of the exchanges raises.
        under_way = [(bucket, self._step.exchanges[bucket.name]) for bucket in pipeline.buckets]
        while under_way:
            # Start every bucket's next collective before waiting for the first of them.
            following = []
            for bucket, result in under_way:
                collective = pipeline.advance(bucket, result(), divisor, self._write)
                if collective is not None:
                    following.append((bucket, self._start(bucket, collective)))
            under_way = following
        for together, message, wait in self._step.dense:
            wait()
            pipeline.finish_dense(together.name, message)
            self._write_dense(together, message)
        for parameter, wait in self._step.sparse.items():
            reduced = wait()
            pipeline.check_reduced(self._routes.names[parameter], reduced._values())
            if parameter.requires_grad:
                parameter.grad = reduced

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        parameters = [self._routes.compressed[slot.name] for slot in slots]
        write_reduced(slots, parameters, reduced, self._routes.sparse_as_dense)

    def _write_dense(self, together: Dense, reduced: Tensor) -> None:
        parts = torch.split(reduced.view(-1), [slot.numel for slot in together.layout.slots])
        write_dense_parts(together.parameters, parts, self._routes.sparse_as_dense)

    def parameters_added(self) -> None:
        """Take in a group of parameters that was added to the optimizer."""
        self.settings_changed()
        if self.active:
            self._routes.adopt()

    def settings_changed(self) -> None:
        """Check the optimizer's settings, which may have changed."""
        check_momentum(self._optimizer.param_groups, self.compressor)

    def _extend_routes(self) -> None:
        new = self._routes.without_route()
        known = (self._pending_state or {}).get("sparse", ())
        agreement = agree(self._optimizer, self.compressor, new, known, self._number)
        agree_on_states(self._problem_with_state(agreement.sparse), self._process_set)
        agreement.conclude()
        self._number = agreement.number
        if self.pipeline is None:
            self.pipeline = Pipeline(
                self._ops,
                self.compressor,
                world=self._process_set.size(),
                position=self._process_set.rank(),
                rank=mpi_ops.rank(),
                averages=self._optimizer.op == mpi_ops.Average,
                device_selector=on_gpu,
            )
        self._routes.extend(new, agreement.sparse, self.pipeline)
        if self._pending_state is not None:
            self.pipeline.load_state_dict(self._pending_state)
            self._pending_state = None

    def _problem_with_state(self, sparse: Collection[str]) -> str:
        """Return why the pending state cannot be loaded, now that it is known which gradients are sparse; "" if it can."""
        if self._pending_state is None:
            return ""
        left_out = () if self._optimizer.sparse_as_dense else sparse
        try:
            check_state(self._pending_state, self.compressor, *self._routes.expected_shapes(left_out))
        except ValueError as error:
            return str(error)
        return ""

    # --- statistics and state: see `BoundCompressor` ---

    def stats(self) -> Stats:
        return stats_of(self.pipeline)

    @property
    def residual_bytes(self) -> int:
        return 0 if self.pipeline is None else self.pipeline.residuals.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Return the pipeline's state, and the names of the parameters with sparse gradients, which have no state."""
        if self._pending_state is not None:
            return copy.deepcopy(dict(self._pending_state))
        if self.pipeline is None:
            return empty_state()
        sparse = sorted(self._routes.names[parameter] for parameter in self._routes.sparse)
        return {**self.pipeline.state_dict(), "sparse": sparse}

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Load the state now. Before the first step, load it when the buckets are made."""
        if self.pipeline is not None:
            self.pipeline.load_state_dict(state)
        else:
            if self.active and holds_anything(state):
                # Find a wrong state when it is loaded, not in the middle of the first step.
                check_state(state, self.compressor, *self._routes.expected_shapes(state.get("sparse", ())))
            self._pending_state = copy.deepcopy(dict(state)) if holds_anything(state) else None
        self._begin_afresh()

    def rescale(self, factor: float) -> None:
        """Multiply all residuals, all velocities and what is kept in their unit by `factor`."""
        if self._pending_state is not None:
            self._pending_state = rescale_state(self._pending_state, self.compressor, factor)
        if self.pipeline is not None:
            self.pipeline.rescale(factor)

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self._pending_state = None
        if self.pipeline is not None:
            self.pipeline.reset()
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Give up a step that has begun, because all residuals were replaced, and forget which parameters are frozen."""
        if self._step.begun:
            self._give_up_step()
        self._frozen.clear()

    def discard_step(self) -> None:
        """See `BoundCompressor.discard_step`. A step whose gradients were only handed over has changed nothing yet."""
        check_discardable(self.compressor)
        if not self.active:
            return
        open_step = bool(self._step.handed)
        if self.pipeline is not None and (self._step.begun or not open_step):
            self.pipeline.discard_step()
        elif not open_step:
            raise RuntimeError("there is no step to discard: nothing was reduced yet")
        if open_step:
            self._give_up_step()
