"""Paths that lose large packets in silence: how ``doctor`` finds them, and what cures them.

A path may carry smaller packets than this machine's interface (a tunnel, PPPoE) while a firewall drops the ICMP
messages that say so: a black hole (RFC 2923). Connections open there and small messages pass, but nothing of the size
of an exchange. Linux recovers by itself only with ``net.ipv4.tcp_mtu_probing``, which is off by default.

``loses_large_packets`` tells a narrow path from a dead one: it connects, sends a few kilobytes and waits until the
other side has acknowledged them, in segments of full size, and of at most 1220 bytes. The other side's p2pd closes such
a connection, as it does any without a libp2p greeting.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
from pathlib import Path

PROBE_S = 4.0
"""Timeout of a probe, in which a lost packet is sent again at least twice. Guess: round trips of slow lines."""
POLL_S = 0.1
PROBE_BYTES = 4096
SMALL_SEGMENT = 1220
"""Segment that every path carries: IPv6's smallest MTU, 1280 bytes, less two headers."""
SMALL_MTU = 1280
SIOCOUTQ = 0x5411  # linux/sockios.h
ROUTES = Path("/proc/net/route")


async def probe(host: str, port: int, segment: int | None = None) -> bool | None:
    """Return whether a few kilobytes arrive at a place; None if nobody answers there, or the system cannot tell.

    Args:
        segment: largest segment to send, in bytes; None: what the interface allows.
    """
    if sys.platform != "linux":
        return None
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setblocking(False)
            if segment is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
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


async def loses_large_packets(host: str, port: int) -> bool | None:
    """Return whether the path to a place loses large packets in silence; None if nobody answers there."""
    full, small = await asyncio.gather(probe(host, port), probe(host, port, SMALL_SEGMENT))
    return None if full is None or small is None else small and not full


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
