"""How far a worker's own steps have moved its parameters. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from horovod_sparse.contrib.lengths import sampled


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


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    # PyTorch refuses empty lists: all parameters may be frozen.
    if targets:
        torch._foreach_copy_(targets, sources)


def _subtract(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_sub_(targets, sources)
