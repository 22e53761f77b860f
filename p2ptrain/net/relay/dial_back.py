"""Dial-back protocol: another node reports our address, whether it can dial us, its clock, and our neighbours.

It also measures bandwidth.

Every node answers; ``p2ptrain doctor`` and ``net.relay.reachability`` ask. The protocol is separate from the exchange
protocol, so that it survives changes of the latter (docs/PROTOCOL.md). A node dials only the address that the request
came from, so it cannot be used to scan other machines, and ``DialBackLimits`` makes it useless for floods.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, key_of, short
from p2ptrain.framing import FrameKind
from p2ptrain.net import address
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.rate_limiter import SlidingWindowLimit, origin
from p2ptrain.net.relay.neighbours import Neighbourhoods
from p2ptrain.net.relay.probe import probe
from p2ptrain.net.rpc import receive_message, request, send_message
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link, Transport

REACH_PROTOCOL = "/p2ptrain/reach/1"

LIMITS = Limits(idle_s=10.0, dial_s=10.0, inbound=8, inbound_per_peer=2)
"""Limits of the protocol. Guess: measure responses; the longest waits for an unanswered dial, 5 s."""
MAX_SAMPLE_BYTES = 4 << 20
"""Large sample, 1.6 s at 20 Mbit/s. Guess: compare its result with a long transfer."""
FIRST_SAMPLE_BYTES = 128 << 10
"""Small sample, 1 s at 1 Mbit/s. Guess: compare its result with a long transfer."""
SAMPLE_DEADLINE_S = 60.0
"""Deadline of a sample for another node, 560 kbit/s for the largest. Guess: measure the slowest connections."""
_CHUNK_BYTES = 64 << 10
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


class DialBackLimits:
    """Rate limits, as of libp2p's AutoNAT. Guess: count the requests per minute at a bootstrap of a full swarm."""

    def __init__(self) -> None:
        self.dials = SlidingWindowLimit(overall=30, each=4, window_s=60.0)
        self.samples = SlidingWindowLimit(overall=16, each=4, window_s=60.0)


async def serve_reach(node: Node, rates: Throttles | None = None) -> P2PTransport:
    """Answer requests until the returned transport is closed. Samples are refused while ``rates.gives`` is false."""
    allowances, rates, neighbourhoods = DialBackLimits(), rates or Throttles(), Neighbourhoods()

    async def serve(link: StreamLink) -> None:
        await answer(link, link.far_end.place, allowances, gives=rates.gives, neighbourhoods=neighbourhoods)

    transport = P2PTransport(node, REACH_PROTOCOL, LIMITS, rates, serves_others=True)
    await transport.listen(serve)
    return transport


async def answer(
    link: Link,
    place: str,
    allowances: DialBackLimits,
    dial: Callable[[str, int], Awaitable[PeerId]] = probe,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = wall,
    gives: bool = True,
    neighbourhoods: Neighbourhoods | None = None,
) -> None:
    """Answer one request that came from the multiaddress ``place``. Raises NetworkError and RemoteError.

    Args:
        dial: dials a host and port, and returns the peer that answers.
        clock: monotonic clock, for the rate limits.
        wall: seconds since 1970, for the report.
        gives: whether samples are answered.
        neighbourhoods: peers that asked for neighbours; None: nobody is remembered.
    """
    match await receive_message(link, _ABOUT, _MAX_BYTES):
        case ["look", int(port), *expected] if 0 <= port < 2**16 and _is_peer(expected):
            peer = PeerId(expected[0]) if expected else link.peer
            dialed, why = await _dial(peer, place, port, allowances, dial, clock)
            await send_message(link, [place, dialed.value, why, wall()])
        case ["near", [*addresses]] if all(type(each) is str for each in addresses):
            met = [] if neighbourhoods is None else neighbourhoods.meet(link.peer, place, addresses)
            await send_message(link, met)
        case ["give" | "take" as action, int(size)] if 0 < size <= MAX_SAMPLE_BYTES:
            if not gives or not allowances.samples.take(origin(place), clock()):
                raise NetworkError(f"{short(link.peer)} exceeded the rate limit for samples")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAMPLE_DEADLINE_S):
                    if action == "give":
                        await _give(link, size)
                    else:
                        await _take(link, size)
                        await send_message(link, [size])
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


async def measure(node: Node, peer: PeerId, addresses: Sequence[str], deadline_s: float) -> tuple[float, float]:
    """Measure the bytes per second from a node and to it. Raises NetworkError, also at the deadline, and RemoteError.

    A large sample follows the small one if it will probably fit into a quarter of the deadline.
    """
    transport = P2PTransport(node, REACH_PROTOCOL, LIMITS)
    rates = []
    try:
        async with asyncio.timeout(deadline_s):
            for question in ("give", "take"):
                rate = await _sample(transport, peer, addresses, question, FIRST_SAMPLE_BYTES)
                if MAX_SAMPLE_BYTES / rate < deadline_s / 4:
                    rate = await _sample(transport, peer, addresses, question, MAX_SAMPLE_BYTES)
                rates.append(rate)
    except TimeoutError:
        raise NetworkError(f"{FIRST_SAMPLE_BYTES:,} bytes were not transferred within {deadline_s:.0f} s") from None
    return rates[0], rates[1]


async def _sample(transport: P2PTransport, peer: PeerId, addresses: Sequence[str], question: str, size: int) -> float:
    link = await transport.open(peer, addresses)
    try:
        began = asyncio.get_running_loop().time()
        await send_message(link, [question, size])
        if question == "give":
            await _take(link, size)
        else:
            await _give(link, size)
            await receive_message(link, _ABOUT, _MAX_BYTES)
        return size / max(asyncio.get_running_loop().time() - began, 1e-6)
    finally:
        await link.close()


def _is_peer(expected: list[Any]) -> bool:
    return not expected or (len(expected) == 1 and type(expected[0]) is str and key_of(PeerId(expected[0])) is not None)


async def _dial(
    peer: PeerId,
    place: str,
    port: int,
    allowances: DialBackLimits,
    dial: Callable[[str, int], Awaitable[PeerId]],
    clock: Callable[[], float],
) -> tuple[DialOutcome, str]:
    if port == 0:
        return DialOutcome.DECLINED, ""
    if not place or address.relay_of(place) is not None:
        return DialOutcome.DECLINED, "the request came through a relay"
    if not allowances.dials.take(origin(place), clock()):
        return DialOutcome.DECLINED, "asked too often"
    try:
        found = await dial(address.host_of(place), port)
    except NetworkError as error:
        return DialOutcome.NO, str(error)[:_MAX_WORDS]
    return (DialOutcome.YES, "") if found == peer else (DialOutcome.NO, f"another peer answers there: {short(found)}")


async def _give(link: Link, size: int) -> None:
    chunk = memoryview(bytes(_CHUNK_BYTES))
    for start in range(0, size, _CHUNK_BYTES):
        await link.send(FrameKind.CHUNK, chunk[: size - start])


async def _take(link: Link, size: int) -> None:
    taken = 0
    while taken < size:
        kind, body = await link.receive()
        if kind != FrameKind.CHUNK or not body:
            raise RemoteError(f"expected a sample, got a frame of kind {kind}")
        taken += len(body)
