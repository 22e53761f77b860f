"""Kinds of home routers, as nftables rulesets. Pure.

All let every packet out and no new connection in. They differ in what decides whether two of them let their hosts
connect directly: which public port they give a host's port (RFC 4787: address and port mapping), and whether they are
silent to unasked packets or reject them.
"""

from __future__ import annotations

from typing import Literal

RouterKind = Literal["keep", "other", "keep_reset", "other_reset", "firewall", "firewall_reset", "symmetric"]
"""keep: the public port is the host's own. other: another one, the same for all destinations, as in providers'
networks. symmetric: another one for each destination. firewall: no translation, the host's address is public. _reset:
the router answers unasked packets with a TCP reset, as OpenWrt does; without it it drops them."""

_MASQUERADE = {
    "keep": "masquerade",
    "other": "masquerade to :jhash tcp sport mod 20000 seed 0x5 offset 20000",
    "symmetric": "masquerade random,fully-random",
}


def translates(kind: RouterKind) -> bool:
    """Return whether the hosts behind a router of this kind have private addresses."""
    return not kind.startswith("firewall")


def ruleset(kind: RouterKind) -> str:
    """Return the ruleset of a router between ``lan0`` and ``wan0``."""
    mapping = kind.removesuffix("_reset")
    refuse = "meta l4proto tcp reject with tcp reset" if kind != mapping else "drop"
    translation = ""
    if translates(kind):
        translation = f"""
    chain out {{
        type nat hook postrouting priority 100; policy accept;
        oifname "wan0" meta l4proto tcp {_MASQUERADE[mapping]}
        oifname "wan0" masquerade
    }}"""
    return f"""
table ip router {{{translation}
    chain through {{
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "lan0" accept
        {refuse}
    }}
    chain in {{
        type filter hook input priority 0; policy drop;
        ct state established,related accept
        iifname "lan0" accept
        {refuse}
    }}
}}
"""
