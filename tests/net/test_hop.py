"""The messages of circuit relay v2."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from p2ptrain.net import control, hop
from p2ptrain.net.hop import Question, Status

# What go-libp2p 0.32.1 answered to a RESERVE: type, reservation (expiry, address, voucher), limit, status.
GO = bytes.fromhex("0802" + "1a0608ddc489d806" + "2209" + "08880e1080808080" + "10" + "2864")


def test_a_place_is_asked_for_in_two_bytes() -> None:
    assert hop.framed(hop.reserve()) == bytes([2, 8, 0])
    assert hop.question(hop.reserve()) == Question(hop.RESERVE)


def test_the_answer_of_go_libp2p_is_understood() -> None:
    assert hop.status(GO) == Status.OK


@pytest.mark.parametrize("status", Status)
def test_our_answer_is_read_back(status: Status) -> None:
    assert hop.status(hop.answer(status)) == hop.status(hop.answer(status, 1_795_000_000)) == status


def test_whom_to_lead_to_is_read() -> None:
    target = bytes(range(38))
    message = bytes([8, hop.CONNECT, 0x12, 40, 0x0A, 38]) + target
    assert hop.question(message) == Question(hop.CONNECT, target)
    assert hop.lead(target) == bytes([8, 0, 0x12, 40, 0x0A, 38]) + target
    assert hop.stop_status(bytes([8, 1, 0x20, 100])) == Status.OK


@pytest.mark.parametrize("message", [b"", b"\x08", b"\x12\x05a", b"\x0d\x00\x00\x00\x00", b"\x08" + b"\xff" * 11])
def test_what_is_none_of_these_is_a_value_error(message: bytes) -> None:
    for reader in (hop.question, hop.status, hop.stop_status):
        with pytest.raises(ValueError, match=r"."):
            reader(message)


@settings(max_examples=200, deadline=None)
@given(some.binary(max_size=100))
def test_any_bytes_are_a_question_or_a_value_error(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(hop.question(message).target, bytes)


@pytest.mark.parametrize("length", [b"\x80", b"\x80" * 5 + b"\xff"])
def test_a_length_without_end_is_not_read_on(length: bytes) -> None:
    read: list[int] = []

    class Endless:
        async def read_exactly(self, size: int) -> bytes:
            assert size == 1
            read.append(size)
            assert len(read) < 100
            return length[len(read) % len(length) :][:1]

    with pytest.raises(OSError, match="bytes"):
        asyncio.run(control.read_message(Endless(), hop.MAX_MESSAGE_BYTES))
    assert len(read) <= control.MAX_LENGTH_BYTES
