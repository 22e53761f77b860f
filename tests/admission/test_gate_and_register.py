"""A node's knowledge about members, and the register of an invite issuer."""

from __future__ import annotations

import pytest
from people import DAY, GUEST, ISSUER, NOW, PUBLIC, RUN, STRANGER, access_list, certificate, credential, somebody

from p2ptrain.admission import AccessList, Certificate, Gate, InviteRegister, Refusal
from p2ptrain.admission import gate as gate_module
from p2ptrain.base.errors import RemoteError

NONE = AccessList()


def gate(policy: str = "invite") -> Gate:
    return Gate(policy, RUN, PUBLIC)


def test_who_has_shown_a_badge_counts_and_nobody_else() -> None:
    door = gate()
    assert not door.counts(GUEST.peer, NOW)
    assert door.refusal(GUEST.peer, b"", NOW) is Refusal.NO_INVITE
    assert door.refusal(GUEST.peer, certificate().encode(), NOW) is None
    assert door.counts(GUEST.peer, NOW)
    assert not door.counts(STRANGER.peer, NOW)
    assert door.refusal(STRANGER.peer, certificate().encode(), NOW) is Refusal.NOT_GENUINE  # what everybody has seen
    assert door.refusal(STRANGER.peer, b"\x90", NOW) is Refusal.NOT_GENUINE
    assert not door.counts(STRANGER.peer, NOW)


def test_a_ban_counts_at_once_also_for_those_that_are_known() -> None:
    door = gate()
    assert door.refusal(GUEST.peer, certificate().encode(), NOW) is None
    assert door.take(access_list(banned=(GUEST.peer,)).encode())
    assert not door.counts(GUEST.peer, NOW)
    assert door.refusal(GUEST.peer, certificate().encode(), NOW) is Refusal.BANNED


def test_older_rulings_lift_no_ban() -> None:
    door = gate()
    assert door.take(access_list(serial=7, banned=(GUEST.peer,)).encode())
    assert not door.take(access_list(serial=7).encode())
    assert not door.take(access_list(serial=6).encode())
    assert not door.counts(GUEST.peer, NOW)
    with pytest.raises(RemoteError):
        door.take(access_list(serial=8, author=STRANGER.key).encode())
    assert door.take(access_list(serial=8, admitted=(GUEST.peer,)).encode())
    assert door.counts(GUEST.peer, NOW)


def test_an_allowlist_reads_no_badges() -> None:
    door = gate("allowlist")
    assert door.refusal(GUEST.peer, certificate().encode(), NOW) is Refusal.NOT_LISTED
    door.take(access_list(admitted=(GUEST.peer,)).encode())
    assert door.refusal(GUEST.peer, b"\xff" * 100, NOW) is None


def test_memory_of_badges_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_REMEMBERED", 3)
    door = gate()
    crowd = [somebody(number) for number in range(20, 25)]
    for each in crowd:
        assert door.refusal(each.peer, certificate(each).encode(), NOW) is None
    assert [door.counts(each.peer, NOW) for each in crowd] == [False, False, True, True, True]


def ask(register: InviteRegister, guest=GUEST, by=None, now: float = NOW, said: AccessList = NONE):
    by = by or credential()
    introduction = by.introduce(RUN, guest.peer)
    return register.admit(by.invite, guest.peer, introduction, said, now, ISSUER.state)


def register() -> InviteRegister:
    return InviteRegister(RUN, ISSUER.peer)


def test_what_a_witness_signs_makes_a_badge() -> None:
    at, attestation = ask(register())
    shown = Certificate(credential().invite, GUEST.peer, credential().introduce(RUN, GUEST.peer), at, attestation)
    assert gate().refusal(GUEST.peer, shown.encode(), NOW) is None


def test_uses_are_counted_and_who_asks_again_is_no_new_use() -> None:
    book = register()
    first = ask(book)
    assert ask(book, now=NOW + 100) == first
    assert ask(book, STRANGER) is Refusal.USED_UP
    assert ask(book, STRANGER, by=credential(uses=2)) != Refusal.USED_UP  # the author may sign the same key anew
    assert ask(book, STRANGER, by=credential(number=8)) != Refusal.USED_UP


def test_an_invite_in_a_full_register_goes_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.admission.issuer.MAX_INVITES", 1)
    book, twice = register(), credential(uses=2)
    assert ask(book, by=twice) is not Refusal.USED_UP
    assert ask(book, STRANGER, by=twice) is not Refusal.USED_UP
    assert ask(book, by=credential(number=8)) is Refusal.NO_ROOM


def test_uses_survive_a_restart() -> None:
    book = register()
    first = ask(book)
    again = InviteRegister.decode(book.encode(), RUN, ISSUER.peer)
    assert ask(again, STRANGER) is Refusal.USED_UP
    assert ask(again) == first
    for damaged in (b"", b"{}", b'{"run": "x"}', book.encode()[:-5], b'{"run": "%s", "invites": 5}' % RUN.encode()):
        with pytest.raises(ValueError, match=r"damaged|another run|Expecting|delimiter"):
            InviteRegister.decode(damaged, RUN, ISSUER.peer)


def test_a_witness_says_no() -> None:
    assert ask(register(), now=NOW + DAY + 1) is Refusal.LATE
    assert ask(register(), said=access_list(banned=(GUEST.peer,))) is Refusal.BANNED
    assert ask(register(), said=access_list(revoked=(credential().invite.id,))) is Refusal.REVOKED
    assert ask(InviteRegister(RUN, STRANGER.peer)) is Refusal.NOT_GENUINE  # the invite names another
    stolen = credential().introduce(RUN, GUEST.peer)  # seen in a badge, and used for another name
    answer = register().admit(credential().invite, STRANGER.peer, stolen, NONE, NOW, ISSUER.state)
    assert answer is Refusal.NOT_GENUINE


def test_the_register_forgets_invites_that_have_run_out() -> None:
    book = register()
    ask(book)
    ask(book, by=credential(number=8, expires_at=NOW + 9 * DAY), now=NOW + 2 * DAY)
    assert len(book.guests) == 1
    assert ask(book, now=NOW + 2 * DAY) is Refusal.LATE
