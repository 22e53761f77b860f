"""Keepers: peers that hold some fragments, average trainers' weights into them and serve them, and do not train.

A keeper contributes no motion, so an exchange with it must not move a trainer: it would be drawn back to an older
average. Let u_i be a trainer's weights and w_i its mixing weight; a keeper's counts as 0 in ``sum w_i u_i / sum w_i``.
The keeper moves by the usual share, and its fragments are a moving average over the trainers that it meets.

A keeper offers exchanges, trainers never do: for them it would take the place of a partner. Its step and progress are
medians of what its partners said in its last exchanges, so a minority hardly makes its weights seem newer or older.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import PeerState, Terms
from p2ptrain.swarm.peer_info import PeerInfo
from p2ptrain.swarm.rules import MAX_KNOWN

Ranges = tuple[tuple[int, int], ...]
"""Fragments as ranges, first and last included: ascending, with a gap between any two."""

MAX_RANGES = 8
"""Ranges in a presence record, which has at most 1,000 bytes."""
MAX_FRAGMENTS = 65_536
"""Fragment numbers in messages end before it."""
EXCHANGES = 7
"""Last exchanges whose medians are a keeper's step and progress. The keeper draws its partners at random, so a minority
that lies seldom has most of them."""
PACE_S = (1.0, 300.0)
"""Bounds of the seconds between two exchanges that a keeper begins; between them, an outer step of its partners, so
that each trainer serves a small part of its exchanges to keepers. Guess: compare the age of kept weights with other
numbers."""
FINAL_PACE_S = 1.0
"""Seconds between two exchanges while a partner makes its last ones, after which it leaves."""
_NUMBER = re.compile("[0-9]{1,5}")


def ranges_of(fragments: Iterable[int]) -> Ranges:
    """Return these fragments as ranges."""
    ranges: list[tuple[int, int]] = []
    for each in sorted(set(fragments)):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1] = ranges[-1][0], each
        else:
            ranges.append((each, each))
    return tuple(ranges)


def fragments_in(ranges: Ranges) -> frozenset[int]:
    return frozenset(each for first, last in ranges for each in range(first, last + 1))


def words(fragments: Iterable[int]) -> str:
    """Return fragments for people: ``0-3, 7``."""
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges_of(fragments))


def parse(text: str) -> frozenset[int]:
    """Return the fragments in a text such as ``0-3,7``. Raises ValueError."""
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if _NUMBER.fullmatch(first) is None or (dash and _NUMBER.fullmatch(last) is None):
            raise ValueError(f"{word.strip()!r} is neither a fragment nor a range such as 0-3")
        begin, end = int(first), int(last) if dash else int(first)
        if not begin <= end < MAX_FRAGMENTS:
            raise ValueError(f"{word.strip()!r} is not an ascending range below {MAX_FRAGMENTS:,}")
        found.update(range(begin, end + 1))
    if len(ranges_of(found)) > MAX_RANGES:
        raise ValueError(f"{len(ranges_of(found))} separate ranges are more than {MAX_RANGES}")
    return frozenset(found)


def held_by(known: PeerInfo, everything: frozenset[int]) -> frozenset[int]:
    """Return the fragments of the weights that a peer says it holds: all, unless it is a keeper."""
    if known.state is not PeerState.KEEPING:
        return everything
    return fragments_in(known.presence.keeps) if known.presence is not None else frozenset()


@dataclass(slots=True)
class KeeperPosition:
    """What a keeper's partners said last: where the swarm is, and how long an outer step takes."""

    _said: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=EXCHANGES))
    """Step and progress of the partner in each of the last exchanges."""
    _seen: BoundedDict[PeerId, tuple[int, float]] = field(default_factory=lambda: BoundedDict(MAX_KNOWN))
    """Step of a partner, and when it was first seen there."""
    _laps: BoundedDict[PeerId, float] = field(default_factory=lambda: BoundedDict(MAX_KNOWN))
    """Seconds of an outer step by partner."""

    def exchanged(self, peer: PeerId, terms: Terms, now: float) -> tuple[int, float]:
        """Record a committed exchange; return the keeper's step and progress."""
        before = self._seen.get(peer)
        if before is None or terms.step < before[0]:
            self._seen[peer] = terms.step, now
        elif terms.step > before[0]:
            self._laps[peer] = (now - before[1]) / (terms.step - before[0])
            self._seen[peer] = terms.step, now
        self._said.append((terms.step, terms.progress))
        steps, progress = zip(*self._said, strict=True)
        return median_low(steps), median_low(progress)

    def pace_s(self, is_final: bool) -> float:
        """Return the seconds between two exchanges."""
        if is_final:
            return FINAL_PACE_S
        shortest, longest = PACE_S
        return min(max(median_low(self._laps.values()), shortest), longest) if self._laps else shortest

    def forget(self) -> None:
        """Forget what partners said before other weights were adopted."""
        self._said.clear()
