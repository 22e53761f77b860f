"""The connection: the transport and directory that the driver uses. It survives the death of p2pd.

When its node's p2pd dies or hangs, the connection starts another node with the same identity and port. The core only
sees a few failed links.

Ownership: ``Connection.close`` closes its tasks, services, transports and node.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from p2ptrain.admission import Gate
from p2ptrain.base.errors import DeviceError, HomeError, NetworkError, UserError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.logging_setup import reporting
from p2ptrain.manifest import JoinLink, SignedManifest
from p2ptrain.net import address
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.manifest_service import serve_manifest
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.daemon import CALM_S
from p2ptrain.net.parallel_streams import ParallelStreams
from p2ptrain.net.relay.dial_back import serve_reach
from p2ptrain.net.relay.reachability import ReachabilityManager
from p2ptrain.net.relay.relay import NO_RELAY, Relay, RelayLimits
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link, Notebook, Transport
from p2ptrain.swarm import PRESENCE_LIFETIME_S, PeerState, Presence
from p2ptrain.swarm.events import Announce
from peer.manifest_fetch import ask_for_manifest
from peer.paths import Paths

REVIVE_PAUSE_S = 1.0
"""First backoff in seconds before p2pd is restarted; doubles up to a minute while it keeps dying.

Guess: how often an immediate restart fails.
"""

CACHE_PERIOD_S = 10.0
"""Seconds between two writes of the peer cache: a peer that ran this long rejoins without a bootstrap after SIGKILL.

Guess: how soon after joining peers are killed.
"""

_report = reporting("the network's background work")


class Connection:
    """Transport and directory (``p2ptrain.ports``) over the current node.

    Args:
        listen: multiaddresses that the owner chose; empty: the last port on all interfaces, or any free one.
        port: port of the last session, 0 for none.
        rates: throttles of all streams, which also count bytes.
        relay: limits of our relay for peers that nobody can dial; None: do not relay.
        paths: records whether links are direct or relayed.
        on_move: called in the loop when ``addresses`` change; may raise HomeError.
    """

    def __init__(
        self,
        identity: Identity,
        run: RunId,
        bootstraps: Sequence[str],
        cache: PeerCache,
        notebook: Notebook,
        *,
        listen: Sequence[str] = (),
        port: int = 0,
        announce: Sequence[str] = (),
        nickname: str = "",
        local: bool = False,
        rates: Throttles | None = None,
        relay: RelayLimits | None = None,
        paths: Paths | None = None,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        self._identity = identity
        self._run = run
        self._bootstraps = tuple(bootstraps)
        self._cache = cache
        self._notebook = notebook
        self._listen = tuple(listen)
        self.port = port
        """Port that the node listens on."""
        self._announce = tuple(announce)
        self._nickname = nickname
        self._local = local
        self._rates = rates or Throttles()
        self._relay = relay
        self._paths = paths if paths is not None else Paths()
        self._on_move = on_move
        self._handler: Callable[[Link], Awaitable[None]] | None = None
        self._signed: bytes | None = None
        self._node: Node | None = None
        self._transport: P2PTransport | None = None
        self._lanes: ParallelStreams | None = None
        self._manifests: P2PTransport | None = None
        self._services: list[P2PTransport | ParallelStreams | Relay] = []
        self._handlers: dict[str, tuple[Limits, Callable[[StreamLink], Awaitable[None]]]] = {}
        self._gate: Gate | None = None
        self._shelter: ReachabilityManager | None = None
        self._sheltering: asyncio.Task[None] | None = None
        self._announced: Announce | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first node.

        Raises UserError if it cannot listen, DeviceError if p2pd does not run on this machine.
        """
        try:
            await self._revive()
        except (NetworkError, OSError, EOFError) as error:  # OSError, EOFError: p2pd died while it started
            raise DeviceError(f"The network daemon p2pd does not work: {error}.", "Try again.") from error
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._watcher.add_done_callback(_report)

    @property
    def addresses(self) -> tuple[str, ...]:
        """This peer's own multiaddresses, with ``/p2p/``."""
        return tuple(address.with_peer(each, self._identity.peer_id) for each in self._places)

    @property
    def _places(self) -> tuple[str, ...]:
        return self._shelter.addresses if self._shelter else ()

    async def fetch_manifest(self, link: JoinLink) -> SignedManifest:
        """Request the run's manifest until an address of the link hands it out. Raises ManifestError."""
        return await ask_for_manifest(link, lambda: self.node, self._notebook)

    async def serve_manifest(self, signed: SignedManifest) -> None:
        """Serve the manifest, on this node and later ones."""
        self._signed = signed.to_bytes()
        with contextlib.suppress(NetworkError):  # p2pd is being restarted, and the next one will serve it
            self._manifests = await serve_manifest(self.node, self._signed, self._rates)

    def stand_at(self, gate: Gate) -> None:
        """Accept only members in the DHT, on this node and later ones."""
        self._gate = gate
        if self._node is not None:
            self._node.stand_at(gate)

    async def serve(self, protocol: str, limits: Limits, handler: Callable[[StreamLink], Awaitable[None]]) -> None:
        """Handle inbound streams of a protocol, on this node and later ones; their bytes count as given."""
        self._handlers[protocol] = limits, handler
        with contextlib.suppress(NetworkError):  # p2pd is being restarted, and the next one will serve it
            await self._serve_on(self.node, protocol)

    async def _serve_on(self, node: Node, protocol: str) -> None:
        limits, handler = self._handlers[protocol]
        transport = P2PTransport(node, protocol, limits, self._rates, is_gift=True)
        await transport.listen(handler)
        self._services.append(transport)

    def speaking(self, protocol: str, limits: Limits) -> Transport:
        """Return a transport for outbound streams of a protocol. Raises NetworkError."""
        return P2PTransport(self.node, protocol, limits, self._rates)

    async def keep_cache(self, records: Callable[[], list[Presence]]) -> None:
        """Save the live peers periodically, so that this peer can rejoin without a bootstrap. Runs until cancelled."""
        while True:
            await asyncio.sleep(CACHE_PERIOD_S)
            self.save_cache(records())

    def save_cache(self, records: list[Presence]) -> None:
        if not records:
            return  # keep the last known peers
        if self._node is not None:
            self._node.learn(records)
        try:
            self._cache.save(records)
        except OSError as error:
            self._notebook.note("not saved", what="the list of known peers", why=error.strerror)

    def sign(self, announce: Announce) -> Presence:
        """Sign our presence record."""
        self._announced = announce
        return self._identity.sign(
            Presence(
                peer=self._identity.peer_id,
                run=self._run,
                addresses=self._places,
                state=PeerState(announce.state),
                step=announce.step,
                progress=announce.progress,
                settled=announce.settled,
                nickname=self._nickname,
                issued_at=time.time(),
                lifetime_s=PRESENCE_LIFETIME_S,
            )
        )

    async def close(self, in_haste: bool = False) -> None:
        """Close everything; ``in_haste`` kills p2pd first, which may be frozen."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if in_haste and self._node is not None:
            await self._node.daemon.kill()
        await self._drop()

    # --- ports.Transport and ports.Directory --------------------------------------------------------------------------

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> Link:
        if self._transport is None or self._lanes is None:
            raise NetworkError("p2pd is being restarted")
        lanes, link = self._lanes, await self._transport.open(peer, addresses)
        self._paths.note(link)
        return lanes.of(link, ours=True)

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        """Pass inbound links to this handler, which replaces an earlier one."""
        is_first, self._handler = self._handler is None, handler
        if self._transport is not None and is_first:
            with contextlib.suppress(NetworkError):  # p2pd is being restarted, and the next one will listen
                await self._transport.listen(self._welcome)

    async def announce(self, presence: Presence) -> None:
        await self.node.directory.announce(presence)

    async def lookup(self) -> list[Presence]:
        return await self.node.directory.lookup()

    async def _moved(self) -> None:
        """Announce changed addresses at once, not only with the next announcement."""
        self._write_down()
        if self._announced is not None:
            await self.announce(self.sign(self._announced))

    def _write_down(self) -> None:
        try:
            self._on_move()
        except HomeError as error:
            self._notebook.note("not saved", what="how others reach this peer", why=error.problem)

    async def _welcome(self, link: StreamLink) -> None:
        assert self._handler is not None  # set by listen
        assert self._lanes is not None
        self._paths.note(link)
        await self._handler(self._lanes.of(link, ours=False))

    # --- the current node -------------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The current node. Raises NetworkError while there is none."""
        if self._node is None:
            raise NetworkError("p2pd is being restarted")
        return self._node

    async def _revive(self) -> None:
        """Start a node and register every service on it."""
        node = await self._start_node()
        self._node = node
        self.port = node.port or self.port
        self._transport = P2PTransport(node, rates=self._rates)
        self._lanes = ParallelStreams(node, self._rates)
        self._services.append(self._lanes)
        await self._lanes.listen()
        self._services.append(await serve_reach(node, self._rates))
        self._services.append(await Relay.start(node, self._relay or NO_RELAY, self._rates))
        if self._gate is not None:
            node.stand_at(self._gate)
        for protocol in tuple(self._handlers):  # ``serve`` may add others meanwhile, on this node
            await self._serve_on(node, protocol)
        self._shelter = ReachabilityManager(
            node, self._notebook, by_owner=bool(self._announce), relays=self._relay is not None, on_change=self._moved
        )
        self._sheltering = asyncio.get_running_loop().create_task(self._shelter.run())
        self._sheltering.add_done_callback(_report)
        if self._handler is not None:
            await self._transport.listen(self._welcome)
        if self._signed is not None:
            self._manifests = await serve_manifest(node, self._signed, self._rates)

    async def _start_node(self) -> Node:
        host = "127.0.0.1" if self._local else "0.0.0.0"
        wishes = [self._listen] if self._listen else [(address.multiaddress(host, port),) for port in {self.port, 0}]
        for wish in sorted(wishes, reverse=True):  # the last port before any free one
            try:
                return await Node.start(
                    self._identity,
                    self._run,
                    listen=wish,
                    announce=self._announce,
                    bootstraps=self._bootstraps,
                    known=self._cache.load(self._run),
                    local=self._local,
                    rates=self._rates,
                )
            except UserError:
                if self._listen or address.port_of(wish) == 0:
                    raise
        raise AssertionError("any free port is always tried")

    async def _watch(self) -> None:
        """Replace the node whenever its p2pd dies."""
        pause = REVIVE_PAUSE_S
        while True:
            started_at = time.monotonic()
            await self.node.died()
            if time.monotonic() - started_at > CALM_S:
                pause = REVIVE_PAUSE_S
            self._notebook.note("p2pd died", why=self.node.daemon.ending)
            await self._drop()
            while self._node is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 60.0)
                try:
                    await self._revive()
                except Exception as error:  # any error, ours or hivemind's, only delays the next try
                    self._notebook.note("p2pd died", why=str(error) or type(error).__name__)
                    await self._drop()
            self._write_down()  # its port may have changed, and relay reservations are gone
            self._notebook.note("p2pd is back")

    async def _drop(self) -> None:
        if self._sheltering is not None:
            self._sheltering.cancel()
            await asyncio.wait([self._sheltering])
        services, node = [self._transport, self._manifests, *self._services], self._node
        self._transport = self._lanes = self._manifests = self._node = self._sheltering = self._shelter = None
        self._services = []
        try:
            closing = [asyncio.create_task(each.close()) for each in services if each is not None]
            for each in closing:
                each.add_done_callback(_report)
            await asyncio.gather(*closing, return_exceptions=True)
        finally:  # p2pd must end even if a service's close fails
            if node is not None:
                await node.close()


def describe_addresses(addresses: Sequence[str]) -> str:
    """Format addresses for people: ``203.0.113.7:31337, …``."""
    return ", ".join(address.host_port(each) for each in addresses) or "no address that others can reach"
