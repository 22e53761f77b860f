"""Common parts of the targets: a peer and what it signs, and links on which given bytes arrive."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgpack
import people
from hivemind.utils import timed_storage

from p2ptrain import framing, wire
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PROTOCOL_VERSION, PeerId, RunId
from p2ptrain.framing import FrameKind, PartEnd
from p2ptrain.manifest import presets
from p2ptrain.manifest.signing import public_key_of, sign
from p2ptrain.net import access_list_store, dht_protocol, directory, payload
from p2ptrain.ports import Link
from p2ptrain.swarm import PeerState, Presence
from p2ptrain.swarm.messages import (
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Message,
    Offer,
    Terms,
    WeightsReply,
    WeightsRequest,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A decoder under test."""

    check: Callable[[bytes], bool]
    """Function that returns whether the decoder accepted these bytes. Raises nothing, whatever they are."""
    seeds: tuple[bytes, ...]
    """Accepted inputs to start from."""
    runs: int = 1
    """Divisor of a campaign's number of runs, for a target that takes this many times as long."""


def refusing(*errors: type[Exception]) -> Callable[[Callable[[bytes], Any]], Callable[[bytes], bool]]:
    """Return a check in which these errors, or False, mean that the bytes were rejected."""

    def with_its_word(check: Callable[[bytes], Any]) -> Callable[[bytes], bool]:
        @functools.wraps(check)
        def is_taken(data: bytes) -> bool:
            with contextlib.suppress(*errors):
                return check(data) is not False
            return False

        return is_taken

    return with_its_word


# --- signed data --------------------------------------------------------------------------------------------------

KEY = people.AUTHOR
OWNER = people.Somebody(KEY)
PEER = OWNER.peer
RUN: RunId = people.RUN
NOW = 1.7e9
"""Time of all messages, in seconds since 1970."""
PLACE = "/ip4/203.0.113.7/tcp/31337"
MANIFEST = presets.preset("demo", public_key_of(KEY))
SIGNED = sign(MANIFEST, KEY)


def signed(presence: Presence) -> Presence:
    """Return the record with its owner's signature."""
    blank = dataclasses.replace(presence, signature=b"")
    return dataclasses.replace(blank, signature=KEY.sign(wire.presence_bytes(blank)))


def resigned(encoded: bytes) -> bytes:
    """Return the record signed with another key; bytes that are not a record stay as they are."""
    with contextlib.suppress(RemoteError, RecursionError, ValueError):
        return wire.encode_presence(signed(dataclasses.replace(wire.decode_presence(encoded), peer=PEER)))
    return encoded


PRESENCE = signed(
    Presence(
        peer=PEER,
        run=RUN,
        addresses=(PLACE,),
        state=PeerState.TRAINING,
        step=3,
        progress=1024.0,
        settled=True,
        nickname="amber fox",
        issued_at=NOW,
        lifetime_s=60.0,
        signature=b"",
    )
)
KEEPER = signed(dataclasses.replace(PRESENCE, state=PeerState.KEEPING, keeps=((0, 3), (5, 5))))
RECORD = wire.encode_presence(PRESENCE)
UNTIL = PRESENCE.issued_at + PRESENCE.lifetime_s
TERMS = Terms(step=1, progress=2.0, weight=1.0, clip_radius=math.inf, settled=True, state=PeerState.TRAINING)
MESSAGES: tuple[Message, ...] = (
    Offer(run=RUN, protocol=PROTOCOL_VERSION, fragments=(0, 2, 5), terms=TERMS, known=(PRESENCE, KEEPER)),
    Accept(fragments=(0, 2), terms=TERMS, known=()),
    Decline(reason=DeclineReason.BUSY, state=PeerState.TRAINING, step=1, progress=2.0, known=()),
    Acknowledge(),
    WeightsRequest(run=RUN, protocol=PROTOCOL_VERSION, progress=1.0),
    WeightsReply(step=1, progress=2.0, known=()),
)


@contextlib.contextmanager
def in_the_seeds_days() -> Iterator[None]:
    """Fix the clock: whether a seed or a saved finding has expired must not depend on the day."""
    with contextlib.ExitStack() as stack:
        for module in (dht_protocol, directory, access_list_store):
            stack.enter_context(mock.patch.object(module, "wall", return_value=NOW))
        stack.enter_context(mock.patch.object(timed_storage, "get_dht_time", return_value=NOW))
        yield


# --- links --------------------------------------------------------------------------------------------------------


class BytesLink(Link):
    """Link on which these bytes arrive, and then the end. Keeps what is sent, as frames."""

    def __init__(self, data: bytes, peer: PeerId = PEER) -> None:
        self.peer = peer
        self.sent: list[tuple[int, bytes]] = []
        self._rest = data

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        framing.encode_header(kind, len(body))
        self.sent.append((kind, bytes(body)))

    async def receive(self) -> tuple[int, bytes]:
        kind, length = framing.decode_header(self._take(framing.HEADER_BYTES))
        return kind, self._take(length)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _take(self, length: int) -> bytes:
        if len(self._rest) < length:
            raise NetworkError("the stream ended")
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken


class BytesStream:
    """Stream of p2pd (``net.p2pd.streams.Stream``) on which these bytes arrive, and then the end."""

    is_closing = False
    lacking = 0

    def __init__(self, data: bytes) -> None:
        self.rest = data

    async def read_exactly(self, length: int) -> bytes:
        if len(self.rest) < length:
            raise EOFError("the stream ended")
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    async def read_into(self, buffer: memoryview) -> None:
        self.lacking = len(buffer)
        buffer[:] = await self.read_exactly(len(buffer))
        self.lacking = 0

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def abort(self) -> None:
        """Do nothing: there is nothing to close."""


class BytesTransport:
    """Transport on which every dial is answered by these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def open(self, peer: PeerId, addresses: Sequence[str] = ()) -> BytesLink:
        return BytesLink(self._data, peer)

    async def listen(self, handler: Callable[[Any], Awaitable[None]]) -> None:
        raise AssertionError("nobody calls")


class Silence:
    """Notebook (``ports.Notebook``) that drops its notes."""

    def note(self, kind: str, **fields: object) -> None:
        """Drop the note."""


def frames(*bodies: tuple[int, bytes]) -> bytes:
    return b"".join(framing.encode_header(kind, len(body)) + body for kind, body in bodies)


def said(*words: list[Any]) -> bytes:
    """Return a message of the small services as frames."""
    return frames(*((FrameKind.MESSAGE, msgpack.packb(each)) for each in words))


def part(body: bytes) -> bytes:
    """Return a payload of one part with one chunk."""
    end = framing.encode_part_end(PartEnd(0, len(body), payload.blake3(body).digest()))
    return frames((FrameKind.CHUNK, body), (FrameKind.PART, end))


def run(conversation: Awaitable[Any]) -> Any:
    """Run a coroutine that never waits, since all its input has arrived, and return its result."""

    async def all_of_it() -> Any:
        return await asyncio.wait_for(conversation, timeout=5)

    return asyncio.run(all_of_it())
