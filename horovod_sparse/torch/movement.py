"""How far a worker's own steps have moved its parameters, and updates that are exchanged in place of gradients. No Horovod."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.core.lengths import sampled
from horovod_sparse.torch.compiled import tensor_ops
from horovod_sparse.torch.parameters import local_part
from horovod_sparse.torch.uncompiled import uncompiled

Reduce = Callable[[dict[Tensor, Tensor]], None]


class Movement:
    """Parameters that each worker moves alone, and `copies` of them from before, the same on all workers.

    The copies are in the parameters' types or wider ones.
    """

    def __init__(self, parameters: list[Tensor], copies: list[Tensor]) -> None:
        self.parameters, self.copies = parameters, copies

    def write(self, drifts: list[Tensor]) -> None:
        """Write how far the parameters have moved, the other way. Each began with what its own type holds of its copy."""
        pairs = zip(self.parameters, self.copies, strict=True)
        _copy(drifts, [copy.to(parameter.dtype) for parameter, copy in pairs])
        _subtract(drifts, self.parameters)

    def move(self, means: list[Tensor]) -> None:
        """Move the copies by the means of what all workers have sent."""
        _subtract(self.copies, means)

    def go_on(self, by: list[Tensor]) -> None:
        """Move the parameters alone."""
        _subtract(self.parameters, by)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters the values of their copies."""
        _copy(self.parameters, self.copies)


class Sample:
    """The entries of movements that are compared with those of other workers; see `Lengths`."""

    def __init__(self) -> None:
        self._positions: dict[Tensor, Tensor] = {}

    def of(self, drifts: Mapping[Tensor, Tensor]) -> Tensor:
        """Return these entries of the parameters' movements, and last their sum of squares, where the first parameter is."""
        if self._positions.keys() != drifts.keys():
            positions = zip(drifts, sampled([drift.numel() for drift in drifts.values()]), strict=True)
            self._positions = {one: torch.from_numpy(found).to(one.device) for one, found in positions}
        device = next((drift.device for drift in drifts.values()), None)
        entries = [drifts[one].take(at).to(device, torch.float32) for one, at in self._positions.items() if len(at)]
        flat = torch.cat(entries) if entries else torch.zeros(1, device=device)
        return torch.cat([flat, flat.square().sum().view(1)])


class Updates:
    """Lets an optimizer step with this worker's gradients, and exchanges the movement of the parameters in their place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # A `GradScaler` then calls `step` also where gradients overflow. The other workers wait for this one's part.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._optimizer = optimizer
        self._copies: dict[Tensor, Tensor] = {}
        """They are kept from step to step, because memory that is new takes longer."""
        self._trained: list[Tensor] = []
        """The parameters that move in this step. Of sharded ones, `Movement` has the parts that are here."""
        self._not_finite: dict[Tensor, Tensor] = {}
        """This step's gradients, if one of them holds NaN or infinity."""
        self._scaler: dict[str, Any] = {}
        """What a `GradScaler` has told the optimizer for this step."""

    def __str__(self) -> str:
        return f"updates of {type(self._optimizer).__name__} in place of gradients"

    def step(self, own: Callable[[], Any], reduce: Reduce, give_up: Callable[[], None]) -> Any:
        """Let the optimizer step, and move the parameters by the mean of all workers' movements, then in their gradients.

        If anything raises before the exchange has ended, the parameters are those of before the step. Return the result of
        the optimizer's `own` step. `reduce` replaces the movements, which are in the gradients of the parameters, by their
        means over the workers. `give_up` is called if this worker does not get as far.
        """
        movement = Movement([], [])
        try:
            movement = self._begin()
            result = own()
            drifts = self._drifts(movement)
        except BaseException:
            movement.restore()
            give_up()
            raise
        self._exchange(movement, drifts, reduce)
        return result

    @uncompiled
    @torch.no_grad()
    def _begin(self) -> Movement:
        """Keep what the parameters are. Take away gradients that are not finite, so that the optimizer's state stays good."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if not parameter.requires_grad:
                # Optimizers would move it by what was left in its gradient.
                parameter.grad = None
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        parts = [*map(local_part, self._trained)]
        for parameter, part in zip(self._trained, parts, strict=True):
            if parameter not in self._copies:
                self._copies[parameter] = part.detach().clone()
        movement = Movement(parts, [self._copies[parameter] for parameter in self._trained])
        _copy(movement.copies, parts)
        self._look()
        return movement

    def checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that also takes away gradients that are not finite."""
        return lambda: (closure(), self._look())[0]

    @torch.no_grad()
    def _look(self) -> None:
        self._not_finite = {}
        gradients = {one: local_part(one.grad) for one in self._trained if one.grad is not None}
        if self._unscaled([*gradients.values()]) and not are_finite([*gradients.values()]):
            self._not_finite = gradients
            self._drop_gradients()

    def _unscaled(self, gradients: Sequence[Tensor]) -> bool:
        """Do what a `GradScaler` leaves to the optimizer. Return False if the step is left out on this worker."""
        # Optimizers that are not fused refuse to step with these.
        told = vars(self._optimizer)
        given = self._scaler = {name: told.pop(name) for name in ("grad_scale", "found_inf") if name in told}
        if given.get("found_inf"):
            self._drop_gradients()
            return False
        if given.get("grad_scale") is not None:
            for gradient in gradients:
                gradient.div_(given["grad_scale"].to(gradient.device))
        return True

    @uncompiled
    @torch.no_grad()
    def _drifts(self, movement: Movement) -> dict[Tensor, Tensor]:
        """Return the movements, and take them back: the first time, workers compare what they begin with."""
        drifts = {parameter: _room(parameter) for parameter in self._trained}
        movement.write([*drifts.values()])
        for parameter, gradient in self._not_finite.items():
            # All workers then raise, and this one names the parameter.
            drifts[parameter] += gradient * 0
        movement.restore()
        return drifts

    @uncompiled
    @torch.no_grad()
    def _exchange(self, movement: Movement, drifts: dict[Tensor, Tensor], reduce: Reduce) -> None:
        try:
            reduce(drifts)
            movement.move([*drifts.values()])
            # The scaler takes it back.
            vars(self._optimizer).update(self._scaler)
        except BaseException:
            self._drop_gradients()
            raise
        finally:
            movement.restore()

    def _drop_gradients(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    # PyTorch refuses empty lists: all parameters may be frozen.
    if targets:
        torch._foreach_copy_(targets, sources)


def _subtract(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_sub_(targets, sources)


def _room(parameter: Tensor) -> Tensor:
    """Return the memory of a parameter's gradient, which is dense from now on."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or gradient.requires_grad:
        gradient = parameter.grad = torch.empty_like(parameter)
    return local_part(gradient)


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether all entries of some gradients are finite. Waits once for a device, if they are."""
    values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    # A sum is not finite if any entry is not. Those of finite entries may overflow too.
    sums = [one.sum(dtype=torch.float32).to(values[0].device) for one in values]
    return not sums or math.isfinite(torch.stack(sums).sum().item()) or all(map(tensor_ops().all_finite, values))
