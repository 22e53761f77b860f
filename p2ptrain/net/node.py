"""One place in the network: a p2pd, the DHT in this process, and the keeper that joins the swarm and stays in it.

A node starts alone: neither p2pd nor the DHT is given a bootstrap, because with hivemind a lone dead bootstrap is
terminal. The keeper then tries every known node, bootstraps and peers of earlier days alike, until one answers, and
goes on looking now and then: a node that finds itself alone, or a swarm that fell in two, heals.

Who closes what: ``close`` ends the keeper, the DHT and p2pd, in this order. Transports over the node are closed before.
The keeper survives NetworkError; when p2pd dies, it ends, and whoever waits for ``died`` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random

from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.logging import use_hivemind_log_handler

from p2ptrain.admission import Gate
from p2ptrain.base.errors import NetworkError, UserError
from p2ptrain.base.ids import PeerId, RunId, short
from p2ptrain.base.logging_setup import reporting
from p2ptrain.net import address
from p2ptrain.net.dht import network_errors, start_node
from p2ptrain.net.directory import DhtDirectory, PresenceValidator
from p2ptrain.net.identity import Identity
from p2ptrain.net.p2pd.daemon import Daemon
from p2ptrain.net.throttle import Throttles
from p2ptrain.swarm.messages import Presence

logger = logging.getLogger(__name__)

DIAL_DEADLINE_S = 10.0
"""For one known node, connecting and the DHT's ping. A guess: 20 ms were measured on loopback, seconds are usual."""
START_DEADLINE_S = 30.0
"""For the DHT and the first question to a p2pd that runs. A guess: 20 ms were measured."""
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
"""Retries of a node that is alone: doubling between the two. Guesses."""
REFRESH_S = 60.0
"""How often a node that has company tries one more known node. A guess."""
MAX_DIALS_AT_ONCE = 8
MAX_KNOWN_PEERS = 256


class Node:
    """See the module. Construct with ``start``."""

    def __init__(
        self,
        identity: Identity,
        run: RunId,
        daemon: Daemon,
        dht: DHTNode,
        validator: PresenceValidator,
        local: bool,
    ) -> None:
        self.peer_id = identity.peer_id
        self.run = run
        self.daemon = daemon
        self.dht = dht
        self.directory = DhtDirectory(dht, run)
        self._validator = validator
        self._local = local
        self._bootstraps: dict[PeerId, tuple[str, ...]] = {}
        self._peers: dict[PeerId, tuple[str, ...]] = {}
        self._random = Random()
        self._keeper: asyncio.Task[None] | None = None
        self._announced: tuple[str, ...] = ()
        self._is_owners_word = False
        self.port = 0
        """Where it listens; 0 when it does not."""

    @classmethod
    async def start(
        cls,
        identity: Identity,
        run: RunId,
        *,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce: Sequence[str] = (),
        bootstraps: Sequence[str] = (),
        known: Iterable[Presence] = (),
        local: bool = False,
        rates: Throttles | None = None,
    ) -> Node:
        """Start a node and its keeper; it has company as soon as some known node answers.

        Args:
            listen: multiaddresses to listen on; port 0: any free port; none: it only dials, and is dialed by relays.
            announce: what to tell others instead of our own addresses (a forwarded port); empty: our own.
            bootstraps: multiaddresses with ``/p2p/``.
            known: peers of earlier days (``directory.PeerCache``).
            local: a swarm on this machine alone; loopback addresses may be announced.
            rates: where the DHT's bytes are counted, and what caps its answers.

        Raises UserError for addresses that cannot be used, DeviceError where p2pd cannot run, NetworkError when it runs
        and does not answer.
        """
        _check(listen, announce, bootstraps)
        use_hivemind_log_handler("nowhere")  # its messages go where all others go
        daemon = await Daemon.start(identity.path, listen, announce)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                validator = PresenceValidator(run)
                dht = await start_node(daemon.p2p, validator, rates or Throttles())
                node = cls(identity, run, daemon, dht, validator, local)
                node.port = address.port_of(await daemon.own_addresses())
                node._announced, node._is_owners_word = tuple(announce), bool(announce)
                await node.look_at_itself()
        except (TimeoutError, P2PDaemonError, ControlFailure) as error:
            await daemon.close()
            raise NetworkError(f"p2pd started and does not answer: {error or 'too late'}") from error
        except BaseException:
            await daemon.close()
            raise
        for each in bootstraps:
            place, peer = address.split_peer(each)
            assert peer is not None  # _check saw to it
            node._bootstraps[peer] = (*node._bootstraps.get(peer, ()), place)
        daemon.caution.trust(bootstraps, local)
        node.learn(known)
        node._keeper = asyncio.get_running_loop().create_task(node._keep_company())
        node._keeper.add_done_callback(reporting("a node's keeper"))
        return node

    def stand_at(self, gate: Gate) -> None:
        """From now on store and find only who may take part. Without a gate: the run is open."""
        self.directory.gate = self._validator.gate = gate

    @property
    def addresses(self) -> tuple[str, ...]:
        """Our own that others can use, or what the owner announces; best first, without ``/p2p/``."""
        return self._announced

    async def look_at_itself(self) -> None:
        """Bring ``addresses`` up to date: interfaces come and go, and routers map ports. Raises NetworkError."""
        if self._is_owners_word:
            return
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                own = await self.daemon.own_addresses()
        except TimeoutError as error:
            raise NetworkError(f"p2pd does not answer: {error or 'too late'}") from error
        self._announced = tuple(address.announceable(own, self._local))

    @property
    def known(self) -> dict[PeerId, tuple[str, ...]]:
        """Other nodes, bootstraps and live peers alike, and their addresses without ``/p2p/``."""
        known = self._peers | self._bootstraps
        known.pop(self.peer_id, None)
        return known

    @property
    def bootstraps(self) -> tuple[PeerId, ...]:
        return tuple(self._bootstraps)

    @property
    def alive(self) -> bool:
        """Whether p2pd runs."""
        return self.daemon.alive

    @property
    def has_company(self) -> bool:
        """Whether the DHT knows another node."""
        return bool(self.dht.protocol.routing_table.uid_to_peer_id)

    async def died(self) -> int:
        """Wait until p2pd ends, wanted or not; its return code."""
        return await self.daemon.died()

    def learn(self, records: Iterable[Presence]) -> None:
        """Remember where live peers are, for the day on which every bootstrap is gone."""
        for record in records:
            self._peers.pop(record.peer, None)  # the most recently seen are last
            self._peers[record.peer] = record.addresses
        for peer in list(self._peers)[:-MAX_KNOWN_PEERS]:
            del self._peers[peer]

    async def close(self) -> None:
        """Leave nothing behind. Safe to call twice."""
        try:
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.wait([self._keeper])
            if self.daemon.alive:
                with contextlib.suppress(Exception):  # a daemon that is just dying fails in ways of hivemind's own
                    async with asyncio.timeout(2.0):
                        await self.dht.shutdown()
        finally:
            await self.daemon.close()

    async def _keep_company(self) -> None:
        retry_s = FIRST_RETRY_S
        while self.alive:
            if self.has_company:
                retry_s = FIRST_RETRY_S
                await asyncio.sleep(REFRESH_S)
                await self._join(self._some_known())
            else:
                await self._join(self._some_known())
                if not self.has_company:
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, LAST_RETRY_S)
        logger.warning("p2pd ended; nobody can be reached any more")

    def _some_known(self) -> dict[PeerId, tuple[str, ...]]:
        """Whom to dial now, and where."""
        known = self.known
        return {peer: known[peer] for peer in whom_to_dial(known, self._bootstraps, self.has_company, self._random)}

    async def _join(self, nodes: Mapping[PeerId, tuple[str, ...]]) -> None:
        """Dial these nodes at once, and look around through those that answer."""
        answers = await asyncio.gather(*(self._greet(peer, addresses) for peer, addresses in nodes.items()))
        if any(answers):
            with contextlib.suppress(TimeoutError, NetworkError):
                async with asyncio.timeout(DIAL_DEADLINE_S), network_errors("looking around"):
                    await self.dht.find_nearest_nodes([self.dht.node_id])

    async def _greet(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        """Connect to a node and enter each other's routing tables."""
        try:
            async with asyncio.timeout(DIAL_DEADLINE_S):
                await self.daemon.connect(peer, addresses)
                return await self.dht.protocol.call_ping(PeerID.from_base58(peer)) is not None
        except (NetworkError, TimeoutError) as error:
            places = ", ".join(map(address.host_port, addresses))
            logger.info("no answer from %s at %s: %s", short(peer), places, error or "too late")
            return False


def whom_to_dial(
    known: Collection[PeerId], bootstraps: Collection[PeerId], has_company: bool, random: Random
) -> list[PeerId]:
    """Some known nodes at random: one in company, several where we are alone.

    After a day away all peers of earlier days may be gone, and a bootstrap is where it always was. So it is one of the
    bootstraps every other time in company, and up to half of those that a lone node dials; also more, where it knows
    few others.
    """
    most = 1 if has_company else MAX_DIALS_AT_ONCE
    share = random.randrange(2) if has_company else MAX_DIALS_AT_ONCE // 2
    shuffled = random.sample(list(known), len(known))
    well_known = [peer for peer in shuffled if peer in bootstraps]
    others = [peer for peer in shuffled if peer not in bootstraps]
    return [*well_known[:share], *others, *well_known[share:]][:most]


def _check(listen: Sequence[str], announce: Sequence[str], bootstraps: Sequence[str]) -> None:
    """UserError for the first address that p2pd could not use."""
    example = "Write it like /ip4/203.0.113.7/tcp/31337"
    for each in (*listen, *announce):
        if not address.is_dialable(each):
            raise UserError(f"{each!r} is not an address we can use.", f"{example}.")
    for each in announce:
        if address.split_peer(each)[1] is not None or address.host_port(each).endswith(":0"):
            raise UserError(f"{each!r} cannot be announced.", f"Name the port that others reach, no peer. {example}.")
    for each in bootstraps:
        if not address.is_dialable(each) or address.split_peer(each)[1] is None:
            raise UserError(f"{each!r} is not the address of a bootstrap.", f"{example}/p2p/12D3Koo….")
