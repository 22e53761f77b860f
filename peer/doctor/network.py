"""Checks with the help of other nodes: some seconds in the swarm without training, under a temporary key.

Ownership: ``examine`` closes the node and removes the folder with the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError, RemoteError, UserError
from p2ptrain.base.ids import PeerId, RunId, short
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net import address, interfaces
from p2ptrain.net.identity import Identity
from p2ptrain.net.manifest_service import fetch_manifest, stranger
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.dialing import UNRESOLVED
from p2ptrain.net.p2pd.error_text import short_reason
from p2ptrain.net.relay.candidates import Candidate
from p2ptrain.net.relay.dial_back import ReachabilityReport, look
from p2ptrain.net.relay.relay import reserve
from p2ptrain.net.relay.second_look import look_by
from p2ptrain.net.relay.verdicts import FAMILIES
from peer.doctor import verdicts
from peer.doctor.findings import Finding, bad, note, ok
from peer.doctor.text import check_text
from peer.doctor.verdicts import Observation
from peer.manifest_fetch import NAMELESS

COMPANY_S = 5.0
"""Seconds to find live peers once an address of the link has answered. Guess: the times of first lookups in a real
swarm."""
MAX_PEERS = 3
"""Maximum number of live peers that are asked besides the link's nodes."""

NodeAddresses = dict[PeerId, list[str]]


class Examined(NamedTuple):
    """Results of the network checks."""

    findings: list[Finding]
    signed: SignedManifest | None
    """The run's manifest, if one was fetched."""


def examine(link: JoinLink, port: int | None, local: bool) -> Examined:
    """Run the network checks. Raises UserError if this machine cannot start a node.

    The node listens on ``port`` (0: any free one), or not at all if it is None.
    """
    with (
        tempfile.TemporaryDirectory(prefix="p2pt-") as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_examine(link, port, local, Path(folder)))


async def _examine(link: JoinLink, port: int | None, local: bool, folder: Path) -> Examined:
    identity = Identity.load_or_create(folder / "identity.key")
    listen = () if port is None else address.listening(port, local)
    node = await Node.start(identity, link.run_id, listen=listen, bootstraps=link.addresses, local=local)
    try:
        return await _look_around(node, link, 0 if port is None else node.port)
    finally:
        await node.close()


async def _look_around(node: Node, link: JoinLink, port: int) -> Examined:
    targets: NodeAddresses = {}
    for each in link.addresses:
        place, peer = address.split_peer(each)
        assert peer is not None  # JoinLink checked it
        targets.setdefault(peer, []).append(place)
    answers = await asyncio.gather(*(_fetched(node, peer, places, link) for peer, places in targets.items()))
    signed = next((each for each in answers if isinstance(each, SignedManifest)), None)
    answered: NodeAddresses = {}
    findings: list[Finding] = []
    for (peer, places), answer in zip(targets.items(), answers, strict=True):
        where = ", ".join(map(address.host_port, places))
        if isinstance(answer, SignedManifest):
            answered[peer] = places
            findings.append(ok("link", f"{short(peer)} at {where} hands out the run {answer.manifest.run.name}"))
        else:
            findings.append(_unanswered(peer, where, answer, others=signed is not None))
    peers = await _peers(node, set(targets)) if answered else {}
    asked = answered | peers
    await node.port_mapping_tried()
    port = node.mapped_port or port
    told = await asyncio.gather(*(_seen(node, *each, port) for each in asked.items()))
    seen = [each for each in told if isinstance(each, Observation)]
    silent = [each for each in told if isinstance(each, str)]
    seen += [Observation(each) for each in await _by_the_other_family(node, asked, seen, port)]
    own = [address.host_of(each) for each in (*node.addresses, *interfaces.way_out())]
    findings += [verdicts.clock(seen), verdicts.router(seen, own, *await _mapped(node.run, asked, bool(port)))]
    has_relay = await _has_relay(node, asked) if seen else None
    findings.append(verdicts.reach(seen, port, own[0] if own else "", has_relay, silent))
    if signed is not None and (text := await check_text(node, asked, signed.manifest)) is not None:
        findings.append(text)
    return Examined(findings, signed)


def _unanswered(peer: PeerId, where: str, why: UserError | str, others: bool) -> Finding:
    """Report an address of the link without a usable manifest: a note if another address has one, else BAD."""
    reason = why.problem if isinstance(why, UserError) else short_reason(why)
    words = f"{short(peer)} at {where}: {reason.removesuffix(f' ({where})')}"
    if others:
        return note("link", words)
    if isinstance(why, UserError):
        return bad("link", words, why.remedy)
    if stranger(why):
        return bad("link", words, "Ask the person who gave you the link for a new one.")
    if UNRESOLVED in why:
        return bad("link", words, NAMELESS)
    return bad(
        "link",
        words,
        f"Ask the person who gave you the link whether {where} is up. If it is, allow outgoing TCP to it.",
    )


async def _fetched(node: Node, peer: PeerId, places: Sequence[str], link: JoinLink) -> SignedManifest | UserError | str:
    try:
        signed = SignedManifest.from_bytes(await fetch_manifest(node, peer, places, link.run_id))
        signed.verify(link.run_id)
    except UserError as error:
        return error
    except (NetworkError, RemoteError) as error:
        return str(error)
    return signed


async def _peers(node: Node, met: set[PeerId]) -> NodeAddresses:
    """Return a few live peers that can be dialed directly."""
    with contextlib.suppress(TimeoutError, NetworkError):
        async with asyncio.timeout(COMPANY_S):
            while not node.has_company:
                await asyncio.sleep(0.1)
            records = await node.directory.lookup()
            direct = {
                each.peer: [*each.addresses] for each in records if not any(map(address.relay_of, each.addresses))
            }
            fresh = [peer for peer in direct if peer not in met and peer != node.peer_id]
            return {peer: direct[peer] for peer in fresh[:MAX_PEERS]}
    return {}


async def _seen(node: Node, peer: PeerId, places: Sequence[str], port: int) -> Observation | str:
    """Ask a node what it sees of us, at most twice, as connections break; return the observation, or why not."""
    first = await _seen_once(node, peer, places, port)
    return first if isinstance(first, Observation) else await _seen_once(node, peer, places, port)


async def _seen_once(node: Node, peer: PeerId, places: Sequence[str], port: int) -> Observation | str:
    try:
        await look(node, peer, places)  # connects, so that the next answer is fast and compares the clocks
        asked_at = wall()
        sight = await look(node, peer, places)
        ahead_s = verdicts.clock_ahead(asked_at, wall(), sight.clock)
        if port:
            sight = await look(node, peer, places, port)
    except (NetworkError, RemoteError) as error:
        return f"{short(peer)}: {short_reason(str(error)) or 'no answer in time'}"
    return Observation(sight, ahead_s)


async def _mapped(run: RunId, targets: NodeAddresses, listens: bool) -> tuple[list[str], int]:
    """Return the addresses that nodes see of connections from one local port, and that port; 0 if it was not tried.

    A second node, under another temporary key, dials from its listening port.
    """
    if not (targets and listens):
        return [], 0
    listen = [address.multiaddress("0.0.0.0", each) for each in [_free_port()]]
    with tempfile.TemporaryDirectory(prefix="p2pt-") as folder:
        identity = Identity.load_or_create(Path(folder) / "identity.key")
        try:
            node = await Node.start(identity, run, listen=listen, punches=True)
        except (UserError, NetworkError):
            return [], 0
        node.daemon.caution.trust([each for places in targets.values() for each in places])
        try:
            answers = await asyncio.gather(*(_place_seen(node, *each) for each in targets.items()))
        finally:
            await node.close()
    return [each for each in answers if each], node.port


async def _place_seen(node: Node, peer: PeerId, places: Sequence[str]) -> str:
    try:
        async with asyncio.timeout(COMPANY_S):
            return (await look(node, peer, places)).place
    except (NetworkError, RemoteError, TimeoutError):
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


async def _by_the_other_family(
    node: Node, targets: NodeAddresses, seen: Sequence[Observation], port: int
) -> list[ReachabilityReport]:
    """Have nodes dial us by IPv4 or IPv6 where our connections with them used only the other."""
    used = {address.family_of(each.sight.place) for each in seen}
    own = {
        address.family_of(each) for each in node.addresses if address.family_of(each) == 4 or address.is_public(each)
    }
    probers = [Candidate(peer, tuple(places)) for peer, places in targets.items()]
    families = [family for family in FAMILIES if port and used and family in own - used]
    return [each for family in families for each in await look_by(family, node, probers, port)]


async def _has_relay(node: Node, targets: NodeAddresses) -> bool:
    for peer, places in targets.items():
        with contextlib.suppress(NetworkError):
            await reserve(node.daemon, peer, places)
            return True
    return False
