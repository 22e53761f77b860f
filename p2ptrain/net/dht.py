"""DHT node: hivemind's ``DHTNode`` with ``dht_protocol.Protocol``, without caches.

Each call of a node is made inside ``network_errors``, which turns hivemind's exceptions into NetworkError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from hivemind.dht import node as node_module
from hivemind.dht import protocol, routing
from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.utils import timed_storage

from p2ptrain.base.clock import wall
from p2ptrain.base.errors import NetworkError
from p2ptrain.net.dht_protocol import MAX_NEAREST, Protocol, id_of
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

MAX_BLAMED = 1024
"""Most nodes whose failures are counted, because responses may name any number of absent nodes. Guess: the number of
failed nodes in a large swarm would settle it."""


@contextlib.asynccontextmanager
async def network_errors(what: str, deadline_s: float | None = None) -> AsyncIterator[None]:
    """Turn hivemind's exceptions into NetworkError, since another peer's response may cause any of them.

    NetworkError passes unchanged; TimeoutError, too, if ``deadline_s`` is None. ``what`` is the operation, for the
    error's text.
    """
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        if deadline_s is None:
            raise
        raise NetworkError(f"{what} took more than {deadline_s:.0f} s") from None
    except NetworkError:
        raise
    except Exception as error:  # such as AssertionError or KeyError, with which hivemind rejects input
        logger.info("%s failed in hivemind", what, exc_info=True)
        raise NetworkError(f"{what} failed in hivemind: {error!r:.120}") from error


def use_wall_clock() -> None:
    """Make hivemind read our wall clock: a jump of the system's would end all entries, or keep bans for as long."""
    for module in (timed_storage, protocol, routing, node_module):
        module.get_dht_time = wall


async def start_node(p2p: P2P, validator: RecordValidatorBase, rates: Throttles) -> DHTNode:
    """Start a DHT node that knows no other node yet, over a running p2pd."""
    use_wall_clock()
    own = id_of(p2p.peer_id.to_bytes())
    # In client mode hivemind's own protocol serves nobody, until ours replaces it. Nothing is cached: lookups need the
    # latest records and would ask anyway, and each would send a neighbour all that it found (measured with 95 peers:
    # 470 kB per lookup instead of 170 kB).
    node = await DHTNode.create(
        p2p=p2p,
        node_id=own,
        client_mode=True,
        record_validator=validator,
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
    )
    spare = node.protocol
    node.blacklist = _Blacklist(node.blacklist.base_time, node.blacklist.backoff)
    node.protocol = await Protocol.create(
        p2p,
        own,
        bucket_size=MAX_NEAREST,
        depth_modulo=spare.routing_table.depth_modulo,
        num_replicas=spare.num_replicas,
        wait_timeout=spare.wait_timeout,
        record_validator=validator,
    )
    node.protocol.rates = rates
    return node


class _Blacklist(Blacklist):
    """Bounded list of nodes that recently did not answer."""

    def register_failure(self, peer: PeerID) -> None:
        if len(self.ban_counter) >= MAX_BLAMED:
            self.clear()
        super().register_failure(peer)
