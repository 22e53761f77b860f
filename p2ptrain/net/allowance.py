"""How often strangers may ask for something: so often overall, each of them, and from each origin. Bounded memory."""

from __future__ import annotations

import ipaddress
from collections import deque

from p2ptrain.net import address


class SlidingWindowLimit:
    """At most ``overall`` in any window; of them at most ``each`` of one asker, and half of them from one origin.

    Askers' names cost nothing: who has many has few origins.
    """

    def __init__(self, overall: int, each: int, window_s: float) -> None:
        self._overall = overall
        self._each = each
        self._from_one = overall // 2
        self._window_s = window_s
        self._taken: deque[tuple[float, str, str]] = deque()

    def take(self, who: str, now: float, where: str = "") -> bool:
        """Whether it is granted. What is refused does not count.

        Args:
            where: the origin; empty: it does not count, as on this machine.
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
    """Whom a multiaddress counts for: its IP address, of IPv6 the /64, since a house has all of it."""
    host = address.host_of(place)
    if place.startswith("/ip6/"):
        return str(ipaddress.ip_network((host, 64), strict=False))
    return host
