"""Detached error feedback: gradients at parameters that part of what waits has moved already. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from horovod_sparse.torch.parameters import local_part

Waiting = Callable[[Mapping[str, Tensor]], Sequence[tuple[Tensor, Tensor, float]]]
"""Returns parameters, their residuals e, and eta of each."""


class Ahead:
    """Moves parameters to `x - c eta e` within a block, with the residual e of this rank (https://arxiv.org/abs/2004.05298).

    Its copies of the parameters are kept from block to block, because memory that is new takes longer.
    """

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}

    @contextmanager
    def block(self, parameters: Mapping[str, Tensor], coefficient: float, waiting: Waiting) -> Iterator[None]:
        """A block in which parameters for which something waits are moved. When it ends, these are what they were, bit by bit.

        Raises:
            RuntimeError: something else has written to one of these within the block; they are what they were before it.
        """
        versions: dict[Tensor, int] = {}
        try:
            for parameter, residual, eta in waiting(parameters):
                # Through `data`, autograd takes no notice.
                value = local_part(parameter.data)
                if parameter not in self._copies:
                    self._copies[parameter] = torch.empty_like(value)
                self._copies[parameter].copy_(value)
                versions[parameter] = parameter._version
                value.sub_(local_part(residual), alpha=coefficient * eta)
            yield
        finally:
            for parameter in versions:
                local_part(parameter.data).copy_(self._copies[parameter])
        if any(parameter._version != version for parameter, version in versions.items()):
            raise RuntimeError(
                "parameters must not be written to within compression.ahead(...), which gives them back the values that they "
                "had before; put optimizer.step() and whatever else changes parameters after the block"
            )
