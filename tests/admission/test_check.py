"""The admission decision: every reason to refuse, and the order of the checks."""

from __future__ import annotations

import dataclasses

import pytest
from people import DAY, GUEST, NOW, STRANGER, access_list, certificate, credential

from p2ptrain.admission import AccessList, Certificate, Refusal, refusal, remedy
from p2ptrain.framing import MAX_IDENTIFIER_CHARS

NONE = AccessList()
REVOKED = access_list(revoked=(credential().invite.id,))


@pytest.mark.parametrize(
    ("policy", "said", "shown", "why"),
    [
        ("open", access_list(banned=(GUEST.peer,)), None, None),
        ("allowlist", NONE, None, Refusal.NOT_LISTED),
        ("allowlist", NONE, certificate(), Refusal.NOT_LISTED),
        ("allowlist", access_list(admitted=(STRANGER.peer,)), None, Refusal.NOT_LISTED),
        ("allowlist", access_list(admitted=(GUEST.peer,)), None, None),
        ("allowlist", access_list(admitted=(GUEST.peer,), banned=(GUEST.peer,)), None, Refusal.BANNED),
        ("invite", NONE, None, Refusal.NO_INVITE),
        ("invite", NONE, certificate(), None),
        ("invite", access_list(admitted=(GUEST.peer,)), None, None),
        ("invite", NONE, certificate(STRANGER), Refusal.NOT_GENUINE),
        ("invite", access_list(banned=(GUEST.peer,)), certificate(), Refusal.BANNED),
        ("invite", REVOKED, certificate(), Refusal.REVOKED),
        ("invite", access_list(revoked=(credential().invite.id,), admitted=(GUEST.peer,)), certificate(), None),
        ("invite", access_list(revoked=("0" * 16,)), certificate(), None),
    ],
)
def test_who_is_admitted(policy: str, said: AccessList, shown: Certificate | None, why: Refusal | None) -> None:
    assert refusal(policy, said, GUEST.peer, shown, NOW) is why


def test_a_badge_that_was_given_in_time_holds_for_ever() -> None:
    assert refusal("invite", NONE, GUEST.peer, certificate(at=NOW + DAY), NOW + 1000 * DAY) is None


def test_a_badge_dated_after_its_invite_or_after_today_does_not() -> None:
    late = dataclasses.replace(certificate(), witnessed_at=NOW + DAY + 1)
    assert refusal("invite", NONE, GUEST.peer, late, NOW + 2 * DAY) is Refusal.LATE
    assert refusal("invite", NONE, GUEST.peer, certificate(at=NOW + 301), NOW) is Refusal.AHEAD
    assert refusal("invite", NONE, GUEST.peer, certificate(at=NOW + 300), NOW) is None


@pytest.mark.parametrize("why", Refusal)
def test_there_is_something_to_do_about_each(why: Refusal) -> None:
    assert "author" in remedy(why, GUEST.peer)
    assert len(why.encode()) <= MAX_IDENTIFIER_CHARS  # fits into a REFUSAL frame
    assert GUEST.peer in remedy(Refusal.NOT_LISTED, GUEST.peer)


def test_reasons_fit_the_frame() -> None:
    assert all(each.isascii() and len(each) <= 64 for each in Refusal)
