"""Bounds on the distance of a partner's weights, learnt from exchanges and never asked of a user.

An adversarial peer's weights are finite and have the right shape; they are recognized because they lie further off than
all others (``are_unrelated``, ``DistanceStats.radius``), or do not change (``Replays``). Honest peers reach none of the
three bounds.

The terms contain the radius and both sides clip to the smaller one, so that clipping also leaves the pair's mean
unchanged. Clipping comes from ClippedGossip (arXiv 2202.01545), which sets the radius by an oracle or by the nearest
neighbours. Ours is a median over partners, in which an adversarial peer counts only once: fewer than half of the
partners cannot move it past what the honest ones measure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median_low

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId

FACTOR = 12.0
"""Radius as a multiple of the median difference. Measured: docs/SECURITY.md."""

MIN_RADIUS = 0.3
"""Minimum radius, as a share of our weights' norm. A peer that sleeps, is slow or came late is further off than usual
and must not be held back. Measured: docs/SECURITY.md."""

UNRELATED = 1.2
"""Difference, as a multiple of our weights' length, that is refused. Negated weights reach 2, random ones of equal norm
1.4, and those of another run at least 1.4; peers of one run began alike."""

TIMES_UNRELATED = 3
"""Unrelated payloads that count as an offence; before that, the pauses are those after a broken-off exchange (2 s, 4
s). A peer that trained alone for a few outer steps of a young run may look unrelated too: at the full rate, right after
an exchange, in about one of twenty runs of a tiny model. It mixes with others meanwhile, or learns that its own weights
are outliers; a pause of 30 s at once would cut it off permanently. An adversarial peer costs two more exchanges, none
of which is mixed; one that alternates costs as much as one that breaks off every other exchange. Guess: count unrelated
payloads in young runs."""

MIN_PARTNERS = 3
"""Minimum number of partners; with fewer, one adversarial peer is half of a median."""

MIN_EXCHANGES = 8
"""Minimum number of exchanges. The first ones are from the run's beginning, when peers are still close and differences
grow. Guess: measure how distances grow at the start of runs."""

PER_PARTNER = 4
"""Exchanges remembered per partner; few, because differences shrink with the learning rate. Guess: compare the clipping
of honest peers with other numbers."""

MAX_REPLAYS = 2
"""Times that the same bytes may be mixed. An exchange moves both sides, so an honest partner's next bytes differ,
unless it did not commit what we did (a half-commit), which does not happen twice with one partner."""

PER_REPLAYER = 8
"""Payloads remembered per partner; replaying more of them means that they are that many exchanges old."""

MAX_PARTNERS = 32
"""Partners remembered, the most recent ones; as many as a peer keeps (``rules.ENOUGH_PEERS``)."""


def are_unrelated(distance: float) -> bool:
    """Report whether weights at this distance, relative to ours, are unrelated to ours."""
    return not distance <= UNRELATED  # True for NaN


def per_fragment(norm: float, fragments: int) -> float:
    """Return the L2 norm of one fragment, for an exchange of fragments of about equal length."""
    return norm / sqrt(max(fragments, 1))


@dataclass(slots=True)
class DistanceStats:
    """Distances to our partners in recent exchanges, as L2 norms of fragments. Bounded."""

    _differences: BoundedDict[PeerId, deque[float]] = field(default_factory=lambda: BoundedDict(MAX_PARTNERS))
    _weights: float = 0.0
    _radius: float | None = None

    def measured(self, peer: PeerId, difference: float, weights: float) -> None:
        """Record the distance of a committed exchange, as norms per fragment: ||theirs - mine|| and ||mine||.

        Two equal peers have not trained since they were, so a difference of zero is ignored, as are NaN and infinity.
        """
        if not (0 < weights < inf and 0 < difference < inf):
            return
        self._weights = weights
        known = self._differences.get(peer) or deque(maxlen=PER_PARTNER)
        known.append(difference)
        self._differences[peer] = known
        self._radius = None

    def radius(self) -> float:
        """Return the largest difference of a fragment that may move us; infinite before enough was measured."""
        if self._radius is None:
            self._radius = self._learn()
        return self._radius

    def forget(self) -> None:
        self._differences.clear()
        self._weights, self._radius = 0.0, None

    def _learn(self) -> float:
        if len(self._differences) < MIN_PARTNERS or sum(map(len, self._differences.values())) < MIN_EXCHANGES:
            return inf  # unrelated weights are refused regardless
        typical = median_low(median_low(each) for each in self._differences.values())  # few partners are not a majority
        return max(FACTOR * typical, MIN_RADIUS * self._weights)


@dataclass(slots=True)
class Replays:
    """Number of times that each partner's last payloads were mixed. Bounded."""

    _times: BoundedDict[PeerId, BoundedDict[bytes, int]] = field(default_factory=lambda: BoundedDict(MAX_PARTNERS))

    def mixed(self, peer: PeerId, fingerprint: bytes) -> None:
        """Record a committed exchange of these bytes; an empty fingerprint is ignored."""
        if not fingerprint:
            return
        times = self._times.get(peer) or BoundedDict(PER_REPLAYER)
        times[fingerprint] = times.get(fingerprint, 0) + 1
        self._times[peer] = times

    def is_one(self, peer: PeerId, fingerprint: bytes) -> bool:
        times = self._times.get(peer)
        return times is not None and times.get(fingerprint, 0) >= MAX_REPLAYS
