"""Adds the original failure to p2pd's "dial backoff" errors.

p2pd reports the cause of a failed dial once, to the request that caused the dial. For the next seconds to minutes it
answers "dial backoff" to every request for that address, so a later request never sees the cause.
"""

from __future__ import annotations

import re

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.clock import steady
from p2ptrain.base.ids import PeerId
from p2ptrain.ports import Clock

BACKOFF = "dial backoff"
_PLACE = re.compile(r"\* \[([^\]\s]+)\] (.*?)(?= \* \[|$)", re.DOTALL)
MAX_REMEMBERED = 1024
"""Most recently failed addresses. Guess: count the addresses dialed during one backoff in a full swarm."""
LONGEST_S = 300.0
"""Longest backoff of p2pd (``BackoffMax`` in go-libp2p's swarm); an older failure is not the cause."""
MAX_LETTERS = 400
"""Longest reason, which the other side may influence. Guess: measure p2pd's own messages; twice the longest."""


class BackoffReasons:
    """The last failure of each address of each peer, and its time."""

    def __init__(self, clock: Clock = steady) -> None:
        self._clock = clock
        self._heard: BoundedDict[tuple[PeerId, str], tuple[str, float]] = BoundedDict(MAX_REMEMBERED)

    def completed(self, peer: PeerId, words: str) -> str:
        """Return p2pd's error (``… * [address] reason * [address] reason``) with the cause of each backoff added.

        A known cause turns ``dial backoff`` into ``dial backoff after: reason``.
        """
        return _PLACE.sub(lambda match: self._with_reason(peer, match[1], match[2]), words)

    def forget(self, peer: PeerId) -> None:
        """Drop all failures of a peer that was reached."""
        for key in [each for each in self._heard if each[0] == peer]:
            del self._heard[key]

    def _with_reason(self, peer: PeerId, place: str, reason: str) -> str:
        key = peer, place
        if reason == BACKOFF:
            before, at = self._heard.get(key, ("", -LONGEST_S))
            is_why = before and self._clock() - at <= LONGEST_S
            return f"* [{place}] {BACKOFF}" + (f" after: {before}" if is_why else "")
        self._heard[key] = reason[:MAX_LETTERS], self._clock()
        return f"* [{place}] {reason}"
