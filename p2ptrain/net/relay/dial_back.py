"""Dial-back protocol: another node reports our address, whether it can dial us, its clock, and our neighbours.

Every node answers; ``p2ptrain doctor`` and ``net.relay.reachability`` ask. The protocol is separate from the exchange
protocol, so that it survives changes of the latter (docs/PROTOCOL.md). A node dials only the address that the request
came from, so it cannot be used to scan other machines, and ``dial_limit`` makes it useless for floods.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, key_of, short
from p2ptrain.net import address
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.rate_limiter import SlidingWindowLimit, origin
from p2ptrain.net.relay.neighbours import Neighbourhoods
from p2ptrain.net.relay.noise import probe
from p2ptrain.net.rpc import receive_message, request, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link, Transport

REACH_PROTOCOL = "/p2ptrain/reach/1"

LIMITS = Limits(idle_s=10.0, dial_s=10.0, inbound=8, inbound_per_peer=2)
"""Limits of the protocol. Guess: measure responses; the longest waits for an unanswered dial, 5 s."""
_ABOUT = "reach"
_MAX_BYTES = 1024  # three times an address, a reason and a clock
_MAX_NEAR_BYTES = 1 << 14  # sixteen peers with four addresses each
_MAX_WORDS = 120
_LAST_S = 1e11  # upper bound of a plausible clock, the year 5138


class DialOutcome(StrEnum):
    YES = "yes"  # the dial reached this peer
    NO = "no"
    DECLINED = "declined"
    """The other node did not try: no port was named, a limit was exceeded, or the request came through a relay."""


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """Another node's view of this peer."""

    place: str  # the multiaddress that our connection comes from, a circuit if it uses a relay; empty if unknown
    dialed: DialOutcome
    why: str  # the other node's reason, for people; empty if there is none
    clock: float  # the other node's clock, in seconds since 1970


def dial_limit() -> SlidingWindowLimit:
    """Return a new rate limit of dials, as of libp2p's AutoNAT. Guess: requests per minute at a busy bootstrap."""
    return SlidingWindowLimit(overall=30, each=4, window_s=60.0)


async def serve_reach(node: Node, rates: Throttles | None = None) -> P2PTransport:
    """Answer requests until the returned transport is closed."""
    limit, neighbourhoods = dial_limit(), Neighbourhoods()

    async def serve(link: StreamLink) -> None:
        await answer(link, link.far_end.place, limit, neighbourhoods=neighbourhoods)

    transport = P2PTransport(node, REACH_PROTOCOL, LIMITS, rates, serves_others=True)
    await transport.listen(serve)
    return transport


async def answer(
    link: Link,
    place: str,
    limit: SlidingWindowLimit,
    dial: Callable[[str, int], Awaitable[PeerId]] = probe,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = wall,
    neighbourhoods: Neighbourhoods | None = None,
) -> None:
    """Answer one request that came from the multiaddress ``place``. Raises NetworkError and RemoteError.

    Args:
        dial: dials a host and port, and returns the peer that answers.
        clock: monotonic clock, for the rate limit.
        wall: seconds since 1970, for the report.
        neighbourhoods: peers that asked for neighbours; None: nobody is remembered.
    """
    match await receive_message(link, _ABOUT, _MAX_BYTES):
        case ["look", int(port), *expected] if 0 <= port < 2**16 and _is_peer(expected):
            peer = PeerId(expected[0]) if expected else link.peer
            dialed, why = await _dial(peer, place, port, limit, dial, clock)
            await send_message(link, [place, dialed.value, why, wall()])
        case ["near", [*addresses]] if all(type(each) is str for each in addresses):
            met = [] if neighbourhoods is None else neighbourhoods.meet(link.peer, place, addresses)
            await send_message(link, met)
        case other:
            raise RemoteError(f"expected a dial-back request, not {str(other)[:_MAX_WORDS]}")


async def look(node: Node, peer: PeerId, addresses: Sequence[str], port: int = 0) -> ReachabilityReport:
    """Ask a node for its view of us and for a dial-back to ``port`` (0: none). Raises NetworkError and RemoteError."""
    return await ask_to_look(P2PTransport(node, REACH_PROTOCOL, LIMITS), peer, addresses, port)


async def ask_to_look(
    transport: Transport, peer: PeerId, addresses: Sequence[str], port: int, expected: PeerId | None = None
) -> ReachabilityReport:
    """Ask for a report over any transport; see ``look``. ``expected`` must answer the dial-back; None: the asker."""
    question = ["look", port] if expected is None else ["look", port, expected]
    match await request(transport, peer, addresses, question, about=_ABOUT, most_bytes=_MAX_BYTES):
        case [str(place), str(dialed), str(why), float(clock)] if dialed in set(DialOutcome) and 0 < clock < _LAST_S:
            seen = place if address.is_dialable(place) else ""
            reason = "".join(filter(str.isprintable, why))[:_MAX_WORDS]
            return ReachabilityReport(seen, DialOutcome(dialed), reason, clock)
        case other:
            raise RemoteError(f"expected a dial-back report, not {str(other)[:_MAX_WORDS]}")


async def ask_neighbours(node: Node, peer: PeerId, addresses: Sequence[str], own: Sequence[str]) -> list[Any]:
    """Tell a node our addresses and return its list of our neighbours. Raises NetworkError and RemoteError."""
    transport = P2PTransport(node, REACH_PROTOCOL, LIMITS)
    return await request(transport, peer, addresses, ["near", list(own)], about=_ABOUT, most_bytes=_MAX_NEAR_BYTES)


def _is_peer(expected: list[Any]) -> bool:
    return not expected or (len(expected) == 1 and type(expected[0]) is str and key_of(PeerId(expected[0])) is not None)


async def _dial(
    peer: PeerId,
    place: str,
    port: int,
    limit: SlidingWindowLimit,
    dial: Callable[[str, int], Awaitable[PeerId]],
    clock: Callable[[], float],
) -> tuple[DialOutcome, str]:
    if port == 0:
        return DialOutcome.DECLINED, ""
    if not place or address.relay_of(place) is not None:
        return DialOutcome.DECLINED, "the request came through a relay"
    if not limit.take(origin(place), clock()):
        return DialOutcome.DECLINED, "asked too often"
    try:
        found = await dial(address.host_of(place), port)
    except NetworkError as error:
        return DialOutcome.NO, str(error)[:_MAX_WORDS]
    return (DialOutcome.YES, "") if found == peer else (DialOutcome.NO, f"another peer answers there: {short(found)}")
