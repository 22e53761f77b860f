"""Why p2pd leaves an address alone, where it says only that it does.

Of a dial that failed it tells the reason once, to whoever asked for that dial. For seconds to minutes it then answers
"dial backoff" to everybody, and who asks may never have heard more: the DHT greets the bootstraps first.
"""

from __future__ import annotations

import re

from p2ptrain.base.clock import steady
from p2ptrain.base.ids import PeerId
from p2ptrain.ports import Clock

BACKOFF = "dial backoff"
_PLACE = re.compile(r"\* \[([^\]\s]+)\] (.*?)(?= \* \[|$)", re.DOTALL)
MOST_REMEMBERED = 1024
"""Addresses of peers, those that failed last. A guess: more than are dialed in the minutes that a backoff lasts."""
LONGEST_S = 300.0
"""That p2pd leaves an address alone at a time (``BackoffMax`` in go-libp2p's swarm): what was heard longer ago is not
why."""
MOST_LETTERS = 400
"""Of a reason, which may be in part what the other side said. A guess: twice the longest of p2pd's own."""


class BackoffReasons:
    """The last reason that was heard for each address of each peer, and when."""

    def __init__(self, clock: Clock = steady) -> None:
        self._clock = clock
        self._heard: dict[tuple[PeerId, str], tuple[str, float]] = {}

    def completed(self, peer: PeerId, words: str) -> str:
        """What p2pd says of a failed dial (``… * [address] reason * [address] reason``), and behind each backoff for
        what: ``dial backoff after: reason``."""
        return _PLACE.sub(lambda match: self._with_reason(peer, match[1], match[2]), words)

    def forget(self, peer: PeerId) -> None:
        """It was reached: what was in the way is so no more."""
        for key in [each for each in self._heard if each[0] == peer]:
            del self._heard[key]

    def _with_reason(self, peer: PeerId, place: str, reason: str) -> str:
        key = peer, place
        if reason == BACKOFF:
            before, at = self._heard.get(key, ("", -LONGEST_S))
            is_why = before and self._clock() - at <= LONGEST_S
            return f"* [{place}] {BACKOFF}" + (f" after: {before}" if is_why else "")
        self._heard.pop(key, None)
        self._heard[key] = reason[:MOST_LETTERS], self._clock()
        if len(self._heard) > MOST_REMEMBERED:
            del self._heard[next(iter(self._heard))]
        return f"* [{place}] {reason}"
