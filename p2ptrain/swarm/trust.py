"""How far a partner's weights may lie from ours: learnt from exchanges, never asked of a user.

A liar's weights are finite and of the right shape; what gives them away is that they lie further off than everybody
else's, or stand still. Three bounds, of which honest peers meet none:

=================  ====================================================================================
``are_strange``    the difference is longer than our weights: nothing in common. Not mixed; an offence
                   the ``TIMES_STRANGE``th time, of which a committed exchange takes back half
``Replays``        these very bytes were mixed twice already, and still they are far off. The same
``DistanceStats.radius``   ``FACTOR`` times what is usual among our partners: the difference is clipped to it
=================  ====================================================================================

The radius travels in the terms and both sides clip to the smaller, so that a clipped exchange, too, leaves the pair's
mean where it is. Clipping is ClippedGossip's (arXiv 2202.01545), which sets the radius by an oracle or by the nearest
neighbours; ours is a median over partners, since a liar fills its own place in it and no other: fewer than half of the
partners cannot move it past what the honest ones measure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from p2ptrain.base.ids import PeerId

FACTOR = 12.0
"""Radius over usual difference. Our measurement: docs/SECURITY.md."""

LEAST_RADIUS = 0.3
"""No radius is below this share of our weights' norm: who sleeps, is slow or came late is further off than usual and
must not be held back. Our measurement: docs/SECURITY.md."""

STRANGE = 1.2
"""A difference so many times as long as our own weights is refused. Negated weights are at 2, random ones of equal norm
at 1.4, and weights of another run at that or more; peers of one run began alike."""

TIMES_STRANGE = 3
"""Until then we leave it alone as one that broke off (2 s, 4 s). Who trained alone for a few outer steps of a young run
may be a stranger, too: at the full rate, right after it had exchanged, in one of some twenty runs of a tiny model. It
mixes with others meanwhile, or learns that its weights are the odd ones; shut out for half a minute at once it was off
for good. A liar costs two more exchanges, of which nothing is mixed; one that is honest every other time costs as much
as one that breaks off every other time. A guess."""

LEAST_PARTNERS = 3
"""With fewer, one liar is half of a median."""

LEAST_EXCHANGES = 8
"""A young history is of the run's beginning, when everybody is still where everybody began and differences grow. A
guess."""

PER_PARTNER = 4
"""Exchanges remembered of each partner. A guess: few, since differences shrink with the learning rate."""

MOST_REPLAYS = 2
"""The same bytes may be mixed so often. An exchange moves both sides, so an honest partner's next bytes differ; unless
it did not commit what we did (a half-commit), which does not happen twice with one partner."""

PER_REPLAYER = 8
"""Payloads remembered of each partner: whoever replays more of them sends ones that are as many exchanges old."""

MOST_PARTNERS = 32
"""Partners remembered, those met last: as many as a peer keeps in mind (``rules.ENOUGH_PEERS``)."""


def are_strange(distance: float) -> bool:
    """Whether weights at this distance, relative to ours, have nothing in common with ours."""
    return not distance <= STRANGE  # True for NaN


def per_fragment(norm: float, fragments: int) -> float:
    """The L2 norm of one fragment, of an exchange of so many that are about equally long."""
    return norm / sqrt(max(fragments, 1))


@dataclass(slots=True)
class DistanceStats:
    """How far apart we and our partners were in our last exchanges. Bounded; fragments' L2 norms."""

    _differences: dict[PeerId, deque[float]] = field(default_factory=dict)
    """Of each partner; who was met last comes last."""
    _weights: float = 0.0
    """A fragment of our own, as last measured."""
    _radius: float | None = None
    """Until something is measured again."""

    def measured(self, peer: PeerId, difference: float, weights: float) -> None:
        """An exchange with this partner was committed.

        Args:
            difference: ||theirs - mine||, a fragment.
            weights: ||mine||, a fragment.

        Nothing is learnt where the numbers are none, nor from a difference of nothing: two that are at the same place
        have not trained since they were, and the radius is of those that have.
        """
        if not (0 < weights < inf and 0 < difference < inf):
            return
        self._weights = weights
        known = self._differences.pop(peer, None) or deque(maxlen=PER_PARTNER)
        known.append(difference)
        self._differences[peer] = known
        if len(self._differences) > MOST_PARTNERS:
            del self._differences[next(iter(self._differences))]
        self._radius = None

    def radius(self) -> float:
        """The longest difference of a fragment that may move us; infinite before enough was measured."""
        if self._radius is None:
            self._radius = self._learn()
        return self._radius

    def forget(self) -> None:
        """Our weights were replaced: what was usual is no measure."""
        self._differences.clear()
        self._weights, self._radius = 0.0, None

    def _learn(self) -> float:
        if len(self._differences) < LEAST_PARTNERS or sum(map(len, self._differences.values())) < LEAST_EXCHANGES:
            return inf  # whoever is stranger than strange is kept out all the same
        usual = _median([_median(each) for each in self._differences.values()])
        return max(FACTOR * usual, LEAST_RADIUS * self._weights)


@dataclass(slots=True)
class Replays:
    """How often each partner's last payloads were mixed. Bounded."""

    _times: dict[PeerId, dict[bytes, int]] = field(default_factory=dict)
    """By fingerprint; whoever and whatever was mixed last comes last."""

    def mixed(self, peer: PeerId, fingerprint: bytes) -> None:
        """An exchange that brought these bytes was committed. No bytes have no fingerprint."""
        if not fingerprint:
            return
        times = self._times.pop(peer, {})
        times[fingerprint] = times.pop(fingerprint, 0) + 1
        if len(times) > PER_REPLAYER:
            del times[next(iter(times))]
        self._times[peer] = times
        if len(self._times) > MOST_PARTNERS:
            del self._times[next(iter(self._times))]

    def is_one(self, peer: PeerId, fingerprint: bytes) -> bool:
        """Whether these bytes were mixed too often."""
        return self._times.get(peer, {}).get(fingerprint, 0) >= MOST_REPLAYS


def _median(values: Sequence[float]) -> float:
    """The lower one of two: few partners are no majority."""
    return sorted(values)[(len(values) - 1) // 2]
