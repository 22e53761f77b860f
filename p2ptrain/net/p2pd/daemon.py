"""The p2pd process: go-libp2p in a child process, controlled through Unix sockets in a private folder.

``hivemind.p2p.P2P`` starts the process and speaks its control protocol. This module adds a separate session, so that
Ctrl+C does not reach p2pd, which still has to send our goodbye; an end with this process, also after SIGKILL; a socket
folder per process (``net.p2pd.socket_folder``); own streams (``net.p2pd.streams``), which leak no connection after a
failure and copy less; and a hardened connection for the DHT (``net.p2pd.unary``).

All code runs on one event loop in one thread. That thread must outlive the daemon, because the parent-death signal
follows the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
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

from p2ptrain.base import udp_filter
from p2ptrain.base.documents import document
from p2ptrain.base.errors import DeviceError, NetworkError, UserError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.launcher import launched
from p2ptrain.net import address, interfaces
from p2ptrain.net.p2pd import control, unary
from p2ptrain.net.p2pd.dialing import DialPolicy
from p2ptrain.net.p2pd.error_text import BackoffReasons
from p2ptrain.net.p2pd.socket_folder import SocketFolder
from p2ptrain.net.p2pd.streams import Stream

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 30.0
"""Guess: starts on overloaded machines; 0.1 s on an idle one."""
DEAF_PATIENCE_S = 1.0
"""Time for p2pd to end after its control connection closed. Guess: ends on overloaded machines."""
SHUTDOWN_PATIENCE_S = 2.0
"""Guess: shutdowns on overloaded machines; 10 ms on an idle one."""
HANDLER_DEADLINE_S = 20.0
"""Timeout to have p2pd accept a handler of streams. Guess: responses on overloaded machines; 1 ms on an idle one."""
PULSE_S = 60.0
"""Interval between health checks of p2pd. Guess: count how often p2pd hangs."""
PULSE_DEADLINE_S = 20.0
"""Timeout of a health check. Guess: responses on overloaded machines; 1 ms on an idle one."""
MAX_MISSED = 2
"""Consecutive failed health checks after which p2pd is killed; a machine that slept may miss one."""
PROTECTING = 1000
"""Weight of a protected connection, far above that of a node in p2pd's own routing table."""

_REUSE = "LIBP2P_TCP_REUSEPORT"
"""Reuse of the listening port for dialing. With reuse, two peers that dial each other at the same instant may get one
connection on which both act as initiator, and both dials fail; without it they get two connections. Nobody dials a
peer that punches holes at its own address, and hole punching needs connections that leave from the listening port."""

_NO_ROOTS = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
"""No root certificates, so that p2pd ends each handshake with a website; it dials ``/wss`` addresses that strangers
name. Go ignores these variables on macOS."""


def _command(punches: bool, connections: int, *args: Any, **kwargs: Any) -> list[str]:
    """Return p2pd's command. A server's p2pd has other limits of connections, of which it closes old ones from the high
    one to the low one, and one processor: with more, Go's idle threads look for work, which a relay's many short waits
    make a quarter of its CPU seconds (``bench.relay_cost``); one moves 1.5 Gbit/s."""
    environment = {_REUSE: "true" if punches else "false", **_NO_ROOTS}
    if connections:
        kwargs |= {"connHi": connections, "connLo": connections * 3 // 4}
        environment["GOMAXPROCS"] = "1"
    return launched(*P2P._make_process_args(*args, **kwargs), udp=False, **environment)


class Daemon:
    """A running p2pd. ``close`` ends the process and removes its socket folder."""

    def __init__(self, p2p: P2P, folder: SocketFolder, caution: DialPolicy, punches_at: Sequence[str] = ()) -> None:
        self.p2p = p2p
        self.caution = caution
        self._punches_at = tuple(punches_at)
        self.dials_circuits = not punches_at
        """Whether ``connect`` uses circuits; p2pd upgrades only those made since it punches holes."""
        self._folder = folder
        self._serials = itertools.count()
        self._reasons = BackoffReasons()
        self._killed_because = ""
        self._sockets: set[str] = {p2p._daemon_listen_maddr["unix"]}
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(self._connection_ended)

    @classmethod
    async def start(
        cls,
        identity_path: Path,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        punches: bool = False,
        connections: int = 0,
    ) -> Daemon:
        """Start p2pd; without listen addresses it only dials, and is dialed through relays.

        ``punches``: whether nobody can dial the node, so that p2pd is to punch holes (libp2p specification:
        relay/DCUtR). It then dials from its listening port, which must be given, and names private addresses alone to
        others, whose dials to a public one would collide with its own.

        ``connections``: how many p2pd keeps on a server, where it uses one processor; 0: its own limit, from which on
        it closes old ones: 512, until 256 are left.

        Raises DeviceError if this platform cannot run it, UserError if it cannot listen.
        """
        if punches:
            announce = interfaces.unreachable_from_afar(interfaces.listening(listen))
        _check_binary()
        _check_free(listen)
        _report_missing_filter()
        unary.install()
        folder = SocketFolder.create()
        # P2P reads the socket folder from the class.
        command = staticmethod(functools.partial(_command, punches, connections))
        own = {"_UNIX_SOCKET_PREFIX": f"/unix{folder.path}/", "_make_process_args": command}
        kind: Any = type("_Daemon", (P2P,), own)
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S + 10):
                p2p = await kind.create(
                    identity_path=str(identity_path),
                    host_maddrs=list(listen),
                    announce_maddrs=list(announce) or None,
                    check_if_identity_free=False,  # the check starts another daemon, and may find our own old one
                    startup_timeout=STARTUP_TIMEOUT_S,
                    # libp2p's DHT, which dials peers known only by id. A node that punches holes answers no questions:
                    # it would tell others the address of a partner, and their plain dials would collide with a punch.
                    dht_mode="client" if punches else "server",
                    no_listen=not listen,
                    use_relay=False,  # would relay for everybody; circuits are dialed anyway (net.relay)
                    auto_nat=punches,  # the only switch that turns hole punching on
                    force_reachability="private",  # otherwise p2pd relays instead of net.relay
                    nat_port_map=False,  # needs UDP; net.port_mapping does it
                    tls=False,  # Noise alone: Go 1.20's TLS has published faults (docs/SECURITY.md)
                )
        except (P2PDaemonError, TimeoutError) as error:
            folder.remove()
            raise _explained(str(error), listen) from error
        except BaseException:
            folder.remove()
            raise
        assert isinstance(p2p._client.control, unary.Control)  # holds for the installed version of hivemind
        # A node that listens on loopback only, or nowhere (the doctor), may dial anything.
        policy = DialPolicy(local=all(map(address.is_loopback, listen)))
        return cls(p2p, folder, policy, listen if punches else ())

    @property
    def punches(self) -> bool:
        """Whether p2pd punches holes; see ``start``."""
        return bool(self._punches_at)

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    @property
    def alive(self) -> bool:
        """Whether the process runs. hivemind's ``is_alive`` stays true after a kill."""
        return self.p2p._child.returncode is None

    async def died(self) -> int:
        """Wait for the process to end and return its exit code; health checks kill a hung process meanwhile."""
        pulse = asyncio.create_task(self._check_health())
        try:
            return int(await self.p2p._child.wait())
        finally:
            pulse.cancel()

    @property
    def ending(self) -> str:
        """The reason why the process ended, in a few words."""
        return self._killed_because or f"exit code {self.p2p._child.returncode}"

    async def own_addresses(self) -> list[str]:
        """Return the multiaddresses of all listening interfaces, or the announced ones, without ``/p2p/``.

        Raises NetworkError if p2pd has died or its response is invalid; no deadline.
        """
        try:
            _, addresses = await self.p2p._client.identify()
        except (P2PDaemonError, ControlFailure, OSError, EOFError) as error:
            raise NetworkError(f"p2pd does not answer: {error}") from error
        own = interfaces.listening(self._punches_at) if self._punches_at else [str(each) for each in addresses]
        self.caution.stand_at([*own, *interfaces.way_out()])
        return own

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect to the peer by the addresses that the dial policy allows. Raises NetworkError; no deadline."""
        usable = [each for each in addresses if self.dials_circuits or address.relay_of(each) is None]
        if addresses and not usable:
            raise NetworkError("this peer does not use circuits yet, as it has just started")
        dialable = [address.packed(each) for each in await self.caution.chosen(usable, peer)]
        try:
            await self._request("CONNECT", connect=p2pd_pb2.ConnectRequest(peer=control.raw(peer), addrs=dialable))
        except NetworkError as error:
            why = self.caution.unresolved(usable) or self._reasons.completed(peer, str(error))
            raise NetworkError(why) from error
        self._reasons.forget(peer)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to a peer, with every stream on them. Raises NetworkError; no deadline."""
        await self._request("DISCONNECT", disconnect=p2pd_pb2.DisconnectRequest(peer=control.raw(peer)))

    async def protect(self, peer: PeerId, purpose: str, weight: int = PROTECTING) -> None:
        """Have p2pd close the connection to this peer last when it has too many; weight 0 ends that. The connection's
        end does, too. Raises NetworkError; no deadline."""
        kind = p2pd_pb2.ConnManagerRequest.TAG_PEER if weight else p2pd_pb2.ConnManagerRequest.UNTAG_PEER
        change = p2pd_pb2.ConnManagerRequest(type=kind, peer=control.raw(peer), tag=purpose, weight=weight)
        await self._request("CONNMANAGER", connManager=change)

    async def connections(self) -> list[control.FarEnd]:
        """Return the remote ends of all connections. Raises NetworkError; no deadline."""
        response = await self._request("LIST_PEERS")
        return [control.FarEnd(control.peer_of(each.id), control.place_of(each.addrs[0])) for each in response.peers]

    async def open_stream(self, peer: PeerId, protocol: str) -> tuple[control.FarEnd, Stream]:
        """Open a stream to the peer's handler of that protocol. Raises NetworkError; no deadline."""
        opening = p2pd_pb2.StreamOpenRequest(peer=control.raw(peer), proto=[protocol])
        response, stream = await self._ask("STREAM_OPEN", streamOpen=opening)
        far_end = control.far_end(response.streamInfo)
        if far_end.place and far_end.relay is None:
            self.caution.worked(peer, far_end.place)
        return far_end, stream

    async def serve_streams(self, protocol: str, on_open: Callable[[Stream], None]) -> asyncio.Server:
        """Call ``on_open`` for each inbound stream, before ``read_opener``. Raises NetworkError."""
        path = self._folder.path / f"in-{next(self._serials)}.sock"
        try:
            server = await asyncio.get_running_loop().create_unix_server(lambda: Stream(on_open), str(path))
        except OSError as error:  # the folder was just removed with the process
            raise NetworkError(f"p2pd does not answer: {error}") from error
        place = Multiaddr(f"/unix{path}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=place, proto=[protocol], balanced=False)
        try:
            async with asyncio.timeout(HANDLER_DEADLINE_S):
                await self._request("STREAM_HANDLER", streamHandler=handler)
        except BaseException as error:
            server.close()
            if isinstance(error, TimeoutError):
                raise NetworkError("p2pd did not accept our stream handler") from None
            raise
        self._sockets.add(str(path))
        return server

    async def stop_serving(self, protocol: str, server: asyncio.Server) -> None:
        """Accept no more streams of that protocol; p2pd may have ended."""
        path = server.sockets[0].getsockname()
        place = Multiaddr(f"/unix{path}").to_bytes()
        self._sockets.discard(path)
        server.close()
        handler = p2pd_pb2.RemoveStreamHandlerRequest(addr=place, proto=[protocol])
        with contextlib.suppress(TimeoutError, NetworkError):
            async with asyncio.timeout(1.0):
                await self._request("REMOVE_STREAM_HANDLER", removeStreamHandler=handler)

    async def close(self) -> None:
        """End the process, with SIGKILL if it does not end in time."""
        try:
            async with asyncio.timeout(SHUTDOWN_PATIENCE_S):
                await self.p2p.shutdown()
        except TimeoutError:
            await self.kill()
        except BaseException:
            self._kill()  # the caller was cancelled and no longer waits
            raise
        finally:
            self._folder.remove()

    async def kill(self) -> None:
        """Kill the process. ``close`` must still be called."""
        self._kill()
        await self.p2p._child.wait()

    async def _check_health(self) -> None:
        missed = 0
        while missed < MAX_MISSED:
            await asyncio.sleep(PULSE_S)
            try:
                async with asyncio.timeout(PULSE_DEADLINE_S):
                    await self._request("IDENTIFY")
                missed = 0
            except (NetworkError, TimeoutError) as error:
                missed += 1
                logger.warning("p2pd did not answer: %s", error or "timeout")
            if not self._keep_sockets():
                self._killed_because = f"its sockets in {self._folder.path} were removed"
                break
        self._killed_because = self._killed_because or f"it did not answer {MAX_MISSED} times in a row and was killed"
        self._kill()

    def _keep_sockets(self) -> bool:
        """Return whether all sockets still exist, and mark them as used, for cleaners of the temporary directory."""
        try:
            for path in self._sockets:
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.debug("the sockets of p2pd cannot be marked as used: %s", error)
        return True

    def _connection_ended(self, task: asyncio.Task[None]) -> None:
        """Kill p2pd soon after hivemind's connection task ended, because it cannot deliver anything any more.

        Reading the exception here keeps asyncio from printing a traceback.
        """
        if not task.cancelled():  # ``close`` cancels it
            logger.debug("the connection to p2pd ended: %r", task.exception())
            task.get_loop().call_later(DEAF_PATIENCE_S, self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            self.p2p._child.kill()

    async def _request(self, kind: str, **fields: Any) -> p2pd_pb2.Response:
        """Send a request that opens no stream, and return the response. Raises NetworkError."""
        response, stream = await self._ask(kind, **fields)
        stream.close()
        return response

    async def _ask(self, kind: str, **fields: Any) -> tuple[p2pd_pb2.Response, Stream]:
        if not self.alive:
            raise NetworkError(f"p2pd ended with code {self.p2p._child.returncode}")
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.Type.Value(kind), **fields)
        return await control.ask(self.p2p._daemon_listen_maddr["unix"], request)


def _check_binary() -> None:
    remedy = "Reinstall hivemind with pip on Linux or macOS, x86-64 or ARM64; p2ptrain runs on no other platforms."
    with as_file(files("hivemind.hivemind_cli") / "p2pd") as path:
        if not path.exists():
            raise DeviceError(f"There is no libp2p daemon for this platform ({sys.platform}): {path}.", remedy)
        if not os.access(path, os.X_OK):
            raise DeviceError(f"The libp2p daemon {path} is not executable.", f"Run: chmod +x {path}")


@functools.cache
def _report_missing_filter() -> None:
    if reason := udp_filter.unavailable():
        page = document("SECURITY.md")
        logger.warning("p2pd runs without the filter that forbids it UDP: %s; see %s", reason, page)


def _check_free(listen: Sequence[str]) -> None:
    """Raise UserError if an address is in use: p2pd would start with the others alone."""
    if taken := [each for each in listen if interfaces.is_taken(each)]:
        raise _in_use(", ".join(map(address.host_port, taken)))


def _in_use(places: str) -> UserError:
    return UserError(
        f"{places} is in use by another program.",
        "Stop it, or choose another port, for instance with --listen /ip4/0.0.0.0/tcp/31338.",
    )


def _explained(reason: str, listen: Sequence[str]) -> UserError:
    places = ", ".join(map(address.host_port, listen))
    silent = not reason.strip()  # p2pd ended before its output was read
    if "address already in use" in reason or (silent and any(map(interfaces.is_taken, listen))):
        return _in_use(places)
    if "cannot assign requested address" in reason:
        return UserError(f"{places} is not an address of this machine.", "Choose one of its own with --listen.")
    if "permission denied" in reason and "listen" in reason:
        return UserError(f"Listening on {places} is not permitted.", "Choose a port above 1023 with --listen.")
    return DeviceError(
        f"The libp2p daemon did not start ({reason}).", "Reinstall hivemind if the message does not name the cause."
    )
