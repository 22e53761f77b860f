"""Planned pairs of an outer step: a pure function on which both sides of a pair agree.

::

    random        k random pairings: each peer has at most k partners, drawn anew for every outer step
    ring          the two neighbours on a ring
    exponential   the peers 1, 2, 4, ... places away on the ring, both ways
    complete      all other peers

Peers stand on the ring in the order of their ids. Peers that know different rosters may plan differently: an offer that
only one side planned is declined, which costs one average in that outer step and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from p2ptrain.base.ids import PeerId

Topology = Literal["random", "ring", "exponential", "complete"]


def planned_partners(
    topology: Topology, partners: int, me: PeerId, roster: Sequence[PeerId], seed: str, step: int
) -> tuple[PeerId, ...]:
    """Return my partners at this outer step, ascending; empty if I am alone or left over.

    ``partners`` is k for ``random``; ``roster`` holds all participants, including me, in any order.
    """
    ring = sorted(set(roster))
    place = ring.index(me)
    others: set[PeerId] = set()
    if topology == "random":
        for draw in range(partners):
            others.update(_partner(ring, me, f"{seed}/{step}/{draw}"))
    elif topology == "complete":
        others.update(ring)
    else:
        others.update(ring[(place + hop) % len(ring)] for hop in _hops(topology, len(ring)))
    return tuple(sorted(others - {me}))


def neighbours(topology: Topology, me: PeerId, roster: Sequence[PeerId]) -> frozenset[PeerId]:
    """Return the peers that I may mix with at all; ``random`` allows all."""
    everybody: Topology = "complete"
    return frozenset(planned_partners(everybody if topology == "random" else topology, 1, me, roster, "", 0))


def _partner(ring: list[PeerId], me: PeerId, seed: str) -> list[PeerId]:
    """Return my partner in a random pairing of all; empty for the peer left over from an odd number."""
    order = list(ring)
    Random(seed).shuffle(order)
    place = order.index(me)
    return [order[place ^ 1]] if place ^ 1 < len(order) else []


def _hops(topology: Topology, size: int) -> list[int]:
    reach = 1 if topology == "ring" else max(size - 1, 1)
    hops = [1 << power for power in range(reach.bit_length()) if 1 << power <= reach]
    return [*hops, *(-hop for hop in hops)]
