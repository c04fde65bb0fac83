"""What carries out the collectives of exchanges, whoever hands over gradients. Imports no framework.

Tested by tests/core/test_driver.py.
"""

from __future__ import annotations

from typing import Any, Protocol

from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named


class Transport(Protocol):
    """The collectives of the workers that exchange."""

    @property
    def world(self) -> int:
        """How many workers there are."""

    @property
    def position(self) -> int:
        """This worker's number among them."""

    @property
    def rank(self) -> int:
        """Its number in messages."""

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        """Start a collective, and return a function that waits for its result. An allreduce may be in place.

        All workers give the same `name`. A transport matches by names, or by order. `bucket` is what is exchanged, if any.
        """

    def everyone(self, value: Any) -> list[Any]:
        """Return every worker's `value`, in order. Blocks. Uses JSON, because data from other machines is not unpickled."""
