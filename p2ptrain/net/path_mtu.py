"""Paths that lose large packets in silence: how ``doctor`` finds them.

A path may carry smaller packets than this machine's interface (a tunnel, PPPoE) while a firewall drops the ICMP
messages that say so: a black hole (RFC 2923). Connections open there and small messages pass, but nothing of the size
of an exchange. Linux recovers by itself only with ``net.ipv4.tcp_mtu_probing``, which is off by default.

``loses_large_packets`` tells a narrow path from a dead one: it connects, sends a few kilobytes and waits until the
other side has acknowledged them, in segments of full size, and of at most 1220 bytes. The other side's p2pd closes such
a connection, as it does any without a libp2p greeting.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys

PROBE_S = 4.0
"""Timeout of a probe, in which a lost packet is sent again at least twice. Guess: round trips of slow lines."""
POLL_S = 0.1
PROBE_BYTES = 4096
SMALL_SEGMENT = 1220
"""Segment that every path carries: IPv6's smallest MTU, 1280 bytes, less two headers."""
SIOCOUTQ = 0x5411  # linux/sockios.h


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
