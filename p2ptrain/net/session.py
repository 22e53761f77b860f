"""Session: one conversation over one link, in the only task that uses that link.

A session sends the core's messages in order, reads exactly where the protocol expects a message, and passes everything
received or completed to the core. A session decides nothing. The driver fetches what it holds between swap and commit,
or between pull and adoption. NetworkError, RemoteError and TimeoutError end a session; the driver closes the link.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from p2ptrain.base.errors import NetworkError, RemoteError, UnbegunError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.net.concurrently import concurrently
from p2ptrain.net.payload import receive_payload, send_payload
from p2ptrain.net.weight_download import Downloader
from p2ptrain.net.weight_server import WeightServer
from p2ptrain.ports import EncodedPayload, LearnerPayloads, Link, Opaque, PayloadDifference
from p2ptrain.swarm import DeclineReason, PeerState
from p2ptrain.swarm.events import Close, Donate, Donated, Event, Pull, Pulled, Send, Swap, SwapDone
from p2ptrain.swarm.messages import Acknowledge, Decline, Message, Offer, WeightsReply, WeightsRequest
from p2ptrain.wire import decode_message, encode_message

OPENING_DEADLINE_S = 15.0
"""Timeout for an inbound link's first message, and for writing any control message."""

QUICK_BYTES = 1 << 20
"""Longest payload whose proposals, a pass over its weights, are made in the event loop: 2 ms for four bits a weight, on
one EPYC core. Guess: delays of other messages for larger ones would settle it."""

Instruction = Send | Swap | Pull | Donate | Close


@dataclass(frozen=True, slots=True)
class SessionEnvironment:
    """Objects that all sessions of a driver share."""

    payloads: LearnerPayloads
    work: Callable[..., Awaitable[Any]]
    """Runs ``work(function, *arguments)`` off the event loop, or at once."""
    weight_server: WeightServer
    """Server of our weights."""
    downloader: Downloader
    """Downloads weights."""
    donors: Callable[[], Mapping[PeerId, Sequence[str]]]
    """Returns further donors and their addresses."""
    keepers: Callable[[], Mapping[PeerId, frozenset[int]]]
    """Returns the fragments of each donor that holds only some."""
    heard: Callable[[LinkId, Message, int], None]
    """Called with each received message and its size in bytes."""
    done: Callable[[Event], None]
    """Called with the event of a completed swap, pull or donation."""


@dataclass(slots=True)
class Session:
    """Conversation over one link: its instructions, and its results between swap and commit."""

    link: LinkId
    tools: SessionEnvironment
    instructions: asyncio.Queue[Instruction] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    interruptible: bool = False
    """True while it waits for the partner: a Close then cancels the task and is not queued."""
    swapped: PayloadDifference | None = None
    """Result of a swap, until the driver commits it."""
    pulled: tuple[WeightsReply, Opaque] | None = None
    """Downloaded weights, until the driver adopts them."""

    async def open(self, link: Link, message: Message) -> None:
        """Send an outbound link's first message, receive the response, and continue until the core closes the link."""
        await self._send(link, message)
        await self._receive(link)
        await self._follow(link)

    async def answer(self, link: Link) -> None:
        """Receive an inbound link's first message, and continue until the core closes the link."""
        async with asyncio.timeout(OPENING_DEADLINE_S):
            message, size_bytes = await _read(link)
        self.tools.heard(self.link, message, size_bytes)
        await self._follow(link)

    async def _follow(self, link: Link) -> None:
        while True:
            self.interruptible = False
            instruction = await self.instructions.get()
            self.interruptible = not isinstance(instruction, Send)
            match instruction:
                case Send():
                    await self._send(link, instruction.message)
                    if isinstance(instruction.message, Acknowledge):
                        await self._receive(link)
                case Swap():
                    await self._swap(link, instruction)
                case Pull():
                    await self._pull(link, instruction)
                case Donate():
                    self.tools.done(Donated(self.link, await self.tools.weight_server.give(link)))
                case Close():
                    return
                case _:
                    assert_never(instruction)

    async def _send(self, link: Link, message: Message) -> None:
        async with asyncio.timeout(OPENING_DEADLINE_S):
            await link.send(FrameKind.MESSAGE, encode_message(message))

    async def _receive(self, link: Link) -> None:
        self.interruptible = True
        message, size_bytes = await _read(link)
        self.tools.heard(self.link, message, size_bytes)

    async def _swap(self, link: Link, swap: Swap) -> None:
        payloads, work = self.tools.payloads, self.tools.work
        sizes, lengths = payloads.proposal_sizes(swap.fragments), payloads.encoded_sizes(swap.fragments)
        snapshot: Opaque = None
        proposals: Sequence[bytes] = ()
        their_proposals: Sequence[bytearray] = ()
        if sizes:  # a codec that negotiates step widths or a rank, of one snapshot for proposals and payload
            try:
                if sum(lengths) <= QUICK_BYTES:
                    snapshot, proposals = payloads.propose(swap.fragments)
                else:
                    snapshot, proposals = await work(payloads.propose, swap.fragments)
            except ValueError as error:
                raise _unsendable(error) from error
            _, their_proposals = await concurrently(send_payload(link, proposals), receive_payload(link, sizes))
        encoded = self._encoded(swap, proposals, their_proposals, snapshot)
        mine, others = await concurrently(encoded, link.open_parallel(sum(lengths)))
        lengths = [len(part) for part in mine.parts]  # shorter if the proposals agreed on a smaller rank
        del snapshot  # a payload may take minutes, and this is a whole model
        if not (self.link.outbound or sizes):  # the initiator may withdraw a late-accepted offer without a payload
            await link.wait_for_frame()
        receiving = receive_payload(link, lengths, others)
        try:
            _, theirs = await concurrently(send_payload(link, mine.parts, others), receiving)
        except UnbegunError as error:  # one of several streams had nothing yet, but the payload has begun
            raise NetworkError(str(error)) from error
        difference: PayloadDifference = await work(payloads.difference, mine, theirs)
        agreeing = sum(sizes)
        sent_bytes, received_bytes = agreeing + mine.size_bytes, agreeing + sum(lengths)
        measured = difference.distance, difference.norm, difference.fingerprint, difference.sketched
        self.swapped = difference
        self.tools.done(SwapDone(self.link, sent_bytes, received_bytes, *measured))

    async def _encoded(
        self, swap: Swap, proposals: Sequence[bytes], their_proposals: Sequence[bytearray], snapshot: Opaque
    ) -> EncodedPayload:
        """Encode our part of these fragments."""
        encode = self.tools.payloads.encode
        try:
            mine: EncodedPayload = await self.tools.work(encode, swap.fragments, proposals, their_proposals, snapshot)
        except ValueError as error:
            raise _unsendable(error) from error
        return mine

    async def _pull(self, link: Link, pull: Pull) -> None:
        parts = await self.tools.downloader.download(link, self.tools.donors(), self.tools.keepers())
        await self.tools.work(self.tools.payloads.check_weights, parts)
        self.pulled = (pull.reply, parts)
        self.tools.done(Pulled(self.link, self.tools.downloader.size_bytes))


async def _read(link: Link) -> tuple[Message, int]:
    kind, body = await link.receive()
    if kind != FrameKind.MESSAGE:
        raise RemoteError(f"expected a message, got a frame of kind {kind}")
    return message_in(body), len(body)


def message_in(body: bytes) -> Message:
    """Decode a message of another peer. Raises RemoteError, also for lists nested too deep for Python."""
    try:
        return decode_message(body)
    except RecursionError:
        raise RemoteError("expected a message, got lists that are nested too deeply") from None


def _unsendable(error: ValueError) -> NetworkError:
    return NetworkError(f"our own weights cannot be sent: {error}")


async def decline_while_away(link: Link, step: int, progress: float) -> None:
    """Decline an offer or a request for weights as a leaving peer, and close the link.

    The initiator makes no further offers until our next presence record. Raises NetworkError and RemoteError.
    """
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENING_DEADLINE_S):
                kind, body = await link.receive()
                if kind == FrameKind.MESSAGE and isinstance(message_in(body), Offer | WeightsRequest):
                    no = Decline(DeclineReason.LEAVING, PeerState.LEAVING, step, progress, known=())
                    await link.send(FrameKind.MESSAGE, encode_message(no))
    finally:
        await link.close()
