"""A node of the DHT: hivemind's ``DHTNode`` with our ``dht_protocol.Protocol`` in it, and nothing cached.

Whatever hivemind's own code raises is turned into NetworkError by ``network_errors``, around each call of a node's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from hivemind.dht.node import Blacklist, DHTNode
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID

from p2ptrain.base.errors import NetworkError
from p2ptrain.net.dht_protocol import MAX_NEAREST, Protocol, id_of
from p2ptrain.net.throttle import Throttles

logger = logging.getLogger(__name__)

MAX_BLAMED = 1024
"""Nodes whose failures are counted: answers may name any number that are not there. A guess."""


@contextlib.asynccontextmanager
async def network_errors(what: str) -> AsyncIterator[None]:
    """Whatever hivemind's own code raises in here is a NetworkError: a stranger's answer can make it stumble, and must
    end nobody's peer. Timeouts stay what they are.

    Args:
        what: what was to be done, for the error's text.
    """
    try:
        yield
    except (NetworkError, TimeoutError):
        raise
    except Exception as error:  # AssertionError, KeyError: hivemind checks strangers' words with what it has
        logger.info("%s failed in hivemind", what, exc_info=True)
        raise NetworkError(f"{what} failed in hivemind: {error!r:.120}") from error


async def start_node(p2p: P2P, validator: RecordValidatorBase, rates: Throttles) -> DHTNode:
    """A node of the DHT that knows nobody yet, over a p2pd that runs."""
    own = id_of(p2p.peer_id.to_bytes())
    # As a client it makes a protocol of hivemind's that serves nobody, and that ours takes the place of. Nothing is
    # cached: lookups want the latest and would ask all the same, and each would send a neighbour all that it found
    # (measured with 95 peers: 470 kB a lookup instead of 170).
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
    """Who did not answer, for a while; bounded."""

    def register_failure(self, peer: PeerID) -> None:
        if len(self.ban_counter) >= MAX_BLAMED:
            self.clear()
        super().register_failure(peer)
