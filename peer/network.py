"""The connection: the transport and directory that the driver uses, over a node that ``net.supervisor`` keeps alive.

When p2pd dies or hangs, the core only sees a few failed links.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from p2ptrain.admission import Gate
from p2ptrain.base.clock import wall
from p2ptrain.base.errors import HomeError, NetworkError, UserError
from p2ptrain.base.ids import PeerId, RunId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.base.telemetry import EventLog
from p2ptrain.manifest import SignedManifest
from p2ptrain.net import address
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.manifest_service import LIMITS, MANIFEST_PROTOCOL, manifest_handler
from p2ptrain.net.network_monitor import NetworkChange, NetworkMonitor
from p2ptrain.net.node import Node
from p2ptrain.net.parallel_streams import ParallelStreams
from p2ptrain.net.path_mtu import PathVerdict, remedies
from p2ptrain.net.relay.dial_back import ask_neighbours, serve_reach
from p2ptrain.net.relay.neighbours import NeighbourFinder
from p2ptrain.net.relay.reachability import ReachabilityManager
from p2ptrain.net.relay.relay import NO_RELAY, Relay, RelayLimits
from p2ptrain.net.relay.upgrade import Upgrades
from p2ptrain.net.supervisor import NodeSupervisor
from p2ptrain.net.throttle import Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.ports import Link, Notebook, Transport
from p2ptrain.swarm import PRESENCE_LIFETIME_S, PeerState, Presence
from p2ptrain.swarm.events import Announce
from peer.duplicate_identity import IdentityWatch
from peer.home import Addresses, Home
from peer.paths import Paths
from peer.start_options import PeerOptions

CACHE_PERIOD_S = 10.0
"""Seconds between two writes of the peer cache: a peer that ran this long rejoins without a bootstrap after SIGKILL.
Guess: how soon after joining peers are killed."""

SETTLING_S = 30.0
"""Seconds after a node's start for which a presence record without addresses is held back: the first verdict about
reachability takes 5 to 10 s (measured)."""

_report = reporting("the network's background work")


class Connection:
    """Transport and directory (``p2ptrain.ports``) over the current node.

    Args:
        options: what the owner chose: addresses, nickname, whether to relay and to punch holes. Without addresses to
            listen on, the last port on all interfaces, or any free one.
        rates: throttles of all streams, which also count bytes.
        watch: gets each live record of this peer that a lookup finds; once it yields, nothing is announced.
        monitor: watches this machine's network; None: the usual one.
    """

    def __init__(
        self,
        home: Home,
        identity: Identity,
        run: RunId,
        options: PeerOptions,
        notebook: Notebook,
        rates: Throttles | None = None,
        watch: IdentityWatch | None = None,
        monitor: NetworkMonitor | None = None,
    ) -> None:
        self.identity = identity
        self.rates = rates or Throttles()
        self.paths = Paths()
        """Whether the latest links are direct or relayed."""
        self._home = home
        self._run = run
        self._options = options
        self._notebook = notebook
        self._watch = watch
        self._cache = PeerCache(home.peers)
        last = home.load_addresses()
        self._bootstraps = options.link.addresses if options.link else last.joined_by
        self.port = last.port  # that the node listens on
        self._is_unreachable = last.unreachable  # by the last verdict: nobody can dial this peer
        self._relay_limits = RelayLimits() if options.relay else NO_RELAY
        self._handler: Callable[[Link], Awaitable[None]] | None = None
        self._supervisor = NodeSupervisor(
            self._start_node, self._start_services, self._watch_node, self._node_died, self._node_returned
        )
        self._transport: P2PTransport | None = None
        self._parallel_streams: ParallelStreams | None = None
        self._handlers: dict[str, tuple[Limits, Callable[[StreamLink], Awaitable[None]]]] = {}
        self._set_ups: list[Callable[[Node], None]] = []
        self._reachability: ReachabilityManager | None = None
        self._started_at = 0.0  # of the current node, monotonic clock
        self._told: Mapping[int, bool] | None = None  # verdicts that made us replace the last node
        self._announced: Announce | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._monitor = None if options.local else monitor or NetworkMonitor()

    async def start(self) -> None:
        """Start the first node. Raises UserError if it cannot listen, DeviceError if p2pd does not run here."""
        if self._monitor is not None:
            self._monitor.begin()
        await self._supervisor.start()
        self._watcher = asyncio.get_running_loop().create_task(self._supervisor.run())
        self._watcher.add_done_callback(_report)

    @property
    def addresses(self) -> tuple[str, ...]:
        """This peer's own multiaddresses, with ``/p2p/``."""
        return tuple(address.with_peer(each, self.identity.peer_id) for each in self._places)

    @property
    def _places(self) -> tuple[str, ...]:
        return self._reachability.addresses if self._reachability else ()

    async def serve_manifest(self, signed: SignedManifest) -> None:
        """Serve the manifest and keep farewell records, on this node and later ones."""
        self._set_up(lambda node: node.end_at(signed.manifest.run.tokens))
        await self.serve(MANIFEST_PROTOCOL, LIMITS, manifest_handler(self._run, signed.to_bytes()))

    def stand_at(self, gate: Gate) -> None:
        """Accept only members in the DHT, on this node and later ones."""
        self._set_up(lambda node: node.stand_at(gate))

    def _set_up(self, set_up: Callable[[Node], None]) -> None:
        """Configure the present node and later ones."""
        self._set_ups.append(set_up)
        if self._supervisor.current is not None:
            set_up(self._supervisor.current)

    async def serve(self, protocol: str, limits: Limits, handler: Callable[[StreamLink], Awaitable[None]]) -> None:
        """Handle inbound streams of a protocol, on this node and later ones; their bytes count as given."""
        self._handlers[protocol] = limits, handler
        with contextlib.suppress(NetworkError):  # p2pd is being restarted, and the next one will serve it
            await self._serve_on(self.node, protocol)

    async def _serve_on(self, node: Node, protocol: str) -> None:
        limits, handler = self._handlers[protocol]
        transport = P2PTransport(node, protocol, limits, self.rates, serves_others=True)
        await transport.listen(handler)
        self._supervisor.services.append(transport)

    def speaking(self, protocol: str, limits: Limits) -> Transport:
        """Return a transport for outbound streams of a protocol. Raises NetworkError."""
        return P2PTransport(self.node, protocol, limits, self.rates)

    async def keep_cache(self, records: Callable[[], list[Presence]]) -> None:
        """Save the live peers periodically, so that this peer can rejoin without a bootstrap. Runs until cancelled."""
        while True:
            await asyncio.sleep(CACHE_PERIOD_S)
            self.save_cache(records())

    def save_cache(self, records: list[Presence]) -> None:
        if not records:
            return  # keep the last known peers
        if self._supervisor.current is not None:
            self._supervisor.current.learn(records)
        try:
            self._cache.save(records)
        except OSError as error:
            self._notebook.note("not saved", what="the list of known peers", why=error.strerror)

    def sign(self, announce: Announce) -> Presence:
        self._announced = announce
        presence = Presence(
            peer=self.identity.peer_id,
            run=self._run,
            addresses=self._places,
            state=PeerState(announce.state),
            step=announce.step,
            progress=announce.progress,
            settled=announce.settled,
            nickname=self._options.nickname or "",
            issued_at=wall(),
            lifetime_s=PRESENCE_LIFETIME_S,
            since=0.0 if self._watch is None else self._watch.since,
            keeps=announce.keeps,
        )
        return self.identity.sign(presence)

    async def close(self, in_haste: bool = False) -> None:
        """Close everything; ``in_haste`` kills p2pd first, which may be frozen."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if in_haste and self._supervisor.current is not None:
            await self._supervisor.current.daemon.kill()
        await self._supervisor.close()

    # --- ports.Transport and ports.Directory --------------------------------------------------------------------------

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> Link:
        if self._transport is None or self._parallel_streams is None:
            raise NetworkError("p2pd is being restarted")
        streams, link = self._parallel_streams, await self._transport.open(peer, addresses)
        self._note_path(link, addresses)
        return streams.of(link, ours=True)

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        """Pass inbound links to this handler, which replaces an earlier one."""
        is_first, self._handler = self._handler is None, handler
        if self._transport is not None and is_first:
            with contextlib.suppress(NetworkError):  # p2pd is being restarted, and the next one will listen
                await self._transport.listen(self._accept_link)

    @property
    def size(self) -> int:
        node = self._supervisor.current
        return 0 if node is None else node.directory.size  # p2pd may be restarted right after a lookup

    async def announce(self, presence: Presence) -> None:
        if self._watch is not None and self._watch.rival is not None:
            return  # our peer id is another process
        is_settled = self._reachability is None or self._reachability.is_settled
        if not (presence.addresses or is_settled) and time.monotonic() - self._started_at < SETTLING_S:
            return  # others would only fail to dial; ``_moved`` announces the first address
        await self.node.directory.announce(presence)

    async def announce_early(self) -> None:
        """Announce this peer before the driver does, so that others that wait for text, too, find what it has."""
        if self._announced is None:
            presence = self.sign(Announce(PeerState.JOINING, 0, 0.0, settled=False))
            self._announced = None  # only the driver's announcement is repeated where addresses change
            await self.announce(presence)

    async def lookup(self) -> list[Presence]:
        return await self.node.directory.lookup()

    async def keep_finished(self, presence: Presence) -> None:
        await self.node.directory.keep_finished(presence)

    async def finished(self) -> list[Presence]:
        return await self.node.directory.finished()

    async def _moved(self) -> None:
        """Announce changed addresses at once, not only with the next announcement. Raises NetworkError."""
        self._try_to_save_addresses()
        if self._announced is not None:
            await self.announce(self.sign(self._announced))

    def save_addresses(self, lasting: bool = False) -> None:
        """Save how others reach this peer, and by whom it joined. ``lasting``: as for ``Home``. Raises HomeError."""
        if self._reachability is not None and (reachable := self._reachability.reachable) is not None:
            self._is_unreachable = not reachable
        known = Addresses(self.addresses, tuple(self._bootstraps), self.port, self._is_unreachable)
        self._home.save_addresses(known, lasting)

    def _try_to_save_addresses(self) -> None:
        try:
            self.save_addresses()
        except HomeError as error:
            self._notebook.note("not saved", what="how others reach this peer", why=error.problem)

    async def _accept_link(self, link: StreamLink) -> None:
        assert self._handler is not None  # set by listen
        assert self._parallel_streams is not None
        self._note_path(link)
        await self._handler(self._parallel_streams.of(link, ours=False))

    def _note_path(self, link: StreamLink, addresses: Sequence[str] = ()) -> None:
        node = self._supervisor.current
        if node is not None:  # else p2pd is being restarted, and the link ends
            self.paths.note(link, node.daemon.punches, addresses or node.known.get(link.peer, ()))

    # --- the current node -------------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        return self._supervisor.node

    async def _start_services(self, node: Node) -> None:
        services = self._supervisor.services
        self.port = node.port or self.port
        self._started_at = time.monotonic()
        if self._watch is not None:
            node.directory.on_own = self._watch.see
        node.on_narrow_path = self._note_narrow_path
        upgrades = Upgrades(node.daemon, lambda: self._is_hopeful)
        self._transport = P2PTransport(node, rates=self.rates, upgrades=upgrades)
        self._parallel_streams = ParallelStreams(node, self.rates)
        services += [self._transport, self._parallel_streams]
        await self._parallel_streams.listen()
        services.append(await serve_reach(node, self.rates))
        services.append(await Relay.start(node, self._relay_limits, self.rates))
        for set_up in self._set_ups:
            set_up(node)
        for protocol in tuple(self._handlers):  # ``serve`` may add others meanwhile, on this node
            await self._serve_on(node, protocol)
        told, self._told = self._told, None
        self._reachability = ReachabilityManager(
            node,
            self._notebook,
            by_owner=bool(self._options.announce),
            relays=bool(self._options.relay),
            may_punch=self._may_punch,
            told=told,
            on_change=self._moved,
        )
        if self._handler is not None:
            await self._transport.listen(self._accept_link)

    @property
    def _is_hopeful(self) -> bool:
        """Whether circuits may become direct connections."""
        found = self._reachability
        return found is not None and (found.is_punching or found.reachable is not False)

    async def _watch_node(self, node: Node) -> bool:
        """Manage reachability while p2pd runs; return whether to replace the node on purpose.

        It is replaced by one that punches holes if nobody can dial it, or after a change of the network, which leaves
        dead connections, lost reservations and verdicts about another router behind.
        """
        reachability = self._reachability
        assert reachability is not None  # set by _start_services
        finder = NeighbourFinder(node, partial(ask_neighbours, node))
        managing, finding = (asyncio.create_task(each.run()) for each in (reachability, finder))
        dying = asyncio.create_task(node.died())
        changing = asyncio.create_task(self._network_change(reachability))
        for task in (managing, finding, changing):
            task.add_done_callback(_report)
        try:
            await asyncio.wait([managing, dying, changing], return_when=asyncio.FIRST_COMPLETED)
            is_changed = changing.done() and not dying.done()
            if not is_changed and (dying.done() or not reachability.is_misplaced):
                await dying
                return False
        finally:
            tasks: list[asyncio.Task[Any]] = [managing, finding, dying, changing]
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)
        self._drop_services()
        self._is_unreachable = not is_changed
        if is_changed:
            change = changing.result()
            assert change.cause is not None  # until_broken
            self._notebook.note("network changed", cause=change.cause.value, seconds=round(change.seconds))
        else:
            self._told = reachability.verdicts
            self._notebook.note("punching")
        return True

    async def _network_change(self, reachability: ReachabilityManager) -> NetworkChange:
        """Wait for a change of the network that breaks connections."""
        if self._monitor is None:
            return await asyncio.get_running_loop().create_future()
        return await self._monitor.until_broken(reachability.refresh)

    def _drop_services(self) -> None:
        """Refuse links until the next node is there."""
        self._transport = self._parallel_streams = self._reachability = None

    def _note_narrow_path(self, host: str, verdict: PathVerdict) -> None:
        self._notebook.note("narrow path", where=host, fragments=verdict.fragments_pass, remedies=remedies())

    def _node_died(self, why: str, pause_s: float) -> None:
        self._notebook.note("p2pd died", why=why)
        self._drop_services()

    def _node_returned(self) -> None:
        self._try_to_save_addresses()  # the port may have changed, and relay reservations are gone
        self._notebook.note("p2pd is back")

    @property
    def _may_punch(self) -> bool:
        return self._options.punch and not self._options.announce and not self._options.local

    async def _start_node(self) -> Node:
        listen, local = self._options.listen, bool(self._options.local)
        choices = [listen] if listen else [address.listening(port, local) for port in {self.port, 0}]
        for choice in sorted(choices, reverse=True):  # the last port before any free one
            try:
                return await Node.start(
                    self.identity,
                    self._run,
                    listen=choice,
                    announce=self._options.announce or (),
                    bootstraps=self._bootstraps,
                    known=self._cache.load(self._run),
                    local=local,
                    rates=self.rates,
                    punches=self._may_punch and self._is_unreachable,
                )
            except UserError:
                if listen or address.port_of(choice) == 0:
                    raise
        raise AssertionError("any free port is always tried")


async def connect(
    stack: contextlib.AsyncExitStack,
    options: PeerOptions,
    home: Home,
    identity: Identity,
    signed: SignedManifest | None,
    log: EventLog,
    rates: Throttles,
    watch: IdentityWatch,
    is_hasty: Callable[[], bool],
) -> Connection:
    """Connect to the run, until ``stack`` closes. Raises UserError if no node can start here.

    Args:
        is_hasty: whether the owner stops the peer at once.
    """
    if options.link is not None:
        run = options.link.run_id
    else:
        assert signed is not None  # home_for checked it
        run = signed.run_id
    connection = Connection(home, identity, run, options, log, rates, watch)
    stack.push_async_callback(lambda: connection.close(in_haste=is_hasty()))
    await connection.start()
    connection.save_addresses(lasting=True)  # by which this peer rejoins after a power cut
    where = ", ".join(map(address.host_port, connection.addresses)) or "no address that others can reach"
    log.note("listening", name=short(identity.peer_id), where=where)
    return connection
