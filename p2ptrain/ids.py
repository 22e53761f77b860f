"""The names things go by. No behaviour beyond shortening them for a human eye."""

from __future__ import annotations

from typing import NamedTuple, NewType

PROTOCOL_VERSION = 1
"""Peers exchange only with the same protocol version; it is part of the manifest, and so of the RunId."""

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58, ``12D3KooW…``: the multihash of the peer's Ed25519 public key."""

RunId = NewType("RunId", str)
"""SHA-256 of the manifest's canonical bytes: 64 lower-case hexadecimal digits."""


class LinkId(NamedTuple):
    """One stream to one partner, as its own side names it. Never sent over the wire."""

    peer: PeerId
    serial: int
    outbound: bool  # True: we opened it

    def __str__(self) -> str:
        return f"{short(self.peer)}{'>' if self.outbound else '<'}{self.serial}"


def short(identifier: str) -> str:
    """Six characters that tell peers apart at a glance; the end, because all Ed25519 peer ids begin alike."""
    return identifier[-6:]
