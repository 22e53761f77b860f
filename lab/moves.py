"""Events in the network of a running host: another address, another network, no route, a router that forgets."""

from __future__ import annotations

import os
import socket
import struct

from lab.hosts import Host, Network
from lab.script import ActKind

_NETFILTER, _CONNTRACK, _DELETE = 12, 1, 2  # linux/netlink.h, linux/netfilter/nfnetlink.h, nfnetlink_conntrack.h
_REQUEST_ACK = 0x5  # NLM_F_REQUEST | NLM_F_ACK
_ERROR = 2  # NLMSG_ERROR, which also acknowledges


def change_network(network: Network, name: str, kind: ActKind) -> None:
    """Perform an act on the network of a host. Raises RuntimeError or OSError if it fails."""
    host = network.hosts[name]
    match kind:
        case ActKind.READDRESS:
            network.readdress(name)
        case ActKind.MOVE:
            network.move(name)
        case ActKind.UNROUTE:
            host.namespace.ip(["route del default"])
        case ActKind.REROUTE:
            host.namespace.ip([f"route replace default via {host.gateway}"])
        case ActKind.RENUMBER:
            network.renumber(name)
            forget_connections(host)
        case ActKind.FORGET:
            forget_connections(host)
        case _:
            raise ValueError(f"not an event of a network: {kind}")


def forget_connections(host: Host) -> None:
    """Delete all connections that the host's router tracks, with their address translations. Raises OSError."""
    assert host.router is not None  # lab.scenario
    host.router.call(_flush)


def _flush() -> None:
    body = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)
    header = struct.pack("=IHHII", 16 + len(body), _CONNTRACK << 8 | _DELETE, _REQUEST_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as link:
        link.send(header + body)
        answer = link.recv(4096)
    kind, error = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    if kind == _ERROR and error:
        raise OSError(-error, os.strerror(-error))
