"""The names things go by, and how a peer id is spelled."""

from __future__ import annotations

from typing import NamedTuple, NewType

import base58

PROTOCOL_VERSION = 8
"""Peers exchange only with the same protocol version; it is part of the manifest, and so of the RunId."""

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58, ``12D3KooW…``: the multihash of the peer's Ed25519 public key."""

LONGEST_PEER_ID = 64
"""Characters; an Ed25519 key's id has 52."""

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


def multihash(peer: str) -> bytes | None:
    """The bytes that a base58 text spells; None when it is too long, or not base58 in its one canonical spelling."""
    if len(peer) > LONGEST_PEER_ID:
        return None
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        return None
    return raw if base58.b58encode(raw).decode() == peer else None


_ED25519 = bytes.fromhex("002408011220")
"""Before the 32 bytes of an Ed25519 key in its peer id: the identity multihash of 36 bytes, which are libp2p's protobuf
``PublicKey{type = Ed25519, data = 32 bytes}``."""


def key_of(peer: str) -> bytes | None:
    """The Ed25519 public key, 32 bytes, that a peer id spells; None when it spells none."""
    raw = multihash(peer)
    if raw is None or len(raw) != len(_ED25519) + 32 or not raw.startswith(_ED25519):
        return None
    return raw[len(_ED25519) :]


def peer_of(key: bytes) -> PeerId:
    """The peer id of an Ed25519 public key of 32 bytes."""
    return PeerId(base58.b58encode(_ED25519 + key).decode())
