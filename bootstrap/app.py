"""The bootstrap program: one node, the manifest service, and a watch on who is here.

Everything runs on one uvloop in the main thread. The home holds::

    HOME/identity.key     the peer id in every join link; keep it
    HOME/join-link.txt    the link that was printed last
    HOME/peers.json       who was here, to find the swarm again after a restart
    HOME/guests.json      who came by which invite (bootstrap.admission_server)
    HOME/lock             held while we live

Who closes what: ``run`` holds the lock, ``_attend`` closes the transports, ``_stay_up`` the node. p2pd may die: it is
started again, on the same ports, so that the link that was passed on stays good. SIGINT, SIGTERM or SIGHUP
ends us cleanly, a second SIGINT or SIGTERM at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from filelock import FileLock, Timeout

from bootstrap import messages
from bootstrap.admission_server import AdmissionServer, doorman_of
from bootstrap.messages import Say
from bootstrap.presence_watch import watch
from bootstrap.swarm_view import SwarmView
from p2ptrain.admission.author import LINK_FILE
from p2ptrain.base import files
from p2ptrain.base.errors import DeviceError, HomeError, JoinLinkError, NetworkError, UserError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.base.logging_setup import logging_installed
from p2ptrain.base.telemetry import lossy_output
from p2ptrain.manifest import KEY_FILE, SETTINGS_FILE, JoinLink, SignedManifest, load_run
from p2ptrain.net.address import with_peer
from p2ptrain.net.directory import PeerCache
from p2ptrain.net.figures_service import FIGURES_PROTOCOL, LIMITS
from p2ptrain.net.identity import Identity
from p2ptrain.net.manifest_service import serve_manifest
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.daemon import CALM_S
from p2ptrain.net.relay.dial_back import serve_reach
from p2ptrain.net.relay.relay import NO_RELAY, Relay, RelayLimits
from p2ptrain.net.throttle import MBIT, Throttles
from p2ptrain.net.transport import P2PTransport
from p2ptrain.page.listen_address import ListenAddress as PagePlace
from p2ptrain.page.server import PageServer

LOCAL_LISTEN = "/ip4/127.0.0.1/tcp/0"
IN_CONTAINER = "P2PTRAIN_IN_CONTAINER"
"""A variable that our images set."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
"""Before p2pd is started again: doubling between the two. Guesses."""
OWN_WORD_S = 10.0
"""For p2pd to tell where it listens. A guess: it takes milliseconds."""
MOST_NAMED = 8
"""Addresses in the link that we print, others' included: half of what a link may have."""


@dataclass(frozen=True, slots=True)
class BootstrapOptions:
    """What this machine's owner chose."""

    run: Path
    """The run's directory, with its signed manifest."""
    home: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    """Empty: our own addresses."""
    local: bool
    """A swarm on this machine alone."""
    relay: bool = True
    """Carry, within limits, what passes between peers whom nobody can dial."""
    beside: JoinLink | None = None
    """Another bootstrap's: both are entries to one swarm, and our link names both."""
    page: PagePlace | None = None
    """Where to show the swarm; None: nowhere."""
    upload_mbit: float = 0.0
    """Most that it sends, in Mbit/s, relayed bytes above all; 0: no cap."""
    download_mbit: float = 0.0

    def rates(self) -> Throttles:
        """Both caps, for all services together."""
        rates = Throttles()
        rates.up.rate = self.upload_mbit * MBIT or math.inf
        rates.down.rate = self.download_mbit * MBIT or math.inf
        return rates


def run(place: BootstrapOptions, say: Say) -> None:
    """Serve the run until a signal. Raises UserError for everything its owner can fix."""
    for each in (place.run, place.home):
        _check_no_peer(each)
    signed = load_run(place.run)
    if place.beside is not None and place.beside.run_id != signed.run_id:
        raise JoinLinkError(
            f"The link of the other bootstrap is of run {short(place.beside.run_id)}, and {place.run} holds run"
            f" {short(signed.run_id)}.",
            "Give both the same signed run: copy manifest.signed alone (and rulings.signed, if there is one) to the"
            " second machine.",
        )
    with _locked(place.home), lossy_output(), logging_installed():
        identity = Identity.load_or_create(place.home / "identity.key")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_stay_up(place, signed, identity, say))


async def _stay_up(place: BootstrapOptions, signed: SignedManifest, identity: Identity, say: Say) -> None:
    """A node for as long as nobody asks us to stop, however often p2pd dies."""
    stop = _stop_event(say)
    view = SwarmView(signed)
    cache = PeerCache(place.home / "peers.json")
    rates = place.rates()
    doorman = doorman_of(place.run, place.home, signed, identity, say)
    say("bootstrap", f"run {signed.manifest.run.name}, {short(signed.run_id)}; we are {identity.peer_id}")
    page = contextlib.ExitStack()
    if place.page is not None:
        server = page.enter_context(PageServer(place.page, view.document))
        view.on_event(server.tell)
        say("page", server.url)
    try:  # the owner's mistakes show here, and end us
        node = await _start(place, as_before(place, identity.peer_id), signed, identity, cache, rates)
    except (NetworkError, OSError, EOFError) as error:
        page.close()
        raise DeviceError(f"The network daemon p2pd does not work: {error}.", "Start again.") from error
    except BaseException:
        page.close()
        raise
    try:
        addresses = messages.link_addresses(node.addresses, place.announce, place.local)
        own = [with_peer(each, identity.peer_id) for each in addresses]
        if place.beside is not None:
            messages.check_beside(place.beside, identity.peer_id, own, place.home)
        link = JoinLink(signed.run_id, tuple(dict.fromkeys([*own, *_beside(place)]))[:MOST_NAMED])
        _write_link(place.home / LINK_FILE.name, link)
        lines = messages.join_lines(link, place.local, IN_CONTAINER in os.environ)
        for line in lines:
            say("join", line)
        view.join(*lines)
        listen = await same_ports(place.listen, node)
        pause_s = FIRST_PAUSE_S
        while not stop.is_set():
            began = asyncio.get_running_loop().time()
            await _attend(node, signed, cache, say, stop, place, doorman, view, rates)
            await node.close()
            if asyncio.get_running_loop().time() - began > CALM_S:
                pause_s = FIRST_PAUSE_S
            while not stop.is_set():
                say("bootstrap", f"p2pd ended; starting it again in {pause_s:.0f} s")
                view.failed("the network daemon of the bootstrap ended and is started again")
                await _first_of(stop.wait(), asyncio.sleep(pause_s))
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                try:
                    node = await _start(place, listen, signed, identity, cache, rates)
                except (UserError, NetworkError, OSError, EOFError) as error:  # the latter two: it died again
                    say("bootstrap", f"it does not start: {' '.join(str(error).split())}")
                    continue
                say("bootstrap", "back; the join link is the same")
                break
    finally:
        await node.close()
        page.close()
    say("bootstrap", "stopped")


async def _start(
    place: BootstrapOptions,
    listen: Sequence[str],
    signed: SignedManifest,
    identity: Identity,
    cache: PeerCache,
    rates: Throttles,
) -> Node:
    return await Node.start(
        identity,
        signed.run_id,
        listen=listen,
        announce=place.announce,
        bootstraps=_beside(place),
        known=cache.load(signed.run_id),
        local=place.local,
        rates=rates,
    )


def _beside(place: BootstrapOptions) -> tuple[str, ...]:
    """Addresses of other bootstraps."""
    return () if place.beside is None else place.beside.addresses


async def _attend(
    node: Node,
    signed: SignedManifest,
    cache: PeerCache,
    say: Say,
    stop: asyncio.Event,
    place: BootstrapOptions,
    doorman: AdmissionServer | None,
    view: SwarmView,
    rates: Throttles,
) -> None:
    """Serve the manifest, relay, and watch the swarm until we are stopped or p2pd dies."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            stack.push_async_callback((await serve_manifest(node, signed.to_bytes(), rates)).close)
            stack.push_async_callback((await serve_reach(node, rates)).close)
            if doorman is not None:
                stack.push_async_callback((await doorman.serve(node, rates)).close)
            limits = RelayLimits() if place.relay else NO_RELAY
            stack.push_async_callback((await Relay.start(node, limits, rates)).close)
        except NetworkError:  # p2pd is gone already
            return
        tasks = [watch(node, signed.manifest.run.tokens_per_peer, cache, say, view)]
        tasks += [] if doorman is None else [doorman.watch(node)]
        if place.page is not None:
            tasks.append(view.ask(P2PTransport(node, FIGURES_PROTOCOL, LIMITS, rates), Random()))
        await _first_of(stop.wait(), node.died(), *tasks)


def as_before(place: BootstrapOptions, me: PeerId) -> tuple[str, ...]:
    """Where to listen. A swarm on one machine takes any free port, and that of last time where it is free: links that
    were passed on stay good."""
    if not place.local or place.announce or place.listen != (LOCAL_LISTEN,):
        return place.listen
    try:
        before = JoinLink.parse((place.home / LINK_FILE.name).read_text(encoding="utf-8"))
        ports = [re.fullmatch(rf"/ip4/127\.0\.0\.1/tcp/(\d+)/p2p/{me}", each) for each in before.addresses]
        port = next(int(each[1]) for each in ports if each is not None)
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of last time may linger
            trial.bind(("127.0.0.1", port))
    except (OSError, ValueError, OverflowError, StopIteration, UserError):  # there is none, or it is somebody else's
        return place.listen
    return (f"/ip4/127.0.0.1/tcp/{port}",)


async def same_ports(listen: Sequence[str], node: Node) -> tuple[str, ...]:
    """``settled``, by p2pd's word. Where it died or hangs: with the one port that is known, to start it again there."""
    try:
        async with asyncio.timeout(OWN_WORD_S):
            own = await node.daemon.own_addresses()
    except (TimeoutError, NetworkError):
        own = [each.replace("/tcp/0", f"/tcp/{node.port}") for each in listen]
    return settled(listen, own)


def settled(listen: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """The listening addresses with the ports that p2pd chose where they said 0: what it listens on after a restart."""

    def fixed(wanted: str) -> str:
        _, kind, host, transport, port = wanted.split("/")[:5]
        actual = [each.split("/") for each in own]
        ports = [each[4] for each in actual if each[1] == kind and (each[2] == host or host in ("0.0.0.0", "::"))]
        return f"/{kind}/{host}/{transport}/{ports[0]}" if port == "0" and ports else wanted

    return tuple(map(fixed, listen))


def _stop_event(say: Say) -> asyncio.Event:
    """Set by the first SIGINT, SIGTERM or SIGHUP; a second one ends the process as if we had never asked to hear of it.

    But for SIGHUP, which kernel and shell both send when a terminal closes; under nohup it is ignored.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stopped() -> None:
        if stop.is_set():  # a second SIGHUP
            return
        say("bootstrap", "leaving; once more to leave at once")
        stop.set()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopped)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stopped)
    return stop


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done; end the others. A failure among them is ours too."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()


def _check_no_peer(path: Path) -> None:
    """Raises HomeError where a peer lives, whose home holds a signed manifest too: our files would mix with its own."""
    try:
        is_a_peers = (path / SETTINGS_FILE).exists() and not (path / KEY_FILE).exists()
    except OSError:  # whoever needs the place says what is wrong with it
        return
    if is_a_peers:
        raise HomeError(
            f"{path} is a peer's home, and no place for a bootstrap.",
            "Name the run's directory; on another machine a new one, with a copy of manifest.signed.",
        )


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """The home, made where it is not there, held against other processes."""
    lock = FileLock(home / "lock")
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise HomeError(
            f"{home} is in use by another process.", "Stop that one, or choose another directory with --home."
        ) from None
    except OSError as error:
        raise HomeError(
            f"The home {home} cannot be written: {error.strerror}.", "Choose a directory of your own with --home."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _write_link(path: Path, link: JoinLink) -> None:
    """Whole or not at all: other programs wait for this file."""
    try:
        files.replace(path, f"{link}\n".encode())
    except OSError as error:
        raise HomeError(f"{path} cannot be written: {error.strerror}.", "Free some space on that disk.") from error
