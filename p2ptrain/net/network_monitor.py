"""Network monitor: notices that this machine's network has changed, or that the machine has slept.

It compares the addresses of the network interfaces, and the source addresses towards the internet, every few seconds.
Nobody tells p2pd or its partners that a connection is dead whose source address is gone, or that outlived a sleep: it
hangs until a keep-alive times out, and each dial meanwhile uses it.

Sources: Tailscale's ``net/netmon`` polls and notices sleep in the same way; the keep-alive is yamux's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.base.clock import steady
from p2ptrain.net import address, interfaces
from p2ptrain.ports import Clock

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Interval of the comparison, which takes a millisecond (measured)."""
DEAD_S = 40.0
"""Seconds without packets after which the other end has closed a connection: yamux asks every 30 s, and waits 10 s."""
READY_S = 30.0
"""Longest wait for a source address towards the internet when a network returns: DHCP takes seconds. A network may
have none."""


@dataclass(frozen=True, slots=True)
class InterfaceAddresses:
    """This machine's addresses, without those that only reach itself or one link."""

    hosts: frozenset[tuple[str, str]]
    """Names of interfaces that are up, with their IP addresses."""
    sources: frozenset[str]
    """Source addresses towards the internet; empty without a route."""

    @classmethod
    def now(cls) -> InterfaceAddresses:
        """Read them from the operating system."""
        found = interfaces.interface_addresses()
        hosts = frozenset((name, host) for name, host in found if _leads_out(host))
        return cls(hosts, frozenset(address.host_of(each) for each in interfaces.way_out()))


def _leads_out(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return not (ip.is_loopback or ip.is_link_local)


class NetworkCause(StrEnum):
    """What breaks the connections of this machine."""

    MOVED = "moved"  # the addresses from which they come are gone
    SLEPT = "slept"  # the machine slept or hung, and others have closed them
    ABSENT = "absent"  # it had no network for as long


@dataclass(frozen=True, slots=True)
class NetworkChange:
    """A change of this machine's network."""

    cause: NetworkCause | None
    """None if no connection is broken."""
    seconds: float = 0.0
    """Duration of the sleep or the absence."""


class ChangeDetector:
    """Compares this machine's addresses with those before. Pure.

    Args:
        now: seconds on a clock that counts sleep.
    """

    def __init__(self, here: InterfaceAddresses, now: float) -> None:
        self._here = here
        self._at = now
        self._used = _used(here)
        """Addresses from which connections come."""
        self._had_route = bool(here.sources)
        self._gone_since: float | None = None
        self._slept_s = 0.0
        """Sleep since the last report."""

    def resume(self, now: float) -> None:
        """Go on after a time in which nothing was observed and there were no connections."""
        self._at = now

    def observe(self, here: InterfaceAddresses, now: float) -> NetworkChange | None:
        """Return what has changed; None if nothing has.

        What broke the connections is returned once there is a network again.
        """
        before, self._here = self._here, here
        gap_s, self._at = now - self._at, now
        self._slept_s = gap_s if gap_s >= DEAD_S else self._slept_s
        hosts = {host for _, host in here.hosts}
        has_moved, absent_s = not self._used <= hosts, 0.0
        if not (here.sources if self._had_route else hosts):
            self._gone_since = now if self._gone_since is None else self._gone_since
            is_elsewhere = bool(hosts) and (has_moved or self._slept_s > 0.0)
            if not is_elsewhere or now - self._gone_since < READY_S:
                return None
        elif self._gone_since is not None:
            absent_s = now - self._gone_since
        slept_s, self._slept_s, self._gone_since = self._slept_s, 0.0, None
        self._used, self._had_route = _used(here), bool(here.sources)
        if slept_s:
            return NetworkChange(NetworkCause.SLEPT, slept_s)
        if has_moved:
            return NetworkChange(NetworkCause.MOVED)
        if absent_s >= DEAD_S:
            return NetworkChange(NetworkCause.ABSENT, absent_s)
        return NetworkChange(None) if here != before else None


def _used(here: InterfaceAddresses) -> frozenset[str]:
    return here.sources or frozenset(host for _, host in here.hosts)


class NetworkMonitor:
    """Watches the network of this machine.

    Args:
        look: reads this machine's addresses.
        clock: clock that counts sleep.
    """

    def __init__(self, look: Callable[[], InterfaceAddresses] = InterfaceAddresses.now, clock: Clock = steady) -> None:
        self._look = look
        self._clock = clock
        self._detector: ChangeDetector | None = None

    def begin(self) -> None:
        """Read the first addresses; changes from now on are noticed."""
        self._observe()

    async def until_broken(self, on_change: Callable[[], None]) -> NetworkChange:
        """Wait for a change that breaks the connections, and return it; call ``on_change`` at any other one."""
        if self._detector is not None:
            self._detector.resume(self._clock())
        while True:
            change = self._observe()
            if change is not None and change.cause is not None:
                return change
            if change is not None:
                on_change()
            await asyncio.sleep(POLL_S)

    def _observe(self) -> NetworkChange | None:
        now = self._clock()
        try:
            here = self._look()
        except OSError as error:  # no file descriptor is free
            logger.debug("the network interfaces cannot be read: %s", error)
            if self._detector is not None:
                self._detector.resume(now)
            return None
        if self._detector is None:
            self._detector = ChangeDetector(here, now)
        return self._detector.observe(here, now)
