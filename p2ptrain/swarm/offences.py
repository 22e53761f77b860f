"""Protocol violations by peer, and the resulting pauses. Pure; bounded; kept while a peer is absent.

Counts halve every ``HALF_LIFE_S``, so that a replaced faulty memory chip is forgiven in the end. They are kept apart
from the live peers' info, so that an adversarial peer cannot reset its count by leaving for a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId

HALF_LIFE_S = 4 * 3600.0
"""Half-life of an offence count. With pauses that double to an hour, a peer that offends at every chance settles at one
offence in about 50 minutes. Guess: measure how long faulty hardware stays in use."""

MAX_REMEMBERED = 512
"""Peers whose offences are kept, latest first. As many as membership keeps (``rules.MAX_KNOWN``)."""

MAX_DOUBLINGS = 16
"""Maximum number of doublings; every longest pause is reached by then, and powers of two stay small."""


@dataclass(frozen=True, slots=True)
class OffenceCount:
    count: float
    """Decayed count, as of ``at``."""
    at: float
    until: float


class Offences:
    def __init__(self) -> None:
        self._tallies: BoundedDict[PeerId, OffenceCount] = BoundedDict(MAX_REMEMBERED)

    def count(self, peer: PeerId, now: float) -> float:
        tally = self._tallies.get(peer)
        return tally.count * exp2(-max(now - tally.at, 0.0) / HALF_LIFE_S) if tally is not None else 0.0

    def add(self, peer: PeerId, now: float, pause_s: tuple[float, float]) -> float:
        """Count one more offence; return the end of the pause, which doubles from the first to the longest."""
        before = self.until(peer)
        count = self.count(peer, now) + 1.0
        first, longest = pause_s
        until = now + min(first * exp2(min(count - 1.0, MAX_DOUBLINGS)), longest)
        self._tallies[peer] = OffenceCount(count, now, max(before, until))
        return until

    def until(self, peer: PeerId) -> float:
        tally = self._tallies.get(peer)
        return tally.until if tally is not None else 0.0
