"""The base of the reducers of PyTorch's gradients, whoever hands gradients over and carries out collectives. No Horovod."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_sparse import kernels
from horovod_sparse.core.agreement import agree_on_states, divides
from horovod_sparse.core.intake import Arrived
from horovod_sparse.core.layout import Parameter, Slot, planned
from horovod_sparse.core.pipeline import AnyBucket, Pipeline, Wait
from horovod_sparse.core.state import check_state, empty_state, holds_anything, kept_shapes
from horovod_sparse.core.store import Store, log_start
from horovod_sparse.core.transport import Transport
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.ops.protocol import Part
from horovod_sparse.torch.compiled import tensor_ops
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.detached import Detached, Waiting
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.momentum import MovedMomentum, is_sgd, moved_momentum
from horovod_sparse.torch.movement import Sample, Updates
from horovod_sparse.torch.parameters import local_part, wide
from horovod_sparse.torch.step import Step
from horovod_sparse.torch.unchanged import Handed, first_changed, hand_over

WITH_SCALER = (
    "With torch.amp.GradScaler, call compression.scale_with(scaler) before the first step, so that all ranks leave out the "
    "same steps"
)


@dataclass
class Routes:
    """Where the gradients of the parameters go that have been agreed on; more can join later."""

    names: dict[Tensor, str] = field(default_factory=dict)
    """All parameters that have a route, with their names, in the order of the model."""
    in_buckets: dict[str, Tensor] = field(default_factory=dict)
    """Those whose gradients go through a bucket, by name."""
    sparse_as_dense: set[Tensor] = field(default_factory=set)
    """Parameters whose reduced gradients become sparse tensors again on every rank."""


class TensorReducer(Store):
    """Reduces the gradients of the parameters that have routes, from the step on in which the ranks have agreed on them.

    A `GradScaler` may have scaled them: residuals are kept without its scale.
    """

    compressor: TorchCompressor
    _transport: Transport
    optimizer: Any = None
    """None if it is not known."""
    _groups: Mapping[Tensor, Hashable] = {}
    """The group of each parameter that has one: Horovod's `groups=`."""
    _sparse_as_dense = False
    """Whether sparse gradients are compressed, too."""
    scaler: torch.amp.GradScaler | None = None
    detached: Detached | None = None
    """Moves the model's parameters while gradients are computed; None if they stay where they are."""
    momentum: MovedMomentum | None = None
    """The optimizer's momentum, if it is applied before the selection."""
    updates: Updates | None = None
    in_flight = False
    """Whether an exchange travels while steps go on. The residuals lack what it has taken."""

    def __init__(self, compressor: TorchCompressor) -> None:
        super().__init__()
        compressor.bind(self)
        self.compressor = compressor
        self._routes = Routes()
        self._step = Step()
        self._sample = Sample()
        self._frozen: set[str] = set()
        """Parameters that are not trained at the moment. They keep no residual and no velocity."""
        self._noted: dict[Tensor, Handed] = {}
        """A reduced gradient that the optimizer is to step with as it is."""

    # --- what is left to others ---

    @property
    def _averages(self) -> bool:
        """Whether gradients are averaged over the ranks, or added up."""
        return True

    @abstractmethod
    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter in this step, as a dense tensor; None if there is none."""

    def _target(self, parameter: Tensor) -> Tensor | None:
        """Return where the reduced gradient of a parameter belongs; None if it is not needed."""
        return self._gradient(parameter)

    @abstractmethod
    def _reduce_updates(self, drifts: dict[Tensor, Tensor]) -> None:
        """Reduce the movements of parameters, which are in their gradients; see `Updates.step`."""

    @abstractmethod
    def give_up(self) -> None:
        """Give up a step that all ranks reduce now."""

    # --- a step ---

    def _begin_step(self) -> None:
        """Begin a step, before its first gradient is taken."""
        step, pipeline = self._step, self.pipeline
        assert pipeline is not None
        if not step.begun:
            step.begun = True
            self._drop_frozen(pipeline)
            if pipeline.intake.in_updates:
                groups = self._param_groups
                step.learning_rates = {one: float(group["lr"]) for group in groups for one in group["params"]}
            gradients = map(self._gradient, self._routes.in_buckets.values())
            scale = None if self.scaler is None else float(self.scaler.get_scale())
            pipeline.start_step((one for one in gradients if one is not None), scale, undoes=self.undoes)

    def _start(self, bucket: AnyBucket | None, collective: Collective) -> Wait:
        """Start a bucket's next collective, or the only one without a bucket, whose name is no parameter's."""
        name = ".sample" if bucket is None else f"{bucket.name}.{bucket.rounds}"
        return self._transport.start(collective, name, bucket)

    def _take(self, parameter: Tensor, name: str) -> None:
        """Give a gradient to the pipeline, and start the exchange of its bucket once that is complete."""
        step, pipeline = self._step, self.pipeline
        assert pipeline is not None
        step.taken.add(name)
        if name in self.sparse:
            self._take_sparse(parameter)
            return
        bucket = pipeline.bucket_of[name]
        if parameter.shape != bucket.slots[name].shape:
            raise ValueError(
                f"parameter {name!r} must keep its shape, which was {bucket.slots[name].shape} in its first step, got "
                f"{tuple(parameter.shape)}: its residual has the first one; make a new optimizer and a new compression"
            )
        noted, given = None if self.momentum is None else self._noted.get(parameter), parameter.grad
        # What is zeroed first has two versions more.
        if noted is not None and given is not None and given is noted.gradient and given._version == noted.version + 1:
            raise RuntimeError(
                f"gradients must be reduced once before a step with {self.compressor.momentum_correction!r}, but that of "
                f"{name!r} was added to one that was reduced: put all backward passes of a step but the last into "
                "model.no_sync() (DDP), use backward_passes_per_step (Horovod), or pass momentum=None to the compressor"
            )
        rate = step.learning_rates[parameter] if step.learning_rates else None
        gradients = step.collect(bucket, Arrived(name, self._gradient(parameter), rate))
        if gradients and pipeline.arrive_together(bucket, gradients) is not None:
            step.exchanges[bucket.name] = self._start(bucket, bucket.begin())

    def _take_sparse(self, parameter: Tensor) -> None:
        """Start the reduction of a sparse gradient. Only a reducer that gives such routes has any."""

    def _take_all(self) -> None:
        """Take what has not been taken. All exchanges have begun then."""
        self._begin_step()
        step = self._step
        for parameter, name in self._routes.names.items():
            if name not in step.taken:
                self._take(parameter, name)
        if step.sample is not None and step.lengths is None:
            step.lengths = self._start(None, Collective("allreduce", step.sample))

    def _complete(self) -> None:
        """Take what has not been taken, end all exchanges, and write the reduced gradients."""
        self._take_all()
        step, pipeline = self._step, self.pipeline
        assert pipeline is not None
        # The order is the same on every rank, so that all have started the same collectives if one of the exchanges raises.
        under_way = [(bucket, step.exchanges[bucket.name]) for bucket in pipeline.all_buckets]
        pipeline.complete(under_way, self._write, self._start)
        self._fail_together(pipeline)
        if step.lengths is not None:
            means = step.lengths() / self._transport.world
            if not pipeline.fails:
                self.lengths.note(means.tolist())

    def _fail_together(self, pipeline: Pipeline) -> None:
        """Let the step fail if it does on a rank that holds another part of the same parameters."""

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> list[str]:
        """Write reduced gradients where they belong, in their types. Return the parameters whose type cannot hold them."""
        parts: list[Part] = []
        rounded: list[tuple[str, Tensor, Tensor]] = []
        for slot in slots:
            target = self._target(self._routes.in_buckets[slot.name])
            if target is None:
                continue
            if target.dtype in (torch.float32, torch.float64) and target.is_contiguous():
                flat = target if target.dim() == 1 else target.view(-1)
            else:
                # Half-precision sums are rounded once at the end, not after every rank.
                flat = torch.empty(target.numel(), dtype=wide(target), device=target.device)
                rounded.append((slot.name, target, flat))
            parts.append((slot.offset, flat))
        reduced.write(parts)
        for _, target, flat in rounded:
            target.copy_(flat.view(target.shape))
        half = [(name, target.isinf().any()) for name, target, flat in rounded if target.dtype != flat.dtype]
        # A device is waited for once.
        found = torch.stack([infinite for _, infinite in half]).tolist() if half else []
        return [name for (name, _), infinite in zip(half, found, strict=True) if infinite]

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _check(self, state: Mapping[str, Any], names: Mapping[Tensor, str], sparse: Collection[str]) -> None:
        """Raise ValueError unless a state fits the parameters that have `names`, without those that are `sparse`."""
        if holds_anything(state):
            shapes = {name: tuple(one.shape) for one, name in names.items() if name not in sparse}
            check_state(state, self.compressor, *kept_shapes(shapes, self.compressor))

    def _extend(self, new: dict[Tensor, str], sparse: Collection[str] = ()) -> None:
        """Make buckets for new parameters, and load the state that was deferred if it fits on all ranks. Blocks."""
        pipeline, compressor, state = self.pipeline, self.compressor, self.deferred or empty_state()
        transport, no_bucket = self._transport, () if self._sparse_as_dense else sparse
        agree_on_states(lambda: self._check(state, new, no_bucket), transport)
        if pipeline is None:
            pipeline = Pipeline(
                tensor_ops(),
                compressor,
                world=transport.world,
                position=transport.position,
                rank=transport.rank,
                averages=self._averages,
                device_selector=on_gpu,
            )
            if self.momentum is not None:
                pipeline.intake.momentum = self.momentum.of
        self._add_buckets(new, sparse, pipeline)
        before, self.pipeline = self.pipeline, pipeline
        try:
            if self.deferred is not None:
                super().load_compression_state(self.deferred)
        except BaseException:
            self.pipeline = before
            raise
        if before is None:
            log_start(pipeline, kernels.variant(), self.updates)

    def _add_buckets(self, new: dict[Tensor, str], sparse: Collection[str], pipeline: Pipeline) -> None:
        routes, here = self._routes, {name: parameter for parameter, name in new.items()}
        if self._sparse_as_dense:
            routes.sparse_as_dense |= {here[name] for name in sparse if name in here}
        else:
            self.sparse = {*self.sparse, *sparse}
            here = {name: parameter for name, parameter in here.items() if name not in sparse}
        numbers = {group: number for number, group in enumerate(dict.fromkeys(self._groups.values()))}
        described = [
            Parameter(
                name,
                tuple(parameter.shape),
                self.compressor.residual_dtype_of(parameter),
                str(parameter.device),
                numbers[self._groups[parameter]] if numbers else None,
            )
            for name, parameter in here.items()
        ]
        buckets, dense = planned(described, self.compressor, pipeline.world)
        pipeline.add_buckets(buckets, here.__getitem__)
        pipeline.add_dense(dense, here.__getitem__)
        routes.names.update(new)
        routes.in_buckets.update(here)

    def _drop_frozen(self, pipeline: Pipeline) -> None:
        """Forget what is kept of parameters that are not trained any more."""
        frozen = {name for parameter, name in self._routes.names.items() if not parameter.requires_grad}
        for name in frozen - self._frozen:
            pipeline.drop(name)
        self._frozen = frozen

    # --- updates in place of gradients, and parameters that move while gradients are computed ---

    def serve(
        self, own_step: Callable[..., Any], names: Mapping[Tensor, str], *, updates: bool, moves: bool = True
    ) -> None:
        """Serve the optimizer: exchange its updates, or gradients, and then its momentum moves if it `moves`.

        `own_step` is the optimizer's own, and `names` are those of the model's parameters.
        """
        optimizer = self.optimizer
        if self.active and updates:
            self.updates = Updates(optimizer)
            self.lengths.grow = divides(optimizer.param_groups)
        elif self.active and moves:
            self.momentum = moved_momentum(self.compressor, optimizer, own_step, names)
        # By itself only where the unit of updates is known.
        if self._in_parameters or is_sgd(own_step) or self.compressor.detached != "auto":
            self.move_parameters(self.compressor.detached_coefficient, optimizer, names)

    def step(
        self, own_step: Callable[..., Any], closure: Callable[[], Any] | None, reduce: Callable[[], None] | None = None
    ) -> Any:
        """Let the optimizer step, with gradients that `reduce` reduces, or exchange its update. Return the closure's result."""
        if self.updates is not None:
            return self.step_alone(own_step if closure is None else partial(own_step, self.updates.checked(closure)))
        # Before the momentum is left out, because backward reads it.
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if reduce is not None:
            reduce()
        self._step_locally(own_step)
        return loss

    def _step_locally(self, own_step: Callable[..., Any]) -> None:
        """Let the optimizer step with its gradients as they are, without the momentum that has moved."""
        with nullcontext() if self.momentum is None else self.momentum.left_out():
            own_step()

    def step_alone(self, step: Callable[[], Any]) -> Any:
        """Let the optimizer step with this rank's gradients, and exchange its update."""
        assert self.updates is not None
        self.restore_moved()
        return self.updates.step(step, self._reduce_updates, self.give_up)

    def grown(self, movements: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return the movements of this step, which have grown by what their mean over the workers loses (`Lengths`)."""
        if self.lengths.grow and movements:
            self._step.sample = self._sample.of(movements)
            torch._foreach_mul_([*movements.values()], self.lengths.factor(self._transport.world))
        return movements

    def move_parameters(
        self, coefficient: float, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
    ) -> None:
        """Move the parameters of an optimizer by a part of what waits, while gradients are computed. Check notes in steps."""
        if not (self.active and (coefficient or self.momentum)):
            return
        optimizer.register_step_pre_hook(self._check_noted)
        if coefficient:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.detached = Detached(coefficient, parameters, partial(self._waiting, optimizer, names))

    def _waiting(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> list[Waiting]:
        """Return what waits between two steps: in the pipeline, or in a state that was loaded before the first step."""
        pipeline, state = self.pipeline, self.deferred or empty_state()
        residuals = state["residuals"]
        if pipeline is not None:
            nothing = (pipeline.is_open and not self.in_flight) or all(bucket.is_dense for bucket in pipeline.buckets)
            residuals = {} if nothing else pipeline.residuals.views
        found, grown = [], self.lengths.factor(self._transport.world)
        for group in optimizer.param_groups:
            rate = 1.0 / grown if self._in_parameters else 1.0 if self.compressor.in_updates else float(group["lr"])
            for parameter in group["params"]:
                name = names.get(parameter, "")
                residual = residuals.get(name) if parameter.requires_grad else None
                # If the shape differs, the step raises.
                if residual is not None and residual.shape == local_part(parameter).shape:
                    # A state that was loaded may be in the host's memory.
                    found.append((parameter, residual.to(parameter.device), rate))
        return found

    def note_reduced(self) -> None:
        """Let a change of the gradients be noticed, which gives the updates another unit than the residuals have."""
        first = next((one for one in self._routes.in_buckets.values() if one.grad is not None), None)
        watches = self.updates is None and (self.detached or self.momentum)
        self._noted = {first: hand_over(first.grad)} if first is not None and watches else {}

    def _check_noted(self, *_: object) -> None:
        """Stop moving parameters if the gradients that the optimizer steps with were changed: residuals have another unit."""
        # The end of backward may have been interrupted.
        self.restore_moved()
        # Before a closure, or after a step that was left out, the note is of an earlier step.
        noted = {one: was for one, was in self._noted.items() if one.grad is not None and not self._step.handed}
        self._noted = {}
        if self.detached is not None and first_changed(noted, wait=False) is not None:
            why = "gradients were changed after they had been reduced. To clip, pass clip=... to the compressor"
            self.detached.stop(why)

    def restore_moved(self) -> None:
        """Give the parameters back what they were before a forward pass."""
        if self.detached is not None:
            self.detached.restore()

    # --- a loss scaler ---

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`."""
        if self.updates is not None or self.scaler is scaler or not scaler.is_enabled():
            return
        if self.pipeline is not None or self.scaler is not None:
            raise RuntimeError(
                "scale_with must be called once, before the first step, because residuals are kept without the loss scale; "
                "make a new optimizer and a new compression, or scale by hand: see docs/pytorch.md"
            )
        self.scaler, self.undoes = scaler, True

    def rescale(self, factor: float) -> None:
        if self.scaler is not None:
            raise RuntimeError(
                "rescale must not be called with scale_with(scaler): residuals are kept without the loss scale"
            )
        super().rescale(factor)

    def _end_step(self, pipeline: Pipeline) -> None:
        try:
            pipeline.end_step()
        except FloatingPointError as error:
            error.args = (f"{error}. {WITH_SCALER}",)
            raise
