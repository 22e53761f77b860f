"""p2pd's control protocol, as far as we speak it ourselves: messages of protobuf, their length ahead as a varint.

Each request has a connection of its own to the daemon's Unix socket. The answer to STREAM_OPEN, and what p2pd says
ahead of an inbound stream's own bytes, name the far end: who it is, and by which address its bytes come. That address
is direct, or a circuit through a relay.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId, short
from p2ptrain.net import address
from p2ptrain.net.p2pd.streams import Stream

MAX_MESSAGE_BYTES = 1 << 20
"""A guess: the longest that we ask for lists all connections, some hundred bytes each."""
MAX_LENGTH_BYTES = 10
"""Of a varint of 64 bits (protobuf)."""


@dataclass(frozen=True, slots=True)
class FarEnd:
    """Who is at the other end of a stream, and how its bytes travel."""

    peer: PeerId
    place: str
    """The multiaddress of its end of the connection, as our p2pd sees it; empty where that has no form we know."""

    @property
    def relay(self) -> PeerId | None:
        """The relay that the bytes go through; None: they come directly."""
        return address.relay_of(self.place)


async def ask(control: str, request: p2pd_pb2.Request) -> tuple[p2pd_pb2.Response, Stream]:
    """One request to the daemon's socket; an opened stream goes on in the same connection. Raises NetworkError."""
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
    """Who opened an inbound stream, as p2pd says ahead of the stream's own bytes. Raises OSError and EOFError."""
    return far_end(p2pd_pb2.StreamInfo.FromString(await read_message(stream)))


def far_end(info: p2pd_pb2.StreamInfo) -> FarEnd:
    return FarEnd(peer_of(info.peer), place_of(info.addr))


def peer_of(multihash: bytes) -> PeerId:
    return PeerId(PeerID(multihash).to_base58())


def place_of(packed: bytes) -> str:
    """The address that p2pd names in its binary form; empty where it has none of our forms."""
    try:
        return address.unpacked(packed)
    except ValueError:
        return ""


async def read_message(stream: Stream, most: int = MAX_MESSAGE_BYTES) -> bytes:
    """One message, its length ahead as a varint. Raises OSError and EOFError.

    A length of more than ten bytes is none. Each byte of it is read by itself, and where bytes are there already nobody
    else has a turn meanwhile: a stranger could go on for ever.
    """
    length = 0
    for shift in range(0, 7 * MAX_LENGTH_BYTES, 7):
        [byte] = await stream.read_exactly(1)
        length |= (byte & 0x7F) << shift
        if length > most:
            raise OSError(f"a message of {length} bytes where {most} are allowed")
        if byte < 0x80:
            return await stream.read_exactly(length)
    raise OSError(f"a message's length of more than {MAX_LENGTH_BYTES} bytes")


def raw(peer: PeerId) -> bytes:
    """A peer id as p2pd takes it. Raises NetworkError where it is none."""
    try:
        return bytes(PeerID.from_base58(peer).to_bytes())
    except ValueError:
        raise NetworkError(f"{short(peer)} is no peer id") from None
