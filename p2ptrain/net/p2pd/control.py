"""The part of p2pd's control protocol that p2ptrain speaks itself: protobuf messages, prefixed by a varint length.

Each request uses its own connection to the daemon's Unix socket. The response to STREAM_OPEN, and the header that p2pd
sends before the bytes of an inbound stream, name the remote peer and its direct or relayed address.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache

from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net import address
from p2ptrain.net.p2pd.streams import Stream

MAX_MESSAGE_BYTES = 1 << 20
"""Guess: the longest response; it lists all connections, at some hundred bytes each."""
MAX_LENGTH_BYTES = 10
"""Length of the longest 64-bit varint (protobuf)."""


@dataclass(frozen=True, slots=True)
class FarEnd:
    """The remote end of a stream: peer and address."""

    peer: PeerId
    place: str  # the multiaddress of the remote end, as our p2pd sees it; empty if it has no known form

    @property
    def relay(self) -> PeerId | None:
        """The relay that carries the stream; None for a direct connection."""
        return address.relay_of(self.place)


async def ask(control: str, request: p2pd_pb2.Request) -> tuple[p2pd_pb2.Response, Stream]:
    """Send one request to the daemon; an opened stream continues on the same connection. Raises NetworkError."""
    stream = Stream()
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, control)
        body = request.SerializeToString()
        await stream.write(address.varint(len(body)) + body)
        response = p2pd_pb2.Response.FromString(await read_message(stream))
        if response.type == p2pd_pb2.Response.ERROR:
            raise NetworkError(" ".join(response.error.msg.split()))
    except BaseException as error:
        stream.close()
        if isinstance(error, (OSError, EOFError)):
            raise NetworkError(f"p2pd does not answer: {error}") from error
        raise
    return response, stream


async def read_opener(stream: Stream) -> FarEnd:
    """Read p2pd's header of an inbound stream, which names its initiator. Raises OSError and EOFError."""
    return far_end(p2pd_pb2.StreamInfo.FromString(await read_message(stream)))


def far_end(info: p2pd_pb2.StreamInfo) -> FarEnd:
    return FarEnd(peer_of(info.peer), place_of(info.addr))


@lru_cache(address.REMEMBERED)
def peer_of(multihash: bytes) -> PeerId:
    return PeerId(PeerID(multihash).to_base58())


def place_of(packed: bytes) -> str:
    """Decode a binary multiaddress; empty if it has no known form."""
    try:
        return address.unpacked(packed)
    except ValueError:
        return ""


async def read_message(stream: Stream, most: int = MAX_MESSAGE_BYTES) -> bytes:
    """Read one message with a varint length prefix. Raises OSError and EOFError.

    The prefix is limited, because its bytes are read one by one without yielding: an endless one would block the
    loop.
    """
    length = 0
    for shift in range(0, 7 * MAX_LENGTH_BYTES, 7):
        [byte] = await stream.read_exactly(1)
        length |= (byte & 0x7F) << shift
        if length > most:
            raise OSError(f"a message of {length} bytes exceeds the limit of {most}")
        if byte < 0x80:
            return await stream.read_exactly(length)
    raise OSError(f"a message length of more than {MAX_LENGTH_BYTES} bytes")


@lru_cache(address.REMEMBERED)
def raw(peer: PeerId) -> bytes:
    """Encode a peer id for p2pd. Raises NetworkError if it is invalid."""
    try:
        return bytes(PeerID.from_base58(peer).to_bytes())
    except ValueError:
        raise NetworkError(f"{short(peer)} is not a peer id") from None
