"""The network part of a peer: its connection to the run, and what belongs to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.base.ids import short
from p2ptrain.base.telemetry import EventLog
from p2ptrain.manifest import SignedManifest
from p2ptrain.net import address
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.identity import Identity
from p2ptrain.net.relay.relay import RelayLimits
from p2ptrain.net.throttle import Throttles
from peer.duplicate_identity import IdentityWatch
from peer.home import AddressBook, Addresses, Home
from peer.network import Connection
from peer.paths import Paths
from peer.start_options import PeerOptions


@dataclass(frozen=True, slots=True)
class NetworkStack:
    """What a peer has to do with its network."""

    connection: Connection
    paths: Paths
    identity: Identity
    rates: Throttles
    identity_watch: IdentityWatch


async def connect(
    stack: contextlib.AsyncExitStack,
    options: PeerOptions,
    home: Home,
    identity: Identity,
    signed: SignedManifest | None,
    log: EventLog,
    rates: Throttles,
    is_hasty: Callable[[], bool],
) -> NetworkStack:
    """Connect to the run, until ``stack`` closes. Raises UserError if no node can start here.

    Args:
        is_hasty: whether the owner stops the peer at once.
    """
    if options.link is not None:
        run = options.link.run_id
    else:
        assert signed is not None  # home_for checked it
        run = signed.run_id
    last = home.load_addresses()
    bootstraps = options.link.addresses if options.link else last.joined_by
    paths, watch = Paths(), IdentityWatch(home, log)

    book = AddressBook(
        home, lambda: Addresses(connection.addresses, tuple(bootstraps), connection.port, connection.unreachable)
    )
    connection = Connection(
        identity,
        run,
        bootstraps,
        PeerCache(home.peers),
        log,
        listen=options.listen or (),
        port=last.port,
        announce=options.announce or (),
        nickname=options.nickname or "",
        local=bool(options.local),
        rates=rates,
        relay=RelayLimits() if options.relay else None,
        paths=paths,
        punch=options.punch,
        unreachable=last.unreachable,
        stamp=watch.stamped,
        see_own=watch.see,
        on_move=book.keep,
    )

    async def close() -> None:
        await connection.close(in_haste=is_hasty())

    stack.push_async_callback(close)
    await connection.start()
    await book.begin()
    where = ", ".join(map(address.host_port, connection.addresses)) or "no address that others can reach"
    log.note("listening", name=short(identity.peer_id), where=where)
    return NetworkStack(connection, paths, identity, rates, watch)
