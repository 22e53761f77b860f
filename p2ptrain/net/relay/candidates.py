"""Selection among the known nodes: relays to ask for a reservation, and nodes to ask for a dial-back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.wire import MAX_ADDRESS_CHARS

PROBERS = 3
"""Nodes asked for a dial-back in one reachability check."""
MAX_ADDRESSES_EACH = 4
"""Addresses kept per node. Guess: count the addresses tried before a dial succeeds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may give us a reservation."""

    peer: PeerId
    addresses: tuple[str, ...]
    is_relayed: bool = False
    """Whether the node announces circuits of its own and no other node announces a circuit through it. Only the node
    itself then says that it can be dialed, or that it relays."""
    is_named: bool = field(default=False, compare=False)
    """Whether another node announces a circuit through it."""


def candidates(
    known: Mapping[PeerId, Sequence[str]], likely: Iterable[PeerId], own: PeerId, random: Random
) -> list[Candidate]:
    """Return the nodes that can be dialed: nodes of the join link, then relays of other nodes, then all others.

    The order within each group is random. Other peers' records say which nodes relay, and may be forged; the join link
    is trusted. One of our reservations is therefore at a node of the link, if they relay (``ReachabilityManager``).
    Addresses through which a circuit would not fit into our presence record are left out.

    Args:
        known: nodes and their addresses, circuits included, which name relays and the relays' addresses. A node with
            circuits can be dialed only at a public address. A relay's own addresses take precedence.
        likely: the nodes of the join link.
    """
    of_link, named = set(likely), set[PeerId]()
    found: dict[PeerId, list[str]] = {}
    relayed = set[PeerId]()
    mentioned: list[tuple[PeerId, str]] = []
    for peer, places in known.items():
        circuits = {each: relay for each in places if (relay := address.relay_of(each)) is not None}
        if circuits:
            relayed.add(peer)
        for each, relay in circuits.items():
            named.add(relay)
            mentioned.append((relay, address.split_peer(each.partition("/p2p-circuit")[0])[0]))
        direct = [each for each in places if each not in circuits and (not circuits or address.is_public(each))]
        found[peer] = [each for each in direct if leads_through(peer, each)]
    addresses_of: dict[PeerId, list[str]] = {}
    for relay, place in mentioned:
        if (not found.get(relay) or relay in relayed) and leads_through(relay, place):  # else it announces its own
            addresses_of.setdefault(relay, []).append(place)
    for relay, reported in addresses_of.items():
        found[relay] = [*found.get(relay, []), *reported]
    peers = [peer for peer in found if found[peer] and peer != own]
    random.shuffle(peers)
    peers.sort(key=lambda peer: (peer not in of_link, peer not in named))
    unproved = relayed - named - of_link
    return [
        Candidate(peer, tuple(dict.fromkeys(found[peer]))[:MAX_ADDRESSES_EACH], peer in unproved, peer in named)
        for peer in peers
    ]


def in_line(candidates: Sequence[Candidate], of_link: Collection[PeerId], held: Collection[PeerId]) -> list[Candidate]:
    """Return the candidates for the next reservation that are equally wanted, in their order; empty if there are none.

    One reservation is to be at a node of the join link. All others are at relays that other nodes use, so that peers
    that relay share the load of the bootstraps; without such at further nodes of the link, and then at any node.
    """
    needs_link = not set(of_link) & set(held)

    def rank(each: Candidate) -> int:
        if each.peer in of_link:
            return 0 if needs_link else 2
        return 1 if each.is_named else 3

    free = [each for each in candidates if each.peer not in held]
    best = min(map(rank, free), default=0)
    return [each for each in free if rank(each) == best]


def probers(candidates: Sequence[Candidate], of_link: Iterable[PeerId], random: Random) -> list[Candidate]:
    """Return the nodes to ask for a dial-back: one node of the join link if there is one, and others at random.

    Relays are not preferred: records that name them may be forged, and a few nodes would then judge everybody.
    """
    well_known = set(of_link)
    drawn = random.sample(candidates, len(candidates))
    first = [each for each in drawn if each.peer in well_known][:1]
    return [*first, *(each for each in drawn if each not in first)][:PROBERS]


def leads_through(relay: PeerId, place: str) -> bool:
    """Return whether p2pd can dial a relay at this address, and a record has room for the circuit."""
    circuit = address.through(relay, place)
    return len(circuit) <= MAX_ADDRESS_CHARS and address.is_dialable(place) and address.is_dialable(circuit)
