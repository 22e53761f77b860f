"""Identifiers of peers, runs and links, and the encoding of peer ids."""

from __future__ import annotations

from typing import NamedTuple, NewType

import base58

PROTOCOL_VERSION = 12
"""Version of the peer protocol. Only equal versions exchange; part of the manifest and therefore of the RunId."""

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id, ``12D3KooW…``: the multihash of the peer's Ed25519 public key."""

LONGEST_PEER_ID = 64
"""Maximum length in characters; the id of an Ed25519 key has 52."""

RunId = NewType("RunId", str)
"""SHA-256 of the manifest's canonical bytes: 64 lower-case hexadecimal digits."""


class LinkId(NamedTuple):
    """Local name of one stream to one partner. Never sent over the wire."""

    peer: PeerId
    serial: int
    outbound: bool  # True: opened by this side

    def __str__(self) -> str:
        return f"{short(self.peer)}{'>' if self.outbound else '<'}{self.serial}"


def short(identifier: str) -> str:
    """Return the last six characters: Ed25519 peer ids all begin alike, so the end tells them apart."""
    return identifier[-6:]


def multihash(peer: str) -> bytes | None:
    """Decode a base58 peer id; None if it is too long or not canonical base58."""
    if len(peer) > LONGEST_PEER_ID:
        return None
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        return None
    return raw if base58.b58encode(raw).decode() == peer else None


_ED25519 = bytes.fromhex("002408011220")
"""Prefix of an Ed25519 key's peer id before its 32 bytes: the identity multihash of 36 bytes, which are libp2p's
protobuf ``PublicKey{type = Ed25519, data = 32 bytes}``."""


def key_of(peer: str) -> bytes | None:
    """Return the Ed25519 public key, 32 bytes, that a peer id holds; None if it holds none."""
    raw = multihash(peer)
    if raw is None or len(raw) != len(_ED25519) + 32 or not raw.startswith(_ED25519):
        return None
    return raw[len(_ED25519) :]


def peer_of(key: bytes) -> PeerId:
    """Return the peer id of an Ed25519 public key of 32 bytes."""
    return PeerId(base58.b58encode(_ED25519 + key).decode())
