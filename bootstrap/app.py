"""The bootstrap program: one node with its services, which lists the live peers.

Everything runs on one uvloop in the main thread. The home has::

    HOME/identity.key     the peer id in every join link; keep it
    HOME/join-link.txt    the last join link
    HOME/peers.json       addresses of peers, to find the swarm after a restart
    HOME/finished.json    records of peers that trained to the run's end (bootstrap.finished_peers)
    HOME/start.json       options of earlier starts (p2ptrain.net.start_options)
    HOME/page.json        contributions and texts that the page shows (p2ptrain.page.memory)
    HOME/guests.json      register of used invites (bootstrap.admission_server)
    HOME/lock             held while the program runs
    RUN/files/            files that the run names by digest (p2ptrain.data.file_store)
    RUN/shards/           its text (p2ptrain.tokens.store)

If p2pd dies, it is restarted on the same ports, so that the join link stays valid. The first SIGINT, SIGTERM or SIGHUP
ends the program cleanly, a second SIGINT or SIGTERM at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from bootstrap import messages
from bootstrap.admission_server import AdmissionServer
from bootstrap.finished_peers import FinishedPeers
from bootstrap.messages import Say
from bootstrap.presence_watch import watch
from bootstrap.run_files import check_shards, files_to_serve, shards_to_serve
from bootstrap.swarm_view import SwarmView
from p2ptrain.admission.author import LINK_FILE
from p2ptrain.base import cgroups, descriptors, files
from p2ptrain.base.background import in_background
from p2ptrain.base.errors import HomeError, JoinLinkError, UserError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.base.logging_setup import logging_installed
from p2ptrain.base.telemetry import MemoryLog, lossy_output
from p2ptrain.base.text import command_line
from p2ptrain.manifest import KEY_FILE, SETTINGS_FILE, JoinLink, SignedManifest, load_run
from p2ptrain.net import address
from p2ptrain.net.address import multiaddress, port_of, with_peer
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.figures_service import FIGURES_PROTOCOL, LIMITS
from p2ptrain.net.file_service import FILES_PROTOCOL, FileServer
from p2ptrain.net.file_service import LIMITS as FILES_LIMITS
from p2ptrain.net.gate import GatedTransport
from p2ptrain.net.identity import Identity
from p2ptrain.net.links import Limits
from p2ptrain.net.manifest_service import serve_manifest
from p2ptrain.net.node import Node
from p2ptrain.net.relay.dial_back import serve_reach
from p2ptrain.net.relay.relay import FOR_A_SERVER, NO_RELAY, Relay, RelayLimits
from p2ptrain.net.shard_service import LIMITS as SHARDS_LIMITS
from p2ptrain.net.shard_service import SHARDS_PROTOCOL
from p2ptrain.net.start_options import NodeOptions, OptionsFile, merged
from p2ptrain.net.supervisor import NodeSupervisor
from p2ptrain.net.throttle import MBIT, Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.page.public import PATH
from p2ptrain.page.server import PageServer
from p2ptrain.ports import Link

LOCAL_LISTEN = "/ip4/127.0.0.1/tcp/0"
PUBLIC_LISTEN = address.listening(31337)
"""Default addresses; the port is fixed so that a router can forward it, unassigned, and easy to remember."""
IN_CONTAINER = "P2PTRAIN_IN_CONTAINER"
"""Environment variable that our container images set."""

MAX_FILES = 2 * FOR_A_SERVER.connections
"""Limit of open files of this process and of p2pd: a connection has one, a circuit's end two."""

MAX_NAMED = 8
"""Most addresses in our link, another bootstrap's included: half of what a link may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedOptions(NodeOptions):
    """Options that the home remembers; None: not given."""

    beside: str | None = None
    """Join link of another bootstrap of the same swarm, which our link then names, too."""
    page_public: bool | None = None
    """Whether everybody may read the page at ``/run``."""
    page_hide: tuple[str, ...] | None = None
    """Words and peers whose texts and nicknames that page leaves out."""
    upload_mbit: float | None = None
    """Upload cap in Mbit/s, relayed bytes included; 0: no cap."""
    download_mbit: float | None = None


@dataclass(frozen=True, slots=True)
class BootstrapOptions(RememberedOptions):
    """Options of the command line."""

    run: Path
    home: Path
    forget: bool = False
    """Use only the options of this start."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses to listen on."""
        return self.listen or ((LOCAL_LISTEN,) if self.local else PUBLIC_LISTEN)

    @property
    def other(self) -> JoinLink | None:
        """Link of the other bootstrap. Raises JoinLinkError."""
        return None if self.beside is None else JoinLink.parse(self.beside)

    def rates(self) -> Throttles:
        """Return throttles with both caps, for all services together."""
        rates = Throttles()
        rates.up.rate = (self.upload_mbit or 0.0) * MBIT or math.inf
        rates.down.rate = (self.download_mbit or 0.0) * MBIT or math.inf
        return rates


def run(given: BootstrapOptions, say: Say) -> None:
    """Serve the run until a signal. Raises UserError."""
    for each in (given.run, given.home):
        _check_no_peer(each)
    cgroups.check_pids()
    descriptors.allow(MAX_FILES)
    signed = load_run(given.run)
    with files.locked(given.home), lossy_output(), logging_installed():
        start = OptionsFile(given.home, RememberedOptions)
        saved = RememberedOptions() if given.forget else start.load()
        options = merged(given, saved)
        if (other := options.other) is not None and other.run_id != signed.run_id:
            raise JoinLinkError(
                f"The link of the other bootstrap is of run {short(other.run_id)}, but {given.run} has run"
                f" {short(signed.run_id)}.",
                f"Give both the same signed run: copy {messages.COPIED} to the second machine.",
            )
        if options.page_public and options.page is None:
            raise UserError("There is no page that could be public.", "Give --page PORT, too, or --no-page-public.")
        if words := saved.words():
            say("bootstrap", f"options of earlier starts: {command_line(*words)} (--forget drops them)")
        identity = Identity.load_or_create(given.home / "identity.key")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lasting = replace(options, weights=None)  # RUN/files keeps them
            runner.run(EntryPoint(options, signed, identity, say, lambda: start.save(lasting)).run())


class EntryPoint:
    """A run's entry point: a node, the services on it, and what its owner sees."""

    def __init__(
        self,
        options: BootstrapOptions,
        signed: SignedManifest,
        identity: Identity,
        say: Say,
        remember: Callable[[], None] = lambda: None,  # called when the options have proved usable
    ) -> None:
        self._options = options
        self._signed = signed
        self._identity = identity
        self._say = say
        self._remember = remember
        self._view = SwarmView(signed)
        self._view.remember(options.home)
        self._cache = PeerCache(options.home / "peers.json")
        self._finished = FinishedPeers(options.home / "finished.json", say)
        self._rates = options.rates()
        self._admission: AdmissionServer | None = None
        if signed.manifest.admission.policy != "open":
            self._admission = AdmissionServer(options.run, options.home, signed, identity, say)
        files = files_to_serve(options, signed, say)
        self._files = FileServer(files, self._rates)
        self._shards = shards_to_serve(options.run, signed, files, self._rates, say)
        self._listen = as_before(options, identity.peer_id)
        self._link: JoinLink | None = None
        self._supervisor = NodeSupervisor(
            self._start_node,
            self._equip,
            self._attend,
            self._node_died,
            on_return=lambda: say("bootstrap", "back; the join link is the same"),
        )

    async def run(self) -> None:
        """Run until a signal, however often p2pd dies. Raises UserError."""
        stop = _stop_event(self._say)
        run = self._signed.manifest.run
        self._say(
            "bootstrap",
            f"run {run.name}, {self._signed.run_id[:12]}; our peer id is {self._identity.peer_id}",
        )
        try:
            async with in_background(*self._page()):
                await self._supervisor.start()
                checks = [] if self._shards is None else [check_shards(self._shards, self._say)]
                async with in_background(self._supervisor.run(), *checks):
                    await stop.wait()
        finally:
            await self._supervisor.close()
            if self._options.page is not None:
                self._view.save(self._say)
        self._say("bootstrap", "stopped")

    def _page(self) -> list[Coroutine[Any, Any, None]]:
        """Return what serves the page, if there is one. Raises UserError if it cannot be served."""
        place, is_public = self._options.page_address, bool(self._options.page_public)
        if place is None:
            return []
        server = PageServer(place, self._view.document, is_public, self._options.page_hide or ())
        server.bind()
        self._say("page", server.url)
        if is_public:
            self._view.publish()
            self._say("page", f"everybody may read {server.address}{PATH}")
        return [server.serve()]

    async def _start_node(self) -> Node:
        return await Node.start(
            self._identity,
            self._signed.run_id,
            listen=self._listen,
            announce=self._options.announce or (),
            bootstraps=_addresses(self._options.other),
            known=self._cache.load(self._signed.run_id),
            local=bool(self._options.local),
            rates=self._rates,
            connections=self._relay_limits.connections,
        )

    @property
    def _relay_limits(self) -> RelayLimits:
        return NO_RELAY if self._options.relay is False else FOR_A_SERVER

    async def _equip(self, node: Node) -> None:
        if self._link is None:
            self._publish_link(node)
            self._listen = tuple(each.replace("/tcp/0", f"/tcp/{node.port}") for each in self._options.addresses)
        node.end_at(self._signed.manifest.run.tokens)
        services, rates = self._supervisor.services, self._rates
        services.append(await serve_manifest(node, self._signed.to_bytes(), rates))
        services.append(await self._serve(node, FILES_PROTOCOL, FILES_LIMITS, self._files.answer))
        if self._shards is not None:
            services.append(await self._serve(node, SHARDS_PROTOCOL, SHARDS_LIMITS, self._shards.answer))
        services.append(await serve_reach(node, rates))
        if self._admission is not None:
            services.append(await self._admission.serve(node, rates))
        services.append(await Relay.start(node, self._relay_limits, rates))

    async def _serve(
        self, node: Node, protocol: str, limits: Limits, handler: Callable[[Link], Awaitable[None]]
    ) -> P2PTransport:
        """Serve files or text of the run; in a closed run only to peers that it admits."""
        transport = P2PTransport(node, protocol, limits, self._rates)
        if self._admission is not None:
            gated = GatedTransport(transport, self._admission.gate, self._identity.peer_id, MemoryLog(1))
            handler = gated.guarded(handler)
        await transport.listen(handler)
        return transport

    def _publish_link(self, node: Node) -> None:
        options, me, local = self._options, self._identity.peer_id, bool(self._options.local)
        ours = messages.link_addresses(node.addresses, options.announce or (), local)
        own = [with_peer(each, me) for each in ours]
        if (other := options.other) is not None:
            messages.check_beside(other, me, own, options.home)
        addresses = dict.fromkeys([*own, *_addresses(other)])
        self._link = JoinLink(self._signed.run_id, tuple(addresses)[:MAX_NAMED])
        _write_link(options.home / LINK_FILE.name, self._link)
        self._remember()
        lines = messages.join_lines(self._link, local, IN_CONTAINER in os.environ)
        for line in lines:
            self._say("join", line)
        self._view.join(*lines)

    async def _attend(self, node: Node) -> None:
        tasks = [
            watch(node, self._signed.manifest.run.tokens, self._cache, self._say, self._view),
            self._finished.keep(node.directory),
        ]
        if self._admission is not None:
            tasks.append(self._admission.watch(node))
        if self._options.page is not None:
            tasks.append(self._view.keep(self._say))
            tasks.append(self._view.ask(P2PTransport(node, FIGURES_PROTOCOL, LIMITS, self._rates), Random()))
        async with in_background(*tasks):
            await node.died()

    def _node_died(self, why: str, pause_s: float) -> None:
        self._say("bootstrap", f"p2pd ended ({why.rstrip('.')}); starting it again in {pause_s:.0f} s")
        self._view.failed("the network daemon of the bootstrap ended and is started again")


def _addresses(link: JoinLink | None) -> tuple[str, ...]:
    return () if link is None else link.addresses


def as_before(place: BootstrapOptions, me: PeerId) -> tuple[str, ...]:
    """Return the addresses to listen on; a swarm on one machine reuses the last free port, so that links stay valid."""
    if not place.local or place.announce or place.addresses != (LOCAL_LISTEN,):
        return place.addresses
    try:
        before = JoinLink.parse((place.home / LINK_FILE.name).read_text(encoding="utf-8"))
        own = [each for each in before.addresses if each.startswith("/ip4/127.0.0.1/") and each.endswith(f"/p2p/{me}")]
        port = port_of(own)
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections may linger
            trial.bind(("127.0.0.1", port))
    except (OSError, ValueError, UserError):  # there is no link, or the port is taken
        return place.addresses
    return (multiaddress("127.0.0.1", port),)


def _stop_event(say: Say) -> asyncio.Event:
    """Return an event that the first SIGINT, SIGTERM or SIGHUP sets; a second SIGINT or SIGTERM kills the process.

    Kernel and shell both send SIGHUP when a terminal closes, so a second one does nothing; under nohup it is
    ignored.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stopped() -> None:
        if stop.is_set():  # a second SIGHUP
            return
        say("bootstrap", "stopping; interrupt again to stop at once")
        stop.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopped)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stopped)
    return stop


def _check_no_peer(path: Path) -> None:
    """Raise HomeError for a peer's home, which has a signed manifest, too: its files and ours would mix."""
    try:
        is_a_peers = files.exists(path / SETTINGS_FILE) and not files.exists(path / KEY_FILE)
    except OSError:  # reported by the code that needs the directory
        return
    if is_a_peers:
        raise HomeError(
            f"{path} is a peer's home, which a bootstrap cannot use.",
            f"Name the run's directory; on another machine, a new directory with copies of {messages.COPIED}.",
        )


def _write_link(path: Path, link: JoinLink) -> None:
    try:
        files.replace(path, f"{link}\n".encode())
    except OSError as error:
        raise HomeError(f"{path} cannot be written: {error.strerror}.", files.remedy(error, "")) from error
