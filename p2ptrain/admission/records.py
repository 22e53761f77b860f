"""Invites, badges and rulings: their bytes, and what makes them genuine.

Each is decoded from strangers' bytes by a ``decode`` that checks form and signatures and raises RemoteError: an object
in memory is genuine. All name the run in what is signed, not in their bytes: the reader knows it.

::

    invite   [key 32, expires_at, uses, [witness, …], author's signature]
    guest    the invite's key signs [run, peer]
    badge    [[invite], peer, guest's signature, witness, witnessed_at, witness's signature]
    witness  the witness signs [run, invite's key, peer, witnessed_at]
    rulings  [serial, issued_at, [admitted peer, …], [banned peer, …], [revoked invite's id, …], author's signature]
    ticket   [[invite], secret 32]                                       in a join link, as base64url text
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.errors import JoinLinkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId, key_of
from p2ptrain.framing import MAX_BADGE_BYTES
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

MAX_WITNESSES = 4
"""Bootstraps of one run; each adds 54 bytes to every badge. A guess."""
MAX_USES = 1000
"""Peers that one invite brings in. A guess: more is what an allowlist or an open run is for."""
MAX_INVITE_BYTES = 400
"""With four witnesses it has 346."""
MAX_RULINGS = 1000
"""Names in the rulings, of all kinds together: an allowlist of that many peers."""
MAX_RULINGS_BYTES = 60_000
"""A thousand peer ids have 54,000; one MESSAGE frame holds it."""

INVITE = b"p2ptrain invite 1"
GUEST = b"p2ptrain guest 1"
WITNESS = b"p2ptrain witness 1"
RULINGS = b"p2ptrain rulings 1"
"""Purposes of signatures (``statements``)."""

_COPY_AGAIN = "Copy the whole link again, or ask the run's author for another."


@dataclass(frozen=True, slots=True)
class Invite:
    """The author's word that the holder of a key may bring peers into the run."""

    key: bytes
    """Ed25519, public, 32 bytes; the invite's own."""
    expires_at: int
    """Seconds since 1970. Whom a witness has seen by then, is in for good."""
    uses: int
    """How many peers each witness lets in by it."""
    witnesses: tuple[PeerId, ...]
    """Who may say that a peer came in time."""
    signature: bytes = b""
    """The author's."""

    @property
    def id(self) -> str:
        """What people call it: 16 hexadecimal digits."""
        return self.key[:8].hex()

    def fields(self) -> list[Any]:
        return [self.key, self.expires_at, self.uses, list(self.witnesses), self.signature]

    def signed(self, run: RunId, author: Ed25519PrivateKey) -> Invite:
        """With the author's signature."""
        return replace(self, signature=signature(author, INVITE, [run, *self.fields()[:-1]]))

    @classmethod
    def read(cls, raw: Any, run: RunId, author: bytes) -> Self:
        """The invite in decoded fields. RemoteError when it is none, or not this author's for this run."""
        match raw:
            case [key, expires_at, uses, [*witnesses], signed] if (
                is_blob(key, KEY_BYTES)
                and is_count(expires_at)
                and is_count(uses, MAX_USES)
                and 1 <= len(witnesses) <= MAX_WITNESSES
                and all(map(_is_peer, witnesses))
                and is_blob(signed, SIGNATURE_BYTES)
            ):
                if holds(author, signed, INVITE, [run, *raw[:-1]]):
                    return cls(key, expires_at, uses, tuple(witnesses), signed)
        raise RemoteError("an invite that the run's author did not sign")


@dataclass(frozen=True, slots=True)
class InviteCredential:
    """What a join link carries: an invite and the secret half of its key."""

    invite: Invite
    secret: bytes = field(repr=False)
    """32 bytes."""

    def __str__(self) -> str:
        """As text for a join link."""
        return base64.urlsafe_b64encode(packed([self.invite.fields(), self.secret])).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str, run: RunId, author: bytes) -> Self:
        """Inverse of ``str``. JoinLinkError when it is damaged, or another run's."""
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
        """The invite's signature under a guest's name."""
        return signature(Ed25519PrivateKey.from_private_bytes(self.secret), GUEST, [run, peer])


def is_introduced(invite: Invite, run: RunId, peer: PeerId, introduction: bytes) -> bool:
    """Whether the holder of the invite's key named this guest."""
    return holds(invite.key, introduction, GUEST, [run, peer])


def attest(sign: Sign, run: RunId, invite: Invite, peer: PeerId, at: int) -> bytes:
    """A witness's signature that the guest came by the invite at that time."""
    return sign(WITNESS, [run, invite.key, peer, at])


@dataclass(frozen=True, slots=True)
class Certificate:
    """A peer's proof that it came by an invite, in time."""

    invite: Invite
    peer: PeerId
    introduction: bytes
    witness: PeerId
    witnessed_at: int
    """Seconds since 1970, by the witness's clock."""
    attestation: bytes

    def encode(self) -> bytes:
        own = [self.peer, self.introduction, self.witness, self.witnessed_at, self.attestation]
        return packed([self.invite.fields(), *own])

    @classmethod
    def decode(cls, body: bytes, run: RunId, author: bytes) -> Self:
        """Inverse of ``encode``. RemoteError unless all three signatures hold. Says nothing of times and bans."""
        match unpacked(body, MAX_BADGE_BYTES):
            case [raw, peer, introduction, witness, at, attestation] if (
                _is_peer(peer)
                and is_blob(introduction, SIGNATURE_BYTES)
                and is_count(at)
                and is_blob(attestation, SIGNATURE_BYTES)
            ):
                invite = Invite.read(raw, run, author)
                key = key_of(witness) if witness in invite.witnesses else None
                if (
                    key is not None
                    and is_introduced(invite, run, peer, introduction)
                    and holds(key, attestation, WITNESS, [run, invite.key, peer, at])
                ):
                    return cls(invite, peer, introduction, witness, at, attestation)
        raise RemoteError("a badge whose signatures do not hold")


@dataclass(frozen=True, slots=True)
class AccessList:
    """The author's word on names. All of it in one document: who has the newest has everything."""

    serial: int = 0
    """Grows with each; the largest counts. Beside order it means nothing, but is made from the time, so that an author
    who lost the last document still makes a newer one."""
    issued_at: int = 0
    admitted: tuple[PeerId, ...] = ()
    """Ascending. They need no badge."""
    banned: tuple[PeerId, ...] = ()
    """Ascending. Whatever they show."""
    revoked: tuple[str, ...] = ()
    """Ids of invites, ascending. They bring in nobody, and whoever came by them is out, unless it is ``admitted``."""
    signature: bytes = b""

    def signed(self, run: RunId, author: Ed25519PrivateKey) -> AccessList:
        """With the author's signature. ValueError when there are too many names."""
        if self.size > MAX_RULINGS:
            raise ValueError(f"{self.size} names where {MAX_RULINGS} are allowed")
        return replace(self, signature=signature(author, RULINGS, [run, *self._fields()]))

    @property
    def size(self) -> int:
        return len(self.admitted) + len(self.banned) + len(self.revoked)

    def encode(self) -> bytes:
        return packed([*self._fields(), self.signature])

    @classmethod
    def decode(cls, body: bytes, run: RunId, author: bytes) -> Self:
        """Inverse of ``encode``. RemoteError when they are none, or not this author's for this run.

        Names are looked at last: anybody may send a thousand, and to check them takes thirty times as long as to see
        that the author did not sign them.
        """
        match unpacked(body, MAX_RULINGS_BYTES):
            case [serial, at, [*admitted], [*banned], [*revoked], signed] as fields if (
                is_count(serial)
                and is_count(at)
                and len(admitted) + len(banned) + len(revoked) <= MAX_RULINGS
                and is_blob(signed, SIGNATURE_BYTES)
                and holds(author, signed, RULINGS, [run, *fields[:-1]])
                and all(map(_is_peer, admitted))
                and all(map(_is_peer, banned))
                and all(type(each) is str and len(each) == 16 for each in revoked)
            ):
                return cls(serial, at, tuple(admitted), tuple(banned), tuple(revoked), signed)
        raise RemoteError("rulings that the run's author did not sign")

    def _fields(self) -> list[Any]:
        return [self.serial, self.issued_at, list(self.admitted), list(self.banned), list(self.revoked)]


def _is_peer(value: object) -> bool:
    return type(value) is str and key_of(value) is not None
