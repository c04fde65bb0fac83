"""Local updates: workers step alone and exchange how far their parameters have moved. Imports Horovod only where it is used.

theta_r are worker r's parameters after H = `every` steps of its optimizer from the shared theta, and s the growth of `Lengths`:

    Delta_r = s (theta_r - theta)
    e_r     = e_r + Delta_r
    sent_r  = the entries of e_r that the compressor selects
    e_r     = e_r - sent_r
    theta   = theta + mean(sent_r)

This is SparseLoCo (https://arxiv.org/abs/2508.15706) without decay of e and without an outer learning rate, and with s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from horovod_sparse.compressors.checks import check_integer, check_number
from horovod_sparse.contrib.lengths import Lengths
from horovod_sparse.contrib.settings import check_settings
from horovod_sparse.contrib.torch_meeting import Meeting
from horovod_sparse.contrib.torch_movement import Movement
from horovod_sparse.contrib.torch_workers import (
    MovementReducer,
    check_arguments,
    check_state,
    names_of,
    placed,
    refuse_steps,
)
from horovod_sparse.core.agreement import Description, divides
from horovod_sparse.core.binding import check_kind
from horovod_sparse.torch.ahead import Ahead
from horovod_sparse.torch.compressors import NoOp, TorchCompressor
from horovod_sparse.torch.parameters import description, follow, sums
from horovod_sparse.torch.uncompiled import uncompiled


class LocalUpdates:
    """Steps of any optimizer on each worker alone, and a sparse exchange of how far they have moved the parameters.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        local = LocalUpdates(optimizer, model, SIDCo(0.01))
        for batch in batches:
            optimizer.zero_grad()
            with local.ahead():
                loss(model, batch).backward()
            local.step()

    Its module begins with the formulas. Where `every` is 1, nothing counts but what the optimizer's step does: `step` reads the
    parameters as the program left them, and nothing is remembered between steps but the residuals e. Call `step` of this object
    and not the optimizer's; a `GradScaler` takes this object for the optimizer. The model is not in `DistributedDataParallel`,
    and the optimizer is not Horovod's: gradients stay on their worker. All workers begin with the same parameters. The states
    of the optimizers and the buffers of the model (running means) differ between workers.

    Args:
        optimizer: the optimizer of the local steps.
        model: whose parameters the optimizer moves.
        compression: a compressor of this module; None exchanges everything.
        every: number of local steps between two exchanges, >= 1. With more than 1, parameters are the worker's own in between.
        grow: whether movements grow by s, but for the weight decay of groups with `decoupled_weight_decay`. None: if the
            optimizer divides by the size of the gradient, as Adam does.
        skip_nonfinite: whether a worker whose gradients hold NaN or infinity leaves out its step, as by `skip`. Otherwise such
            parameters become NaN on all workers, as with dense averages.
        group: a process group of `torch.distributed`, or a process set of Horovod; None for all workers of the one that was
            initialised. With a model of `fully_shard`, `mesh["replicate"]`: each replica is a worker.

    Raises:
        TypeError: the optimizer is Horovod's, the model is in `DistributedDataParallel`, the two are in the wrong order,
            `compression` is not a compressor of this module, a parameter has no memory of its own, or a number is no int.
        ValueError: a number is not in its range, the optimizer has parameters that the model has not, or nothing connects
            the workers yet.
    """

    _step_supports_amp_scaling = True
    """A `GradScaler` then calls `step` in any case, and sets the next two for that."""
    found_inf: Tensor | None = None
    """Above 0 if gradients are not finite."""
    grad_scale: Tensor | float | None = 1.0
    """A tensor is what gradients are still multiplied by."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        compression: TorchCompressor | None = None,
        *,
        every: int = 1,
        grow: bool | None = None,
        skip_nonfinite: bool = False,
        group: Any = None,
    ) -> None:
        check_arguments(optimizer, model)
        check_integer("every", every, 1)
        self.optimizer, self.every, self.skip_nonfinite = optimizer, int(every), skip_nonfinite
        self._model = model
        self.compression = NoOp() if compression is None else compression
        check_kind(self.compression, TorchCompressor, "horovod_sparse.torch", stock=False)
        self.compression.check_free()
        check_settings(self.compression)
        names = names_of(optimizer, model)
        self._known = [*names.values()]
        parts, self._transport, shards = placed(model, names, group)
        # A rank may hold nothing of a sharded parameter.
        self._parts = {whole: part for whole, part in parts.items() if part.numel()}
        self._names = {part: names[whole] for whole, part in self._parts.items()}
        self._by_name = {self._names[part]: whole for whole, part in self._parts.items()}
        self._lengths = Lengths()
        self._lengths.grow = divides(optimizer.param_groups) if grow is None else bool(grow)
        self._movement = Movement(self._parts, self._lengths)
        self._reducer = MovementReducer(self.compression, self._transport, self._names)
        self._reducer.shards = shards
        self._ahead = Ahead()
        self._moved: dict[Tensor, None] = {}
        """The parts that have been trained since the last exchange, in the order of the model."""
        self._trained: list[str] = []
        """Their names in the last exchange, which are those of all workers."""
        self._steps = self._age = 0
        """The steps since the last exchange, and all steps."""
        self._meeting = Meeting(self._transport, shards)
        self._stepping = False
        if self._reducer.active:
            refuse_steps(self, optimizer, lambda local: local._stepping)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the optimizer step, and exchange after every `every`-th step. Return what the optimizer's `step` returns.

        Raises:
            ValueError: on all workers, if they differ in settings, in their steps, or in the parameters with which they begin.
            RuntimeError: another worker has given up the step; the parameters are where they began.
        """
        if not self._reducer.active:
            return self._step_alone(closure)
        if self._unfit():
            self.skip()
            return None
        self._begin()
        try:
            loss = self._step_alone(closure)
        except Exception as error:
            # The others wait for this worker.
            self._count(error)
            raise
        self._movement.note_decay(self.param_groups)
        self._count()
        return loss

    def skip(self) -> None:
        """Count a step that this worker leaves out: where it has moved to since the last exchange is exchanged all the same."""
        if self._reducer.active:
            self._begin()
            self._count()

    def synchronize(self) -> None:
        """Exchange now if a step was made since the last exchange. Call this on all workers, for instance at the end."""
        if self._movement.begun:
            self._exchange()

    def ahead(self, coefficient: float = 0.5) -> AbstractContextManager[None]:
        """A block for forward and backward in which this worker's parameters are at `theta + coefficient e / s`.

        What a worker has found and not sent yet is then not lost to its gradients. When the block ends, the parameters are what
        they were, bit by bit. The copies have the memory of the parameters.

        Args:
            coefficient: in [0, 1].

        Raises:
            RuntimeError: something has written to parameters within the block.
        """
        check_number("coefficient", coefficient, "in [0, 1]", lambda c: 0.0 <= c <= 1.0)
        return self._ahead.block(self._by_name, coefficient, self._waiting)

    def shared(self) -> AbstractContextManager[None]:
        """A block in which parameters are those of the last exchange, the same on all workers, also on one worker alone."""
        return self._movement.shared()

    # --- a step ---

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        self._stepping = True
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self._stepping = False

    def _unfit(self) -> bool:
        """Return whether this worker leaves out the step. Otherwise gradients have no loss scale any more."""
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        found = [one for one in gradients if one is not None]
        if self.found_inf is not None and self.found_inf.item():
            return True
        if isinstance(self.grad_scale, Tensor):
            for gradient in found:
                gradient.div_(self.grad_scale.to(gradient.device))
        return self.skip_nonfinite and not all(bool(one.isfinite().all()) for one in found)

    @torch.no_grad()
    def _begin(self) -> None:
        """Note where the parameters are, and which of them this step trains."""
        follow(self._parts)
        self._movement.begin()
        still = {parameter for group in self.param_groups if group.get("lr") == 0 for parameter in group["params"]}
        for whole, part in self._parts.items():
            # One that is frozen and has a gradient is moved by the optimizer.
            if whole not in still and (whole.requires_grad or whole.grad is not None):
                self._moved[part] = None

    def _count(self, problem: Exception | None = None) -> None:
        self._steps += 1
        self._age += 1
        if self._steps >= self.every:
            self._exchange(problem)

    @uncompiled
    @torch.no_grad()
    def _exchange(self, problem: Exception | None = None) -> None:
        """Replace the values of the parameters by those of the start, plus the mean of what all workers send."""
        movement, parts = self._movement, [part for part in self._names if part in self._moved]
        # Not later: also if this exchange fails, all workers count from here.
        self._steps, self._moved = 0, {}
        try:
            follow(self._parts)
            try:
                names_of(self.optimizer, self._model, self._known)
            except ValueError as error:
                problem = problem or error
            movement.take_away(parts)
            # Workers may train other parameters than before. Then they compare what they train.
            trained = [self._names[part] for part in parts]
            self._meeting.compares |= trained != self._trained
            sample = movement.sample(parts, self._transport.device)
            found = self._meeting.meet(self._age, sample, problem, lambda: self._describe(parts))
            movement.grow(parts, self._transport.world)
            self._reducer.exchange({part: part.detach() for part in parts})
            movement.add_to(parts)
        except BaseException:
            movement.restore()
            self._meeting.compares = True
            raise
        movement.begun, self._trained = False, trained
        if self._lengths.grow:
            self._lengths.note(found)

    def _describe(self, parts: list[Tensor]) -> Description:
        """Return what must be equal on all workers."""
        values = sums(self._movement.start[part] for part in parts)
        return {
            **description(self.compression, {part: self._names[part] for part in parts}, ()),
            "settings": f"every={self.every}, grow={self._lengths.grow}",
            "exchange": str(self._reducer.exchanges),
            "shared parameters": [f"{self._names[part]}: {bits}" for part, bits in zip(parts, values, strict=True)],
        }

    def _waiting(self, parameters: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor, float]]:
        """Return the parameters for which something waits, their residuals, and -1/s, which makes these movements."""
        unit = -1.0 / self._lengths.factor(self._transport.world)
        return [(one, residual, unit) for one, residual in self._reducer.residuals_of(parameters)]

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps beside its parameters and its optimizer: save all three on every worker."""
        start = self._movement.start if self._movement.begun else {}
        return {
            "steps": [self._steps, self._age],
            "lengths": self._lengths.state(),
            "start": {self._names[part]: value.clone() for part, value in start.items()},
            "moved": [self._names[part] for part in self._moved],
            "compression": self._reducer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the same parameters and settings.

        Before the first exchange, the state of the compression is checked in that exchange, and all workers raise.

        Raises:
            ValueError: the state belongs to other parameters, or is none of `LocalUpdates`; nothing was changed.
        """
        check_state(state, self._names)
        parts = {name: part for part, name in self._names.items()}
        self.compression.load_state_dict(state["compression"])
        self._lengths.load(state["lengths"])
        self._steps, self._age = map(int, state["steps"])
        self._movement.load({parts[name]: value for name, value in state["start"].items()})
        self._moved = {parts[name]: None for name in state["moved"] if name in parts}
        self._meeting.compares = True
