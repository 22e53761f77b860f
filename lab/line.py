"""Network link with delay and loss: a process that forwards packets between two TUN devices, one in each namespace.

    python -I -S line.py NAMESPACE DEVICE NAMESPACE DEVICE DELAY_S LOSS SEED

It makes both devices, prints ``ready`` and forwards until it is ended; the devices end with it. Every packet leaves
``DELAY_S`` after it arrived, in order, or is lost with probability ``LOSS``. It uses the standard library only, because
one process runs for each link.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

CLONE_NEWNET = 0x40000000  # linux/sched.h
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
LARGEST_PACKET = 65_536
MOST_WAITING_BYTES = 32_000_000
"""Bytes queued in one direction; more is dropped. Guess: 100 ms at 2.5 Gbit/s; the fastest link of a scenario would
settle it."""


@dataclass(slots=True)
class Direction:
    """Packets on their way in one direction. Pure: time and randomness are arguments."""

    delay_s: float
    loss: float
    chance: Callable[[], float]
    """Draws uniformly from [0, 1)."""
    dropped: int = 0
    _waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    _waiting_bytes: int = 0

    def put(self, packet: bytes, now: float) -> None:
        if self.chance() < self.loss or self._waiting_bytes + len(packet) > MOST_WAITING_BYTES:
            self.dropped += 1
            return
        self._waiting.append((now + self.delay_s, packet))
        self._waiting_bytes += len(packet)

    def take(self, now: float) -> list[bytes]:
        """Return the packets that have arrived."""
        arrived = []
        while self._waiting and self._waiting[0][0] <= now:
            packet = self._waiting.popleft()[1]
            self._waiting_bytes -= len(packet)
            arrived.append(packet)
        return arrived

    @property
    def next_at(self) -> float | None:
        """Arrival time of the next packet."""
        return self._waiting[0][0] if self._waiting else None


def tun(namespace: str, device: str) -> int:
    """Make a TUN device in a namespace, which this process enters for that."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(home, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(home)
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH14x", device.encode(), IFF_TUN | IFF_NO_PI))
    return handle


def carry(ends: tuple[int, int], directions: tuple[Direction, Direction]) -> None:
    """Forward packets until the process ends. ``directions[0]`` leads from the first end to the second."""
    while True:
        now = time.monotonic()
        for place, direction in enumerate(directions):
            for packet in direction.take(now):
                _write(ends[1 - place], packet)
        due = [each.next_at for each in directions if each.next_at is not None]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select(ends, [], [], patience)
        for handle in readable:
            _read(handle, directions[ends.index(handle)])


def _read(handle: int, direction: Direction) -> None:
    """Read the waiting packets, at most 64, since the other direction waits."""
    for _ in range(64):
        try:
            packet = os.read(handle, LARGEST_PACKET)
        except OSError:  # no packet waits, or the device is not up yet
            return
        direction.put(packet, time.monotonic())


def _write(handle: int, packet: bytes) -> None:
    """Write a packet; it is lost if the device is down or its queue full, as on any link."""
    try:
        os.write(handle, packet)
    except OSError:
        return


def main(arguments: list[str]) -> None:
    near, near_device, far, far_device, delay_s, loss, seed = arguments
    ends = tun(near, near_device), tun(far, far_device)
    chance = random.Random(int(seed)).random
    there, back = (Direction(float(delay_s), float(loss), chance) for _ in range(2))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(ends, (there, back))


if __name__ == "__main__":
    main(sys.argv[1:])
