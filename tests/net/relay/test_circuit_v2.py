"""Messages of circuit relay v2."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from p2ptrain.net.p2pd import control
from p2ptrain.net.relay import circuit_v2
from p2ptrain.net.relay.circuit_v2 import CircuitRequest, CircuitStatus

# go-libp2p 0.32.1's answer to a RESERVE: type, reservation (expiry, address, voucher), limit, status.
GO = bytes.fromhex("0802" + "1a0608ddc489d806" + "2209" + "08880e1080808080" + "10" + "2864")


def test_a_place_is_asked_for_in_two_bytes() -> None:
    assert circuit_v2.framed(circuit_v2.reserve()) == bytes([2, 8, 0])
    assert circuit_v2.question(circuit_v2.reserve()) == CircuitRequest(circuit_v2.RESERVE)


def test_the_answer_of_go_libp2p_is_understood() -> None:
    assert circuit_v2.status(GO) == CircuitStatus.OK


@pytest.mark.parametrize("status", CircuitStatus)
def test_our_answer_is_read_back(status: CircuitStatus) -> None:
    assert (
        circuit_v2.status(circuit_v2.answer(status))
        == circuit_v2.status(circuit_v2.answer(status, 1_795_000_000))
        == status
    )


def test_whom_to_lead_to_is_read() -> None:
    target = bytes(range(38))
    message = bytes([8, circuit_v2.CONNECT, 0x12, 40, 0x0A, 38]) + target
    assert circuit_v2.question(message) == CircuitRequest(circuit_v2.CONNECT, target)
    assert circuit_v2.lead(target) == bytes([8, 0, 0x12, 40, 0x0A, 38]) + target
    assert circuit_v2.stop_status(bytes([8, 1, 0x20, 100])) == CircuitStatus.OK


@pytest.mark.parametrize("message", [b"", b"\x08", b"\x12\x05a", b"\x0d\x00\x00\x00\x00", b"\x08" + b"\xff" * 11])
def test_what_is_none_of_these_is_a_value_error(message: bytes) -> None:
    for reader in (circuit_v2.question, circuit_v2.status, circuit_v2.stop_status):
        with pytest.raises(ValueError, match=r"."):
            reader(message)


@settings(max_examples=200)
@given(some.binary(max_size=100))
def test_any_bytes_are_a_question_or_a_value_error(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(circuit_v2.question(message).target, bytes)


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
        asyncio.run(control.read_message(Endless(), circuit_v2.MAX_MESSAGE_BYTES))
    assert len(read) <= control.MAX_LENGTH_BYTES
