"""How far an optimizer moves the parameters of one worker, and by how much that grows. Never imports Horovod.

Tested by tests/parallel/local_programs.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.contrib.lengths import ENTRIES, Lengths, sampled
from horovod_sparse.ops.protocol import Moved

Groups = Sequence[Mapping[str, Any]]
"""The optimizer's groups of parameters."""
_CACHED = 2**20
"""Bytes of parameters that several operations follow each other on: a processor's caches hold as many, and where they began."""


class Movement:
    """Where parameters began, and how far they have moved from there.

    `start` has the memory of one copy of the parameters, which is kept from step to step because new memory takes longer.
    """

    def __init__(self, parts: Mapping[Tensor, Tensor], lengths: Lengths) -> None:
        self._parts = parts
        """The part of each parameter that this rank holds."""
        self.start: dict[Tensor, Tensor] = {}
        """The values with which the parameters began, by part. They count while `begun`."""
        self.begun = False
        self.trained: dict[Tensor, None] = {}
        """The parts that have been trained since the last exchange."""
        self._decay: defaultdict[Tensor, float] = defaultdict(float)
        """By how much of its start decoupled weight decay has moved each parameter since."""
        self._lengths = lengths
        self._positions: dict[Tensor, Tensor] = {}

    def begin(self, groups: Groups) -> None:
        """Note which parameters a step of these groups trains, and where they are if that was not done since the exchange."""
        still = {parameter for group in groups if group.get("lr") == 0 for parameter in group["params"]}
        for whole, part in self._parts.items():
            # One that is frozen and has a gradient is moved by the optimizer.
            if whole not in still and (whole.requires_grad or whole.grad is not None):
                self.trained[part] = None
        if self.begun:
            return
        for part in self._parts.values():
            start = self.start.get(part)
            if start is None or (start.shape, start.dtype, start.device) != (part.shape, part.dtype, part.device):
                self.start[part] = torch.empty_like(part, requires_grad=False)
        _copy([self.start[part] for part in self._parts.values()], [*self._parts.values()])
        self._decay.clear()
        self.begun = True

    def note_decay(self, groups: Groups) -> None:
        """Note the decoupled weight decay of one step: the part `lr * weight_decay` of each parameter."""
        for group in groups:
            if group.get("decoupled_weight_decay"):
                for parameter in group["params"]:
                    # A rank may hold nothing of a sharded one.
                    if parameter in self._parts:
                        self._decay[self._parts[parameter]] += float(group["lr"]) * group["weight_decay"]

    def state(self, names: Mapping[Tensor, str]) -> dict[str, Any]:
        """Return what `load` continues from, by the names of the parts."""
        start = self.start if self.begun else {}
        return {
            "start": {names[part]: value.clone() for part, value in start.items()},
            "moved": [names[part] for part in self.trained],
            "decay": {names[part]: self._decay[part] for part in start},
        }

    def load(self, state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
        """Continue from what `state` has returned. Where it has no start, the parameters have not begun."""
        self.trained = {part: None for part, name in names.items() if name in state["moved"]}
        self.begun = bool(state["start"])
        for part, name in names.items() if self.begun else ():
            self.start[part] = state["start"][name].detach().to(part.device, part.dtype, copy=True)
            self._decay[part] = state["decay"][name]

    def restore(self) -> None:
        """Give the parameters the values with which they began, and begin anew."""
        self._give()
        self.begun = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A block in which the parameters have the values with which they began."""
        if not self.begun:
            yield
            return
        with torch.no_grad():
            own = [part.clone() for part in self._parts.values()]
            self._give()
        try:
            yield
        finally:
            with torch.no_grad():
                _copy([*self._parts.values()], own)

    def _give(self) -> None:
        _copy([*self._parts.values()], [self.start[part] for part in self._parts.values()])

    def moved(self, part: Tensor, growth: float) -> Moved:
        """Return how far a part is from its start, times `growth` but for its decay."""
        # The model may have got another type since.
        return Moved(part.detach(), self.start[part].to(part), growth, (growth - 1.0) * self._decay[part])

    def add_to(self, parts: list[Tensor]) -> None:
        """Turn how far values are to be from the start into these values."""
        if parts:
            torch._foreach_add_(parts, [self.start[part] for part in parts])

    def sample(self, parts: list[Tensor], device: torch.device) -> Tensor:
        """Return 256 entries of how far the optimizer has moved parameters without decay, and their sum of squares."""
        if self._lengths.grow and self._positions.keys() != {*parts}:
            found = zip(parts, sampled([part.numel() for part in parts]), strict=True)
            self._positions = {part: torch.from_numpy(where).to(part.device) for part, where in found}
        some = [(part, where) for part, where in self._positions.items() if len(where)]
        if not some:
            # The message has the same length on all workers also where they are told that not all grow.
            return torch.zeros(ENTRIES + 1, dtype=torch.float64, device=device)
        # All are computed together: on a device a launch takes longer than these few entries.
        now = [part.take(where).to(device, torch.float64) for part, where in some]
        start = [self.start[part].take(where).to(device, torch.float64) for part, where in some]
        decayed = torch._foreach_mul(start, [1.0 - self._decay[part] for part, _ in some])
        entries = torch.cat(now) - torch.cat(decayed)
        return torch.cat([entries, entries.square().sum().view(1)])


def in_turns(parts: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield some parameters at a time: on the host as many as the caches hold, on a device, which launches less then, all."""
    some: list[Tensor] = []
    nbytes = 0
    for part in parts:
        some.append(part)
        nbytes += part.nbytes if part.is_cpu else 0
        if nbytes >= _CACHED:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    # PyTorch refuses empty lists: all parameters may be frozen.
    if targets:
        torch._foreach_copy_(targets, sources)
