"""Noise without p2pd: what proves nothing is refused. ``test_mirror`` and ``test_relay`` speak it with a real p2pd."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.ids import peer_of
from p2ptrain.net.relay import noise

STATIC = bytes(range(32))
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def test_a_payload_names_the_peer_that_signed_this_static_key_alone() -> None:
    payload = noise.proof(KEY, STATIC)
    assert noise.owner(payload, STATIC) == peer_of(KEY.public_key().public_bytes_raw())
    for false in (payload[:-1], payload[:-1] + b"\x00", payload[:36], b"", b"\xff" * 40):
        with pytest.raises(ValueError, match=r"\w"):
            noise.owner(false, STATIC)
    with pytest.raises(ValueError, match="signature"):
        noise.owner(payload, bytes(32))


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31), os.urandom(32)], ids=["zero", "one", "any"])
def test_an_answer_without_proof_names_nobody(point: bytes) -> None:
    for size in (0, 31, 48, 79, 80, 95, 96, 200, 65_535):
        handshake = noise.Handshake()
        handshake.begin()
        with pytest.raises(ValueError, match=r"\w"):
            handshake.answered((point + os.urandom(size))[:size])


def test_a_channel_carries_long_writes_and_refuses_changed_bytes() -> None:
    async def main() -> None:
        sent = bytearray()
        reader = asyncio.StreamReader()
        writer = cast(Any, SimpleNamespace(write=sent.extend))
        channel = noise.NoiseChannel(reader, writer, noise.Cipher(STATIC), noise.Cipher(STATIC))
        text = os.urandom(200_000)
        channel.write(text)
        reader.feed_data(bytes(sent))
        assert await channel.readexactly(150_000) + await channel.readexactly(50_000) == text
        sent.clear()
        channel.write(b"more")
        sent[-1] ^= 1
        reader.feed_data(bytes(sent))
        with pytest.raises(ValueError, match="decrypted"):
            await channel.readexactly(4)

    asyncio.run(main())
