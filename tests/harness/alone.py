"""A transport of one worker. Imports no framework."""

from __future__ import annotations

from typing import Any

from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named


class Alone:
    """Notes what is started."""

    world, position, rank = 1, 0, 0

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        self.started.append(name)
        return lambda: collective.message

    def everyone(self, value: Any) -> list[Any]:
        return [value]
