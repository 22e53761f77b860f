"""Liars of the laboratory: what leaves them, and that nothing else of theirs is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from p2ptrain import codec as codecs
from p2ptrain.codec import CodecTerms
from p2ptrain.errors import NetworkError
from p2ptrain.framing import FrameKind, decode_header
from p2ptrain.ids import PeerId, RunId
from p2ptrain.net.driver import Shore, at_once
from p2ptrain.net.links import Limits, StreamLink
from p2ptrain.ports import Link
from p2ptrain.swarm import PeerState
from p2ptrain.swarm.messages import Accept, Decline, DeclineReason, Offer, Terms
from p2ptrain.train.learner import Learner
from p2ptrain.train.payloads import Payloads, Snapshot
from p2ptrain.wire import decode_message, encode_message
from peer.lab import hostile
from peer.lab.hostile import LIES, Hostility

FP32 = codecs.get("fp32")
THEM = PeerId("them")
WEIGHTS = torch.linspace(-1.0, 1.0, 256)


@dataclass
class Wire:
    """A link that keeps what is sent, and breaks after so many frames."""

    peer: PeerId = THEM
    patience: int = 1000
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    coming: list[tuple[int, bytes]] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)
    """Below its frames."""

    async def send(self, kind: int, body: bytes | memoryview) -> None:
        if len(self.sent) == self.patience:
            raise NetworkError("they had enough")
        self.sent.append((kind, bytes(body)))

    async def receive(self) -> tuple[int, bytes]:
        return self.coming.pop(0)

    async def _write(self, header: bytes, body: bytes | memoryview) -> None:
        self.written.append(header + bytes(body))

    async def close(self) -> None:
        """Nothing is held."""


@dataclass
class OneWire:
    """A transport with one link, in and out."""

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


def disguised(lie: str, wire: Wire | None = None, payloads: Payloads | None = None) -> Shore:
    nothing: Any = None
    shore = Shore(
        transport=OneWire(wire or Wire()),
        directory=nothing,
        notebook=nothing,
        clock=lambda: 0.0,
        sign=nothing,
        live_until=nothing,
        begin_training=nothing,
        work=at_once,
    )
    learner = cast(Learner, OneLearner(payloads or honest_payloads()))
    return Hostility(lie, 1000.0).disguised(shore, learner)


def encoded(lie: str) -> torch.Tensor:
    """What partners decode of its weights."""
    payloads = honest_payloads()
    payload = asyncio.run(disguised(lie, payloads=payloads).work(payloads.encode, (0,), (), (), payloads.published))
    assert payloads.published.parts[0] is WEIGHTS  # the lie is told, not believed
    return FP32.decode(payload.parts[0], CodecTerms(len(WEIGHTS)))


def sent(
    lie: str, *frames: tuple[int, bytes], patience: int = 1000, wire: Wire | None = None
) -> list[tuple[int, bytes]]:
    """What goes over the wire when it is to send these frames."""
    wire = wire or Wire(patience=patience)

    async def send() -> None:
        link = await disguised(lie, wire).transport.open(wire.peer, ())
        for kind, body in frames:
            await link.send(kind, body)

    asyncio.run(send())
    return wire.sent


MESSAGE = FrameKind.MESSAGE, encode_message(Decline(DeclineReason.BUSY, PeerState.TRAINING, 2, 5.0))
CHUNK = FrameKind.CHUNK, bytes(64)
PART = FrameKind.PART, bytes(44)


def test_weights_that_are_lied_about() -> None:
    assert torch.equal(encoded("flipped"), -WEIGHTS)
    assert torch.equal(encoded("scaled"), 3 * WEIGHTS)
    assert float(encoded("enormous").abs().max()) > 1e6
    assert not torch.equal(encoded("random"), WEIGHTS)


@pytest.mark.parametrize("lie", ["flipped", "scaled", "random", "enormous"])
def test_whoever_looks_while_it_lies_sees_what_the_trainer_published(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads, seen = honest_payloads(), list[torch.Tensor]()
    encode = Payloads.encode

    def looked_at(*arguments: Any) -> Any:
        seen.append(payloads.published.parts[0])
        return encode(*arguments)

    monkeypatch.setattr(Payloads, "encode", looked_at)
    asyncio.run(disguised(lie, payloads=payloads).work(payloads.encode, (0,), (), (), payloads.published))
    assert seen
    assert all(each is WEIGHTS for each in seen)


HONEST_IN_WEIGHTS = ("frames", "shapes", "endless", "drip", "lingering", "heavy", "flood", "forged_record")


@pytest.mark.parametrize("lie", [*HONEST_IN_WEIGHTS, "silent", "stalling"])
def test_other_liars_have_honest_weights(lie: str) -> None:
    assert torch.equal(encoded(lie), WEIGHTS)


def test_frames_are_garbage_and_payloads_are_not() -> None:
    [(_, body), chunk] = sent("frames", MESSAGE, CHUNK)
    assert body != MESSAGE[1]
    assert len(body) == len(MESSAGE[1])
    assert chunk == CHUNK


def test_shapes_are_wrong() -> None:
    assert sent("shapes", MESSAGE, CHUNK) == [MESSAGE, (FrameKind.CHUNK, bytes(32))]


def test_an_endless_payload_ends_when_the_partner_has_had_enough() -> None:
    with pytest.raises(NetworkError):
        sent("endless", CHUNK, PART, patience=20)


def test_it_claims_to_be_at_the_end() -> None:
    [(_, body)] = sent("progress", MESSAGE)
    assert decode_message(body) == replace(cast(Decline, decode_message(MESSAGE[1])), progress=1000.0)


def test_a_drip_and_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(hostile.asyncio, "sleep", nap)
    wire = Wire()
    assert sent("drip", MESSAGE, CHUNK, PART, wire=wire) == [MESSAGE, PART]
    header, *drops = wire.written
    assert decode_header(header) == (FrameKind.CHUNK, 64)  # a true frame, which nobody turns down for its shape
    assert drops == [b"\0"] * 64
    assert naps == [hostile.DRIP_S] * 64
    naps.clear()
    sent("stalling", MESSAGE, CHUNK)
    assert naps == [hostile.FOREVER_S]


@pytest.mark.parametrize(("lie", "lied"), [("heavy", {"weight": 1e6}), ("lingering", {"seconds_per_byte": 1.0})])
def test_lies_about_terms(lie: str, lied: dict[str, float]) -> None:
    terms = Terms(3, 5.0, 1.0, float("inf"), True, PeerState.TRAINING)
    offer, accept = Offer(RunId("ab" * 32), 1, (0,), terms), Accept((0,), terms)
    frames = sent(lie, *((FrameKind.MESSAGE, encode_message(each)) for each in (offer, accept)), MESSAGE)
    told = [decode_message(body) for _, body in frames]
    assert told == [replace(each, terms=replace(terms, **lied)) for each in (offer, accept)] + [
        decode_message(MESSAGE[1])
    ]


def test_it_lingers_just_above_the_rate_at_which_a_link_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(hostile.asyncio, "sleep", nap)
    wire, body = Wire(), bytes(range(256)) * 40
    sent("lingering", (FrameKind.CHUNK, body), wire=wire)
    header, *pieces = wire.written
    assert decode_header(header) == (FrameKind.CHUNK, len(body))
    assert b"".join(pieces) == body
    assert 1.0 < len(body) / sum(naps) / Limits().slowest_rate < 1.5


def test_a_flood_calls_everybody_at_once_and_so_often_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "FLOOD_PAUSE_S", 0.0)
    monkeypatch.setattr(hostile, "FLOOD_AT_ONCE", 3)
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
        lying = hostile.Lying(Busy(Wire()), nothing, cast(Any, Everybody()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lying._call_everybody(), 0.2)

    asyncio.run(flood())
    assert sorted(called) == ["anna"] * 3 + ["bert"] * 3


def test_real_links_can_drip() -> None:
    assert callable(StreamLink._write)  # hostile.Raw


def test_every_lie_of_a_scenario_is_known() -> None:
    assert {"flipped", "stale", "drip", "flood", "forged_record", "enormous"} <= set(LIES)
    assert len(LIES) == len(set(LIES)) == 18
