"""An author, an invite issuer, a guest and a stranger, each with a key, and what they sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain import statements
from p2ptrain.admission import AccessList, Certificate, Invite, InviteCredential, InviteRegister, Refusal
from p2ptrain.base.ids import PeerId, RunId, peer_of

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
AUTHOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NOW = 1_800_000_000
DAY = 86_400


@dataclass(frozen=True)
class Somebody:
    key: Ed25519PrivateKey

    @property
    def peer(self) -> PeerId:
        return peer_of(self.key.public_key().public_bytes_raw())

    def state(self, purpose: bytes, fields: list[Any]) -> bytes:
        return statements.signature(self.key, purpose, fields)


def somebody(number: int) -> Somebody:
    return Somebody(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


ISSUER, GUEST, STRANGER = map(somebody, (1, 2, 3))
PUBLIC = AUTHOR.public_key().public_bytes_raw()


def credential(
    uses: int = 1, expires_at: int = NOW + DAY, number: int = 9, author: Ed25519PrivateKey = AUTHOR
) -> InviteCredential:
    key = somebody(number).key
    blank = Invite(key.public_key().public_bytes_raw(), expires_at, uses, ISSUER.peer)
    return InviteCredential(blank.signed(RUN, author), key.private_bytes_raw())


def certificate(
    guest: Somebody = GUEST, by: InviteCredential | None = None, at: int = NOW, issuer: Somebody = ISSUER
) -> Certificate:
    """Return a guest's certificate as the invite issuer signs it, at a time of the test's choice."""
    by = by or credential(uses=1000)
    introduction = by.introduce(RUN, guest.peer)
    answer = InviteRegister(RUN, issuer.peer).admit(by.invite, guest.peer, introduction, AccessList(), at, issuer.state)
    assert not isinstance(answer, Refusal), answer
    return Certificate(by.invite, guest.peer, introduction, *answer)


def access_list(serial: int = 1, author: Ed25519PrivateKey = AUTHOR, **names: tuple[Any, ...]) -> AccessList:
    return AccessList(serial, NOW, **names).signed(RUN, author)
