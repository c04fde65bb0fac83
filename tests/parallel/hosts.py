"""When workers of an elastic job die, and when others come. Workers kill themselves, and ask for others, in given steps.

A host is a name of this machine that Horovod takes for another one. Imports no framework.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

FIRST_HOSTS = ("localhost", "127.0.0.1")
MORE_HOSTS = ("127.1", "127.0.1")
DIES = {6: "127.0.0.1", 20: "127.0.1"}
"""The step in which a worker gets SIGKILL, and its host: first it is one of two workers, then one of three."""
ASKS = 12
"""The step in which the only worker that is left asks for two more. It trains on until they are there."""
STEPS = 30
MOST = 20_000
"""Steps after which nobody has come."""


def write_hosts(path: Path, hosts: tuple[str, ...]) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text("".join(f"{host}:1\n" for host in hosts))
    unfinished.replace(path)


def begin_step(hosts: Path, step: int, rank: int) -> None:
    """Die, or ask for other workers, if it is time. `hosts` is the file that the discovery script prints."""
    if DIES.get(step) == os.environ["HOROVOD_HOSTNAME"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == ASKS and rank == 0:
        write_hosts(hosts, (FIRST_HOSTS[0], *MORE_HOSTS))


def after(step: int, size: int) -> int:
    """The step that follows. The second death is in a step that begins when three workers train."""
    return min(step + 1, 19) if size == 1 else step + 1


def goes_on(step: int, size: int) -> bool:
    return step < STEPS or size == 1
