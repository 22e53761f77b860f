"""How often peers broke the rules, and how long each is left alone for it. Pure; bounded; outlives a peer's absence.

A count decays by half in ``HALF_LIFE_S``, so that a faulty memory chip that was replaced is forgiven in the end. It is
kept apart from what is known of live peers: a liar that goes away for a minute and comes back is still known.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2

from p2ptrain.base.ids import PeerId

HALF_LIFE_S = 4 * 3600.0
"""With pauses that double to an hour, somebody who offends at every chance settles at one chance in about 50 minutes.
A guess."""

MOST_REMEMBERED = 512
"""Of whom an offence is kept, those who offended last. As many as membership knows (``rules.MAX_KNOWN``)."""

MOST_DOUBLINGS = 16
"""Beyond these every longest pause is reached, and powers of two stay small."""


@dataclass(frozen=True, slots=True)
class OffenceCount:
    """One peer's offences."""

    count: float
    """Decayed, as of ``at``."""
    at: float
    until: float
    """It is left alone until then."""


class Offences:
    """Everybody's tally."""

    def __init__(self) -> None:
        self._tallies: dict[PeerId, OffenceCount] = {}  # who offended last comes last

    def count(self, peer: PeerId, now: float) -> float:
        """A peer's offences, decayed."""
        tally = self._tallies.get(peer)
        return tally.count * exp2(-max(now - tally.at, 0.0) / HALF_LIFE_S) if tally is not None else 0.0

    def add(self, peer: PeerId, now: float, pause_s: tuple[float, float]) -> float:
        """It offended again: until when to leave it alone.

        Args:
            pause_s: after the first offence, and the longest; in between it doubles with each.
        """
        before = self.until(peer)
        count = self.count(peer, now) + 1.0
        first, longest = pause_s
        until = now + min(first * exp2(min(count - 1.0, MOST_DOUBLINGS)), longest)
        self._tallies.pop(peer, None)
        if len(self._tallies) >= MOST_REMEMBERED:
            del self._tallies[next(iter(self._tallies))]
        self._tallies[peer] = OffenceCount(count, now, max(before, until))
        return until

    def until(self, peer: PeerId) -> float:
        """When the last pause ends, or ended."""
        tally = self._tallies.get(peer)
        return tally.until if tally is not None else 0.0
