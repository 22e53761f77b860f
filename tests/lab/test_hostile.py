"""Adversarial peers of the lab: what they send, and that they alter nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import virtual_time

from lab import false_records, hostile
from lab.hostile import LIES, WireAdversary
from p2ptrain import codec as codecs
from p2ptrain.base.errors import NetworkError, RemoteError
from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.codec import CodecTerms
from p2ptrain.framing import FrameKind, decode_header
from p2ptrain.host.learner import Learner
from p2ptrain.host.payloads import Payloads, Snapshot
from p2ptrain.net.driver import DriverEnvironment, at_once
from p2ptrain.net.identity import Identity, verify
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.net.node import Node
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.streams import Stream
from p2ptrain.net.parallel_streams import ParallelStreams
from p2ptrain.net.throttle import Throttles
from p2ptrain.ports import Directory, Link, Notebook
from p2ptrain.statements import packed
from p2ptrain.swarm import PeerState, Presence
from p2ptrain.swarm.messages import Accept, Decline, DeclineReason, Offer, Terms
from p2ptrain.wire import MAX_KNOWN, decode_message, encode_message

FP32 = codecs.get("fp32")
THEM = PeerId("them")
RUN = RunId("ab" * 32)
TERMS = Terms(3, 5.0, 1.0, float("inf"), True, PeerState.TRAINING)
WEIGHTS = torch.linspace(-1.0, 1.0, 256)


@dataclass
class Wire:
    """Link that records what is sent and breaks after a number of frames."""

    peer: PeerId = THEM
    patience: int = 1000
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    coming: list[tuple[int, bytes]] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)
    """Bytes written below the frames."""

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        if len(self.sent) == self.patience:
            raise NetworkError("they had enough")
        self.sent.append((kind, bytes(body)))

    async def receive(self) -> tuple[int, bytes]:
        return self.coming.pop(0)

    async def _write(self, header: bytes, body: bytes | memoryview) -> None:
        self.written.append(header + bytes(body))

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


@dataclass
class OneWire:
    """Transport with one link in each direction."""

    wire: Wire

    async def open(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        return self.wire

    async def listen(self, handler: Callable[[Link], Awaitable[None]]) -> None:
        await handler(self.wire)


@dataclass
class OneLearner:
    payloads: Payloads


def honest_payloads() -> Payloads:
    payloads = Payloads([len(WEIGHTS)], FP32, None)
    payloads.publish(Snapshot(3, (WEIGHTS,), (WEIGHTS,)))
    return payloads


def disguised(
    lie: str,
    wire: Wire | None = None,
    payloads: Payloads | None = None,
    directory: Directory | None = None,
    notebook: Notebook | None = None,
) -> DriverEnvironment:
    nothing: Any = None
    environment = DriverEnvironment(
        transport=OneWire(wire or Wire()),
        directory=directory or nothing,
        notebook=notebook or nothing,
        clock=lambda: 0.0,
        sign=nothing,
        live_until=nothing,
        begin_training=nothing,
        work=at_once,
    )
    learner = cast(Learner, OneLearner(payloads or honest_payloads()))
    return WireAdversary(lie, 1000.0).wrapped(environment, learner)


def encoded(lie: str) -> torch.Tensor:
    """Return what partners decode of the peer's weights."""
    payloads = honest_payloads()
    payload = asyncio.run(disguised(lie, payloads=payloads).work(payloads.encode, (0,), (), (), payloads.published))
    assert payloads.published.parts[0] is WEIGHTS  # the peer itself keeps the true weights
    return FP32.decode(payload.parts[0], CodecTerms(len(WEIGHTS)))


def sent(
    lie: str, *frames: tuple[int, bytes], patience: int = 1000, wire: Wire | None = None
) -> list[tuple[int, bytes]]:
    """Return the frames on the wire when the peer sends these frames."""
    wire = wire or Wire(patience=patience)

    async def send() -> None:
        link = await disguised(lie, wire, notebook=MemoryLog()).transport.open(wire.peer, ())
        for kind, body in frames:
            await link.send(kind, body)

    asyncio.run(send())
    return wire.sent


MESSAGE = FrameKind.MESSAGE, encode_message(Decline(DeclineReason.BUSY, PeerState.TRAINING, 2, 5.0))
CHUNK = FrameKind.CHUNK, bytes(64)
PART = FrameKind.PART, bytes(44)


def test_false_weights() -> None:
    assert torch.equal(encoded("flipped"), -WEIGHTS)
    assert torch.equal(encoded("scaled"), 3 * WEIGHTS)
    assert float(encoded("enormous").abs().max()) > 1e6
    assert not torch.equal(encoded("random"), WEIGHTS)


@pytest.mark.parametrize("lie", ["flipped", "scaled", "random", "enormous"])
def test_published_weights_stay_true_while_false_ones_are_encoded(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads, seen = honest_payloads(), list[torch.Tensor]()
    encode = Payloads.encode

    def looked_at(*arguments: Any) -> Any:
        seen.append(payloads.published.parts[0])
        return encode(*arguments)

    monkeypatch.setattr(Payloads, "encode", looked_at)
    asyncio.run(disguised(lie, payloads=payloads).work(payloads.encode, (0,), (), (), payloads.published))
    assert seen
    assert all(each is WEIGHTS for each in seen)


def test_stale_weights_are_the_first_that_were_sent() -> None:
    payloads = honest_payloads()
    environment = disguised("stale", payloads=payloads)

    async def first_and_second() -> list[bytes]:
        sent = list[bytes]()
        for weights in (WEIGHTS, 2 * WEIGHTS):
            payloads.publish(Snapshot(3, (weights,), (weights,)))
            sent += (await environment.work(payloads.encode, (0,), (), (), payloads.published)).parts
        return sent

    first, second = asyncio.run(first_and_second())
    assert second == first
    assert torch.equal(FP32.decode(first, CodecTerms(len(WEIGHTS))), WEIGHTS)


def test_partners_reject_a_sketch_of_infinite_weights_and_the_adversary_does_not() -> None:
    def modular() -> Payloads:
        payloads = Payloads([len(WEIGHTS)], codecs.get("modular4"), None)
        payloads.publish(Snapshot(3, (WEIGHTS,), (WEIGHTS,)))
        return payloads

    theirs, liars = modular(), modular()
    honest, environment = theirs.proposals((0,)), disguised("infinite", payloads=liars)

    async def lie() -> tuple[Any, Any]:
        snapshot, proposals = liars.propose((0,))
        return proposals, await environment.work(liars.encode, (0,), proposals, honest, snapshot)

    proposals, payload = asyncio.run(lie())
    assert payload.parts == liars.encode((0,), liars.proposals((0,)), honest).parts
    with pytest.raises(RemoteError, match="sketch of its weights is not finite"):
        theirs.encode((0,), honest, proposals)


HONEST_IN_WEIGHTS = ("frames", "shapes", "endless", "drip", "lingering", "heavy", "flood", "forged_record", "crowd")


@pytest.mark.parametrize("lie", [*HONEST_IN_WEIGHTS, "silent", "stalling"])
def test_other_lies_leave_the_weights_true(lie: str) -> None:
    assert torch.equal(encoded(lie), WEIGHTS)


def test_frames_are_garbage_and_payloads_are_not() -> None:
    [(_, body), chunk] = sent("frames", MESSAGE, CHUNK)
    assert body != MESSAGE[1]
    assert len(body) == len(MESSAGE[1])
    assert chunk == CHUNK


def test_shapes_are_wrong() -> None:
    assert sent("shapes", MESSAGE, CHUNK) == [MESSAGE, (FrameKind.CHUNK, bytes(32))]


def test_an_endless_payload_ends_with_the_link() -> None:
    with pytest.raises(NetworkError):
        sent("endless", CHUNK, PART, patience=20)


def test_progress_is_claimed_at_the_end() -> None:
    [(_, body)] = sent("progress", MESSAGE)
    assert decode_message(body) == replace(cast(Decline, decode_message(MESSAGE[1])), progress=1000.0)


def test_progress_is_claimed_at_the_beginning() -> None:
    [(_, body)] = sent("behind", MESSAGE)
    assert decode_message(body) == replace(cast(Decline, decode_message(MESSAGE[1])), progress=0.0)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the peer's sleeps, in seconds, without sleeping."""
    taken: list[float] = []

    async def suspend(seconds: float) -> None:
        taken.append(seconds)

    monkeypatch.setattr(hostile.asyncio, "sleep", suspend)
    return taken


def test_a_drip_and_a_stall(naps: list[float]) -> None:
    wire = Wire()
    assert sent("drip", MESSAGE, CHUNK, PART, wire=wire) == [MESSAGE, PART]
    header, *drops = wire.written
    assert decode_header(header) == (FrameKind.CHUNK, 64)  # a well-formed frame, which partners accept
    assert drops == [b"\0"] * 64
    assert naps == [hostile.DRIP_S] * 64
    naps.clear()
    sent("stalling", MESSAGE, CHUNK)
    assert naps == [hostile.FOREVER_S]


def test_a_silent_adversary_counts_ignored_messages(naps: list[float]) -> None:
    log = MemoryLog()
    wire = Wire(coming=[(FrameKind.MESSAGE, encode_message(Offer(RUN, 1, (0,), TERMS))), MESSAGE])

    async def hear() -> None:
        link = await disguised("silent", wire, notebook=log).transport.open(wire.peer, ())
        await link.receive()
        assert await link.receive() == MESSAGE

    asyncio.run(hear())
    assert naps == [hostile.FOREVER_S]
    assert list(log.notes) == [("lied", {"peer": wire.peer, "times": 1})]


@pytest.mark.parametrize(("lie", "lied"), [("heavy", {"weight": 1e6}), ("lingering", {"seconds_per_byte": 1.0})])
def test_lies_about_terms(lie: str, lied: dict[str, float]) -> None:
    offer, accept = Offer(RUN, 1, (0,), TERMS), Accept((0,), TERMS)
    frames = sent(lie, *((FrameKind.MESSAGE, encode_message(each)) for each in (offer, accept)), MESSAGE)
    told = [decode_message(body) for _, body in frames]
    assert told == [replace(each, terms=replace(TERMS, **lied)) for each in (offer, accept)] + [
        decode_message(MESSAGE[1])
    ]


def test_lingering_is_just_above_the_rate_limit_of_dead_links(naps: list[float]) -> None:
    wire, body = Wire(), bytes(range(256)) * 40
    sent("lingering", (FrameKind.CHUNK, body), wire=wire)
    header, *pieces = wire.written
    assert decode_header(header) == (FrameKind.CHUNK, len(body))
    assert b"".join(pieces) == body
    assert 1.0 < len(body) / sum(naps) / Limits().slowest_rate < 1.5


def test_a_flood_dials_all_peers_with_bounded_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "FLOOD_PAUSE_S", 0.0)
    monkeypatch.setattr(hostile, "FLOOD_CONNECTIONS", 3)
    called: list[str] = []

    @dataclass
    class Known:
        peer: str
        addresses: tuple[str, ...] = ()

    class Everybody:
        async def lookup(self) -> list[Known]:
            return [Known("anna"), Known("bert")]

    class Busy(OneWire):
        async def open(self, peer: PeerId, addresses: Sequence[str]) -> Link:
            called.append(peer)
            await asyncio.sleep(60)
            raise NetworkError("it hangs")

    async def flood() -> None:
        nothing: Any = None
        lying = hostile.AdversarialTransport(Busy(Wire()), nothing, cast(Any, Everybody()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lying._flood_peers(), 0.2)

    asyncio.run(flood())
    assert sorted(called) == ["anna"] * 3 + ["bert"] * 3


@dataclass
class Shelf:
    """Directory that keeps the last record of each peer, and all announced records."""

    records: list[Presence]
    brought: list[Presence] = field(default_factory=list)

    async def announce(self, presence: Presence) -> None:
        self.brought.append(presence)

    async def lookup(self) -> list[Presence]:
        return self.records

    async def keep_finished(self, presence: Presence) -> None:
        pass

    async def finished(self) -> list[Presence]:
        return []


def test_forged_records_go_to_the_directory_and_to_partners(tmp_path: Path) -> None:
    def presence(who: Identity, host: str, at: float) -> Presence:
        state, nickname = PeerState.TRAINING, "name"
        return who.sign(Presence(who.peer_id, RUN, (host,), state, 3, 5.0, True, nickname, at, lifetime_s=100.0))

    liar, honest = (Identity.load_or_create(tmp_path / name) for name in ("liar", "honest"))
    own, other = presence(liar, "/ip4/203.0.113.6/tcp/6", 9.0), presence(honest, "/ip4/203.0.113.7/tcp/7", 8.0)
    shelf, log, wire = Shelf([own, other]), MemoryLog(), Wire()
    environment = disguised("forged_record", wire, directory=shelf, notebook=log)
    offer, accept = Offer(RUN, 1, (0,), TERMS), Accept((0,), TERMS, known=(other,))

    async def lie() -> None:
        link = await environment.transport.open(THEM, ())
        # It has announced nothing, so it has no false record yet
        await link.send(FrameKind.MESSAGE, encode_message(offer))
        await environment.directory.announce(own)
        for message in (offer, accept, decode_message(MESSAGE[1])):
            await link.send(FrameKind.MESSAGE, encode_message(message))

    asyncio.run(lie())
    forged = replace(own, peer=other.peer)
    assert shelf.brought == [own, forged]
    assert forged.issued_at > other.issued_at  # else nodes that have the true record would keep it
    assert not verify(forged)
    told = [decode_message(body) for _, body in wire.sent]
    assert told == [
        offer,
        replace(offer, known=(forged,)),
        replace(accept, known=(forged,)),
        decode_message(MESSAGE[1]),
    ]
    assert list(log.notes) == 2 * [("lied", {"peer": THEM, "times": 1})]


def test_a_crowd_of_nobody_is_announced_and_told_to_partners(tmp_path: Path) -> None:
    liar = Identity.load_or_create(tmp_path / "liar")
    state = PeerState.JOINING
    own = liar.sign(Presence(liar.peer_id, RUN, ("/ip4/127.0.0.1/tcp/6",), state, 3, 5.0, False, "liar", 9.0, 100.0))
    shelf, wire = Shelf([]), Wire()
    environment = disguised("crowd", wire, directory=shelf, notebook=MemoryLog())
    piece = FrameKind.MESSAGE, packed(["piece", 0])  # a request of a download, which is not a message

    async def lie() -> None:
        await environment.directory.announce(own)
        while len(shelf.brought) <= false_records.CROWD:
            await asyncio.sleep(0)
        link = await environment.transport.open(THEM, ())
        await link.send(FrameKind.MESSAGE, encode_message(Offer(RUN, 1, (0,), TERMS)))
        await link.send(*piece)

    asyncio.run(lie())
    first, *crowd = shelf.brought
    assert first == own
    assert len({each.peer for each in crowd} - {own.peer}) == false_records.CROWD
    assert all(verify(each) for each in crowd)
    assert {each.state for each in crowd} == {PeerState.TRAINING}
    assert all(each.addresses[0].startswith("/ip4/127.0.0.1/tcp/") for each in crowd)
    assert own.addresses[0] not in crowd[0].addresses
    shelf.records = [own, *crowd]
    assert asyncio.run(cast(false_records.CrowdDirectory, environment.directory).lookup()) == [own]
    [(_, offer), unchanged] = wire.sent
    told = cast(Offer, decode_message(offer)).known
    assert set(told) <= set(crowd)
    assert len(told) == MAX_KNOWN
    assert unchanged == piece


def test_a_flood_counts_completed_connections() -> None:
    log = MemoryLog()

    class TurnedDown(Wire):
        async def receive(self) -> tuple[int, bytes]:
            raise NetworkError("the stream ended")

    async def flood() -> None:
        known = Presence(THEM, RUN, (), PeerState.TRAINING, 3, 5.0, True, "", 9.0, 100.0)
        environment = disguised("flood", TurnedDown(), directory=Shelf([known]), notebook=log)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(
                cast(hostile.AdversarialTransport, environment.transport)._flood_peers(), 1.5 * hostile.FLOOD_LOOKUP_S
            )

    virtual_time.run(flood())
    [(kind, fields)] = log.notes
    assert (kind, fields["peer"]) == ("lied", THEM)
    assert fields["times"] == pytest.approx(hostile.FLOOD_LOOKUP_S / hostile.FLOOD_PAUSE_S, rel=0.02)


def test_real_links_can_drip() -> None:
    assert callable(StreamLink._write)  # hostile.FrameWriter
    stream = StreamLink(FarEnd(THEM, ""), cast(Stream, None), Limits(), Throttles())
    assert hostile.frame_writer(ParallelStreams(cast(Node, None)).of(stream, ours=True)) is stream


def test_every_lie_of_a_scenario_is_known() -> None:
    assert {"flipped", "stale", "drip", "flood", "forged_record", "enormous", "crowd"} <= set(LIES)
    assert len(LIES) == len(set(LIES)) == 21
