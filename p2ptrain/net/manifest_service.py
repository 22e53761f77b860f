"""Manifest protocol: every node serves the run's signed manifest to peers that have only a join link.

One MANIFEST_REQUEST frame with the RunId, one MANIFEST frame in response. The protocol is separate from the exchange
protocol, whose version the manifest names, so it survives changes of that. The client must verify digest and signature
(``p2ptrain.manifest``); nothing else protects it from a false manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId, short
from p2ptrain.framing import MAX_MANIFEST_BYTES, FrameKind
from p2ptrain.net.links import Limits, origin_of
from p2ptrain.net.node import Node
from p2ptrain.net.rate_limiter import SlidingWindowLimit
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Clock, Link, Transport

MANIFEST_PROTOCOL = "/p2ptrain/manifest/1"

LIMITS = Limits(inbound_per_peer=2)
OVERALL, EACH, WINDOW_S = 600, 6, 60.0
"""Limits on manifests overall and per peer, and their window in seconds; a newcomer needs one. Guess: the requests at
the start of a large run would settle it."""


async def serve_manifest(node: Node, signed: bytes, rates: Throttles | None = None) -> P2PTransport:
    """Serve the node's run's signed manifest until the returned transport is closed."""
    transport = P2PTransport(node, MANIFEST_PROTOCOL, LIMITS, rates, serves_others=True)
    await transport.listen(manifest_handler(node.run, signed))
    return transport


async def fetch_manifest(node: Node, peer: PeerId, addresses: Sequence[str], run: RunId) -> bytes:
    """Ask a peer for the run's signed manifest; return it unverified. Raises NetworkError and RemoteError."""
    return await ask(P2PTransport(node, MANIFEST_PROTOCOL), peer, addresses, run)


def manifest_handler(
    run: RunId, signed: bytes, clock: Clock = time.monotonic
) -> Callable[[Link], Coroutine[Any, Any, None]]:
    """Return the handler of inbound links that serves a run's signed manifest."""
    if len(signed) > MAX_MANIFEST_BYTES:
        raise ValueError(f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got {len(signed)}")

    allowance = SlidingWindowLimit(OVERALL, EACH, WINDOW_S)

    async def answer(link: Link) -> None:
        kind, body = await link.receive()
        if kind != FrameKind.MANIFEST_REQUEST:
            raise RemoteError(f"expected a manifest request, got a frame of kind {kind}")
        if not allowance.take(link.peer, clock(), origin_of(link)):
            raise NetworkError(f"{short(link.peer)} sent too many manifest requests")
        await link.send(FrameKind.MANIFEST, signed if body == run.encode() else b"")

    return answer


def stranger(error: str) -> str:
    """Describe, from a NetworkError's text, what other node answered than a link names; empty if none did."""
    if error.endswith("takes part in another run"):
        return "the node that answers there takes part in another run"
    is_other = "peer id mismatch" in error  # go-libp2p's words
    return "the node that answers there is not the one that the link names" if is_other else ""


async def ask(transport: Transport, peer: PeerId, addresses: Sequence[str], run: RunId) -> bytes:
    """Ask a peer for the run's signed manifest over any transport; see ``fetch_manifest``."""
    link = await transport.open(peer, addresses)
    try:
        await link.send(FrameKind.MANIFEST_REQUEST, run.encode())
        kind, body = await link.receive()
    finally:
        await link.close()
    if kind != FrameKind.MANIFEST:
        raise RemoteError(f"expected a manifest, got a frame of kind {kind}")
    if not body:
        raise NetworkError(f"{short(peer)} takes part in another run")
    return body
