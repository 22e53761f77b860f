"""A fake libp2p node that names a QUIC address of its choice in its identify answer, and nothing else.

It dials p2pd over TCP and speaks the least that identify needs: Noise and yamux (libp2p specifications: connections,
noise, identify; hashicorp/yamux: spec.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2ptrain.base.ids import PeerId, peer_of
from p2ptrain.net.address import varint
from p2ptrain.net.relay.noise import NoiseChannel, open_channel

MULTISTREAM, IDENTIFY = b"/multistream/1.0.0", b"/ipfs/id/1.0.0"
_LISTEN_ADDRESS, _OBSERVED_ADDRESS = b"\x12", b"\x22"  # fields 2 and 4 of identify's message
_UDP, _QUIC_V1 = 273, 461  # github.com/multiformats/multiaddr, protocols.csv
_DATA, _WINDOW, _PING, _GO_AWAY = range(4)  # types of yamux frames
_SYN, _ACK, _FIN = 1, 2, 4


def quic_address(host: str, port: int) -> bytes:
    """Return the binary form of ``/ip4/HOST/udp/PORT/quic-v1``."""
    return b"\x04" + ipaddress.IPv4Address(host).packed + varint(_UDP) + port.to_bytes(2, "big") + varint(_QUIC_V1)


async def name_address(host: str, port: int, source: str, named: bytes) -> PeerId:
    """Dial p2pd from the address ``source``, name one address when it asks, hang up; return the fake node's id."""
    identity = Ed25519PrivateKey.generate()
    reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
    try:
        channel = await open_channel(reader, writer, identity)
        identify = b"".join(field + varint(len(named)) + named for field in (_LISTEN_ADDRESS, _OBSERVED_ADDRESS))
        answer = _line(MULTISTREAM) + _line(IDENTIFY) + varint(len(identify)) + identify
        await _serve_identify(channel, answer)
        await asyncio.sleep(0.5)  # until p2pd has noted what it read; it asks nothing else that would show that
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return peer_of(identity.public_key().public_bytes_raw())


async def _serve_identify(channel: NoiseChannel, answer: bytes) -> None:
    def send(kind: int, flags: int, stream: int, body: bytes = b"", length: int | None = None) -> None:
        channel.write(struct.pack("!BBHII", 0, kind, flags, stream, len(body) if length is None else length) + body)

    heard: dict[int, bytes] = {}
    while True:
        _, kind, flags, stream, length = struct.unpack("!BBHII", await channel.readexactly(12))
        if kind == _PING and flags & _SYN:
            send(_PING, _ACK, 0, length=length)
        if kind in (_DATA, _WINDOW) and flags & _SYN:
            send(_WINDOW, _ACK, stream, length=0)
        if kind == _DATA:
            heard[stream] = heard.get(stream, b"") + await channel.readexactly(length)
            if heard[stream].endswith(_line(IDENTIFY)):
                send(_DATA, _FIN, stream, answer)
                return
        assert kind != _GO_AWAY


def _line(text: bytes) -> bytes:
    return bytes([len(text) + 1]) + text + b"\n"
