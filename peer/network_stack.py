"""The network part of a peer: its thread, its connection to the run, and what both share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from p2ptrain.base.ids import short
from p2ptrain.base.telemetry import EventLog
from p2ptrain.manifest import SignedManifest
from p2ptrain.net import address
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.identity import Identity
from p2ptrain.net.relay.relay import RelayLimits
from p2ptrain.net.throttle import Throttles
from peer.assembly import PeerOptions
from peer.duplicate_identity import IdentityWatch
from peer.home import AddressBook, Addresses, Home
from peer.network import Connection
from peer.network_thread import NetworkThread
from peer.paths import Paths


@dataclass(frozen=True, slots=True)
class NetworkStack:
    """The network thread and what runs on it."""

    thread: NetworkThread
    connection: Connection
    paths: Paths
    identity: Identity
    rates: Throttles
    identity_watch: IdentityWatch


def connect(
    stack: contextlib.ExitStack,
    options: PeerOptions,
    home: Home,
    identity: Identity,
    signed: SignedManifest | None,
    log: EventLog,
    rates: Throttles,
) -> NetworkStack:
    """Connect to the run, until ``stack`` closes. Raises UserError if no node can start here."""
    if options.link is not None:
        run = options.link.run_id
    else:
        assert signed is not None  # home_for checked it
        run = signed.run_id
    last = home.load_addresses()
    bootstraps = options.link.addresses if options.link else last.joined_by
    thread = stack.enter_context(NetworkThread())
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

    async def start() -> None:
        await connection.start()
        await book.begin()

    def close(kind: type[BaseException] | None, *_: object) -> None:
        thread.call(connection.close(in_haste=kind is KeyboardInterrupt))  # the owner's second Ctrl+C

    stack.push(close)
    thread.call(start())
    where = ", ".join(map(address.host_port, connection.addresses)) or "no address that others can reach"
    log.note("listening", name=short(identity.peer_id), where=where)
    return NetworkStack(thread, connection, paths, identity, rates, watch)
