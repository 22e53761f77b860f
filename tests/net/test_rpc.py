"""Messages of the small services: lists of plain values that can also be quoted in an error."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from p2ptrain.base.errors import RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.net.relay import dial_back
from p2ptrain.net.rpc import MAX_NESTED, receive_message, send_message
from p2ptrain.ports import Link


class ScriptedLink(Link):
    """A link on which these frames arrive; it records what is sent."""

    peer = PeerId("somebody")

    def __init__(self, *frames: tuple[int, bytes]) -> None:
        self._frames = list(frames)
        self.said: list[bytes] = []

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        self.said.append(bytes(body))

    async def receive(self) -> tuple[int, bytes]:
        return self._frames.pop(0)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def heard(body: bytes, kind: int = FrameKind.MESSAGE, most_bytes: int = 4096) -> list[Any]:
    return asyncio.run(receive_message(ScriptedLink((kind, body)), "this and that", most_bytes))


def nested(levels: int) -> bytes:
    """Return lists nested this deep."""
    return b"\x91" * levels + b"\xc0"


def test_what_is_said_is_heard() -> None:
    words = ["figures", 7, [["loss", 1.5], ["where", ["a", b"b"]]], None]
    link = ScriptedLink()
    asyncio.run(send_message(link, words))
    assert heard(link.said[0]) == words


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xc1", "expected a statement"),
        (msgpack.packb({"a": 1}), "expected a statement"),
        (msgpack.packb(["x" * 5000]), "at most 4096 bytes, got"),
        (nested(MAX_NESTED + 1), "expected a message about this and that, got lists"),
        (nested(1000), "expected a message about this and that, got lists"),
        (nested(3000), "expected a statement"),
    ],
)
def test_what_nobody_says_is_an_offence(body: bytes, why: str) -> None:
    with pytest.raises(RemoteError, match=why):
        heard(body)


def test_another_frame_is_an_offence() -> None:
    with pytest.raises(RemoteError, match="got a frame of kind 2"):
        heard(b"\x90", kind=FrameKind.CHUNK)


def test_lists_may_be_nested_as_deep_as_anybody_needs() -> None:
    assert heard(nested(MAX_NESTED))


def test_a_bottomless_question_is_an_offence_and_no_bug_of_ours() -> None:
    """Check that a request nested too deep is an offence: the answer quotes the request, and Python cannot print it."""
    link = ScriptedLink((FrameKind.MESSAGE, nested(1000)))
    with pytest.raises(RemoteError):
        asyncio.run(dial_back.answer(link, "", dial_back.dial_limit()))
