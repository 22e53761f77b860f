"""One conversation over one link: the only task that touches that link.

A session says what the core told it to say, in order, and reads exactly where the protocol says that something must
come; what it reads or completes it hands to the core. It decides nothing. What it holds between swap and commit, or
between pull and adoption, the driver fetches. NetworkError, RemoteError and TimeoutError end it; the driver closes the
link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from p2ptrain.base.errors import NetworkError, RemoteError, UnbegunError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.framing import FrameKind
from p2ptrain.net.concurrently import concurrently
from p2ptrain.net.payload import Buffers, begun, receive_payload, send_payload, widened
from p2ptrain.net.weight_download import Downloader
from p2ptrain.net.weight_server import WeightServer
from p2ptrain.ports import Link
from p2ptrain.swarm.events import Close, Donate, Donated, Event, Pull, Pulled, Send, Swap, SwapDone
from p2ptrain.swarm.messages import Acknowledge, Message, WeightsReply
from p2ptrain.train.payloads import Difference, Encoded, Payloads, Snapshot
from p2ptrain.wire import decode_message, encode_message

OPENING_DEADLINE_S = 15.0
"""How long an inbound link may take to say what it is for, and any one control message to be written."""

Instruction = Send | Swap | Pull | Donate | Close


@dataclass(frozen=True, slots=True)
class SessionEnvironment:
    """What all sessions of a driver work with."""

    payloads: Payloads
    buffers: Buffers
    work: Callable[..., Awaitable[Any]]
    """``await work(function, *arguments)``: run it off the loop, or at once."""
    copies: WeightServer
    """Gives our weights."""
    gatherer: Downloader
    """Takes others'."""
    donors: Callable[[], Mapping[PeerId, Sequence[str]]]
    """Who else could give us weights, and their addresses."""
    heard: Callable[[LinkId, Message, int], None]
    """A message came, of so many bytes."""
    done: Callable[[Event], None]
    """A swap, a pull or a donation is through."""


@dataclass(slots=True)
class Session:
    """One link's conversation: its instructions, and what it holds between swap and commit."""

    link: LinkId
    tools: SessionEnvironment
    instructions: asyncio.Queue[Instruction] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None
    interruptible: bool = False
    """It waits for the partner: a Close cancels it instead of queueing behind what it does."""
    swapped: tuple[Swap, Difference] | None = None
    pulled: tuple[WeightsReply, list[bytearray]] | None = None

    async def open(self, link: Link, message: Message) -> None:
        """Say what an outbound link is for, hear the answer, and go on until the core closes it."""
        await self._send(link, message)
        await self._receive(link)
        await self._follow(link)

    async def answer(self, link: Link) -> None:
        """Hear what an inbound link is for, and go on until the core closes it."""
        async with asyncio.timeout(OPENING_DEADLINE_S):
            message, size_bytes = await _read(link)
        self.tools.heard(self.link, message, size_bytes)
        await self._follow(link)

    async def _follow(self, link: Link) -> None:
        """Take the core's instructions in order until it closes the link."""
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
                    self.tools.done(Donated(self.link, await self.tools.copies.give(link)))
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
        sizes, lengths = (
            payloads.wish_sizes(swap.fragments),
            payloads.encoded_sizes(swap.fragments),
        )
        snapshot = payloads.published  # what our sketch tells of is what is encoded, whatever is published meanwhile
        wishes: Sequence[bytes] = ()
        their_wishes: Sequence[bytearray] = ()
        try:
            if sizes:  # a codec that wants to know how far apart both are
                wishes = await work(payloads.wishes, swap.fragments, snapshot)
                _, their_wishes = await concurrently(send_payload(link, wishes), receive_payload(link, sizes))
        except ValueError as error:
            raise _unsendable(error) from error
        mine, road = await concurrently(
            self._encoded(swap, wishes, their_wishes, snapshot), widened(link, sum(lengths))
        )
        del snapshot  # a payload may be on its way for minutes, and this is a whole model
        if not (self.link.outbound or sizes):  # its offer may be taken back: our Accept may have been long on its way
            await begun(road)
        receiving = receive_payload(road, lengths, self.tools.buffers)
        try:
            _, theirs = await concurrently(send_payload(road, mine.parts), receiving)
        except UnbegunError as error:  # one of several lanes had none yet: the payload had begun all the same
            raise NetworkError(str(error)) from error
        difference = await work(payloads.difference, mine, theirs)
        self.tools.buffers.give_back(theirs)
        self.swapped = (swap, difference)
        agreeing = sum(sizes)
        sent_bytes, received_bytes = agreeing + mine.size_bytes, agreeing + sum(lengths)
        measured = difference.distance, difference.norm, difference.fingerprint, difference.sketched
        self.tools.done(SwapDone(self.link, sent_bytes, received_bytes, *measured))

    async def _encoded(
        self, swap: Swap, wishes: Sequence[bytes], their_wishes: Sequence[bytearray], snapshot: Snapshot
    ) -> Encoded:
        """What we send of these fragments."""
        encode = self.tools.payloads.encode
        try:
            mine: Encoded = await self.tools.work(encode, swap.fragments, wishes, their_wishes, snapshot)
        except ValueError as error:
            raise _unsendable(error) from error
        return mine

    async def _pull(self, link: Link, pull: Pull) -> None:
        parts = await self.tools.gatherer.gather(link, self.tools.donors())
        await self.tools.work(self.tools.payloads.check_weights, parts)
        self.pulled = (pull.reply, parts)
        self.tools.done(Pulled(self.link, sum(map(len, parts))))


async def _read(link: Link) -> tuple[Message, int]:
    kind, body = await link.receive()
    if kind != FrameKind.MESSAGE:
        raise RemoteError(f"a frame of kind {kind} where a message belongs")
    return message_in(body), len(body)


def message_in(body: bytes) -> Message:
    """``wire.decode_message`` of a stranger's bytes, which may be lists a thousand deep: Python cannot even print them
    to say that they are none of ours."""
    try:
        return decode_message(body)
    except RecursionError:
        raise RemoteError("a message was due, not lists in lists in lists") from None


def _unsendable(error: ValueError) -> NetworkError:
    """Our own weights have become such that no codec takes them."""
    return NetworkError(f"our own weights cannot be sent: {error}")
