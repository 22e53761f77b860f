"""Invites, certificates and access lists: encoding and signatures.

``decode`` checks form and signatures of untrusted bytes and raises RemoteError, so an object in memory is genuine. The
signatures cover the id of the run, which is not in the bytes.

::

    invite        [key 32, expires_at, uses, issuer, author's signature]
    introduction  the invite's key signs [run, peer]
    certificate   [[invite], peer, introduction, witnessed_at, attestation]
    attestation   the issuer signs [run, invite's key, peer, witnessed_at]
    access list   [serial, issued_at, [admitted peer, …], [banned peer, …], [revoked invite, …], author's signature]
    credential    [[invite], secret 32]                                       in a join link, as base64url text
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.errors import JoinLinkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId, key_of
from p2ptrain.framing import MAX_CERTIFICATE_BYTES
from p2ptrain.statements import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    Sign,
    holds,
    is_blob,
    is_count,
    packed,
    signature,
    unpacked,
)

MAX_USES = 1000
"""Peers that one invite brings in. Guess: count the peers that real invites bring in."""
MAX_INVITE_BYTES = 400
"""Largest invite; usual ones have 161 bytes."""
MAX_ACCESS_LIST_NAMES = 1000
"""Names in an access list, all kinds together."""
MAX_ACCESS_LIST_BYTES = 60_000
"""Largest access list, which fits into one MESSAGE frame; 1000 peer ids take 54,000 bytes."""

INVITE = b"p2ptrain invite 1"
GUEST = b"p2ptrain guest 1"
ATTESTATION = b"p2ptrain witness 1"
ACCESS_LIST = b"p2ptrain rulings 1"
"""Purposes of signatures (``statements``)."""

_COPY_AGAIN = "Copy the whole link again, or ask the run's author for another."


@dataclass(frozen=True, slots=True)
class Invite:
    """The author's signed permission for the holder of a key to bring peers into the run."""

    key: bytes
    """The invite's own Ed25519 public key, 32 bytes."""
    expires_at: int
    """Seconds since 1970. Peers that an issuer has attested by then remain admitted."""
    uses: int
    """Number of peers that the invite admits."""
    issuer: PeerId
    """Node that may attest that a peer came in time."""
    signature: bytes = b""

    @property
    def id(self) -> str:
        """Name of the invite for people: 16 hexadecimal digits."""
        return self.key[:8].hex()

    def fields(self) -> list[Any]:
        return [self.key, self.expires_at, self.uses, self.issuer, self.signature]

    def signed(self, run: RunId, author: Ed25519PrivateKey) -> Invite:
        return replace(self, signature=signature(author, INVITE, [run, *self.fields()[:-1]]))

    @classmethod
    def read(cls, raw: Any, run: RunId, author: bytes) -> Self:
        """Read an invite from decoded fields. Raises RemoteError unless this author signed it for this run."""
        match raw:
            case [key, expires_at, uses, issuer, signed] if (
                is_blob(key, KEY_BYTES)
                and is_count(expires_at)
                and is_count(uses, MAX_USES)
                and _is_peer(issuer)
                and is_blob(signed, SIGNATURE_BYTES)
            ):
                if holds(author, signed, INVITE, [run, *raw[:-1]]):
                    return cls(key, expires_at, uses, issuer, signed)
        raise RemoteError("an invite that the run's author did not sign")


@dataclass(frozen=True, slots=True)
class InviteCredential:
    """An invite and the secret half of its key, as a join link carries them."""

    invite: Invite
    secret: bytes = field(repr=False)
    """Secret half of the invite's key, 32 bytes."""

    def __str__(self) -> str:
        """Encode as text for a join link."""
        return base64.urlsafe_b64encode(packed([self.invite.fields(), self.secret])).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, run: RunId, author: bytes) -> Self:
        """Parse the text from a join link. Raises JoinLinkError if it is damaged or of another run."""
        try:
            body = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            raw, secret = unpacked(body, MAX_INVITE_BYTES + KEY_BYTES + 8)
            key = Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        except (RemoteError, binascii.Error, ValueError, TypeError):
            raise JoinLinkError("The link's invite is cut off or was retyped.", _COPY_AGAIN) from None
        try:
            invite = Invite.read(raw, run, author)
        except RemoteError as error:
            raise JoinLinkError(f"The link's invite cannot be used: {error}.", _COPY_AGAIN) from None
        if key != invite.key:
            raise JoinLinkError("The link's invite is cut off or was retyped.", _COPY_AGAIN)
        return cls(invite, secret)

    def introduce(self, run: RunId, peer: PeerId) -> bytes:
        """Sign the id of an invited peer with the invite's key."""
        return signature(Ed25519PrivateKey.from_private_bytes(self.secret), GUEST, [run, peer])


def is_introduced(invite: Invite, run: RunId, peer: PeerId, introduction: bytes) -> bool:
    """Return whether the invite's key signed the id of this peer."""
    return holds(invite.key, introduction, GUEST, [run, peer])


def attest(sign: Sign, run: RunId, invite: Invite, peer: PeerId, at: int) -> bytes:
    """Sign, as an issuer, that the peer used the invite at that time."""
    return sign(ATTESTATION, [run, invite.key, peer, at])


@dataclass(frozen=True, slots=True)
class Certificate:
    """A peer's proof that it was admitted with an invite, in time."""

    invite: Invite
    peer: PeerId
    introduction: bytes
    witnessed_at: int
    """Time of admission in seconds since 1970, by the issuer's clock."""
    attestation: bytes

    def encode(self) -> bytes:
        own = [self.peer, self.introduction, self.witnessed_at, self.attestation]
        return packed([self.invite.fields(), *own])

    @classmethod
    def decode(cls, body: bytes, run: RunId, author: bytes) -> Self:
        """Decode a certificate.

        Raises RemoteError unless all three signatures are valid; times and bans are not checked.
        """
        match unpacked(body, MAX_CERTIFICATE_BYTES):
            case [raw, peer, introduction, at, attestation] if (
                _is_peer(peer)
                and is_blob(introduction, SIGNATURE_BYTES)
                and is_count(at)
                and is_blob(attestation, SIGNATURE_BYTES)
            ):
                invite = Invite.read(raw, run, author)
                key = key_of(invite.issuer)
                if (
                    key is not None
                    and is_introduced(invite, run, peer, introduction)
                    and holds(key, attestation, ATTESTATION, [run, invite.key, peer, at])
                ):
                    return cls(invite, peer, introduction, at, attestation)
        raise RemoteError("a certificate with invalid signatures")


@dataclass(frozen=True, slots=True)
class AccessList:
    """The author's signed list of admitted peers, banned peers and revoked invites; the newest replaces all others."""

    serial: int = 0
    """Version; the list with the largest one counts.

    Derived from the time, so that an author without the last list still makes a newer one.
    """
    issued_at: int = 0
    """Seconds since 1970."""
    admitted: tuple[PeerId, ...] = ()
    """Peers admitted without a certificate, ascending."""
    banned: tuple[PeerId, ...] = ()
    """Peers refused whatever they show, ascending."""
    revoked: tuple[str, ...] = ()
    """Ids of revoked invites, ascending. Their certificates are invalid, but ``admitted`` takes precedence."""
    signature: bytes = b""

    def signed(self, run: RunId, author: Ed25519PrivateKey) -> AccessList:
        """Return a copy with the author's signature. Raises ValueError if there are too many names."""
        if self.size > MAX_ACCESS_LIST_NAMES:
            raise ValueError(f"{self.size} names, but at most {MAX_ACCESS_LIST_NAMES} are allowed")
        return replace(self, signature=signature(author, ACCESS_LIST, [run, *self._fields()]))

    @property
    def size(self) -> int:
        return len(self.admitted) + len(self.banned) + len(self.revoked)

    def encode(self) -> bytes:
        return packed([*self._fields(), self.signature])

    @classmethod
    def decode(cls, body: bytes, run: RunId, author: bytes) -> Self:
        """Decode an access list. Raises RemoteError unless this author signed it for this run.

        Names are checked after the signature, because checking 1000 names takes thirty times as long.
        """
        match unpacked(body, MAX_ACCESS_LIST_BYTES):
            case [serial, at, [*admitted], [*banned], [*revoked], signed] as fields if (
                is_count(serial)
                and is_count(at)
                and len(admitted) + len(banned) + len(revoked) <= MAX_ACCESS_LIST_NAMES
                and is_blob(signed, SIGNATURE_BYTES)
                and holds(author, signed, ACCESS_LIST, [run, *fields[:-1]])
                and all(map(_is_peer, admitted))
                and all(map(_is_peer, banned))
                and all(type(each) is str and len(each) == 16 for each in revoked)
            ):
                return cls(serial, at, tuple(admitted), tuple(banned), tuple(revoked), signed)
        raise RemoteError("an access list that the run's author did not sign")

    def _fields(self) -> list[Any]:
        return [self.serial, self.issued_at, list(self.admitted), list(self.banned), list(self.revoked)]


def _is_peer(value: object) -> bool:
    return type(value) is str and key_of(value) is not None
