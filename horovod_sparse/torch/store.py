"""The base of the reducers of PyTorch's gradients, whoever hands gradients over and carries out collectives. No Horovod."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from horovod_sparse import kernels
from horovod_sparse.core.agreement import advice, agree_on_states
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
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.parameters import local_part, wide
from horovod_sparse.torch.step import Step


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
    """Only `lr_in_residual`, `ahead` and a sentence in the log look at it; None if it is not known."""
    _groups: Mapping[Tensor, Hashable] = {}
    """The group of each parameter that has one: Horovod's `groups=`."""
    _sparse_as_dense = False
    """Whether sparse gradients are compressed, too."""
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, compressor: TorchCompressor) -> None:
        compressor.bind(self)
        self.compressor = compressor
        self._routes = Routes()
        self._step = Step()
        self._order: list[str] = []
        """Names of the buckets, in the order in which their exchanges began in the last step: the same on all ranks."""

    # --- what is left to others ---

    @property
    def _averages(self) -> bool:
        """Whether gradients are averaged over the ranks, or added up."""
        return True

    @abstractmethod
    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient that a parameter has got in this step, as a dense tensor; None if it has got none."""

    @abstractmethod
    def _target(self, parameter: Tensor) -> Tensor:
        """Return where the reduced gradient of a parameter belongs."""

    # --- a step ---

    def _begin_step(self) -> None:
        """Begin a step, before its first gradient is taken."""
        step, pipeline = self._step, self.pipeline
        assert pipeline is not None
        if not step.begun:
            step.begun = True
            if pipeline.intake.in_updates:
                groups = self._param_groups
                step.learning_rates = {one: float(group["lr"]) for group in groups for one in group["params"]}
            gradients = map(self._gradient, self._routes.in_buckets.values()) if self.compressor.holds_back else ()
            scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
            pipeline.start_step((one for one in gradients if one is not None), scale)

    def _start(self, bucket: AnyBucket, collective: Collective) -> Wait:
        """Start a bucket's next collective."""
        return self._transport.start(collective, f"{bucket.name}.{bucket.rounds}", bucket)

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

    def _complete(self) -> None:
        """Take what has not been taken, end all exchanges, and write the reduced gradients."""
        self._take_all()
        step, pipeline = self._step, self.pipeline
        assert pipeline is not None
        # The order is the same on every rank, so that all have started the same collectives if one of the exchanges raises.
        under_way = [(bucket, step.exchanges[bucket.name]) for bucket in pipeline.all_buckets]
        pipeline.complete(under_way, self._start)
        self._order = [*step.exchanges]
        self._fail_together(pipeline)
        pipeline.end_step(self._write, self._transport.everyone)

    def _fail_together(self, pipeline: Pipeline) -> None:
        """Let the step fail if it does on a rank that holds another part of the same parameters."""

    def give_up(self) -> None:
        """Give up the step that has begun. Tell the other ranks, which wait for this one's part of it, and wait for theirs."""
        step, pipeline = self._step, self.pipeline
        if pipeline is not None and step.begun and not pipeline.is_broken:
            buckets = {bucket.name: bucket for bucket in pipeline.all_buckets}
            # A process group matches collectives by their order.
            for name in dict.fromkeys([*self._order, *buckets]):
                if name not in step.exchanges:
                    step.exchanges[name] = self._start(buckets[name], pipeline.spoil(buckets[name]).begin())
            under_way = [(bucket, step.exchanges[bucket.name]) for bucket in pipeline.all_buckets]
            pipeline.complete(under_way, self._start)
            pipeline.end_step(lambda *_: None, self._transport.everyone)
        self._step = Step()

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        """Write reduced gradients where they belong, in their types."""
        parts: list[Part] = []
        rounded: list[tuple[Tensor, Tensor]] = []
        for slot in slots:
            target = self._target(self._routes.in_buckets[slot.name])
            if target.dtype in (torch.float32, torch.float64) and target.is_contiguous():
                flat = target if target.dim() == 1 else target.view(-1)
            else:
                # Half-precision sums are rounded once at the end, not after every rank.
                flat = torch.empty(target.numel(), dtype=wide(target), device=target.device)
                rounded.append((target, flat))
            parts.append((slot.offset, flat))
        reduced.write(parts)
        for target, flat in rounded:
            target.copy_(flat.view(target.shape))

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
        agree_on_states(lambda: self._check(state, new, no_bucket), state, transport)
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
        self._add_buckets(new, sparse, pipeline)
        before, self.pipeline = self.pipeline, pipeline
        try:
            if self.deferred is not None:
                super().load_compression_state(self.deferred)
        except BaseException:
            self.pipeline = before
            raise
        if before is None:
            optimizer = self.optimizer
            hint = "" if optimizer is None else advice(type(optimizer).__name__, optimizer.param_groups)
            log_start(pipeline, kernels.variant(), hint)

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

    def waiting(self, parameters: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor, float]]:
        """Return parameters for which something waits, their residuals, and what makes these updates; between two steps.

        Raises:
            ValueError: residuals hold gradients, and nothing tells the learning rates.
        """
        in_updates = self.compressor.lr_in_residual
        if self.optimizer is None and not in_updates:
            raise ValueError(
                "optimizer must be given, since what waits is moved by its learning rate; call register(model, compression, "
                "optimizer)"
            )
        groups = [] if in_updates else self.optimizer.param_groups
        rates = {one: float(group["lr"]) for group in groups for one in group["params"]}
        return [
            (one, residual, 1.0 if in_updates else rates.get(one, 0.0))
            for one, residual in self.residuals_of(parameters)
        ]

    def residuals_of(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters for which something waits, and their residuals; between two steps, or before the first one."""
        pipeline, state = self.pipeline, self.deferred or empty_state()
        residuals = state["residuals"] if pipeline is None else pipeline.residuals.views
        if pipeline is not None and all(bucket.is_dense for bucket in pipeline.buckets):
            return
        names = {parameter: name for name, parameter in self._routes.in_buckets.items()}
        for name, parameter in parameters.items():
            residual = residuals.get(names.get(parameter, name)) if parameter.requires_grad else None
            # If the shape differs, the step raises.
            if residual is not None and residual.shape == local_part(parameter).shape:
                # A state that was loaded may be in the host's memory.
                yield parameter, residual.to(parameter.device)

    # --- a loss scaler ---

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`."""
        if self.scaler is scaler or not scaler.is_enabled():
            return
        if self.pipeline is not None or self.scaler is not None:
            raise RuntimeError(
                "scale_with must be called once, before the first step, because residuals are kept without the loss scale; "
                "make a new optimizer and a new compression, or scale by hand: see docs/pytorch.md"
            )
        self.scaler = scaler

    def rescale(self, factor: float) -> None:
        if self.scaler is not None:
            raise RuntimeError(
                "rescale must not be called with scale_with(scaler): residuals are kept without the loss scale"
            )
        super().rescale(factor)
