"""Dial-backs by the address family that our own connections do not use, for which a second p2pd runs for some seconds.

p2pd keeps one connection to a peer, by IPv4 or by IPv6, and a dial-back goes to the address that a request came from. A
connected peer can therefore test one family only. The second p2pd has a temporary identity, does not listen, and names
the peer that the others should find.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.base.errors import NetworkError, RemoteError, UserError
from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.daemon import Daemon
from p2ptrain.net.relay.candidates import Candidate
from p2ptrain.net.relay.dial_back import LIMITS, REACH_PROTOCOL, ReachabilityReport, ask_to_look
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Link, Transport

DEADLINE_S = 30.0
"""Timeout; p2pd starts in 0.1 s, an unanswered dial takes 5 s. Guess: starts on overloaded machines."""


class _BareTransport(Transport):
    """Opens links over a p2pd that has no node; they end with it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> Link:
        try:
            async with asyncio.timeout(LIMITS.dial_s):
                await self._daemon.connect(peer, addresses)
                far_end, stream = await self._daemon.open_stream(peer, REACH_PROTOCOL)
        except TimeoutError:
            raise NetworkError("it does not answer") from None
        return StreamLink(far_end, stream, LIMITS, Throttles())

    async def listen(self, handler: object) -> None:
        raise NotImplementedError


async def look_by(family: int, node: Node, probers: Sequence[Candidate], port: int) -> list[ReachabilityReport]:
    """Ask nodes, by one address family, to dial the node at ``port``; empty if none has such an address or answers."""
    asked = {each.peer: [place for place in each.addresses if address.family_of(place) == family] for each in probers}
    asked = {peer: [each for each in places if address.relay_of(each) is None] for peer, places in asked.items()}
    if not any(asked.values()):
        return []
    reports: list[ReachabilityReport] = []
    try:
        with tempfile.TemporaryDirectory(prefix="p2pt-") as folder:
            async with asyncio.timeout(DEADLINE_S):
                daemon = await Daemon.start(Identity.load_or_create(Path(folder) / "identity.key").path, ())
                daemon.caution = node.daemon.caution
                transport = _BareTransport(daemon)

                async def ask(peer: PeerId, places: Sequence[str]) -> None:
                    try:
                        reports.append(await ask_to_look(transport, peer, places, port, node.peer_id))
                    except (NetworkError, RemoteError):
                        return  # among others: an older version, which dials only the asker

                try:
                    await asyncio.gather(*(ask(*each) for each in asked.items() if each[1]))
                finally:
                    await daemon.close()
    except (UserError, NetworkError, OSError):  # TimeoutError is an OSError
        pass
    return [each for each in reports if address.family_of(each.place) == family]
