"""Encoded invites, certificates and access lists: round trips, and every way to forge one."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from people import (
    AUTHOR,
    DAY,
    GUEST,
    ISSUER,
    NOW,
    OTHER_RUN,
    PUBLIC,
    RUN,
    STRANGER,
    access_list,
    certificate,
    credential,
    somebody,
)

from p2ptrain.admission import MAX_ACCESS_LIST_BYTES, AccessList, Certificate, Invite, InviteCredential, records
from p2ptrain.admission.records import MAX_ACCESS_LIST_NAMES
from p2ptrain.base.errors import JoinLinkError, RemoteError
from p2ptrain.framing import MAX_CERTIFICATE_BYTES
from p2ptrain.manifest import JoinLink
from p2ptrain.statements import packed, unpacked

ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{ISSUER.peer}"


def test_they_read_back() -> None:
    assert Certificate.decode(certificate().encode(), RUN, PUBLIC) == certificate()
    named = access_list(admitted=(GUEST.peer,), banned=(STRANGER.peer,), revoked=("0" * 16,))
    assert AccessList.decode(named.encode(), RUN, PUBLIC) == named
    assert InviteCredential.parse(str(credential()), RUN, PUBLIC) == credential()


def test_a_ticket_travels_in_a_link() -> None:
    link = JoinLink(RUN, (ADDRESS,), str(credential()))
    assert JoinLink.parse(f" {link}\n") == link
    assert credential().secret.hex() not in repr(link) + repr(credential())


Forge = Callable[[Certificate], Certificate]


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda b: dataclasses.replace(b, peer=STRANGER.peer), id="another's name"),
        pytest.param(lambda b: dataclasses.replace(b, witnessed_at=b.witnessed_at - 1), id="dated back"),
        pytest.param(
            lambda b: dataclasses.replace(b, invite=dataclasses.replace(b.invite, expires_at=NOW + 99 * DAY)),
            id="a longer invite",
        ),
        pytest.param(
            lambda b: dataclasses.replace(b, invite=dataclasses.replace(b.invite, issuer=GUEST.peer)),
            id="an issuer chosen by the guest",
        ),
        pytest.param(lambda b: dataclasses.replace(b, introduction=bytes(64)), id="no introduction"),
        pytest.param(lambda b: dataclasses.replace(b, attestation=bytes(64)), id="no attestation"),
        pytest.param(lambda b: certificate(by=credential(author=STRANGER.key)), id="another author"),
        pytest.param(lambda b: certificate(by=credential(number=8)), id="control: another invite of the author"),
    ],
)
def test_no_badge_can_be_forged(forge: Forge, request: pytest.FixtureRequest) -> None:
    forged = forge(certificate()).encode()
    if "control" in request.node.callspec.id:
        assert Certificate.decode(forged, RUN, PUBLIC).peer == GUEST.peer
        return
    with pytest.raises(RemoteError):
        Certificate.decode(forged, RUN, PUBLIC)


def test_a_guest_cannot_date_a_badge_of_its_own_back() -> None:
    """Check the issuer's name: a guest has the invite's key, and may be the issuer of another invite."""
    held = credential()
    invite = dataclasses.replace(held.invite, issuer=ISSUER.peer)
    own = Certificate(invite, GUEST.peer, held.introduce(RUN, GUEST.peer), NOW, bytes(64))
    signed = GUEST.state(b"p2ptrain witness 1", [RUN, invite.key, GUEST.peer, NOW])
    with pytest.raises(RemoteError):
        Certificate.decode(dataclasses.replace(own, attestation=signed).encode(), RUN, PUBLIC)


def test_nothing_passes_for_another_run() -> None:
    for kind, body in ((Certificate, certificate().encode()), (AccessList, access_list().encode())):
        with pytest.raises(RemoteError):
            kind.decode(body, OTHER_RUN, PUBLIC)
    with pytest.raises(JoinLinkError, match="cannot be used"):
        InviteCredential.parse(str(credential()), OTHER_RUN, PUBLIC)


def test_a_statement_for_one_purpose_is_none_for_another() -> None:
    """Check that an author's signature under an invite does not pass for an access list."""
    fields = [1, NOW, [], [], []]
    signature = somebody(9).state(b"p2ptrain invite 1", [RUN, *fields])
    with pytest.raises(RemoteError):
        AccessList.decode(packed([*fields, signature]), RUN, somebody(9).key.public_key().public_bytes_raw())


@settings(max_examples=60)
@given(st.data())
def test_one_bit_off_and_it_is_refused(data: st.DataObject) -> None:
    body = bytearray(certificate().encode())
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RemoteError):
        Certificate.decode(bytes(body), RUN, PUBLIC)


@settings(max_examples=60)
@given(st.binary(max_size=700))
def test_any_bytes_are_refused(body: bytes) -> None:
    for kind in (Certificate, AccessList):
        with pytest.raises(RemoteError):
            kind.decode(body, RUN, PUBLIC)
    with pytest.raises(JoinLinkError):
        InviteCredential.parse(base64.urlsafe_b64encode(body).decode().rstrip("="), RUN, PUBLIC)


def test_one_spelling_only() -> None:
    """Check that only one encoding is accepted: caches of verified certificates depend on it."""
    body = certificate().encode()
    assert body[0] == 0x95
    longer = b"\xdc\x00\x05" + body[1:]  # the same array with a longer header
    with pytest.raises(RemoteError):
        unpacked(longer, 1000)


def test_true_is_no_number() -> None:
    fields = [credential().invite.key, NOW, True, ISSUER.peer]
    signed = Invite(credential().invite.key, NOW, True, ISSUER.peer).signed(RUN, AUTHOR).signature
    with pytest.raises(RemoteError):
        Invite.read([*fields, signed], RUN, PUBLIC)


def test_the_largest_fit_their_caps() -> None:
    key = somebody(9).key
    invite = Invite(key.public_key().public_bytes_raw(), 2**53, 1000, ISSUER.peer).signed(RUN, AUTHOR)
    largest = certificate(by=InviteCredential(invite, key.private_bytes_raw()), at=2**40)
    assert len(largest.encode()) <= MAX_CERTIFICATE_BYTES
    assert Certificate.decode(largest.encode(), RUN, PUBLIC) == largest
    full = AccessList(1, NOW, admitted=(GUEST.peer,) * MAX_ACCESS_LIST_NAMES).signed(RUN, AUTHOR)
    assert len(full.encode()) <= MAX_ACCESS_LIST_BYTES
    assert AccessList.decode(full.encode(), RUN, PUBLIC) == full
    with pytest.raises(ValueError, match="1001 names"):
        dataclasses.replace(full, revoked=("0" * 16,)).signed(RUN, AUTHOR)


@pytest.mark.parametrize("spoil", [lambda text: text[:-3], lambda text: text[:-1] + "!", lambda text: "A" + text[1:]])
def test_a_ticket_that_was_mangled(spoil: Callable[[str], str]) -> None:
    with pytest.raises(JoinLinkError):
        InviteCredential.parse(spoil(str(credential())), RUN, PUBLIC)


def test_of_forged_rulings_no_name_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the signature first: a thousand entries take thirty times as long to parse as the signature to verify."""
    looked: list[object] = []
    monkeypatch.setattr(records, "_is_peer", lambda value: looked.append(value) or True)
    full = AccessList(1, NOW, banned=(GUEST.peer,) * MAX_ACCESS_LIST_NAMES).signed(RUN, AUTHOR)
    for forged in (dataclasses.replace(full, signature=bytes(64)), dataclasses.replace(full, issued_at=NOW + 1)):
        with pytest.raises(RemoteError):
            AccessList.decode(forged.encode(), RUN, PUBLIC)
    assert looked == []
    assert AccessList.decode(full.encode(), RUN, PUBLIC) == full
    assert len(looked) == MAX_ACCESS_LIST_NAMES
