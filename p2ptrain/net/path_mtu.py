"""Paths that lose large packets in silence, and how p2pd's connections get through them.

A path may carry smaller packets than this machine's interface (a tunnel, PPPoE) while a firewall drops the ICMP
messages that say so: a black hole (RFC 2923). Connections open there and small messages pass, but nothing of the size
of an exchange. Linux recovers by itself only with ``net.ipv4.tcp_mtu_probing``, which is off by default.

``PathWatch`` looks for connections of p2pd whose oldest segment times out again and again. It lets routers fragment
their packets (``IP_MTU_DISCOVER``), which changes nothing on other paths. This needs no privileges: a parent may take
its child's sockets (pidfd_getfd(2), Linux 5.6). IPv6 has no such fragments; there the watch only names the path.

``examine`` tells a narrow path from a dead one: it connects, sends a few kilobytes and waits until the other side has
acknowledged them, in segments of full size, of at most 1220 bytes, and of full size that routers may fragment. The
other side's p2pd closes such a connection, as it does any without a libp2p greeting.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from p2ptrain.base.bounded import BoundedDict

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Seconds between two looks."""
STUCK_TIMEOUTS = 3
"""Timeouts of one segment in a row, each twice as long as the last, after which its connection counts as stuck: 1.4 s
on a short path (measured)."""
PROBE_S = 4.0
"""Timeout of a probe, in which a lost packet is sent again at least twice. Guess: round trips of slow lines."""
POLL_S = 0.1
PROBE_BYTES = 4096
SMALL_SEGMENT = 1220
"""Segment that every path carries: IPv6's smallest MTU, 1280 bytes, less two headers."""
SMALL_MTU = 1280
MAX_PLACES = 256
MAX_EXAMINED = 8
"""Most paths examined at once."""
ESTABLISHED = "01"  # include/net/tcp_states.h
PIDFD_GETFD = 438  # the same on all architectures of Linux
IP_MTU_DISCOVER, IP_PMTUDISC_DONT = 10, 0  # linux/in.h
SIOCOUTQ = 0x5411  # linux/sockios.h
PROBING = Path("/proc/sys/net/ipv4/tcp_mtu_probing")
ROUTES = Path("/proc/net/route")


class TcpRow(NamedTuple):
    """An open connection in the kernel's table."""

    host: str
    """Remote IP address; an IPv4 one in its IPv4 form, also on a socket for both families."""
    port: int
    timeouts: int
    """Timeouts of its oldest segment so far."""
    inode: int


def parse(table: str, least_timeouts: int = 0) -> Iterator[TcpRow]:
    """Yield the established connections in the text of /proc/net/tcp or tcp6 with at least so many timeouts."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != ESTABLISHED or int(fields[6], 16) < least_timeouts:
            continue
        host, _, port = fields[2].partition(":")
        words = [int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8)]
        place = ipaddress.ip_address(b"".join(words))
        mapped = place.ipv4_mapped if isinstance(place, ipaddress.IPv6Address) else None
        yield TcpRow(str(mapped or place), int(port, 16), int(fields[6], 16), int(fields[9]))


async def probe(host: str, port: int, segment: int | None = None, fragments: bool = False) -> bool | None:
    """Return whether a few kilobytes arrive at a place; None if nobody answers there, or the system cannot tell.

    Args:
        segment: largest segment to send, in bytes; None: what the interface allows.
        fragments: whether routers may fragment the packets, which needs IPv4.
    """
    if sys.platform != "linux":
        return None
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setblocking(False)
            if segment is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            if fragments:
                sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT)
            async with asyncio.timeout(PROBE_S):
                await loop.sock_connect(sock, (host, port))
            return await _arrives(loop, sock)
    except (OSError, TimeoutError):
        return None


async def _arrives(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            await loop.sock_sendall(sock, bytes(PROBE_BYTES))
            while _unacknowledged(sock):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    except OSError:  # the other side has closed the connection, having read the first segment
        return True
    return True


def _unacknowledged(sock: socket.socket) -> int:
    """Return the bytes that the other side has not acknowledged. Raises OSError once the connection is gone."""
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
    return int.from_bytes(fcntl.ioctl(sock, SIOCOUTQ, bytes(4)), sys.byteorder)


class PathVerdict(NamedTuple):
    """What ``examine`` found out about a path."""

    is_narrow: bool
    """Whether it loses large packets in silence."""
    fragments_pass: bool = False
    """Whether large packets pass once routers may fragment them."""


async def examine(host: str, port: int) -> PathVerdict | None:
    """Examine the path to a place; None if nobody answers there."""
    full, small, pieces = await asyncio.gather(
        probe(host, port), probe(host, port, SMALL_SEGMENT), probe(host, port, fragments=True)
    )
    if full is None or small is None:
        return None
    return PathVerdict(is_narrow=small and not full, fragments_pass=":" not in host and pieces is True)


def default_interface() -> str:
    """Return the name of the interface of the default route by IPv4; empty if there is none."""
    with contextlib.suppress(OSError):
        for row in map(str.split, ROUTES.read_text().splitlines()[1:]):
            if len(row) > 1 and row[1] == "00000000":
                return row[0]
    return ""


def remedies() -> list[str]:
    """Return the commands that cure narrow paths on this machine: for what it sends, and for both directions."""
    name = default_interface() or "INTERFACE"
    return ["sudo sysctl -w net.ipv4.tcp_mtu_probing=1", f"sudo ip link set dev {name} mtu {SMALL_MTU}"]


class PathWatch:
    """Watches the connections of one p2pd.

    Args:
        pid: p2pd's process id.
        found: called for each remote host behind a narrow path, once.
    """

    def __init__(self, pid: int, found: Callable[[str, PathVerdict], None]) -> None:
        self._pid = pid
        self._found = found
        self._hosts: BoundedDict[str, PathVerdict] = BoundedDict(MAX_PLACES)
        """Remote hosts whose path was examined."""
        self._handled: BoundedDict[int, bool] = BoundedDict(4 * MAX_PLACES)
        """Inodes of handled sockets, and whether routers may fragment their packets now."""

    async def run(self) -> None:
        """Watch until cancelled. Returns at once where the system does not show connections."""
        while PROBING.exists():
            await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Help the connections that are stuck now, and examine their paths."""
        knows_any = any(each.is_narrow for each in self._hosts.values())
        rows = self._rows(0 if knows_any else STUCK_TIMEOUTS)
        due = [row for row in rows if row.inode not in self._handled and self._is_due(row)]
        if not due:
            return
        mine = self._sockets()
        stuck = [row for row in due if row.inode in mine]
        for row in stuck:
            self._handled[row.inode] = ":" not in row.host and self._fragment(mine[row.inode])
        unknown = {row.host: row for row in stuck if row.host not in self._hosts and not _is_local(row.host)}
        await asyncio.gather(*(self._examine(row) for row in list(unknown.values())[:MAX_EXAMINED]))

    def _is_due(self, row: TcpRow) -> bool:
        known = self._hosts.get(row.host)
        return row.timeouts >= STUCK_TIMEOUTS or (known is not None and known.is_narrow)

    async def _examine(self, row: TcpRow) -> None:
        verdict = await examine(row.host, row.port)
        if verdict is not None:  # else it was only away, or lets nobody in
            helps = verdict.fragments_pass and self._handled.get(row.inode, False)
            verdict = verdict._replace(fragments_pass=helps)
            self._hosts[row.host] = verdict
            if verdict.is_narrow:
                self._found(row.host, verdict)

    def _rows(self, least_timeouts: int) -> Iterable[TcpRow]:
        for name in ("tcp", "tcp6"):
            try:
                yield from parse(Path(f"/proc/{self._pid}/net/{name}").read_text(), least_timeouts)
            except (OSError, ValueError):  # p2pd has ended, or IPv6 is off
                continue

    def _sockets(self) -> dict[int, int]:
        """Return p2pd's descriptors by the inode of their sockets."""
        found: dict[int, int] = {}
        with contextlib.suppress(OSError):  # p2pd has ended, or the system hides it
            for each in os.scandir(f"/proc/{self._pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    kind, _, inode = str(Path(each.path).readlink()).partition(":")
                    if kind == "socket":
                        found[int(inode.strip("[]"))] = int(each.name)
        return found

    def _fragment(self, descriptor: int) -> bool:
        """Let routers fragment what p2pd sends by this socket; return False if the system forbids it."""
        try:
            with _taken(self._pid, descriptor) as sock:
                sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT)
        except OSError as error:
            logger.info("p2pd's socket cannot be changed: %s", error)
            return False
        return True


def _taken(pid: int, descriptor: int) -> socket.socket:
    """Return a duplicate of another process's socket. Raises OSError."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    handle = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        taken = libc.syscall(PIDFD_GETFD, handle, descriptor, 0)
    finally:
        os.close(handle)
    if taken < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return socket.socket(fileno=taken)


def _is_local(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
