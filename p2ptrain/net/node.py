"""Network node: a p2pd, the DHT in this process, a port mapper, and the keeper task, which joins and rejoins the swarm.

A node starts without any bootstrap, because hivemind fails for good when its only bootstrap is dead. The keeper dials
known nodes until one answers, and another from time to time, so that a partitioned swarm recovers. Resources: ``close``
ends the tasks, the port mapping, the DHT and p2pd, in this order; close transports over the node first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from random import Random
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.logging import use_hivemind_log_handler

from p2ptrain.admission import Gate
from p2ptrain.base.backoff import backoff
from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, RunId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net import address, interfaces
from p2ptrain.net.dht import network_errors, start_node
from p2ptrain.net.directory import DhtDirectory, PresenceValidator
from p2ptrain.net.identity import Identity
from p2ptrain.net.p2pd.daemon import Daemon
from p2ptrain.net.path_mtu import PathVerdict, PathWatch
from p2ptrain.net.port_mapping import PortMapper
from p2ptrain.net.throttle import Throttles
from p2ptrain.swarm.messages import Presence

logger = logging.getLogger(__name__)

DIAL_DEADLINE_S = 10.0
"""Timeout to connect to one known node and ping it; 20 ms were measured on loopback. Guess: dial times between real
homes would settle it."""
START_DEADLINE_S = 30.0
"""Timeout to start the DHT and ask p2pd for its addresses; 20 ms were measured. Guess: starts on slow, busy machines
would settle it."""
RETRY_S = (1.0, 30.0)
"""First and longest backoff of an isolated node. Guess: the time until isolated nodes rejoin would settle it."""
REFRESH_S = 60.0
"""Pause after which a connected node dials one more known node. Guess: the time until a partitioned swarm rejoins would
settle it."""
MAX_DIALS_AT_ONCE = 8  # by an isolated node
MAX_KNOWN_PEERS = 256
CROWD = 64
"""Known peers from which on a node asks the join link's nodes less often, a quarter as often with all that it can know.
Guess: count the requests at a bootstrap of a large swarm."""


class Node:
    """Network node; see the module. ``start`` constructs one."""

    def __init__(
        self,
        identity: Identity,
        run: RunId,
        daemon: Daemon,
        dht: DHTNode,
        validator: PresenceValidator,
        announce: Sequence[str],
        local: bool,
    ) -> None:
        self.peer_id = identity.peer_id
        self.run = run
        self.daemon = daemon
        self.dht = dht
        self.directory = DhtDirectory(dht, run)
        self.directory.me = identity.peer_id
        self._validator = validator
        self._local = local
        self._bootstraps: dict[PeerId, tuple[str, ...]] = {}
        self._peers: dict[PeerId, tuple[str, ...]] = {}
        self._random = Random()
        self._tasks: list[asyncio.Task[None]] = []  # the keeper and the port mapper
        self._mapper: PortMapper | None = None
        self._announced = tuple(announce)
        self._is_owners_word = bool(announce)
        self.streams: Counter[PeerId] = Counter()
        """Streams with each peer, of all protocols, also those that are being opened."""
        self.neighbours: dict[PeerId, tuple[str, ...]] = {}
        """Peers behind the same router, with the addresses at which we reach them (``net.relay.neighbours``)."""
        self.on_narrow_path: Callable[[str, PathVerdict], None] = _log_narrow_path
        """Called with each host to which large packets are lost in silence."""
        self.port = 0  # TCP port that the node listens on; 0 if none

    @classmethod
    async def start(
        cls,
        identity: Identity,
        run: RunId,
        *,
        listen: Sequence[str] | None = None,
        announce: Sequence[str] = (),
        bootstraps: Sequence[str] = (),
        known: Iterable[Presence] = (),
        local: bool = False,
        rates: Throttles | None = None,
        punches: bool = False,
        connections: int = 0,
    ) -> Node:
        """Start a node and its keeper.

        Args:
            listen: multiaddresses to listen on, with port 0 for any free port, the same one for all of them; empty:
                only dial out or use relays; None: all interfaces, by IPv4 and IPv6.
            announce: addresses to announce instead of our own, such as a forwarded port; empty: our own.
            bootstraps: multiaddresses with ``/p2p/``.
            known: formerly seen peers (``directory.PeerCache``).
            local: whether the swarm runs on this machine alone; then loopback addresses may be announced.
            rates: throttles that count the DHT's bytes and limit its responses.
            punches: whether nobody can dial this node, so that p2pd is to punch holes; needs a listening port.
            connections: connections that p2pd keeps on a server; 0: its own limit of some hundred.

        Raises UserError for unusable addresses, DeviceError if p2pd cannot run, NetworkError if it does not answer.
        """
        listen = address.listening(0) if listen is None else listen
        address.check(listen, announce, bootstraps)
        listen = interfaces.with_one_port(listen, needs_number=punches)
        use_hivemind_log_handler("nowhere")  # hivemind's messages go to the root logger only
        daemon = await Daemon.start(
            identity.path, listen, announce, punches and address.port_of(listen) > 0, connections
        )
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                validator = PresenceValidator(run)
                dht = await start_node(daemon.p2p, validator, rates or Throttles())
                node = cls(identity, run, daemon, dht, validator, announce, local)
                node.port = address.port_of(await daemon.own_addresses())
                await node.look_at_itself()
        except (TimeoutError, P2PDaemonError, ControlFailure) as error:
            await daemon.close()
            raise NetworkError(f"p2pd started but does not answer: {error or 'timed out'}") from error
        except BaseException:
            await daemon.close()
            raise
        for each in bootstraps:
            place, peer = address.split_peer(each)
            assert peer is not None  # as checked by _check
            node._bootstraps[peer] = (*node._bootstraps.get(peer, ()), place)
        daemon.caution.trust(bootstraps, local)
        node.learn(known)
        node._start_task(node._keep_company(), "a node's keeper")
        if not local:
            watch = PathWatch(daemon.pid, lambda host, verdict: node.on_narrow_path(host, verdict))
            node._start_task(watch.run(), "the watch over paths")
        if not announce and node.port and not all(address.is_loopback(each) or "/ip6/" in each for each in listen):
            node._mapper = PortMapper(node.port)
            node._start_task(node._mapper.run(), "the port mapper")
        return node

    def stand_at(self, gate: Gate) -> None:
        """Store and find only admitted peers from now on; without a gate the run is open."""
        self.directory.gate = self._validator.gate = gate

    def end_at(self, progress: float) -> None:
        """Store and find farewell records from now on, of peers with at least this progress: the run's end."""
        self.directory.end = self._validator.end = progress

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses to announce: our own that others can use, or the owner's; best first, without ``/p2p/``."""
        return self._announced

    async def look_at_itself(self) -> None:
        """Update ``addresses``, since interfaces change. Raises NetworkError."""
        if self._is_owners_word:
            return
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                own = await self.daemon.own_addresses()
        except TimeoutError as error:
            raise NetworkError(f"p2pd does not answer: {error or 'timed out'}") from error
        self._announced = tuple(interfaces.announceable(own, self._local))

    @property
    def mapped_port(self) -> int:
        """Port that the router forwards to us at our request; 0 if none."""
        return 0 if self._mapper is None else self._mapper.mapped_port

    async def port_mapping_tried(self) -> None:
        """Wait for the first attempt to map the port, at most 15 s."""
        if self._mapper is not None:
            await self._mapper.tried.wait()

    @property
    def known(self) -> dict[PeerId, tuple[str, ...]]:
        """Known bootstraps and live peers, with their addresses without ``/p2p/``."""
        known = self._peers | self._bootstraps
        known.pop(self.peer_id, None)
        return known

    @property
    def bootstraps(self) -> tuple[PeerId, ...]:
        return tuple(self._bootstraps)

    @property
    def alive(self) -> bool:
        return self.daemon.alive

    @property
    def has_company(self) -> bool:
        """Whether the DHT knows another node."""
        return bool(self.dht.protocol.routing_table.uid_to_peer_id)

    async def died(self) -> int:
        return await self.daemon.died()

    def learn(self, records: Iterable[Presence]) -> None:
        """Remember live peers' addresses, to rejoin the swarm when every bootstrap is gone."""
        for record in records:
            self._peers.pop(record.peer, None)  # the most recently seen are last
            self._peers[record.peer] = record.addresses
        for peer in list(self._peers)[:-MAX_KNOWN_PEERS]:
            del self._peers[peer]

    def forget_stream(self, peer: PeerId) -> None:
        """Count one of a peer's streams no more."""
        self.streams[peer] -= 1
        if self.streams[peer] <= 0:
            del self.streams[peer]

    async def close(self) -> None:
        """End the tasks, the port mapping, the DHT and p2pd. Safe to call twice."""
        try:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            if self._mapper is not None:
                await self._mapper.close()
            if self.daemon.alive:
                with contextlib.suppress(Exception):  # with a dying p2pd, hivemind may raise anything
                    async with asyncio.timeout(2.0):
                        await self.dht.shutdown()
        finally:
            await self.daemon.close()

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(reporting(name))
        self._tasks.append(task)

    async def _keep_company(self) -> None:
        retries_s = backoff(*RETRY_S)
        while self.alive:
            if self.has_company:
                retries_s = backoff(*RETRY_S)
                await asyncio.sleep(slower_in_a_crowd(REFRESH_S, len(self.known)))
                await self._join()
            else:
                await self._join()
                if not self.has_company:
                    await asyncio.sleep(next(retries_s))
        logger.warning("p2pd exited; no node can be reached")

    async def _join(self) -> None:
        known = self.known
        chosen = whom_to_dial(known, self._bootstraps, self.has_company, self._random)
        answers = await asyncio.gather(*(self._greet(peer, known[peer]) for peer in chosen))
        if any(answers):
            with contextlib.suppress(TimeoutError, NetworkError):
                async with asyncio.timeout(DIAL_DEADLINE_S), network_errors("looking for neighbours"):
                    await self.dht.find_nearest_nodes([self.dht.node_id])

    async def _greet(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        """Connect to a node and exchange routing-table entries; return whether it answered."""
        try:
            async with asyncio.timeout(DIAL_DEADLINE_S):
                await self.daemon.connect(peer, addresses)
                return await self.dht.protocol.call_ping(PeerID.from_base58(peer)) is not None
        except (NetworkError, TimeoutError) as error:
            places = ", ".join(map(address.host_port, addresses))
            logger.info("no answer from %s at %s: %s", short(peer), places, error or "timed out")
            return False


def slower_in_a_crowd(interval_s: float, known: int) -> float:
    """Return the interval of requests to nodes of the join link, which all peers ask: in a large swarm a longer one."""
    return interval_s * max(1.0, known / CROWD)


def _log_narrow_path(host: str, verdict: PathVerdict) -> None:
    logger.warning("the path to %s loses large packets in silence: %s", host, verdict)


def whom_to_dial(
    known: Collection[PeerId], bootstraps: Collection[PeerId], has_company: bool, random: Random
) -> list[PeerId]:
    """Choose known nodes to dial at random: one for a connected node, several for an isolated one.

    Other peers may be gone after a long absence, while bootstraps keep their addresses. Therefore a connected node
    dials a bootstrap every other time, and up to half of an isolated node's dials go to bootstraps, or more if it knows
    few other peers.
    """
    most = 1 if has_company else MAX_DIALS_AT_ONCE
    share = random.randrange(2) if has_company else MAX_DIALS_AT_ONCE // 2
    shuffled = random.sample(list(known), len(known))
    well_known = [peer for peer in shuffled if peer in bootstraps]
    others = [peer for peer in shuffled if peer not in bootstraps]
    return [*well_known[:share], *others, *well_known[share:]][:most]
