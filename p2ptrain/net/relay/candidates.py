"""Whom to ask for a place at a relay, and whom to ask what they see of us: of all nodes that are known. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.wire import MAX_ADDRESS_CHARS

WITNESSES = 3
"""Nodes that are asked to dial us for one verdict."""
MOST_ADDRESSES = 4
"""Kept of one node. A guess."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may have a place for us."""

    peer: PeerId
    addresses: tuple[str, ...]
    is_sheltered: bool = False
    """It announces circuits of its own, and nobody others that lead through it: whether it relays, and can be dialed at
    all, nobody but itself says."""


def candidates(
    known: Mapping[PeerId, Sequence[str]], likely: Iterable[PeerId], own: PeerId, random: Random
) -> list[Candidate]:
    """Nodes that can be dialed: first those of the join link, then those who relay for others, then all others; each at
    random.

    Who relays is strangers' word, and many strangers may name one relay that leads nobody to us; the link's nodes are
    the word of whoever invited us. So one of the places that we hold is theirs, if they have any.

    Of their addresses those count by which a circuit would be an address as records have it: they are strangers' words,
    and one that is none would spoil our own record.

    Args:
        known: nodes and their addresses, circuits included. Whoever announces circuits cannot be dialed, unless at a
            public address beside them; but they name relays, and where these are dialed, and what a relay says of
            itself comes first.
        likely: those of the join link among them.
    """
    of_link, named = set(likely), set[PeerId]()
    found: dict[PeerId, list[str]] = {}
    sheltered = set[PeerId]()
    told: list[tuple[PeerId, str]] = []
    for peer, places in known.items():
        circuits = {each: relay for each in places if (relay := address.relay_of(each)) is not None}
        if circuits:
            sheltered.add(peer)
        for each, relay in circuits.items():
            named.add(relay)
            told.append((relay, address.split_peer(each.partition("/p2p-circuit")[0])[0]))
        direct = [each for each in places if each not in circuits and (not circuits or address.is_public(each))]
        found[peer] = [each for each in direct if leads_through(peer, each)]
    told_of: dict[PeerId, list[str]] = {}
    for relay, place in told:
        if (not found.get(relay) or relay in sheltered) and leads_through(relay, place):  # else it said so itself
            told_of.setdefault(relay, []).append(place)
    for relay, places_told in told_of.items():
        found[relay] = [*found.get(relay, []), *places_told]
    peers = [peer for peer in found if found[peer] and peer != own]
    random.shuffle(peers)
    peers.sort(key=lambda peer: (peer not in of_link, peer not in named))
    unproved = sheltered - named - of_link
    return [Candidate(peer, tuple(dict.fromkeys(found[peer]))[:MOST_ADDRESSES], peer in unproved) for peer in peers]


def witnesses(candidates: Sequence[Candidate], of_link: Iterable[PeerId], random: Random) -> list[Candidate]:
    """Whom to ask what they see of us: one of the join link's nodes if there is any, and others at random. Not those
    first who relay: that is strangers' word, and a few of them would be everybody's witnesses."""
    well_known = set(of_link)
    drawn = random.sample(candidates, len(candidates))
    first = [each for each in drawn if each.peer in well_known][:1]
    return [*first, *(each for each in drawn if each not in first)][:WITNESSES]


def leads_through(relay: PeerId, place: str) -> bool:
    """Whether p2pd can dial a relay there, and a record has room for the circuit."""
    circuit = address.through(relay, place)
    return len(circuit) <= MAX_ADDRESS_CHARS and address.is_dialable(place) and address.is_dialable(circuit)
