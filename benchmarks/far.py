"""A far network: passes frames between hosts late, and loses some. `hosts.py` runs it, as root.

    python benchmarks/far.py HOSTS DELAY LOSS

Makes the devices host0, host1, ..., says so by a line, and works until its standard input ends. A frame comes out of the device
that it is for DELAY seconds after it went in, or with the probability LOSS never. netem does the same on machines whose kernel
has it.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0002, 0x1000, 0x4000
_TUNSETOFFLOAD, _TUN_F_CSUM, _TUN_F_TSO4 = 0x400454D0, 0x01, 0x02
_LARGEST = 2 * 65_536
_TO, _FROM = slice(10, 16), slice(16, 22)
"""The addresses in an Ethernet frame, behind what the device says of it."""


def device(name: str, *, joins_frames: bool) -> int:
    """Make a device whose frames this process gets and gives; joined, they are few enough for hosts at 1 Gbit/s."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 if joins_frames else 0)
    return file


def serve(files: list[int], delay: float, loss: float) -> None:
    """Pass frames on until the standard input ends."""
    chance = random.Random(0)
    at: dict[bytes, int] = {}
    """The device where an address was seen."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for file in select.select([*files, 0], [], [], pause)[0]:
            try:
                frame = os.read(file, _LARGEST) if file else b""
            except OSError:
                # The host is gone.
                frame = b""
            if not frame:
                return
            at[frame[_FROM]] = file
            if chance.random() >= loss:
                waiting.append((time.monotonic() + delay, file, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, source, frame = waiting.popleft()
            target = at.get(frame[_TO])
            for file in files if target is None else [target]:
                if file != source:
                    try:
                        os.write(file, frame)
                    except OSError:
                        # The device is down, or has no room: a network loses such a frame.
                        continue


def main(hosts: int, delay: float, loss: float) -> None:
    files = [device(f"host{number}", joins_frames=loss == 0.0) for number in range(hosts)]
    print("ready", flush=True)
    serve(files, delay, loss)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
