"""What all sources of PyTorch's gradients share: parameters by name, for a `Driver`. Never imports Horovod."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from horovod_sparse import kernels
from horovod_sparse.core.agreement import advice, steps_made, warn_of_no_state
from horovod_sparse.core.driver import Driver
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.core.layout import Parameter, Slot
from horovod_sparse.core.state import empty_state
from horovod_sparse.core.transport import Transport
from horovod_sparse.exchange.protocols import Reduced
from horovod_sparse.ops.protocol import Moved, Part
from horovod_sparse.torch.compiled import tensor_ops
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.parameters import local_part, wide

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return a function that runs as it is, with all that it calls, also where `torch.compile` has compiled the caller.

    The compiler cannot trace compiled kernels. It takes seconds to import, but whoever has made an optimizer has done so.
    """
    disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


class TensorSource(ABC):
    """Gradients of parameters, from the step on in which the ranks have agreed on these.

    Args:
        compressor: whose gradients these are.
        transport: the ranks that exchange.
        active: whether anything is compressed.
        optimizer: only `lr_in_residual`, `ahead`, a sentence in the log and a warning look at it; None if it is not known.
        place: see `Store`.
    """

    def __init__(
        self,
        compressor: TorchCompressor,
        transport: Transport,
        *,
        active: bool,
        optimizer: Any = None,
        place: str = "",
    ) -> None:
        compressor.bind(self)
        self.compressor, self.active, self.optimizer = compressor, active, optimizer
        self.driver = Driver(
            compressor, transport, self._new_feedback, kernels=kernels.variant(), settle=self.settle, place=place
        )
        self.names: dict[Tensor, str] = {}
        """The parameters that have a bucket, with their names, in the order of the model; more can join."""
        self.parameters: dict[str, Tensor] = {}
        """The same parameters, by name."""
        self.memory: dict[Tensor, Tensor] = {}
        """Where the reduced gradients of this step belong, by parameter."""
        self._rates: dict[Tensor, float] = {}
        """This step's learning rates, for `lr_in_residual`."""
        self.scaler: torch.amp.GradScaler | None = None
        """What has scaled the gradients: residuals are kept without its scale."""

    # --- what a source tells ---

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks, or added up."""
        return True

    @property
    def speaks(self) -> bool:
        """Whether this rank writes the log for all."""
        return self.driver.transport.position == 0

    @abstractmethod
    def gradient(self, parameter: Tensor) -> Tensor | Moved | None:
        """Return what a parameter has got in this step, as a dense tensor or as `Moved`; None if it has got nothing."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the tensors that are reduced."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    # --- a step ---

    def begin(self) -> None:
        """Begin a step, before its first gradient is added, if none has begun."""
        if self.driver.step is not None:
            return
        if self.compressor.lr_in_residual:
            self._rates = {one: float(group["lr"]) for group in self.param_groups for one in group["params"]}
        self.driver.begin(1.0 if self.scaler is None else float(self.scaler.get_scale()))

    def add(self, parameter: Tensor) -> None:
        """Add a parameter's gradient to the step that has begun."""
        name, feedback = self.names[parameter], self.driver.feedback
        assert feedback is not None
        shape = feedback.bucket_of[name].slots[name].shape
        if parameter.shape != shape:
            raise ValueError(
                f"parameter {name!r} must keep its shape, which was {shape} in its first step, got {tuple(parameter.shape)}: "
                "its residual has the first one; make a new optimizer and a new compression"
            )
        self.driver.add(name, self.gradient(parameter), self._rates[parameter] if self._rates else None)

    def add_rest(self) -> None:
        """Add what has not been added. All exchanges have begun then."""
        self.begin()
        step = self.driver.step
        assert step is not None
        if len(step.added) < len(self.names):
            # Buckets are packed from the last parameter to the first.
            for parameter, name in reversed(self.names.items()):
                if name not in step.added:
                    self.add(parameter)

    def write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        """Write reduced gradients where they belong, in their types."""
        parts: list[Part] = []
        rounded: list[tuple[Tensor, Tensor]] = []
        for slot in slots:
            target = self.memory[self.parameters[slot.name]]
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

    def settle(self, call: str) -> None:
        """Give up a step that has begun, and do nothing if none has: see `Settle`."""
        if call == "rescale" and self.scaler is not None:
            raise RuntimeError(
                "rescale must not be called with scale_with(scaler): residuals are kept without the loss scale"
            )
        if self.driver.step is not None:
            self.give_up()

    def give_up(self) -> None:
        """Give up the step that has begun, on all ranks."""
        self.driver.give_up()

    # --- parameters ---

    def extend(
        self, new: Mapping[Tensor, str], groups: Mapping[Tensor, Hashable] | None = None, later: Collection[str] = ()
    ) -> None:
        """Make buckets for new parameters, on which the ranks have agreed. Blocks.

        `groups` are Horovod's, by parameter. `later` are the names of those that may come later.
        """
        numbers = {group: number for number, group in enumerate(dict.fromkeys((groups or {}).values()))}
        described = [
            Parameter(
                name,
                tuple(parameter.shape),
                self.compressor.residual_dtype_of(parameter),
                str(parameter.device),
                numbers[groups[parameter]] if groups else None,
                on_device=not parameter.is_cpu,
            )
            for parameter, name in new.items()
        ]
        tensors = {name: parameter for parameter, name in new.items()}
        optimizer = self.optimizer
        hint = "" if optimizer is None else advice(type(optimizer).__name__, optimizer.param_groups)
        driver = self.driver
        is_new = driver.feedback is None and driver.deferred is None
        driver.extend(described, tensors, hint, later)
        if is_new and self.speaks:
            warn_of_no_state(steps_made(optimizer))
        self.names.update(new)
        self.parameters.update(tensors)

    def _new_feedback(self) -> Feedback:
        one = self.driver.transport
        return Feedback(
            tensor_ops(),
            self.compressor,
            world=one.world,
            position=one.position,
            rank=one.rank,
            averages=self.averages,
            device_selector=on_gpu,
            speaks=self.speaks,
        )

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
        feedback, state = self.driver.feedback, self.driver.deferred or empty_state()
        residuals = state["residuals"] if feedback is None else feedback.residuals.views
        if feedback is not None and all(bucket.stage.is_dense for bucket in feedback.buckets):
            return
        for name, parameter in parameters.items():
            residual = residuals.get(self.names.get(parameter, name)) if parameter.requires_grad else None
            # If the shape differs, the step raises.
            if residual is not None and residual.shape == local_part(parameter).shape:
                # A state that was loaded may be in the host's memory.
                yield parameter, residual.to(parameter.device)

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`."""
        if self.scaler is scaler or not scaler.is_enabled():
            return
        if self.driver.feedback is not None or self.scaler is not None:
            raise RuntimeError(
                "scale_with must be called once, before the first step, because residuals are kept without the loss scale; "
                "make a new optimizer and a new compression, or scale by hand: see docs/pytorch.md"
            )
        self.scaler = scaler
