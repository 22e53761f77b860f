"""Bootstrap of a run by invite: what it reads, stores and serves. The DHT is one fake node without a network."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import virtual_time
from people import GUEST, STRANGER

from bootstrap.admission_server import LOOK_EVERY_S, AdmissionServer
from p2ptrain.admission import AccessList, Refusal, author
from p2ptrain.base.errors import AdmissionError, HomeError
from p2ptrain.manifest import KEY_FILE, JoinLink, SignedManifest, create_run, load_run, sign_run
from p2ptrain.net.identity import Identity


class Stage:
    def __init__(self, folder: Path, policy: str = "invite") -> None:
        self.run, self.home = folder / "run", folder / "home"
        create_run(self.run, "demo", {"admission.policy": policy})
        sign_run(self.run)
        self.home.mkdir()
        self.identity = Identity.load_or_create(self.home / "identity.key")
        self.said: list[str] = []
        self.stored: dict[int, Any] = {}

    @property
    def signed(self) -> SignedManifest:
        return load_run(self.run)

    def doorman(self) -> AdmissionServer:
        return AdmissionServer(
            self.run, self.home, self.signed, self.identity, lambda tag, text: self.said.append(text)
        )

    @property
    def node(self) -> Any:
        return SimpleNamespace(dht=self)

    async def get(self, key: str, latest: bool) -> Any:
        return SimpleNamespace(value=self.stored) if self.stored else None

    async def store(self, key: str, value: bytes, until: float, subkey: int) -> bool:
        self.stored[subkey] = SimpleNamespace(value=value, expiration_time=until)
        return True

    def watch(self, doorman: AdmissionServer, acts: Any = lambda: None) -> None:
        async def main() -> None:
            watching = asyncio.create_task(doorman.watch(self.node))
            await asyncio.sleep(1.0)
            acts()
            await asyncio.sleep(2 * LOOK_EVERY_S)
            watching.cancel()
            await asyncio.wait([watching])

        virtual_time.run(main())


def test_it_says_how_guests_come(tmp_path: Path) -> None:
    for policy, order in (("invite", "p2ptrain invite"), ("allowlist", "p2ptrain admit")):
        (tmp_path / policy).mkdir()
        stage = Stage(tmp_path / policy, policy)
        stage.doorman()
        assert f"for each peer: {order} {stage.run}" in stage.said[-1]


def test_where_the_key_is_elsewhere_it_says_how_guests_come_from_there(tmp_path: Path) -> None:
    orders = {"invite": "p2ptrain invite RUN --link LINK", "allowlist": "p2ptrain admit RUN PEER_ID; then copy RUN/"}
    for policy, order in orders.items():
        (tmp_path / policy).mkdir()
        stage = Stage(tmp_path / policy, policy)
        (stage.run / KEY_FILE).unlink()
        stage.doorman()
        assert f"for each peer: where run.key lies, {order}" in stage.said[-1]


def test_a_ruling_is_handed_out_within_seconds(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    doorman = stage.doorman()
    stage.watch(doorman, lambda: author.revoke(stage.run, [GUEST.peer], time.time()))
    assert doorman.gate.access_list.banned == (GUEST.peer,)
    assert list(stage.stored) == [doorman.gate.access_list.serial]
    assert "1 banned" in stage.said[-1]
    assert stage.doorman().gate.access_list.banned == (GUEST.peer,)  # and after a restart


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    author.revoke(stage.run, [GUEST.peer], time.time())
    doorman = stage.doorman()
    file = stage.run / author.ACCESS_LIST_FILE
    stage.watch(doorman, lambda: file.write_bytes(b"half of"))
    assert doorman.gate.access_list.banned == (GUEST.peer,)
    assert "stays in force" in stage.said[-1]
    with pytest.raises(AdmissionError):
        stage.doorman()


def test_an_author_who_begins_anew_gets_the_swarms_rulings(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    access_list: AccessList = author.revoke(stage.run, [GUEST.peer], time.time())
    file = stage.run / author.ACCESS_LIST_FILE
    file.unlink()
    asyncio.run(stage.store("", access_list.encode(), time.time() + 3000.0, access_list.serial))
    stage.watch(stage.doorman())
    assert author.load_access_list(file, stage.signed) == access_list
    later = author.admit(stage.run, [STRANGER.peer], time.time())
    assert later.banned == (GUEST.peer,)


def test_a_use_outlasts_a_crash(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    address = f"/ip4/203.0.113.7/tcp/1/p2p/{stage.identity.peer_id}"
    link, issued = author.invite(stage.run, JoinLink(stage.signed.run_id, (address,)), 3600, 1, time.time())
    credential = author.InviteCredential.parse(link.invite, stage.signed.run_id, author.author_of(stage.signed))

    def come(guest: Any) -> list[Any]:
        introduction = credential.introduce(stage.signed.run_id, guest.peer)
        return stage.doorman()._desk._guest(guest.peer, issued.fields(), introduction)

    first = come(GUEST)
    assert first[0] == "came"
    assert f"let {GUEST.peer} in by invite {issued.id}" in stage.said[-1]
    assert come(STRANGER) == ["refused", Refusal.USED_UP.value]
    assert come(GUEST) == first
    (stage.home / "guests.json").write_bytes(b"{")
    with pytest.raises(HomeError, match="cannot be used"):
        stage.doorman()
