"""Admission of a peer to a run by invite: over links in memory, in virtual time, with a home on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import virtual_time
from member import RUN as MEMBERS_RUN
from member import Member
from memory_network import MemoryNetwork, MemoryTransport
from people import GUEST, ISSUER, STRANGER, Somebody

from p2ptrain.admission import AccessList, Gate, InviteRegister, Refusal, author
from p2ptrain.base.clock import CLOCK_SKEW_S, steady
from p2ptrain.base.errors import AdmissionError, JoinLinkError, NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.framing import FrameKind
from p2ptrain.manifest import JoinLink, SignedManifest, create_run, load_run, sign_run
from p2ptrain.net.admission_service import AdmissionHandler
from p2ptrain.net.gate import GatedTransport
from p2ptrain.net.identity import Identity
from p2ptrain.net.shard_service import ShardServer
from p2ptrain.ports import Link, Transport
from p2ptrain.swarm import PRESENCE_LIFETIME_S, PeerState, Presence
from p2ptrain.tokens.store import ShardStore
from p2ptrain.tokens.writing import ShardWriter
from peer.admission_client import AdmissionClient
from peer.home import Home
from peer.shard_sources import ShardSources

ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{ISSUER.peer}"


class World:
    """A run, its invite issuer, and a guest's home."""

    def __init__(self, folder: Path, policy: str = "invite") -> None:
        self.run = folder / "run"
        create_run(self.run, "demo", {"admission.policy": policy})
        sign_run(self.run)
        self.home = Home(folder / "home")
        self.home.path.mkdir()
        self.notebook = MemoryLog()
        self.is_up = True
        signed = self.signed
        self.gate = Gate(policy, signed.run_id, author.author_of(signed))
        self.handler = AdmissionHandler(self.gate, InviteRegister(signed.run_id, ISSUER.peer), ISSUER.state)

    @property
    def signed(self) -> SignedManifest:
        return load_run(self.run)

    def link(self, uses: int = 1) -> JoinLink:
        plain = JoinLink(self.signed.run_id, (ADDRESS,))
        return author.invite(self.run, plain, 3600, uses, time.time())[0]

    def rule(self, order: Callable[..., AccessList], *names: str) -> None:
        self.gate.take(order(self.run, names, time.time()).encode())

    def enter(
        self, link: JoinLink | None, who: Somebody = GUEST, down_s: float = 0.0, gone_for: int = 0
    ) -> AdmissionClient:
        """Request admission; the issuer answers after ``down_s``, and our p2pd is away for ``gone_for`` requests."""

        async def main() -> AdmissionClient:
            network = MemoryNetwork(latency=0.01, fail=lambda dialer, dialed: not self.is_up)
            await network.transport(ISSUER.peer).listen(self.handler.answer)
            connection = FakeConnection(network, who.peer)
            connection.gone_for = gone_for
            entrance = AdmissionClient(connection, self.home, self.signed, who.peer, self.notebook)
            self.is_up = down_s == 0
            asyncio.get_running_loop().call_later(down_s, lambda: setattr(self, "is_up", down_s < 1e6))
            await entrance.enter(link)
            return entrance

        return virtual_time.run(main())


class FakeConnection:
    """The part of ``peer.network.Connection`` that an admission client uses."""

    def __init__(self, network: MemoryNetwork, me: PeerId) -> None:
        self._network = network
        self._me = me
        self.there = SimpleNamespace(bootstraps=(ISSUER.peer,), known={ISSUER.peer: ("/ip4/203.0.113.7/tcp/31337",)})
        self.gone_for = 0
        """Number of requests for the node during which p2pd is being restarted."""

    @property
    def node(self) -> SimpleNamespace:
        if self.gone_for:
            self.gone_for -= 1
            raise NetworkError("p2pd is being restarted")
        return self.there

    def stand_at(self, gate: Gate) -> None:
        pass

    async def serve(self, *_: object) -> None:
        pass

    def speaking(self, *_: object) -> Transport:
        return self._network.transport(self._me)

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> Any:
        raise AssertionError("nobody exchanges here")


def test_a_guest_comes_in_and_needs_nobody_afterwards(tmp_path: Path) -> None:
    world = World(tmp_path)
    entrance = world.enter(world.link())
    assert entrance.gate is not None
    assert "let in" in world.notebook.kinds()
    again = world.enter(None, down_s=1e9)  # from its home alone, while no node answers
    assert again.gate is not None
    assert again.gate.certificate == entrance.gate.certificate
    assert again.gate.refusal(GUEST.peer, again.gate.certificate, time.time()) is None


def test_it_waits_for_a_witness_that_is_down_and_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.enter(world.link(), down_s=20.0)
    assert world.notebook.kinds().count("no certificate") == 4  # after 2, 4, 8 and 16 s
    assert world.notebook.kinds()[-1] == "let in"


def test_a_p2pd_that_dies_meanwhile_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.enter(world.link(), gone_for=3).gate is not None
    assert world.notebook.kinds()[-1] == "let in"
    nobody = World(tmp_path / "list", "allowlist")
    assert nobody.enter(None, gone_for=1).gate is not None  # as if no node answered


def said(world: World, link: JoinLink | None, who: Somebody = GUEST, error: type[Exception] = AdmissionError) -> str:
    with pytest.raises(error) as caught:
        world.enter(link, who)
    return str(caught.value)


def test_who_is_not_let_in_is_told_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    plain = JoinLink(world.signed.run_id, (ADDRESS,))
    assert Refusal.NO_INVITE.value in said(world, plain)
    link = world.link()
    world.enter(link)
    (world.home.path / "badge").unlink()
    assert Refusal.USED_UP.value in said(world, link, STRANGER)
    assert "cut off or was retyped" in said(world, JoinLink(link.run_id, link.addresses, "AAAA"), error=JoinLinkError)


def test_a_ban_is_learnt_at_the_door_and_kept(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.enter(world.link(uses=5))
    world.rule(author.revoke, GUEST.peer)
    (world.home.path / "badge").unlink()  # so that it asks
    assert Refusal.BANNED.value in said(world, world.link())
    assert (world.home.path / author.ACCESS_LIST_FILE).exists()
    assert Refusal.BANNED.value in said(world, world.link())


def test_a_new_invite_heals_a_revoked_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = world.link()
    world.enter(first)
    invite = next(fields["invite"] for kind, fields in world.notebook.notes if kind == "let in")
    world.rule(author.revoke, invite)
    world.home.write(world.home.path / author.ACCESS_LIST_FILE, world.gate.access_list.encode())
    assert Refusal.REVOKED.value in said(world, None)
    assert Refusal.REVOKED.value in said(world, first)
    entrance = world.enter(world.link())
    assert entrance.gate is not None
    assert entrance.gate.refusal(GUEST.peer, entrance.gate.certificate, time.time()) is None


def test_an_allowlist_names_the_command_that_would_help(tmp_path: Path) -> None:
    world = World(tmp_path, "allowlist")
    plain = JoinLink(world.signed.run_id, (ADDRESS,))
    assert f"p2ptrain admit RUN {GUEST.peer}" in said(world, plain)
    world.rule(author.admit, GUEST.peer)
    assert world.enter(plain).gate is not None


async def handlers(*staff: tuple[Somebody, AdmissionHandler], known: Sequence[PeerId]) -> FakeConnection:
    """Return a guest's connection to several nodes."""
    network = MemoryNetwork(latency=0.01)
    for who, handler in staff:
        await network.transport(who.peer).listen(handler.answer)
    connection = FakeConnection(network, GUEST.peer)
    connection.there = SimpleNamespace(bootstraps=tuple(known), known=dict.fromkeys(known, ()))
    return connection


def test_a_node_that_is_behind_does_not_keep_us_out(tmp_path: Path) -> None:
    """Check that a node without the access list, asked first, does not decide."""
    world = World(tmp_path, "allowlist")
    world.rule(author.admit, GUEST.peer)
    behind = AdmissionHandler(Gate("allowlist", world.signed.run_id, author.author_of(world.signed)))

    async def main() -> AdmissionClient:
        known = (STRANGER.peer, ISSUER.peer)
        connection = await handlers((STRANGER, behind), (ISSUER, world.handler), known=known)
        entrance = AdmissionClient(connection, world.home, world.signed, GUEST.peer, world.notebook)
        await entrance.enter(None)
        return entrance

    entrance = virtual_time.run(main())
    assert entrance.gate is not None
    assert entrance.gate.access_list.admitted == (GUEST.peer,)


def test_an_issuer_whose_clock_is_ahead_admits_nobody(tmp_path: Path) -> None:
    world = World(tmp_path)
    link = world.link()
    for ahead_s, why in ((1800.0, Refusal.AHEAD), (2.0**33, Refusal.LATE)):
        world.handler.wall = lambda ahead_s=ahead_s: time.time() + ahead_s
        assert why in said(world, link)


def test_a_link_that_names_this_peer_itself_asks_the_others(tmp_path: Path) -> None:
    world = World(tmp_path, "allowlist")
    world.rule(author.admit, GUEST.peer)

    async def main() -> AdmissionClient:
        connection = await handlers((ISSUER, world.handler), known=(GUEST.peer, ISSUER.peer))
        del connection.there.known[GUEST.peer]
        entrance = AdmissionClient(connection, world.home, world.signed, GUEST.peer, world.notebook)
        await entrance.enter(None)
        return entrance

    entrance = virtual_time.run(main())
    assert entrance.gate is not None
    assert entrance.gate.access_list.admitted == (GUEST.peer,)


def test_where_nobody_tells_of_rulings_partners_decide(tmp_path: Path) -> None:
    world = World(tmp_path, "allowlist")
    assert world.enter(None, down_s=1e9).gate is not None


class Gossip:
    """A peer's presence records, as another peer's admission client receives them from anyone."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.world = World(folder, policy)
        self.author = Identity.load_or_create(folder / "author.key")
        connection = FakeConnection(MemoryNetwork(), GUEST.peer)
        self.entrance = AdmissionClient(connection, self.world.home, self.world.signed, GUEST.peer, self.world.notebook)

    def record(self, **changes: Any) -> Presence:
        """Return a record of this peer with these fields, and its signature."""
        fields: dict[str, Any] = {
            "peer": self.author.peer_id,
            "run": self.world.signed.run_id,
            "addresses": ("/ip4/203.0.113.9/tcp/31337",),
            "state": PeerState.TRAINING,
            "step": 3,
            "progress": 5.0,
            "settled": True,
            "nickname": "",
            "issued_at": time.time(),
            "lifetime_s": PRESENCE_LIFETIME_S,
        }
        return self.author.sign(Presence(**fields | changes))

    def left_s(self, record: Presence) -> float | None:
        """Return for how many seconds the record counts; None if it does not."""
        until = self.entrance.live_until(record)
        return None if until is None else until - steady()


def _flipped(signature: bytes) -> bytes:
    return bytes([signature[0] ^ 1, *signature[1:]])


FALSE_RECORDS: dict[str, Callable[[Gossip], Presence]] = {
    "its signature changed": lambda by: replace(by.record(), signature=_flipped(by.record().signature)),
    "without a signature": lambda by: replace(by.record(), signature=b""),
    "at another address": lambda by: replace(by.record(), addresses=("/ip4/203.0.113.66/tcp/666",)),
    "with its life prolonged": lambda by: replace(by.record(issued_at=time.time() - 1e4), issued_at=time.time()),
    "in another peer's name": lambda by: replace(by.record(), peer=STRANGER.peer),
    "in the name of no key": lambda by: replace(by.record(), peer=PeerId("anna")),
    "expired": lambda by: by.record(issued_at=time.time() - PRESENCE_LIFETIME_S - 1.0),
    "expired by its own word": lambda by: by.record(issued_at=time.time() - 20.0, lifetime_s=10.0),
    "expired, whatever it says": lambda by: by.record(issued_at=time.time() - 3000.0, lifetime_s=3100.0),
    "dated far ahead": lambda by: by.record(issued_at=time.time() + CLOCK_SKEW_S + 60.0),
    "another run's": lambda by: by.record(run=MEMBERS_RUN),
}


@pytest.mark.parametrize("false", FALSE_RECORDS.values(), ids=FALSE_RECORDS)
def test_false_records_that_partners_hand_on_do_not_count(tmp_path: Path, false: Callable[[Gossip], Presence]) -> None:
    gossip = Gossip(tmp_path, "open")
    assert gossip.left_s(gossip.record()) is not None
    assert gossip.left_s(false(gossip)) is None


@pytest.mark.parametrize("ahead_s", [0.0, CLOCK_SKEW_S - 60.0])
def test_true_records_count_while_they_live_whatever_their_clock(tmp_path: Path, ahead_s: float) -> None:
    gossip = Gossip(tmp_path, "open")
    left = gossip.left_s(gossip.record(issued_at=time.time() + ahead_s))
    assert left is not None
    assert 0 < left <= PRESENCE_LIFETIME_S


def test_in_a_private_run_records_of_those_who_are_not_let_in_do_not_count(tmp_path: Path) -> None:
    gossip = Gossip(tmp_path, "allowlist")
    gate, writer = gossip.entrance.gate, gossip.author.peer_id
    assert gate is not None
    assert gossip.left_s(gossip.record()) is None
    gossip.world.rule(author.admit, writer)
    gate.take(gossip.world.gate.access_list.encode())
    assert gossip.left_s(gossip.record()) is not None
    assert gossip.left_s(FALSE_RECORDS["its signature changed"](gossip)) is None
    gossip.world.rule(author.revoke, writer)
    gate.take(gossip.world.gate.access_list.encode())
    assert gossip.left_s(gossip.record()) is None


def test_an_open_run_has_no_gate_and_asks_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, "open")
    entrance = world.enter(None, down_s=1e9)
    assert entrance.gate is None
    assert isinstance(entrance.transport(), FakeConnection)
    assert not (world.home.path / "badge").exists()


def test_a_peer_that_is_not_admitted_gets_no_text_and_once_it_is_admitted_gets_it(tmp_path: Path) -> None:
    world, store = World(tmp_path), ShardStore(tmp_path / "shards")
    writer = ShardWriter(store, 2)
    for is_training in (True, False):
        writer.add(np.arange(5000 + is_training) % 251, is_training)
    index = writer.finish(32)

    async def main() -> tuple[str, object]:
        network = MemoryNetwork(latency=0.01)
        await network.transport(ISSUER.peer).listen(world.handler.answer)
        guest = AdmissionClient(
            FakeConnection(network, GUEST.peer), world.home, world.signed, GUEST.peer, world.notebook
        )
        await guest.enter(world.link())
        await network.transport(GUEST.peer).listen(guest.guarded(ShardServer(index, store).answer))

        async def dial(peer: PeerId, addresses: Sequence[str]) -> Link:
            over = stranger.transport(over=network.transport(STRANGER.peer), checks_responder=False)
            return await over.open(peer, addresses)

        async def peers() -> list[tuple[PeerId, Sequence[str]]]:
            return []

        home = Home(tmp_path / "stranger")
        home.path.mkdir()
        stranger = AdmissionClient(
            FakeConnection(network, STRANGER.peer), home, world.signed, STRANGER.peer, MemoryLog()
        )
        sources = ShardSources(index, [(GUEST.peer, ())], peers, dial, [], Random(0))
        await sources.look()
        fault = sources.fault
        assert not sources.known([0])
        await stranger.enter(world.link())
        await sources.look()
        return fault, await sources.fetch(GUEST.peer, 0, lambda size: None)

    fault, data = virtual_time.run(main())
    assert Refusal.NO_INVITE in fault
    assert data == store.path(index.digests[0]).read_bytes()


def test_any_protocol_can_stand_behind_the_gate(tmp_path: Path) -> None:
    """Check the gate around the weight services: both sides show their certificates there too."""
    world = World(tmp_path)

    async def main() -> tuple[list[PeerId], list[str]]:
        network = MemoryNetwork(latency=0.01)
        served: list[PeerId] = []

        async def serve(link: Link) -> None:
            served.append(link.peer)
            await link.send(*await link.receive())

        await network.transport(ISSUER.peer).listen(world.handler.answer)
        guest = AdmissionClient(
            FakeConnection(network, GUEST.peer), world.home, world.signed, GUEST.peer, world.notebook
        )
        await guest.enter(world.link())
        await network.transport(GUEST.peer).listen(guest.guarded(serve))
        stranger_home = Home(tmp_path / "stranger")
        stranger_home.path.mkdir()
        stranger = AdmissionClient(
            FakeConnection(network, STRANGER.peer), stranger_home, world.signed, STRANGER.peer, MemoryLog()
        )
        whys = []
        for transport in (
            network.transport(STRANGER.peer),
            stranger.transport(over=network.transport(STRANGER.peer)),
            guest.transport(over=network.transport(GUEST.peer)),
        ):
            link = await transport.open(GUEST.peer, ())
            try:
                await link.send(FrameKind.MESSAGE, b"weights, please")
                await link.receive()
            except NetworkError as error:
                whys.append(str(error))
        return served, whys

    served, whys = virtual_time.run(main())
    assert served == [GUEST.peer]  # only the guest itself
    assert len(whys) == 2
    assert Refusal.NO_INVITE.value in whys[1]


def test_behind_a_gate_peers_train_as_without_one() -> None:
    """Check bitwise equality at equal times: a certificate precedes each message, and nothing waits for it."""

    def trained(gated: bool) -> list[tuple[int, float, torch.Tensor]]:
        def wrap(name: str) -> Callable[[MemoryTransport], Transport]:
            gate = Gate("open", MEMBERS_RUN, bytes(32), certificate=b"x" * 500)
            return lambda plain: GatedTransport(plain, gate, PeerId(name), MemoryLog()) if gated else plain

        async def main() -> list[tuple[int, float, torch.Tensor]]:
            network = MemoryNetwork(latency=0.01)
            names = "amber", "birch", "cedar"
            members = [Member(network, name, tokens=400.0, wrap=wrap(name), leaves=True) for name in names]
            async with asyncio.timeout(3000):
                await asyncio.gather(*(each.live() for each in members))
            assert all(each.counted().exchanges_ok > 50 for each in members)
            ended = asyncio.get_running_loop().time()
            return [(each.counted().exchanges_ok, ended, each.learner.task.theta.clone()) for each in members]

        return virtual_time.run(main())

    for (plain_count, plain_end, plain), (count, end, gated) in zip(trained(False), trained(True), strict=True):
        assert (plain_count, plain_end) == (count, end)
        assert torch.equal(plain, gated)
