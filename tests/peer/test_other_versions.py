"""Runs of other versions of p2ptrain: the messages, for each source of the manifest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import virtual_time
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import STRANGER

from p2ptrain.base.errors import HomeError, ManifestError, NetworkError, UserError
from p2ptrain.base.ids import PROTOCOL_VERSION, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.manifest import JoinLink, genuine_run, preset
from p2ptrain.manifest.document import canonical_json
from p2ptrain.manifest.signing import public_key_of, sign
from peer import manifest_fetch, messages
from peer.doctor import network as doctor
from peer.home import Home
from peer.manifest_fetch import ask_for_manifest

KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
INSTALL = "Install the p2ptrain version of the run's author; peers of different versions cannot exchange."
ADDRESS = f"/ip4/127.0.0.1/tcp/31337/p2p/{STRANGER}"


def signed_by_another_p2ptrain(**run: Any) -> bytes:
    fields = preset("demo", public_key_of(KEY)).model_dump()
    fields["run"] |= {"protocol": PROTOCOL_VERSION + 1, **run}
    signature = KEY.sign(b"p2ptrain manifest\0" + canonical_json(fields)).hex()
    return canonical_json({"manifest": fields, "signature": signature})


THEIRS = signed_by_another_p2ptrain()
RUN = cast(RunId, genuine_run(THEIRS))
OURS = sign(preset("demo", public_key_of(KEY)), KEY)


def test_a_home_keeps_its_manifest_and_another_p2ptrain_is_installed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.manifest.write_bytes(THEIRS)
    with pytest.raises(HomeError, match=f"the run uses protocol version {PROTOCOL_VERSION + 1}") as caught:
        home.load_manifest(None)
    assert caught.value.remedy == INSTALL


def test_a_homes_damaged_manifest_is_moved_away(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.manifest.write_bytes(THEIRS.replace(b'"seed":1', b'"seed":2'))
    with pytest.raises(HomeError) as caught:
        home.load_manifest(None)
    assert caught.value.remedy.startswith("Move it away")


def answers(monkeypatch: pytest.MonkeyPatch, module: Any, *raw: bytes) -> MemoryLog:
    """Let the link's nodes return these manifests, one after the other."""
    left = list(raw)

    async def fetch(*_: object) -> bytes:
        if not left:
            raise NetworkError("it said nothing")
        return left.pop(0)

    monkeypatch.setattr(module, "fetch_manifest", fetch)
    return MemoryLog()


def test_who_is_handed_a_manifest_of_another_version_does_not_wait_for_a_better_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = answers(monkeypatch, manifest_fetch, THEIRS)
    with pytest.raises(ManifestError, match="uses protocol version") as caught:
        virtual_time.run(ask_for_manifest(JoinLink(RUN, (ADDRESS,)), cast(Any, object), log))
    assert caught.value.remedy == INSTALL
    assert log.kinds() == []


def test_nobody_else_ends_its_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check invalid answers, another run's manifest or false signatures: another node may have the right one."""
    own = OURS.to_bytes()
    lies = (THEIRS, own.replace(OURS.signature.encode(), b"00" * 64), own + b"\n", b"", b"[]", own[:-1])
    log = answers(monkeypatch, manifest_fetch, *lies, own)
    found = virtual_time.run(ask_for_manifest(JoinLink(OURS.run_id, (ADDRESS,)), cast(Any, object), log))
    assert found == OURS
    assert log.kinds() == ["no manifest", "waiting"] * len(lies)


@pytest.mark.parametrize("later", ["", f"failed to dial * [{ADDRESS}] dial backoff"])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("abcdef takes part in another run", "the node that answers there takes part in another run"),
        (
            "failed to dial: peer id mismatch: expected abc",
            "the node that answers there is not the one that the link names",
        ),
        ("failed to dial: connection refused", "no address in the link returned the run's manifest"),
        ("a.b cannot be resolved on this computer (DNS)", "a.b cannot be resolved on this computer (DNS)"),
    ],
)
def test_who_waits_says_whether_somebody_else_answers(
    error: str, why: str, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the stated reason: if another node answers, no firewall is in the way, also during p2pd's backoff."""
    asked = 0

    async def fetch(*_: object) -> bytes:
        nonlocal asked
        asked += 1
        if asked == 3:
            return OURS.to_bytes()
        raise NetworkError(later or error if asked == 2 else error)

    monkeypatch.setattr(manifest_fetch, "fetch_manifest", fetch)
    log = MemoryLog()
    virtual_time.run(ask_for_manifest(JoinLink(OURS.run_id, (ADDRESS,)), cast(Any, object), log))
    waits = [fields for kind, fields in log.notes if kind == "waiting"]
    assert len(waits) == 2
    for fields in waits:
        assert fields["why"].startswith(why)
        assert ("firewall" in str(messages.line("waiting", fields))) is why.startswith("no address")


def test_the_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    link = JoinLink(RUN, (ADDRESS,))
    answers(monkeypatch, doctor, THEIRS)
    answer = asyncio.run(doctor._fetched(cast(Any, None), cast(Any, STRANGER), [], link))
    assert isinstance(answer, UserError)
    finding = doctor._unanswered(cast(Any, STRANGER), "127.0.0.1:31337", answer, others=False)
    assert "the run uses protocol version" in finding.found
    assert finding.fix == INSTALL
    answer = asyncio.run(doctor._fetched(cast(Any, None), cast(Any, STRANGER), [], link))
    finding = doctor._unanswered(cast(Any, STRANGER), "127.0.0.1:31337", cast(Any, answer), others=False)
    assert finding.found.endswith("it said nothing")
    assert finding.fix.startswith("Ask the person who gave you the link")
