"""The gate before every conversation, and the admission handler, over links in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import virtual_time
from memory_network import MemoryLink, MemoryNetwork
from people import DAY, GUEST, ISSUER, NOW, PUBLIC, RUN, STRANGER, Somebody, access_list, certificate, credential

from p2ptrain.admission import Certificate, Gate, InviteRegister, Refusal
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.framing import FrameKind
from p2ptrain.net.admission_service import AdmissionHandler, ask_access_list, come_in
from p2ptrain.net.gate import CERTIFICATE_DEADLINE_S, GatedLink, GatedTransport
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.ports import Link
from p2ptrain.statements import packed

MEMBER = ISSUER
"""Identity of a member that has a certificate."""


class Door:
    """One node behind its gate; every link that passes the gate is echoed once."""

    def __init__(self, network: MemoryNetwork, who: Somebody, shown: bytes) -> None:
        self.gate = Gate("invite", RUN, PUBLIC, shown)
        self.notebook = MemoryLog()
        self.heard: list[bytes] = []
        self.transport = GatedTransport(
            network.transport(who.peer), self.gate, who.peer, self.notebook, wall=lambda: float(NOW)
        )

    async def listen(self) -> None:
        await self.transport.listen(self._echo)

    async def _echo(self, link: Link) -> None:
        kind, body = await link.receive()
        self.heard.append(body)
        await link.send(kind, body)
        await send_payload(link, [b"weights" * 1000])


def play(scene: Callable[[MemoryNetwork, Door], Awaitable[Any]], latency: float = 0.01) -> tuple[Any, Door]:
    """Play a scene with a member's gate, and return its result and the gate."""

    async def stage() -> tuple[Any, Door]:
        network = MemoryNetwork(latency=latency)
        door = Door(network, MEMBER, certificate(MEMBER, by=credential(uses=1000)).encode())
        await door.listen()
        return await scene(network, door), door

    return virtual_time.run(stage())


async def converse(network: MemoryNetwork, who: Somebody, shown: bytes) -> tuple[float, MemoryLog]:
    """Talk to the member as this peer with this certificate; return the seconds until the answer, and the notes."""
    own = Door(network, who, shown)
    loop = asyncio.get_running_loop()
    began = loop.time()
    link = await own.transport.open(MEMBER.peer)
    try:
        await link.send(FrameKind.MESSAGE, b"hello")
        assert await link.receive() == (FrameKind.MESSAGE, b"hello")
        took = loop.time() - began
        assert await receive_payload(link, [7000]) == [b"weights" * 1000]
    except NetworkError as error:
        own.notebook.note("failed", why=str(error))
        return loop.time() - began, own.notebook
    finally:
        await link.close()
    return took, own.notebook


def test_two_members_talk_and_it_takes_no_longer() -> None:
    (took, notebook), door = play(lambda network, _: converse(network, GUEST, certificate().encode()), latency=1.0)
    assert door.heard == [b"hello"]
    assert took == pytest.approx(2.0)  # one round trip, as without a gate
    assert notebook.kinds() == []
    assert door.gate.counts(GUEST.peer, NOW)


@pytest.mark.parametrize(
    ("shown", "why"),
    [(b"", Refusal.NO_INVITE), (certificate().encode(), Refusal.NOT_GENUINE), (b"\x90" * 600, Refusal.NOT_GENUINE)],
)
def test_a_stranger_is_told_why_and_what_to_do(shown: bytes, why: Refusal) -> None:
    (_, notebook), door = play(lambda network, _: converse(network, STRANGER, shown))
    assert door.heard == []
    (kind, fields), (failed, said) = notebook.notes
    assert (kind, failed) == ("not admitted", "failed")
    assert fields["why"] == why
    assert "author" in fields["remedy"]
    assert said["why"] == f"it did not admit us: {why}"
    assert door.notebook.notes[0] == ("turned away", {"peer": STRANGER.peer, "why": why})


def test_we_do_not_talk_with_one_that_shows_no_badge_either() -> None:
    """Check that a responder must be a member too: else any peer could answer in the name of a run."""

    async def scene(network: MemoryNetwork, door: Door) -> None:
        impostor = Door(network, STRANGER, certificate().encode())
        impostor.gate = Gate("open", RUN, PUBLIC, certificate().encode())
        impostor.transport._gate = impostor.gate
        await impostor.listen()
        link = await door.transport.open(STRANGER.peer)
        await link.send(FrameKind.MESSAGE, b"hello")
        with pytest.raises(NetworkError, match="we did not admit it"):
            await link.receive()

    play(scene)


class RecordingLink(MemoryLink):
    """A link with its own versions of the optional methods; it records which were called."""

    calls: list[str]

    async def wait_for_frame(self) -> None:
        self.calls.append("wait_for_frame")

    async def receive_into(self, buffer: memoryview) -> tuple[int, int]:
        self.calls.append("receive_into")
        return FrameKind.CHUNK, 0

    async def open_parallel(self, size_bytes: int) -> Sequence[Link]:
        self.calls.append("open_parallel")
        return (self,)

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        self.calls.append("record_transfer")


@pytest.mark.parametrize("first", ["wait_for_frame", "receive_into", "open_parallel"])
def test_a_gated_link_checks_the_certificate_first_and_then_uses_the_link_s_own_forms(first: str) -> None:
    async def scene(network: MemoryNetwork, door: Door) -> tuple[list[str], list[str]]:
        checked: list[str] = []
        near = network.connect(GUEST.peer, MEMBER.peer)
        inner = RecordingLink(near.peer, near._outgoing, near._incoming)
        inner.calls = []
        opened = GatedLink(inner, lambda peer, kind, body: checked.append(FrameKind(kind).name))
        await opened.send(FrameKind.BADGE, certificate().encode())
        arguments = {"receive_into": [memoryview(bytearray(1))], "open_parallel": [1]}
        await getattr(opened, first)(*arguments.get(first, []))
        opened.record_transfer(1, 1.0)
        return checked, inner.calls

    (checked, calls), _ = play(scene)
    assert checked == ["BADGE"]
    assert calls == [first, "record_transfer"]


def test_a_ban_counts_from_the_next_conversation_on() -> None:
    async def scene(network: MemoryNetwork, door: Door) -> MemoryLog:
        await converse(network, GUEST, certificate().encode())
        door.gate.take(access_list(banned=(GUEST.peer,)).encode())
        _, notebook = await converse(network, GUEST, certificate().encode())
        return notebook

    notebook, door = play(scene)
    assert door.heard == [b"hello"]
    assert notebook.notes[0][1]["why"] == Refusal.BANNED.value


@pytest.mark.parametrize("kind", [FrameKind.MESSAGE, FrameKind.MANIFEST_REQUEST, FrameKind.REFUSAL])
def test_what_is_no_badge_ends_the_link(kind: FrameKind) -> None:
    async def scene(network: MemoryNetwork, door: Door) -> None:
        link = await network.transport(STRANGER.peer).open(MEMBER.peer)
        await link.send(kind, b"x")
        with pytest.raises(NetworkError):
            await link.receive()

    _, door = play(scene)
    assert door.heard == []


def test_who_shows_nothing_holds_a_link_for_seconds_only() -> None:
    async def scene(network: MemoryNetwork, door: Door) -> float:
        link = await network.transport(STRANGER.peer).open(MEMBER.peer)
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(NetworkError):
            await link.receive()
        return asyncio.get_running_loop().time() - began

    waited, _ = play(scene)
    assert waited == pytest.approx(CERTIFICATE_DEADLINE_S, abs=1.0)


@pytest.mark.parametrize("said", [b"busy", b"\xff", "weiß nicht".encode()])
def test_a_refusal_in_strange_words_is_not_shown(said: bytes) -> None:
    async def scene(network: MemoryNetwork, door: Door) -> None:
        async def refuse(link: Link) -> None:
            await link.receive()
            await link.send(FrameKind.REFUSAL, said)

        await network.transport(STRANGER.peer).listen(refuse)
        link = await door.transport.open(STRANGER.peer)
        with pytest.raises(RemoteError):
            await link.receive()

    _, door = play(scene)
    assert door.notebook.kinds() == []


def test_strangers_do_not_fill_the_log() -> None:
    async def scene(network: MemoryNetwork, door: Door) -> None:
        for _ in range(30):
            await converse(network, STRANGER, b"")

    _, door = play(scene)
    assert door.notebook.kinds() == ["turned away"]


# --- the admission handler --------------------------------------------------------------------------------------------


def handler(**more: Any) -> tuple[AdmissionHandler, list[bytes]]:
    kept: list[bytes] = []
    made = AdmissionHandler(
        Gate("invite", RUN, PUBLIC),
        InviteRegister(RUN, ISSUER.peer),
        ISSUER.state,
        lambda encoded, guest, invite: kept.append(encoded),
        wall=lambda: float(NOW),
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made, kept


def asked_of(made: AdmissionHandler, ask: Callable[[Any], Awaitable[Any]], who: Somebody = GUEST) -> Any:
    async def main() -> Any:
        network = MemoryNetwork(latency=0.01)
        await network.transport(ISSUER.peer).listen(made.answer)
        return await ask(network.transport(who.peer))

    return virtual_time.run(main())


def join(transport: Any, guest: Somebody = GUEST, by: Any = None) -> Awaitable[Certificate | Refusal]:
    return come_in(transport, [], by or credential(), Gate("invite", RUN, PUBLIC), guest.peer)


def test_a_guest_comes_by_its_invite_and_the_use_is_on_disk() -> None:
    made, kept = handler()
    got = asked_of(made, join)
    assert isinstance(got, Certificate)
    assert Gate("invite", RUN, PUBLIC).refusal(GUEST.peer, got.encode(), NOW) is None
    assert GUEST.peer.encode() in kept[-1]
    assert asked_of(made, lambda transport: join(transport, STRANGER), STRANGER) is Refusal.USED_UP
    assert asked_of(made, join) == got  # it lost our answer, and asks again


def test_the_link_proves_who_asks() -> None:
    """Check that a copied introduction is useless: the guest is the peer at the other end of the link."""
    made, _ = handler()
    assert asked_of(made, lambda transport: join(transport, GUEST), STRANGER) is Refusal.NOT_GENUINE


def test_a_full_disk_gives_no_use_away() -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    made, _ = handler(keep=full)
    with pytest.raises(NetworkError):
        asked_of(made, join)


def test_who_is_no_witness_says_so_and_late_is_late() -> None:
    made, _ = handler(register=None)
    with pytest.raises(NetworkError):  # so that the guest asks the next
        asked_of(made, join)
    made, _ = handler(wall=lambda: float(NOW + 2 * DAY))
    assert asked_of(made, join) is Refusal.LATE


def test_rulings_are_handed_out_to_whoever_has_older_ones() -> None:
    made, _ = handler()
    made.gate.take(access_list(serial=5, banned=(STRANGER.peer,)).encode())
    mine = Gate("invite", RUN, PUBLIC)
    assert asked_of(made, lambda transport: ask_access_list(transport, ISSUER.peer, [], mine)) is True
    assert mine.access_list == made.gate.access_list
    assert asked_of(made, lambda transport: ask_access_list(transport, ISSUER.peer, [], mine)) is False


def test_asking_too_often_is_not_answered() -> None:
    made, _ = handler()
    for _ in range(12):
        asked_of(made, join)
    with pytest.raises(NetworkError):
        asked_of(made, join)


def test_a_clock_that_is_set_back_locks_nobody_out() -> None:
    """Check a clock that is set back: rate limits use the monotonic one."""
    made, _ = handler()

    async def ask(transport: Any) -> None:
        mine = Gate("invite", RUN, PUBLIC)
        for turn in range(40):
            made.wall = lambda turn=turn: float(NOW - (3600 if turn >= 12 else 0))
            await ask_access_list(transport, ISSUER.peer, [], mine)
            await asyncio.sleep(6.0)

    asked_of(made, ask)


@pytest.mark.parametrize("question", [b"", b"\xc1", packed([]), packed(["rulings"]), packed(["rulings", -1, 2])])
def test_garbage_is_their_fault(question: bytes) -> None:
    made, _ = handler()

    async def ask(transport: Any) -> None:
        link = await transport.open(ISSUER.peer)
        await link.send(FrameKind.MESSAGE, question)
        with pytest.raises(NetworkError):
            await link.receive()

    asked_of(made, ask)
