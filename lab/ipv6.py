"""IPv6 in the small internet of ``lab.hosts``: addresses, routes and firewalls beside those of IPv4.

::

    backbone 2600:11:n::1 ── 2600:11:n::2 host
    backbone 2600:11:n::1 ── 2600:11:n::2 router 2600:12:n::1 ── 2600:12:n::2 host

The prefix counts as public; its owner cannot be reached from inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lab.namespaces import Namespace

IPv6 = Literal["none", "open", "firewall"]
"""open: everybody may connect. firewall: nothing new comes in, as home routers have it."""

_FIREWALL = """
table ip6 firewall {
    chain through {
        type filter hook %s priority 0; policy drop;
        ct state established,related accept
        meta l4proto icmpv6 accept
        iifname { "lo", "lan0" } accept
    }
}
"""


def connect_line(backbone: Namespace, edge: Namespace, number: int) -> None:
    """Give IPv6 addresses to both ends of access link ``number``, which is up."""
    _forward(backbone)
    backbone.ip([f"address add 2600:11:{number:x}::1/64 dev line{number} nodad"])
    edge.ip([f"address add 2600:11:{number:x}::2/64 dev wan0 nodad"])
    edge.ip([f"route add default via 2600:11:{number:x}::1 dev wan0"])


def connect_router(backbone: Namespace, router: Namespace, number: int) -> None:
    """Give the network behind a router a public prefix."""
    _forward(router)
    router.ip([f"address add 2600:12:{number:x}::1/64 dev lan0 nodad"])
    backbone.ip([f"route add 2600:12:{number:x}::/64 via 2600:11:{number:x}::2 dev line{number}"])


def connect_host(host: Namespace, number: int, place: int) -> str:
    """Give host ``place`` behind the router of access link ``number`` an address, and return it."""
    host.ip([f"address add 2600:12:{number:x}::{place:x}/64 dev wan0 nodad"])
    host.ip([f"route add default via 2600:12:{number:x}::1 dev wan0"])
    return f"2600:12:{number:x}::{place:x}"


def close_to_strangers(edge: Namespace, is_router: bool) -> None:
    """Let nothing new in from the access link."""
    edge.run("nft", "-f", "-", given=_FIREWALL % ("forward" if is_router else "input"))


def _forward(namespace: Namespace) -> None:
    namespace.call(lambda: Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1"))
