"""Peer identity: an Ed25519 key pair; the peer id encodes its public key.

The key file has go-libp2p's format: the protobuf ``PrivateKey{type = Ed25519, data = 32-byte seed + 32-byte public
key}``. A peer id is the base58 form of the identity multihash of ``PublicKey{type = Ed25519, data = 32 bytes}``
(libp2p specification, peer-ids). Therefore a signed presence needs no field for the public key.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2ptrain import statements
from p2ptrain.base import files
from p2ptrain.base.errors import HomeError
from p2ptrain.base.ids import PeerId, key_of, peer_of
from p2ptrain.swarm.messages import Presence
from p2ptrain.wire import presence_bytes, trimmed

_PRIVATE_PREFIX = bytes.fromhex("08011240")  # field 1: type 1 (Ed25519); field 2: 64 bytes
_KEY_PREFIX = bytes.fromhex("08011220")  # field 1: type 1; field 2: 32 bytes
_KEY_BYTES = 32  # private seed and public key alike


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Key pair and its file."""

    path: Path
    peer_id: PeerId
    _key: Ed25519PrivateKey = dataclasses.field(repr=False)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Load the identity at ``path``, or create one if there is no file. Raises HomeError."""
        try:
            if not files.exists(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                files.replace(path, _serialized(Ed25519PrivateKey.generate()), mode=0o600)
            raw = path.read_bytes()
        except OSError as error:
            raise HomeError(
                f"The identity key {path} cannot be read or written: {error.strerror}.", files.remedy(error)
            ) from error
        key = _parsed(raw)
        if key is None:
            raise HomeError(
                f"{path} is not an identity key ({len(raw)} bytes; its secret and public halves do not match).",
                "Restore it from a backup, or move it away to get a new identity.",
            )
        return cls(path, peer_of(key.public_key().public_bytes_raw()), key)

    def sign(self, presence: Presence) -> Presence:
        """Trim our own presence to the limits of a directory record and sign it. Raises ValueError if not ours."""
        if presence.peer != self.peer_id:
            raise ValueError(f"{self.peer_id} cannot sign for {presence.peer}")
        presence = trimmed(presence)
        return dataclasses.replace(presence, signature=self._key.sign(presence_bytes(presence)))

    def state(self, purpose: bytes, fields: list[object]) -> bytes:
        """Sign a statement (``p2ptrain.statements``)."""
        return statements.signature(self._key, purpose, fields)


def verify(presence: Presence) -> bool:
    """Return whether the key in its peer id signed the presence."""
    key = public_key(presence.peer)
    if key is None:
        return False
    try:
        key.verify(presence.signature, presence_bytes(presence))
    except InvalidSignature:
        return False
    return True


def peer_id_of(serialized: bytes) -> PeerId | None:
    """Return the peer id of a public key in libp2p's protobuf form; None if it is not an Ed25519 key."""
    if len(serialized) != len(_KEY_PREFIX) + _KEY_BYTES or not serialized.startswith(_KEY_PREFIX):
        return None
    return peer_of(serialized[len(_KEY_PREFIX) :])


def public_key(peer: PeerId) -> Ed25519PublicKey | None:
    """Return the public key in a peer id; None if it is not an Ed25519 peer id."""
    raw = key_of(peer)
    return None if raw is None else Ed25519PublicKey.from_public_bytes(raw)


def _serialized(key: Ed25519PrivateKey) -> bytes:
    return _PRIVATE_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()


def _parsed(raw: bytes) -> Ed25519PrivateKey | None:
    seed = raw[len(_PRIVATE_PREFIX) : len(_PRIVATE_PREFIX) + _KEY_BYTES]
    if len(seed) != _KEY_BYTES:
        return None
    key = Ed25519PrivateKey.from_private_bytes(seed)
    return key if raw == _serialized(key) else None
