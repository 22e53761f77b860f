"""One p2pd: go-libp2p in a child process, spoken to through Unix sockets in a private folder.

``hivemind.p2p.P2P`` starts it and speaks its control protocol; this module adds what a volunteer's machine needs:

- It runs in a session of its own, so that Ctrl+C in the terminal reaches us and not it: we say goodbye through it.
- It dies with us, also after SIGKILL (Linux: parent-death signal; elsewhere it ends when its control connection does).
- Its sockets lie in one folder for this process, locked while we live (``net.p2pd.socket_folder``).
- Dialing, opening and taking in streams are our own few lines of its control protocol: no connection leaks when one
  fails, addresses have a form that p2pd takes, and bulk data is copied less (``net.p2pd.streams``).
- hivemind's own side of the conversation, which the DHT needs, is fit for strangers (``net.p2pd.unary``).

Everything here runs on one loop, in one thread, and that thread must outlive the daemon (the parent whose death counts
is the thread).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from p2ptrain.base.errors import DeviceError, NetworkError, UserError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.launcher import launched
from p2ptrain.net import address
from p2ptrain.net.p2pd import control, unary
from p2ptrain.net.p2pd.backoff import BackoffReasons
from p2ptrain.net.p2pd.dialing import DialPolicy
from p2ptrain.net.p2pd.socket_folder import SocketFolder
from p2ptrain.net.p2pd.streams import Stream

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 30.0
"""A guess: it takes 0.1 s here, and a busy machine must not fail."""
DEAF_PATIENCE_S = 1.0
"""For p2pd to end after its connection did. A guess."""
SHUTDOWN_PATIENCE_S = 2.0
"""A guess: it takes some 10 ms here."""
PULSE_S = 60.0
"""Between two questions whether p2pd still answers. A guess."""
PULSE_DEADLINE_S = 20.0
"""For its answer. A guess: a millisecond here, and a machine that is busy to its limit must not cost us the node."""
MOST_MISSED = 2
"""Answers missed in a row, after which it is ended: one may be missed by a machine that slept."""

_ENVIRONMENT = {"LIBP2P_TCP_REUSEPORT": "false"}
"""Without reuse of the listening port for dialing, two peers that dial each other at the same instant get two
connections. With it they may get one, opened from both ends, on which both play the initiator: both dials fail."""


class _HivemindP2P(P2P):
    """hivemind's P2P with our launcher around the process."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        return launched(*P2P._make_process_args(*args, **kwargs), **_ENVIRONMENT)


class Daemon:
    """A running p2pd. ``close`` ends it; nothing of it stays.

    Args:
        caution: what it dials of what others announce.
    """

    def __init__(self, p2p: P2P, folder: SocketFolder, caution: DialPolicy) -> None:
        self.p2p = p2p
        self.caution = caution
        self._folder = folder
        self._serials = itertools.count()
        self._reasons = BackoffReasons()
        self._is_deaf = False
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(self._conversation_ended)

    @classmethod
    async def start(cls, identity_path: Path, listen: Sequence[str], announce: Sequence[str] = ()) -> Daemon:
        """Start p2pd. Raises DeviceError when this platform cannot run it, UserError when it cannot listen.

        Listening nowhere, it only dials, and is dialed through relays.
        """
        _check_binary()
        unary.install()
        folder = SocketFolder.create()
        # P2P takes the folder of its sockets from the class.
        kind: Any = type("_Daemon", (_HivemindP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder.path}/"})
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S + 10):
                p2p = await kind.create(
                    identity_path=str(identity_path),
                    host_maddrs=list(listen),
                    announce_maddrs=list(announce) or None,
                    check_if_identity_free=False,  # it starts another daemon, and can meet our own ghost
                    startup_timeout=STARTUP_TIMEOUT_S,
                    dht_mode="server",  # libp2p's own: how a peer known by id alone is dialed
                    no_listen=not listen,
                    use_relay=False,  # makes it a relay for all the world; circuits it dials anyway (net.relay)
                    auto_nat=False,
                    force_reachability="private",  # else it comes to relay in our place (net.relay)
                    nat_port_map=not all(map(address.is_loopback, listen)),
                )
        except (P2PDaemonError, TimeoutError) as error:
            folder.remove()
            raise _explained(str(error), listen) from error
        except BaseException:
            folder.remove()
            raise
        assert isinstance(p2p._client.control, unary.Control)  # of whatever version hivemind is
        # Who listens on this machine alone, or nowhere (the doctor), leads nobody astray.
        return cls(p2p, folder, DialPolicy(local=all(map(address.is_loopback, listen))))

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    @property
    def alive(self) -> bool:
        """Whether the process runs. hivemind's ``is_alive`` stays true when it was killed."""
        return self.p2p._child.returncode is None

    async def died(self) -> int:
        """Wait for the process to end; its return code. While somebody waits, one that answers nothing is ended."""
        pulse = asyncio.create_task(self._feel_the_pulse())
        try:
            return int(await self.p2p._child.wait())
        finally:
            pulse.cancel()

    @property
    def ending(self) -> str:
        """Why the process ended, in a few words."""
        if self._is_deaf:
            return f"it ran and gave no answer {MOST_MISSED} times in a row, so it was ended"
        return f"exit code {self.p2p._child.returncode}"

    async def own_addresses(self) -> list[str]:
        """The multiaddresses it listens on, every interface's, without ``/p2p/``; or those that it is to announce.

        Raises NetworkError where it has died or answers nonsense; no deadline.
        """
        try:
            _, addresses = await self.p2p._client.identify()
        except (P2PDaemonError, ControlFailure, OSError, EOFError) as error:
            raise NetworkError(f"p2pd does not answer: {error}") from error
        own = [str(each) for each in addresses]
        self.caution.stand_at([*own, *address.way_out()])
        return own

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Have a connection to the peer, dialing these addresses if there is none, as far as caution allows.

        Raises NetworkError; no deadline.
        """
        dialable = [address.packed(each) for each in await self.caution.chosen(addresses)]
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(peer=control.raw(peer), addrs=dialable),
        )
        try:
            (await self._ask(request))[1].close()
        except NetworkError as error:
            raise NetworkError(self._reasons.completed(peer, str(error))) from error
        self._reasons.forget(peer)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer, with every stream on them. Raises NetworkError; no deadline."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DISCONNECT, disconnect=p2pd_pb2.DisconnectRequest(peer=control.raw(peer))
        )
        (await self._ask(request))[1].close()

    async def connections(self) -> list[control.FarEnd]:
        """The other ends of all connections. Raises NetworkError; no deadline."""
        response, stream = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        stream.close()
        return [control.FarEnd(control.peer_of(each.id), control.place_of(each.addrs[0])) for each in response.peers]

    async def open_stream(self, peer: PeerId, protocol: str) -> tuple[control.FarEnd, Stream]:
        """A new stream to the peer's handler of that protocol. Raises NetworkError; no deadline."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=control.raw(peer), proto=[protocol]),
        )
        response, stream = await self._ask(request)
        return control.far_end(response.streamInfo), stream

    async def serve_streams(self, protocol: str, on_open: Callable[[Stream], None]) -> asyncio.Server:
        """Call back for each inbound stream, whose opener ``read_opener`` tells. Raises NetworkError; no deadline."""
        path = self._folder.path / f"in-{next(self._serials)}.sock"
        try:
            server = await asyncio.get_running_loop().create_unix_server(lambda: Stream(on_open), str(path))
        except OSError as error:  # the folder went with the process, a moment ago
            raise NetworkError(f"p2pd does not answer: {error}") from error
        place = Multiaddr(f"/unix{path}").to_bytes()
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(addr=place, proto=[protocol], balanced=False),
        )
        try:
            (await self._ask(request))[1].close()
        except BaseException:
            server.close()
            raise
        return server

    async def stop_serving(self, protocol: str, server: asyncio.Server) -> None:
        """Take in no more streams of that protocol. Raises NetworkError; no deadline."""
        place = Multiaddr(f"/unix{server.sockets[0].getsockname()}").to_bytes()
        server.close()
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.REMOVE_STREAM_HANDLER,
            removeStreamHandler=p2pd_pb2.RemoveStreamHandlerRequest(addr=place, proto=[protocol]),
        )
        (await self._ask(request))[1].close()

    async def close(self) -> None:
        """End the process, by SIGKILL where it does not end by itself: it may be frozen."""
        try:
            async with asyncio.timeout(SHUTDOWN_PATIENCE_S):
                await self.p2p.shutdown()
        except TimeoutError:
            await self.kill()
        except BaseException:
            self._kill()  # whoever waited for us does not any more
            raise
        finally:
            self._folder.remove()

    async def kill(self) -> None:
        """End the process as it stands. ``close`` is still to be called."""
        self._kill()
        await self.p2p._child.wait()

    async def _feel_the_pulse(self) -> None:
        """Ask it something cheap now and then, and end it when it has missed the answer again and again."""
        missed = 0
        while missed < MOST_MISSED:
            await asyncio.sleep(PULSE_S)
            try:
                async with asyncio.timeout(PULSE_DEADLINE_S):
                    (await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)))[1].close()
                missed = 0
            except (NetworkError, TimeoutError) as error:
                missed += 1
                logger.warning("p2pd did not answer: %s", error or "too late")
        self._is_deaf = True
        self._kill()

    def _conversation_ended(self, task: asyncio.Task[None]) -> None:
        """hivemind's task that speaks with p2pd ended, by itself or by an error that nobody asks for (asyncio would
        print a traceback). Mostly p2pd died, and ``died`` tells. If it lives, nothing of it would be heard any more."""
        if not task.cancelled():  # it is, where we close
            logger.debug("the conversation with p2pd ended: %r", task.exception())
            task.get_loop().call_later(DEAF_PATIENCE_S, self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            self.p2p._child.kill()

    async def _ask(self, request: p2pd_pb2.Request) -> tuple[p2pd_pb2.Response, Stream]:
        if not self.alive:
            raise NetworkError(f"p2pd ended with code {self.p2p._child.returncode}")
        return await control.ask(self.p2p._daemon_listen_maddr["unix"], request)


def _check_binary() -> None:
    remedy = "p2ptrain runs on Linux and macOS, x86-64 and ARM64; reinstall hivemind with pip on one of these."
    with as_file(files("hivemind.hivemind_cli") / "p2pd") as path:
        if not path.exists():
            raise DeviceError(f"There is no libp2p daemon for this platform ({sys.platform}): {path}.", remedy)
        if not os.access(path, os.X_OK):
            raise DeviceError(f"The libp2p daemon {path} is not executable.", f"Run: chmod +x {path}")


def _is_taken(place: str) -> bool:
    """Whether another program listens at this multiaddress's host and port."""
    host, _, port = address.host_port(place).rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    except ValueError:  # no port is in it
        return False
    return False


def _explained(reason: str, listen: Sequence[str]) -> UserError:
    """What p2pd's last words mean to the owner."""
    places = ", ".join(map(address.host_port, listen))
    silent = not reason.strip()  # p2pd was faster to end than its words to be read
    if "address already in use" in reason or (silent and any(map(_is_taken, listen))):
        return UserError(f"{places} is in use by another program.", "Stop it, or choose another port with --listen.")
    if "cannot assign requested address" in reason:
        return UserError(f"{places} is not an address of this machine.", "Choose one of its own with --listen.")
    if "permission denied" in reason and "listen" in reason:
        return UserError(f"Listening on {places} is not permitted.", "Choose a port above 1023 with --listen.")
    return DeviceError(
        f"The libp2p daemon did not start: {reason}", "If the text does not say why, reinstall hivemind."
    )
