"""hivemind's control connection to p2pd, and attacks on it: strangers choose call ids, and know those of our calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import p2pd_pb2

from p2ptrain.base.errors import RemoteError
from p2ptrain.net.address import varint
from p2ptrain.net.p2pd import unary
from p2ptrain.net.p2pd.unary import MAX_AT_ONCE, MAX_UNSENT, Control

STRANGER = PeerID(b"\x00\x24\x08\x01\x12\x20" + bytes(32))
ASK, SLOW, FAULTY, LONG = "ask", "slow", "faulty", "long"
MOST_BYTES = 1 << 16

Scene = Callable[["Conversation"], Awaitable[None]]


class Conversation:
    """A control client that reads messages which the test writes in p2pd's place."""

    def __init__(self) -> None:
        self.client: ControlClient = Control(
            cast(Any, None), _initialized_with_create=True, persistent_conn_max_msg_size=MOST_BYTES
        )
        self.client.unary_handlers = {ASK: self._echo, SLOW: self._never, FAULTY: self._fail, LONG: self._talk}
        self.reader = asyncio.StreamReader()
        self.task = asyncio.create_task(self.client._read_from_persistent_conn(self.reader))
        self.client._read_task = self.task
        self.asked = 0

    def says(self, *messages: bytes) -> None:
        """Deliver messages in one piece, as in a flood."""
        self.reader.feed_data(b"".join(varint(len(each)) + each for each in messages))

    async def settled(self) -> None:
        """Wait until all messages are read and all tasks have run."""
        while self.reader._buffer:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        for _ in range(9):
            await asyncio.sleep(0)

    async def call(self) -> tuple[UUID, asyncio.Task[bytes]]:
        """Start a call of ours, and return its id, which the responder knows."""
        task = asyncio.create_task(self.client.call_unary_handler(STRANGER, ASK, b"what?"))
        await self.settled()
        [call] = self.client._pending_calls
        return call, task

    def answers(self) -> list[p2pd_pb2.PersistentConnectionRequest]:
        queue = self.client._pending_messages
        return [queue.get_nowait() for _ in range(queue.qsize())]

    async def _echo(self, data: bytes, peer: PeerID) -> bytes:
        self.asked += 1
        return data

    async def _never(self, data: bytes, peer: PeerID) -> bytes:
        self.asked += 1
        await asyncio.Event().wait()
        return b""

    async def _fail(self, data: bytes, peer: PeerID) -> bytes:
        raise RemoteError("expected at most 32 keys, got 33") if data else OSError("/home/me/secret")

    async def _talk(self, data: bytes, peer: PeerID) -> bytes:
        return bytes(MOST_BYTES)


def message(call: UUID, **what: Any) -> bytes:
    return bytes(p2pd_pb2.PersistentConnectionResponse(callId=call.bytes, **what).SerializeToString())


def question(call: UUID, proto: str = ASK, data: bytes = b"") -> bytes:
    return message(call, requestHandling=p2pd_pb2.CallUnaryRequest(peer=STRANGER.to_bytes(), proto=proto, data=data))


def cancel(call: UUID) -> bytes:
    return message(call, cancel=p2pd_pb2.Cancel())


def answer(call: UUID, **what: bytes) -> bytes:
    return message(call, callUnaryResponse=p2pd_pb2.CallUnaryResponse(**what))


@pytest.fixture
def during(capfd: pytest.CaptureFixture[str]) -> Callable[[Scene], None]:
    """Play a scene; then check that the connection still works, holds nothing, and printed nothing."""
    faults: list[dict[str, Any]] = []

    async def main(scene: Scene) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        talk = Conversation()
        await scene(talk)
        last = uuid4()
        talk.says(question(last, data=b"still there?"))
        await talk.settled()
        assert not talk.task.done()
        answers = {each.callId: each.unaryResponse.response for each in talk.answers()}
        assert answers[last.bytes] == b"still there?"
        assert talk.client._handler_tasks == {}
        talk.reader.feed_eof()
        await asyncio.wait_for(talk.task, 1.0)

    def play(scene: Scene) -> None:
        asyncio.run(asyncio.wait_for(main(scene), 10.0))
        assert faults == []
        assert capfd.readouterr() == ("", "")

    return play


def test_cancels_of_our_own_call_do_nothing_to_it(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        call, task = await talk.call()
        talk.says(cancel(call), cancel(call), cancel(call))
        await talk.settled()
        assert not task.done()
        talk.says(answer(call, response=b"that"))
        assert await task == b"that"

    during(scene)


def test_a_call_of_ours_ends_once(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        call, task = await talk.call()
        talk.says(answer(call, response=b"that"), cancel(call), answer(call, error=b"no"), message(call), cancel(call))
        assert await task == b"that"

    during(scene)


def test_what_ends_a_call_of_ours_is_told_in_one_short_line(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        for raised, said in (
            (P2PHandlerError, lambda call: answer(call, error=b"\x1b[2J" + b"\xff" * 4096)),
            (P2PHandlerError, lambda call: answer(call)),
            (P2PDaemonError, lambda call: message(call, daemonError=p2pd_pb2.DaemonError(message="\x1b]0;" * 999))),
        ):
            call, task = await talk.call()
            talk.says(said(call))
            with pytest.raises(raised) as caught:
                await task
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 400

    during(scene)


def test_p2pd_does_what_it_is_told(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        adding = asyncio.create_task(talk.client.add_unary_handler("new", talk.client.unary_handlers[ASK]))
        await talk.settled()
        [call] = talk.client._pending_calls
        talk.says(message(call))
        await adding

    during(scene)


@pytest.mark.parametrize("proto", [ASK, SLOW])
def test_one_id_is_one_question(during: Callable[[Scene], None], proto: str) -> None:
    async def scene(talk: Conversation) -> None:
        call = uuid4()
        talk.says(*[question(call, SLOW)] * 3, question(call, proto))
        await talk.settled()
        assert talk.asked == 1
        talk.says(cancel(call), cancel(call))

    during(scene)


def test_the_id_of_our_own_call_is_no_question(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        call, task = await talk.call()
        talk.says(question(call, SLOW), cancel(call), answer(call, response=b"that"))
        assert await task == b"that"
        assert talk.asked == 0

    during(scene)


def test_questions_that_nobody_answers_are_dropped_without_a_word(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        odd = question(uuid4(), "odd!").replace(b"odd!", b"\xff\xfe\xfd\xfc")
        talk.says(question(uuid4(), "\x1b]0;yours\x07\x1b[2J" * 1000), question(uuid4(), ""), odd)
        await talk.settled()
        assert talk.answers() == []

    during(scene)


@pytest.mark.parametrize("proto", [ASK, SLOW])
def test_questions_that_are_taken_back_leave_nothing(during: Callable[[Scene], None], proto: str) -> None:
    async def scene(talk: Conversation) -> None:
        for _ in range(10):
            for call in (uuid4() for _ in range(100)):
                talk.says(question(call, proto), cancel(call))
            await talk.settled()
            talk.answers()

    during(scene)


def test_what_is_no_message_of_p2pds_is_dropped(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        short = p2pd_pb2.PersistentConnectionResponse(callId=b"short", cancel=p2pd_pb2.Cancel())
        talk.says(b"\xff\xff\xff", b"", short.SerializeToString(), answer(uuid4(), response=b""), cancel(uuid4()))

    during(scene)


def test_of_a_failure_a_stranger_hears_what_it_did_and_nothing_of_ours(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        talk.says(
            *(question(uuid4(), proto, data) for proto, data in ((FAULTY, b"theirs"), (FAULTY, b""), (LONG, b"")))
        )
        await talk.settled()
        assert [each.unaryResponse.error for each in talk.answers()] == [
            b"expected at most 32 keys, got 33",
            b"OSError",
            b"the answer is too long",
        ]

    during(scene)


def test_a_flood_is_not_heard_beyond_what_can_be_answered_at_once(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        calls = [uuid4() for _ in range(2 * MAX_AT_ONCE)]
        talk.says(*(question(call, SLOW) for call in calls))
        await talk.settled()
        assert talk.asked == len(talk.client._handler_tasks) == MAX_AT_ONCE
        talk.says(*map(cancel, calls))
        await talk.settled()

    during(scene)


def test_a_p2pd_that_takes_no_answers_gets_no_more_than_a_bound(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        talk.says(*(question(uuid4()) for _ in range(4 * MAX_UNSENT)))
        await talk.settled()
        assert len(talk.answers()) == MAX_UNSENT

    during(scene)


def test_others_have_their_turn_in_a_flood(during: Callable[[Scene], None]) -> None:
    async def scene(talk: Conversation) -> None:
        talk.says(*(question(uuid4()) for _ in range(100)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert talk.asked < 5
        for _ in range(150):
            await asyncio.sleep(0)
        assert talk.asked == 100

    during(scene)


def test_hivemind_takes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.p2p.p2p_daemon_bindings import p2pclient

    monkeypatch.setattr(p2pclient, "ControlClient", ControlClient)
    unary.install()
    assert p2pclient.ControlClient is Control
