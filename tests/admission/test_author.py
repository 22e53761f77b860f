"""The author's admission files: what is written and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from people import DAY, GUEST, ISSUER, NOW, RUN, STRANGER

from p2ptrain.admission import InviteCredential, author
from p2ptrain.base.errors import AdmissionError
from p2ptrain.manifest import JoinLink, SignedManifest, create_run, sign_run

Run = tuple[Path, SignedManifest]


def link_to(signed: SignedManifest, *peers: str) -> JoinLink:
    return JoinLink(signed.run_id, tuple(f"/ip4/203.0.113.7/tcp/1/p2p/{peer}" for peer in peers or (ISSUER.peer,)))


def test_an_invite_names_the_nodes_of_the_link_as_witnesses(private_run: Run) -> None:
    run, signed = private_run
    link, issued = author.invite(run, link_to(signed, ISSUER.peer, GUEST.peer, ISSUER.peer), DAY, 3, NOW)
    read = InviteCredential.parse(JoinLink.parse(str(link)).invite, signed.run_id, author.author_of(signed))
    assert read.invite == issued
    assert (issued.issuer, issued.uses, issued.expires_at) == (ISSUER.peer, 3, NOW + DAY)
    another, _ = author.invite(run, link_to(signed), DAY, 3, NOW)
    assert another.invite != link.invite


def test_rulings_grow_and_the_newest_wins(private_run: Run) -> None:
    run, signed = private_run
    assert author.load_access_list(run / author.ACCESS_LIST_FILE, signed) is None
    first = author.admit(run, [GUEST.peer], NOW)
    second = author.revoke(run, [STRANGER.peer, "ab" * 8], NOW)  # in the same second
    assert second.serial > first.serial
    assert (second.admitted, second.banned, second.revoked) == ((GUEST.peer,), (STRANGER.peer,), ("ab" * 8,))
    assert author.load_access_list(run / author.ACCESS_LIST_FILE, signed) == second
    third = author.revoke(run, [GUEST.peer], NOW - DAY)  # the clock was set back
    assert third.serial > second.serial
    assert third.admitted == ()
    assert author.admit(run, [STRANGER.peer], NOW).banned == (GUEST.peer,)


def test_the_same_ruling_twice_writes_nothing(private_run: Run) -> None:
    run, _ = private_run
    assert author.admit(run, [GUEST.peer], NOW) == author.admit(run, [GUEST.peer], NOW + 5)


def test_what_is_refused(private_run: Run, tmp_path: Path) -> None:
    run, signed = private_run
    with pytest.raises(AdmissionError, match="is not a peer id"):
        author.admit(run, ["ab" * 8], NOW)
    with pytest.raises(AdmissionError, match="1 to 1,000 peers, not 0"):
        author.invite(run, link_to(signed), DAY, 0, NOW)
    with pytest.raises(AdmissionError, match="The link belongs to run"):
        author.invite(run, JoinLink(RUN, link_to(signed).addresses), DAY, 1, NOW)
    (run / author.ACCESS_LIST_FILE).write_bytes(b"nothing")
    with pytest.raises(AdmissionError, match="is not an access list"):
        author.revoke(run, [GUEST.peer], NOW)
    create_run(tmp_path / "open", "demo")
    sign_run(tmp_path / "open")
    with pytest.raises(AdmissionError, match="is open"):
        author.admit(tmp_path / "open", [GUEST.peer], NOW)
    create_run(tmp_path / "listed", "demo", {"admission.policy": "allowlist"})
    listed = sign_run(tmp_path / "listed").signed
    with pytest.raises(AdmissionError, match="no invites"):
        author.invite(tmp_path / "listed", link_to(listed), DAY, 1, NOW)


def test_too_many_names(private_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = private_run
    monkeypatch.setattr("p2ptrain.admission.records.MAX_ACCESS_LIST_NAMES", 1)
    author.admit(run, [GUEST.peer], NOW)
    with pytest.raises(AdmissionError, match="would have 2 names"):
        author.admit(run, [STRANGER.peer], NOW)
