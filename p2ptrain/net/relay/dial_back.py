"""What another node sees of us: by which address we come, whether it can dial us, what its clock says; and how fast
bytes pass. Every node answers; ``p2ptrain doctor`` and ``net.relay.reachability`` ask.

A protocol of its own (docs/PROTOCOL.md), so that it outlives changes of the exchange protocol. A node that is asked to
dial dials nothing but the address that the question came from, so nobody is used to scan others; and it answers seldom
enough to be of no use in a flood: ``DialBackLimits``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.framing import FrameKind
from p2ptrain.net import address
from p2ptrain.net.allowance import SlidingWindowLimit, origin
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.relay.probe import probe
from p2ptrain.net.rpc import hear, say
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link, Transport

REACH_PROTOCOL = "/p2ptrain/reach/1"

LIMITS = Limits(idle_s=10.0, dial_s=10.0, inbound=8, inbound_per_peer=2)
"""A guess: the answer takes as long as a dial that nobody answers, 5 s, and what is around it."""
MAX_SAMPLE_BYTES = 4 << 20
"""A guess: 1.6 s at 20 Mbit/s."""
FIRST_SAMPLE_BYTES = 128 << 10
"""A guess: 1 s at 1 Mbit/s."""
SAMPLE_DEADLINE_S = 60.0
"""For one that somebody takes or gives at our cost. A guess: 560 kbit/s."""
_CHUNK_BYTES = 64 << 10
_ABOUT = "reach"
_MAX_BYTES = 1024
"""An address, a reason and a clock, thrice over."""
_MAX_WORDS = 120
_LAST_S = 1e11
"""No clock says more: the year 5138."""


class DialOutcome(StrEnum):
    """What became of the wish to be dialed."""

    YES = "yes"
    """We answered, under our name."""
    NO = "no"
    DECLINED = "declined"
    """They did not try: nobody asked them to, they were asked too often, or we talk through a relay."""


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """What another node sees of us."""

    place: str
    """The multiaddress that our connection comes from; a circuit's where it comes through a relay; empty: unknown."""
    dialed: DialOutcome
    why: str
    """In its words, for people; empty where all is well."""
    clock: float
    """Seconds since 1970, by its clock."""


class DialBackLimits:
    """How much of one node's help the others get. All are guesses; libp2p's own AutoNAT gives the same dials."""

    def __init__(self) -> None:
        self.dials = SlidingWindowLimit(overall=30, each=4, window_s=60.0)
        self.samples = SlidingWindowLimit(overall=16, each=4, window_s=60.0)


async def serve_reach(node: Node, rates: Throttles | None = None) -> P2PTransport:
    """Answer others until the returned transport is closed. There are no samples while nothing is given."""
    allowances, rates = DialBackLimits(), rates or Throttles()

    async def serve(link: StreamLink) -> None:
        await answer(link, link.far_end.place, allowances, gives=rates.gives)

    transport = P2PTransport(node, REACH_PROTOCOL, LIMITS, rates, is_gift=True)
    await transport.listen(serve)
    return transport


async def answer(
    link: Link,
    place: str,
    allowances: DialBackLimits,
    dial: Callable[[str, int], Awaitable[PeerId]] = probe,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    gives: bool = True,
) -> None:
    """Answer one question that came from ``place``, over any link. Raises NetworkError and RemoteError.

    Args:
        gives: samples too.
    """
    match await hear(link, _ABOUT, _MAX_BYTES):
        case ["look", int(port)] if 0 <= port < 2**16:
            dialed, why = await _dial(link.peer, place, port, allowances, dial, clock)
            await say(link, [place, dialed.value, why, wall()])
        case ["give" | "take" as wish, int(size)] if 0 < size <= MAX_SAMPLE_BYTES:
            if not gives or not allowances.samples.take(origin(place), clock()):
                raise NetworkError(f"{short(link.peer)} asked for bytes too often")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAMPLE_DEADLINE_S):
                    if wish == "give":
                        await _give(link, size)
                    else:
                        await _take(link, size)
                        await say(link, [size])
        case other:
            raise RemoteError(f"a question about reach was due, not {str(other)[:_MAX_WORDS]}")


async def look(node: Node, peer: PeerId, addresses: Sequence[str], port: int = 0) -> ReachabilityReport:
    """Ask a node what it sees of us, and to dial us at that port (0: not). Raises NetworkError and RemoteError."""
    return await ask_to_look(P2PTransport(node, REACH_PROTOCOL, LIMITS), peer, addresses, port)


async def ask_to_look(transport: Transport, peer: PeerId, addresses: Sequence[str], port: int) -> ReachabilityReport:
    """``look`` over any transport."""
    link = await transport.open(peer, addresses)
    try:
        await say(link, ["look", port])
        match await hear(link, _ABOUT, _MAX_BYTES):
            case [str(place), str(dialed), str(why), float(clock)] if (
                dialed in set(DialOutcome) and 0 < clock < _LAST_S
            ):
                seen = place if address.is_dialable(place) else ""
                words = "".join(filter(str.isprintable, why))[:_MAX_WORDS]
                return ReachabilityReport(seen, DialOutcome(dialed), words, clock)
            case other:
                raise RemoteError(f"what it sees of us was due, not {str(other)[:_MAX_WORDS]}")
    finally:
        await link.close()


async def measure(node: Node, peer: PeerId, addresses: Sequence[str], deadline_s: float) -> tuple[float, float]:
    """Bytes a second from a node and to it. Raises NetworkError and RemoteError, also at the deadline.

    A small sample first, and the large one only where the small one shows that it passes soon.
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
        raise NetworkError(f"{FIRST_SAMPLE_BYTES:,} bytes did not pass in {deadline_s:.0f} s") from None
    return rates[0], rates[1]


async def _sample(transport: P2PTransport, peer: PeerId, addresses: Sequence[str], question: str, size: int) -> float:
    """Bytes a second over so many bytes, the question's way included."""
    link = await transport.open(peer, addresses)
    try:
        began = asyncio.get_running_loop().time()
        await say(link, [question, size])
        if question == "give":
            await _take(link, size)
        else:
            await _give(link, size)
            await hear(link, _ABOUT, _MAX_BYTES)
        return size / max(asyncio.get_running_loop().time() - began, 1e-6)
    finally:
        await link.close()


async def _dial(
    peer: PeerId,
    place: str,
    port: int,
    allowances: DialBackLimits,
    dial: Callable[[str, int], Awaitable[PeerId]],
    clock: Callable[[], float],
) -> tuple[DialOutcome, str]:
    """Dial the host that the question came from, whatever it says, at the port that it names."""
    if port == 0:
        return DialOutcome.DECLINED, ""
    if not place or address.relay_of(place) is not None:
        return DialOutcome.DECLINED, "the question came through a relay"
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
            raise RemoteError(f"bytes to measure with were due, not a frame of kind {kind}")
        taken += len(body)
