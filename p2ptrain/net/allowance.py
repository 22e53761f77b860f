"""Sliding-window limits on requests: overall, by peer and by origin. Memory is bounded."""

from __future__ import annotations

import ipaddress
from collections import deque

from p2ptrain.net import address


class SlidingWindowLimit:
    """Limit of ``overall`` requests per window: at most ``each`` from one peer, and half from one origin.

    Peer ids cost nothing, but somebody with many of them has few origins.
    """

    def __init__(self, overall: int, each: int, window_s: float) -> None:
        self._overall = overall
        self._each = each
        self._from_one = overall // 2
        self._window_s = window_s
        self._taken: deque[tuple[float, str, str]] = deque()

    def take(self, who: str, now: float, where: str = "") -> bool:
        """Return whether a request is granted, and count it if so.

        Args:
            where: the request's origin; empty: no limit by origin, as on this machine.
        """
        while self._taken and self._taken[0][0] <= now - self._window_s:
            self._taken.popleft()
        if len(self._taken) >= self._overall or sum(asker == who for _, asker, _ in self._taken) >= self._each:
            return False
        if where and sum(origin == where for _, _, origin in self._taken) >= self._from_one:
            return False
        self._taken.append((now, who, where))
        return True


def origin(place: str) -> str:
    """Return the origin of a multiaddress: its IPv4 address, or its IPv6 /64, since one household has all of that."""
    host = address.host_of(place)
    if place.startswith("/ip6/"):
        return str(ipaddress.ip_network((host, 64), strict=False))
    return host
