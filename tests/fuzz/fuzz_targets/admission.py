"""Targets for membership certificates, invites, access lists and receipts, and for the gate that reads certificates."""

from __future__ import annotations

import people

from fuzz_targets.common import (
    MESSAGES,
    NOW,
    OWNER,
    PEER,
    RUN,
    BytesLink,
    BytesTransport,
    Silence,
    Target,
    frames,
    refusing,
    run,
)
from p2ptrain import wire
from p2ptrain.admission import AccessList, Certificate, Gate, InviteCredential
from p2ptrain.base.errors import JoinLinkError, NetworkError, RemoteError
from p2ptrain.framing import FrameKind
from p2ptrain.net.gate import GatedTransport
from p2ptrain.net.session import decline_while_away
from p2ptrain.ports import Link
from p2ptrain.receipts import Receipt

CERTIFICATE = people.certificate(OWNER, at=int(NOW)).encode()
MESSAGE = (FrameKind.MESSAGE, wire.encode_message(MESSAGES[0]))


@refusing(RemoteError)
def certificate(data: bytes) -> None:
    found = Certificate.decode(data, RUN, people.PUBLIC)
    assert found == people.certificate(), "nobody else has signed anything here"
    assert found.encode() == data


@refusing(JoinLinkError)
def credential(data: bytes) -> None:
    assert InviteCredential.parse(data.decode("utf-8", "replace"), RUN, people.PUBLIC) == people.credential()


@refusing(RemoteError)
def access_list(data: bytes) -> None:
    assert AccessList.decode(data, RUN, people.PUBLIC).encode() == data


@refusing(RemoteError)
def receipt(data: bytes) -> None:
    found = Receipt.decode(data)
    assert found.encode() == data
    found.is_signed(RUN)


# --- the gate -----------------------------------------------------------------------------------------------------


def gated(data: bytes) -> GatedTransport:
    gate = Gate("invite", RUN, people.PUBLIC, CERTIFICATE)
    return GatedTransport(BytesTransport(data), gate, PEER, Silence(), wall=lambda: NOW)


@refusing(RemoteError, NetworkError)
def shown_certificate(data: bytes) -> bool:
    """Check the certificate that the initiator of a link shows."""
    heard: list[tuple[int, bytes]] = []

    async def handler(link: Link) -> None:
        heard.append((FrameKind.BADGE, b""))
        heard.append(await link.receive())

    link = BytesLink(data)
    run(gated(data).guarded(handler)(link))
    assert [kind for kind, _ in link.sent] == [FrameKind.BADGE if heard else FrameKind.REFUSAL]
    assert not heard or CERTIFICATE in data, "nobody else has a badge here"
    return len(heard) == 2


@refusing(RemoteError, NetworkError)
def answered_certificate(data: bytes) -> None:
    """Check the certificate that precedes the answer of a peer that we dialed."""

    async def call() -> None:
        link = await gated(data).open(PEER)
        await link.receive()

    run(call())
    assert CERTIFICATE in data, "nobody else has a badge here"


@refusing(RemoteError, NetworkError)
def turned_away(data: bytes) -> None:
    """Check a request to a peer that is away."""
    link = BytesLink(data)
    run(decline_while_away(link, step=1, progress=2.0))
    assert len(link.sent) <= 1


def targets() -> dict[str, Target]:
    """Return the targets of this module by name."""
    access_list_with_names = people.access_list(2, admitted=(PEER,), revoked=("ab" * 8,))
    signed = Receipt(people.GUEST.peer, people.ISSUER.peer, 1, 2, 3, 4, 5, 6, 7, 8).signed(RUN, people.ISSUER.state)
    shown = frames((FrameKind.BADGE, CERTIFICATE), MESSAGE)
    return {
        "certificate": Target(certificate, (people.certificate().encode(),)),
        "credential": Target(credential, (str(people.credential()).encode(),)),
        "access_list": Target(access_list, (people.access_list().encode(), access_list_with_names.encode())),
        "receipt": Target(receipt, (signed.encode(),)),
        "shown_certificate": Target(shown_certificate, (shown,), 5),
        "answered_certificate": Target(answered_certificate, (shown,), 5),
        "turned_away": Target(turned_away, (frames(MESSAGE),), 5),
    }
