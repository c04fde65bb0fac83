"""The rounds of local updates: some steps of each worker alone, then an exchange of how far they have moved the parameters.

Tested by tests/parallel/local_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.contrib.lengths import Lengths
from horovod_sparse.contrib.torch_meeting import Meeting
from horovod_sparse.contrib.torch_movement import Movement
from horovod_sparse.contrib.torch_workers import MovementSource
from horovod_sparse.core.agreement import Description, steps_made, warn_of_no_state
from horovod_sparse.core.transport import Transport
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.parameters import description, follow, sums
from horovod_sparse.torch.source import uncompiled


class Rounds:
    """The rounds of one worker. `LocalUpdates` says when its steps begin and end.

    Args:
        compression: what selects.
        parts: the part of each parameter that this rank holds.
        names: those of the parts, in the order of the model.
        transport: what joins the workers.
        shards: what joins the ranks of this worker, if its parameters are sharded.
        every: number of steps of a round.
        grow: whether movements grow (`Lengths`).
        check: raises ValueError if the parameters are not those of the beginning any more.
        device: where the parameters are.
    """

    def __init__(
        self,
        compression: TorchCompressor,
        parts: Mapping[Tensor, Tensor],
        names: Mapping[Tensor, str],
        transport: Transport,
        shards: Sequence[Group],
        *,
        every: int,
        grow: bool,
        check: Callable[[], object],
        device: torch.device,
    ) -> None:
        self._compression, self._parts, self._names, self._transport = compression, parts, names, transport
        self._every, self._check, self._device = every, check, device
        self._lengths = Lengths()
        self._lengths.grow = grow
        self.movement = Movement(parts, self._lengths)
        self._source = MovementSource(compression, transport, names, shards)
        self._meeting = Meeting(transport, shards)
        self._trained: list[str] = []
        """What was trained in the last round, by name: the same on all workers."""
        self._steps = self._age = 0
        """The steps of this round, and all steps."""
        self.exchange = uncompiled(self._exchange)

    @property
    def active(self) -> bool:
        """Whether anything is exchanged."""
        return self._source.active

    @torch.no_grad()
    def begin_step(self, optimizer: Any) -> None:
        """Note where the parameters are, and which of them a step of the optimizer trains."""
        if self._age == 0 and self._source.speaks:
            warn_of_no_state(steps_made(optimizer), "LocalUpdates")
        follow(self._parts)
        self.movement.begin(optimizer.param_groups)

    def end_step(self, problem: Exception | None = None) -> None:
        """Count a step, which this worker has given up because of a `problem`, if any. Exchange after the last of a round."""
        self._steps += 1
        self._age += 1
        if self._steps >= self._every:
            self.exchange(problem)

    @torch.no_grad()
    def _exchange(self, problem: Exception | None = None) -> None:
        """Replace the values of the parameters by those of the start, plus the mean of what all workers send."""
        movement = self.movement
        parts = [part for part in self._names if part in movement.trained]
        # Not later: also if this exchange fails, all workers count from here.
        self._steps, movement.trained = 0, {}
        try:
            follow(self._parts)
            try:
                self._check()
            except ValueError as error:
                problem = problem or error
            # Workers may train other parameters than before. Then they compare what they train.
            trained = [self._names[part] for part in parts]
            self._meeting.compares |= trained != self._trained
            sample = movement.sample(parts, self._device)
            found = self._meeting.meet(self._age, sample, problem, lambda: self._describe(parts))
            self._source.exchange(movement, parts, self._lengths.factor(self._transport.world))
        except BaseException:
            movement.restore()
            self._meeting.compares = True
            raise
        movement.begun, self._trained = False, trained
        if self._lengths.grow:
            self._lengths.note(found)

    def _describe(self, parts: list[Tensor]) -> Description:
        """Return what must be equal on all workers."""
        values = sums(self.movement.start[part] for part in parts)
        return {
            **description(self._compression, {part: self._names[part] for part in parts}),
            "settings": f"every={self._every}, grow={self._lengths.grow}",
            "exchange": str(self._source.exchanges),
            "shared parameters": [f"{self._names[part]}: {bits}" for part, bits in zip(parts, values, strict=True)],
        }

    def waiting(self, parameters: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor, float]]:
        """Return the parameters for which something waits, their residuals, and -1/s, which makes these movements."""
        unit = -1.0 / self._lengths.factor(self._transport.world)
        return [(one, residual, unit) for one, residual in self._source.residuals_of(parameters)]

    def state(self) -> dict[str, Any]:
        """Return what `load` continues from."""
        return {
            "steps": [self._steps, self._age],
            "lengths": self._lengths.state(),
            **self.movement.state(self._names),
            "compression": self._source.driver.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` has returned; `check_state` accepts it. The next exchange compares everything."""
        self._compression.load_state_dict(state["compression"])
        self._lengths.load(state["lengths"])
        self._steps, self._age = map(int, state["steps"])
        self.movement.load(state, self._names)
        self._meeting.compares = True
