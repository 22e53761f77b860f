"""Adversarial real peer, to test its effect on honest ones: ``python -m lab.hostile LIE LINK --home HOME …``.

It is a complete peer with its own p2pd, except for its transport, directory and codec pool, which alter what it sends.
``lab.scenario`` lists the lies; ``sim.adversaries`` alters weights, as in simulations. Only the lab starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast, get_args

import click
import torch
from torch import Tensor

from lab.false_records import CrowdDirectory, ForgingDirectory
from lab.scenario import WireLie
from p2ptrain import codec as codecs
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId
from p2ptrain.cli import run_command
from p2ptrain.codec.steps import SKETCH_BYTES, SKETCH_SUMS
from p2ptrain.framing import FrameKind, encode_header
from p2ptrain.host.learner import Learner
from p2ptrain.host.payloads import Encoded, Payloads, Snapshot
from p2ptrain.manifest import JoinLink
from p2ptrain.net.driver import DriverEnvironment
from p2ptrain.net.parallel_streams import ParallelLink
from p2ptrain.ports import Directory, Link, Notebook, Transport
from p2ptrain.swarm import Presence
from p2ptrain.swarm.events import Announce
from p2ptrain.swarm.messages import Accept, Message, Offer, WeightsReply
from p2ptrain.wire import MAX_KNOWN, decode_message, encode_message
from peer.app import run
from peer.start_options import PeerOptions
from sim.adversaries import Adversary
from sim.scenario import Lie

LIES: tuple[str, ...] = (*get_args(Lie), *get_args(WireLie))

DRIP_S = 2.0
"""Pause between two bytes: no frame of an honest peer takes that long."""
LINGERING_BYTES_PER_S = 5000.0
"""Slightly above ``net.links.Limits.slowest_rate``, below which a link times out."""
LINGERING_S_PER_BYTE = 1.0
"""Waiting time that it announces: a day for 86 kB."""
LINGERING_PIECE = 500
HEAVY_WEIGHT = 1e6
FLOOD_PAUSE_S = 0.02
"""Pause between two connections of a flood to the same peer: fifty per second, far beyond the rate limit."""
FLOOD_CONNECTIONS = 20
"""Open connections to one peer. Guess: more only queue in the flood's own p2pd; its connection rate at 40 would settle
it."""
FLOOD_LOOKUP_S = 5.0
"""Interval of directory lookups for peers to flood."""
FOREVER_S = 3600.0


@dataclass(slots=True)
class WireAdversary:
    """Lie of one peer, and its effect on everything that the peer sends."""

    lie: str
    progress: float
    """Tokens of all peers at the run's end."""
    random: Random = field(default_factory=lambda: Random(1))
    simulated: Adversary = field(init=False)
    forging_directory: ForgingDirectory | CrowdDirectory | None = field(default=None, init=False)
    """Directory that announces false records, if that is the lie."""
    notebook: Notebook = field(init=False)
    """Notebook of the honest environment."""

    def __post_init__(self) -> None:
        lie: Any = self.lie if self.is_simulated else "stalling"
        self.simulated = Adversary(lie, self.progress, self.random, self.garbled)

    @property
    def is_simulated(self) -> bool:
        """Whether the lie is one of the simulator's."""
        return self.lie in get_args(Lie)

    def wrapped(self, environment: DriverEnvironment, learner: Learner) -> DriverEnvironment:
        """Return an honest peer's environment with this lie."""
        payloads, self.notebook = learner.payloads, environment.notebook
        if self.lie == "infinite":
            payloads.propose = partial(infinite, payloads.propose)  # type: ignore[method-assign]

        async def work(function: Callable[..., Any], *arguments: Any) -> Any:
            if self.lie == "enormous" and function == payloads.encode:
                return await environment.work(enormous, payloads, arguments)
            if self.lie == "infinite" and function == payloads.encode:
                return await environment.work(encode_truthfully, payloads, arguments)
            result = await environment.work(function, *arguments)
            if not self.is_simulated or self.lie == "stalling":
                return result
            if function == payloads.encode:
                return await environment.work(self.simulated.sends, result, payloads, arguments)
            if function == payloads.slow:
                return await environment.work(self._weights_for_newcomers, payloads)
            return result

        def sign(announce: Announce) -> Presence:
            return environment.sign(self.simulated.announces(announce) if self.is_simulated else announce)

        directory: Directory = environment.directory
        if self.lie == "forged_record":
            directory = self.forging_directory = ForgingDirectory(environment.directory)
        elif self.lie == "crowd":
            directory = self.forging_directory = CrowdDirectory(environment.directory)
        return replace(
            environment,
            transport=AdversarialTransport(environment.transport, self, directory),
            directory=directory,
            work=work,
            sign=sign,
        )

    def with_forged_records(self, message: Message, to: PeerId) -> Message:
        """Return a message with false records in place of known ones, if it carries any and there are some."""
        false = self.forging_directory.forged if self.forging_directory is not None else ()
        forged = tuple(self.random.sample(false, min(len(false), MAX_KNOWN)))
        if not forged or not isinstance(message, Offer | Accept | WeightsReply):
            return message
        self.note_lie(to)
        return replace(message, known=forged)

    def note_lie(self, to: PeerId, times: int = 1) -> None:
        """Note a lie that honest peers drop without a note."""
        self.notebook.note("lied", peer=to, times=times)

    def _weights_for_newcomers(self, payloads: Payloads) -> list[Tensor]:
        """Return weights for newcomers and for comparison with other donors, in place of the true ones."""
        return [
            torch.frombuffer(bytearray(part), dtype=torch.float32) for part in self.simulated.gives(payloads.weights())
        ]

    def garbled(self, payload: Encoded, random: Random) -> Encoded:
        return replace(payload, parts=tuple(random.randbytes(len(part)) for part in payload.parts))


def enormous(payloads: Payloads, question: Sequence[Any]) -> Encoded:
    """Encode weights that are as large as codecs accept."""
    fragments, mine, theirs, snapshot = question
    true = snapshot or payloads.current(fragments)
    parts = tuple(part * (codecs.LARGEST_MAGNITUDE / 2 / float(part.abs().max())) for part in true.parts)
    return payloads.encode(fragments, mine, theirs, replace(true, parts=parts))


Propose = Callable[[Sequence[int]], tuple[Snapshot, tuple[bytes, ...]]]


def infinite(propose: Propose, fragments: Sequence[int]) -> tuple[Snapshot, tuple[bytes, ...]]:
    """Return the true proposals with a sketch of infinite weights."""
    sketch = struct.pack("<f", math.inf) * SKETCH_SUMS
    snapshot, proposals = propose(fragments)
    return snapshot, tuple(each[:-SKETCH_BYTES] + sketch if each else each for each in proposals)


def encode_truthfully(payloads: Payloads, question: Sequence[Any]) -> Encoded:
    """Encode with the true proposals, because our own codec would reject the altered ones."""
    fragments, _, theirs, true = question
    return payloads.encode(fragments, payloads.proposals(fragments, true), theirs, true)


class FrameWriter(Protocol):
    """``net.links.StreamLink`` below its frames, for writing parts of a frame."""

    async def _write(self, header: bytes, body: bytes | memoryview) -> None: ...


def frame_writer(link: Link) -> FrameWriter:
    """Return the link under the first stream of a connection."""
    return cast(FrameWriter, link._link if isinstance(link, ParallelLink) else link)


async def drip(link: FrameWriter, kind: int, body: bytes | memoryview) -> None:
    """Send a true frame: the header at once, then one byte per DRIP_S."""
    await link._write(encode_header(kind, len(body)), b"")
    for place in range(len(body)):
        await asyncio.sleep(DRIP_S)
        await link._write(b"", memoryview(body)[place : place + 1])


async def linger(link: FrameWriter, kind: int, body: bytes | memoryview) -> None:
    """Send a true frame just fast enough that the link does not time out."""
    await link._write(encode_header(kind, len(body)), b"")
    for start in range(0, len(body), LINGERING_PIECE):
        await asyncio.sleep(LINGERING_PIECE / LINGERING_BYTES_PER_S)
        await link._write(b"", memoryview(body)[start : start + LINGERING_PIECE])


def with_terms(message: Message, **lie: Any) -> Message:
    """Return a message with altered terms, if it has terms."""
    if isinstance(message, Offer | Accept):
        return replace(message, terms=replace(message.terms, **lie))
    return message


@dataclass(slots=True)
class AdversarialTransport:
    """Transport whose links alter what they send."""

    transport: Transport
    adversary: WireAdversary
    directory: Directory
    _flood: asyncio.Task[None] | None = None
    _connections: Counter[PeerId] = field(default_factory=Counter)
    """Completed connections of a flood since they were last noted."""

    async def open(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        return AdversarialLink(await self.transport.open(peer, addresses), self.adversary)

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        if self.adversary.lie == "flood":
            self._flood = asyncio.get_running_loop().create_task(self._flood_peers())
        await self.transport.listen(lambda link: handler(AdversarialLink(link, self.adversary)))

    async def _flood_peers(self) -> None:
        """Dial every peer forever, in parallel, and send nothing."""
        loop, known, looked_at = asyncio.get_running_loop(), list[Presence](), -FLOOD_LOOKUP_S
        calls = dict[PeerId, set[asyncio.Task[None]]]()
        while True:
            if loop.time() - looked_at >= FLOOD_LOOKUP_S:
                looked_at = loop.time()
                for peer, times in self._connections.items():
                    self.adversary.note_lie(peer, times)
                self._connections.clear()
                with contextlib.suppress(NetworkError):
                    known = await self.directory.lookup()
            for presence in known:
                if len(under_way := calls.setdefault(presence.peer, set())) < FLOOD_CONNECTIONS:
                    under_way.add(call := loop.create_task(self._connect_idle(presence)))
                    call.add_done_callback(under_way.discard)
            await asyncio.sleep(FLOOD_PAUSE_S)

    async def _connect_idle(self, presence: Presence) -> None:
        with contextlib.suppress(NetworkError, RemoteError):
            link = await self.transport.open(presence.peer, presence.addresses)
            try:
                await link.receive()  # the peer waits for our first message
            finally:
                self._connections[presence.peer] += 1
                await link.close()


@dataclass(slots=True)
class AdversarialLink(Link):
    """Link that alters what it sends; with the lie ``silent`` it ignores messages."""

    link: Link
    adversary: WireAdversary
    peer: PeerId = field(init=False)

    def __post_init__(self) -> None:
        self.peer = self.link.peer

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        adversary = self.adversary
        said = _message_of(kind, body)
        match adversary.lie:
            case "frames" if kind == FrameKind.MESSAGE:
                body = adversary.random.randbytes(len(body))
                kind = adversary.random.choice([FrameKind.MESSAGE, FrameKind.CHUNK])  # of any length
            case "progress" | "behind" if said is not None:
                lie = adversary.simulated.says(said)
                if lie != said:
                    adversary.note_lie(self.peer)
                body = encode_message(lie)
            case "forged_record" | "crowd" if said is not None:
                body = encode_message(adversary.with_forged_records(said, self.peer))
            case "heavy" if said is not None:
                body = encode_message(with_terms(said, weight=HEAVY_WEIGHT))
            case "lingering" if said is not None:
                body = encode_message(with_terms(said, seconds_per_byte=LINGERING_S_PER_BYTE))
            case "lingering" if kind == FrameKind.CHUNK:
                await linger(frame_writer(self.link), kind, body)
                return
            case "stalling" if kind == FrameKind.CHUNK:
                await asyncio.sleep(FOREVER_S)
            case "shapes" if kind == FrameKind.CHUNK:
                body = memoryview(body)[: len(body) // 2]
            case "endless" if kind == FrameKind.PART:
                while True:
                    await self.link.send(FrameKind.CHUNK, adversary.random.randbytes(1 << 16))
            case "drip" if kind == FrameKind.CHUNK:
                await drip(frame_writer(self.link), kind, body)
                return
        await self.link.send(kind, body)

    async def receive(self) -> tuple[int, bytes]:
        kind, body = await self.link.receive()
        lie = self.adversary.lie
        if lie == "silent" and kind == FrameKind.MESSAGE and not self.adversary.simulated.hears(decode_message(body)):
            self.adversary.note_lie(self.peer)
            await asyncio.sleep(FOREVER_S)
        return kind, body

    async def close(self) -> None:
        await self.link.close()


def _message_of(kind: int, body: bytes | memoryview) -> Message | None:
    """Return the message in a frame; None for other frames, and for requests of pieces, which are not messages."""
    if kind != FrameKind.MESSAGE:
        return None
    try:
        return decode_message(bytes(body))
    except RemoteError:
        return None


@click.command()
@click.argument("lie", type=click.Choice(LIES))
@click.argument("link")
@click.option("--home", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--nickname", default="")
@click.option("--local", is_flag=True)
def hostile(lie: str, link: str, home: Path, nickname: str, local: bool) -> None:
    """Run an adversarial peer of the lab that tells LIE to the swarm of LINK."""

    def disguise(environment: DriverEnvironment, learner: Learner, progress: float) -> DriverEnvironment:
        return WireAdversary(lie, progress).wrapped(environment, learner)

    run(PeerOptions(JoinLink.parse(link), home, nickname=nickname, local=local), disguise)


if __name__ == "__main__":
    run_command(hostile, name=f"{Path(sys.argv[0]).name} (adversarial peer of the lab)")
