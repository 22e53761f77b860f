"""Limits on what one stranger can use of a relay, over streams in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import base58
import pytest
import virtual_time
from hivemind.proto import p2pd_pb2

from p2ptrain.base.errors import NetworkError
from p2ptrain.base.ids import PeerId
from p2ptrain.net import address
from p2ptrain.net.p2pd.control import FarEnd
from p2ptrain.net.p2pd.daemon import PROTECTING
from p2ptrain.net.rate_limiter import PER_PEER
from p2ptrain.net.relay.circuit_v2 import CircuitStatus
from p2ptrain.net.relay.relay import (
    ASK_DEADLINE_S,
    FOR_A_SERVER,
    GATHER_FROM_BYTES,
    GATHER_S,
    IDLE_BYTES,
    LAST_WORD_S,
    NO_RELAY,
    QUESTIONS,
    READ_BYTES,
    Relay,
    RelayLimits,
    circuit_v2,
    reserve,
)
from p2ptrain.net.throttle import Throttles

LIMITS = RelayLimits()
HERE, THERE = "/ip4/203.0.114.7/tcp/4001", "/ip4/203.0.114.8/tcp/4001"


def peer(number: int) -> PeerId:
    return PeerId(base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + number.to_bytes(32, "big")).decode())


class Wire:
    """An inbound stream: what its initiator sent, and then silence until either side closes."""

    def __init__(self, who: PeerId, place: str, *said: bytes) -> None:
        info = p2pd_pb2.StreamInfo(
            peer=base58.b58decode(who), addr=address.packed(place), proto=circuit_v2.HOP_PROTOCOL
        )
        self._unread = circuit_v2.framed(info.SerializeToString()) + b"".join(map(circuit_v2.framed, said))
        self._hung_up = asyncio.Event()
        self._news = asyncio.Event()
        """Event: more was sent, or a side closed."""
        self.heard = b""
        self.pauses = 0

    @property
    def status(self) -> int | None:
        """Status code of the relay's answer."""
        return circuit_v2.status(self.heard[1:]) if self.heard else None

    @property
    def is_open(self) -> bool:
        return not self._hung_up.is_set()

    async def read_exactly(self, length: int) -> bytes:
        if len(self._unread) < length:
            await self._hung_up.wait()
            raise EOFError("hung up")
        taken, self._unread = self._unread[:length], self._unread[length:]
        return taken

    async def read_some(self) -> bytes:
        self._news.clear()
        if not self._unread and self.is_open:
            await self._news.wait()
        if not self._unread:
            raise EOFError("hung up")
        taken, self._unread = self._unread, b""
        return taken

    def sends(self, more: bytes) -> None:
        self._unread += more
        self._news.set()

    async def write(self, *buffers: bytes) -> None:
        self.heard += b"".join(buffers)

    def close(self) -> None:
        self._hung_up.set()
        self._news.set()

    abort = close

    def widen(self, size_bytes: int) -> None:
        pass

    def pause(self) -> None:
        self.pauses += 1


class Line:
    """A relay and the peers that use it."""

    def __init__(self, limits: RelayLimits = LIMITS) -> None:
        self.rates = Throttles()
        daemon = SimpleNamespace(open_stream=self._open, protect=self._protect, connections=self._connections)
        node = SimpleNamespace(daemon=daemon)
        self.silent: set[PeerId] = set()
        """Targets that answer no STOP message."""
        self.connected: set[PeerId] = set()
        self.protected: list[tuple[PeerId, str, int]] = []
        self.relay = Relay(cast(Any, node), limits, self.rates)
        self.relay._server = cast(Any, object())  # as if it were serving
        self.led: list[Wire] = []
        """Streams on which the relay announced an initiator to a target."""

    async def _open(self, target: PeerId, protocol: str) -> tuple[FarEnd, Any]:
        yes = Wire(target, THERE)
        yes._unread = circuit_v2.framed(circuit_v2._number(1, 1) + circuit_v2._number(4, CircuitStatus.OK))
        self.led.append(yes)
        if target in self.silent:
            raise NetworkError("stream reset")
        return FarEnd(target, THERE), yes

    async def _connections(self) -> list[FarEnd]:
        return [FarEnd(each, THERE) for each in self.connected]

    async def _protect(self, peer: PeerId, purpose: str, weight: int) -> None:
        self.protected.append((peer, purpose, weight))

    async def says(self, who: PeerId, place: str, *said: bytes) -> Wire:
        wire = Wire(who, place, *said)
        self.relay._take(cast(Any, wire))
        for _ in range(5):
            await asyncio.sleep(0)
        return wire

    async def reserves(self, who: PeerId, place: str) -> int | None:
        """Request a reservation, and end the stream after the answer."""
        wire = await self.says(who, place, circuit_v2.reserve())
        status = wire.status
        wire.close()
        for _ in range(5):
            await asyncio.sleep(0)
        return status

    async def dials(self, who: PeerId, place: str, target: PeerId) -> Wire:
        return await self.says(who, place, connect(base58.b58decode(target)))


def connect(target: bytes) -> bytes:
    return circuit_v2._number(1, circuit_v2.CONNECT) + circuit_v2.field(2, circuit_v2.field(1, target))


@pytest.mark.parametrize("name", [lambda number: peer(1), peer], ids=["one name", "many names"])
def test_streams_that_say_nothing_do_not_keep_others_away(name: Callable[[int], PeerId]) -> None:
    async def main() -> None:
        line = Line()
        for second in range(60):
            if second % 10 == 0:
                for number in range(200):
                    await line.says(name(number + 100), HERE)
            assert await line.reserves(peer(2), THERE) == CircuitStatus.OK, second
            await asyncio.sleep(1.0)
        await asyncio.sleep(ASK_DEADLINE_S)
        assert not line.relay._tasks

    virtual_time.run(main())


def test_the_streams_of_one_peer_and_of_one_address_are_counted() -> None:
    async def main() -> None:
        line = Line()
        mine = [await line.says(peer(1), HERE) for _ in range(30)]
        assert sum(each.is_open for each in mine) == LIMITS.circuits_per_peer + QUESTIONS
        others = [await line.says(peer(number), HERE) for number in range(2, 30)]
        there = LIMITS.circuits_per_origin + QUESTIONS
        assert sum(each.is_open for each in [*mine, *others]) == there

    virtual_time.run(main())


def test_who_asks_too_often_is_not_heard() -> None:
    async def main() -> None:
        line = Line()
        answers = [await line.reserves(peer(1 + number % 5), HERE) for number in range(300)]
        assert answers.count(CircuitStatus.OK) == PER_PEER.burst + 5  # the first of each, before it was a guest
        assert await line.reserves(peer(9), THERE) == CircuitStatus.OK
        await asyncio.sleep(10.0)
        assert await line.reserves(peer(1), HERE) == CircuitStatus.OK

    virtual_time.run(main())


def test_a_crowd_that_finds_no_room_keeps_no_guest_from_renewing() -> None:
    async def main() -> None:
        line = Line(RelayLimits(places=1))
        assert await line.reserves(peer(1), HERE) == CircuitStatus.OK
        crowd = [await line.reserves(peer(2 + n), f"/ip4/203.0.{n // 250}.{n % 250}/tcp/1") for n in range(500)]
        assert crowd[0] == CircuitStatus.RESERVATION_REFUSED
        assert crowd[-1] is None  # not even read
        assert await line.reserves(peer(1), HERE) == CircuitStatus.OK

    virtual_time.run(main())


def test_an_answer_is_left_to_be_read_but_not_for_ever() -> None:
    """Check that the relay closes after a pause: closing at once could discard the answer (``net.links``)."""

    async def main() -> None:
        line = Line()
        wire = await line.says(peer(1), HERE, circuit_v2.reserve())
        assert (wire.is_open, wire.status) == (True, CircuitStatus.OK)
        await asyncio.sleep(LAST_WORD_S + 0.1)
        assert not wire.is_open
        assert not line.relay._tasks

    virtual_time.run(main())


def test_a_peer_with_an_endless_name_is_not_spelled() -> None:
    async def main() -> None:
        line = Line()
        wire = await line.says(peer(1), HERE, connect(bytes(4000)))
        assert (wire.is_open, wire.status) == (False, None)

    virtual_time.run(main())


def test_circuits_are_counted_by_address_and_end_with_their_streams() -> None:
    async def main() -> None:
        line = Line()
        for number in range(8):
            assert await line.reserves(peer(number), THERE) == CircuitStatus.OK
        dialed = [await line.dials(peer(100 + number), HERE, peer(number % 8)) for number in range(34)]
        statuses = [each.status for each in dialed]
        assert statuses == [CircuitStatus.OK] * LIMITS.circuits_per_origin + [CircuitStatus.RESOURCE_LIMIT_EXCEEDED] * 2
        elsewhere = await line.dials(peer(200), "/ip4/203.0.114.9/tcp/1", peer(0))
        assert elsewhere.status == CircuitStatus.OK
        for each in dialed:
            each.close()
        await asyncio.sleep(0.1)
        assert [each.ends[0] for each in line.relay._circuits] == [peer(200)]
        assert (await line.dials(peer(100), HERE, peer(1))).status == CircuitStatus.OK

    virtual_time.run(main())


def test_a_pair_has_two_circuits_whoever_asks() -> None:
    async def main() -> None:
        line = Line()
        for each in (1, 2):
            assert await line.reserves(peer(each), THERE) == CircuitStatus.OK
        asked = [(await line.dials(peer(2), HERE, peer(1))).status for _ in range(4)]
        assert asked == [CircuitStatus.OK] * 2 + [CircuitStatus.RESOURCE_LIMIT_EXCEEDED] * 2
        assert (await line.dials(peer(1), THERE, peer(2))).status == CircuitStatus.RESOURCE_LIMIT_EXCEEDED
        assert (await line.dials(peer(3), HERE, peer(1))).status == CircuitStatus.OK

    virtual_time.run(main())


def test_an_address_with_many_ids_leaves_others_half_of_a_targets_circuits() -> None:
    async def main() -> None:
        line = Line()
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK

        async def granted(origin: int, ids: int) -> int:
            places = [f"/ip4/203.0.115.{origin}/tcp/{number + 1}" for number in range(ids)]
            asked = [await line.dials(peer(100 * origin + n), place, peer(1)) for n, place in enumerate(places)]
            return sum(each.status == CircuitStatus.OK for each in asked)

        assert await granted(2, 30) == LIMITS.circuits_per_peer // 2
        assert await granted(3, 30) == LIMITS.circuits_per_peer // 4
        assert [await granted(origin, 1) for origin in (4, 5, 6, 7, 8)] == [1, 1, 1, 1, 0]

    virtual_time.run(main())


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_target_keeps_its_reservation_as_long_as_it_is_connected(is_connected: bool) -> None:
    """Check that failed circuits, which anybody can cause, end no reservation of a peer that is there."""

    async def main() -> None:
        line = Line()
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK
        line.silent = {peer(1)}
        line.connected = {peer(1)} if is_connected else set()
        assert (await line.dials(peer(2), HERE, peer(1))).status == CircuitStatus.CONNECTION_FAILED
        line.silent = set()
        after = (await line.dials(peer(3), HERE, peer(1))).status
        assert after == (CircuitStatus.OK if is_connected else CircuitStatus.NO_RESERVATION)

    virtual_time.run(main())


def test_a_circuit_without_traffic_ends_and_one_with_some_stays() -> None:
    """Check that pings, which a circuit carries after its pair has become directly connected, do not keep it."""

    async def main() -> None:
        line = Line()
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK
        idle, busy = await line.dials(peer(2), HERE, peer(1)), await line.dials(peer(3), HERE, peer(1))
        for _ in range(12):
            idle.sends(bytes(50))
            busy.sends(bytes(2 * IDLE_BYTES))
            await asyncio.sleep(LIMITS.idle_s / 3)
        assert [each.ends[0] for each in line.relay._circuits] == [peer(3)]
        assert not idle.is_open
        busy.close()

    virtual_time.run(main())


def test_circuits_that_are_cut_put_off_nobody_and_are_counted_as_given() -> None:
    """Check two colluding peers that repeatedly send on a circuit and end it before the throttle admits the bytes."""

    async def main() -> None:
        line = Line()
        line.rates.up.rate = 125_000.0
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK
        for number in range(40):
            asker = await line.dials(peer(2 + number % 8), HERE, peer(1))
            assert asker.status == CircuitStatus.OK
            asker.sends(bytes(64 << 10))
            await asyncio.sleep(0.02)
            line.led[-1].close()
            await asyncio.sleep(1.0)
        came = 40 * (64 << 10)
        assert line.rates.up.book(1) < 1.0, "the owner's next byte"
        assert line.rates.down.total_bytes == came
        assert line.rates.given_bytes == came + line.rates.up.total_bytes - 1
        assert line.rates.up.total_bytes < came

    virtual_time.run(main())


def test_who_did_not_agree_to_relay_gives_no_place() -> None:
    """Check a peer whose owner did not agree to relay: on its own, its p2pd would, whatever its options."""

    async def main() -> None:
        line = Line(NO_RELAY)
        asked = await line.says(peer(1), THERE, circuit_v2.reserve())
        assert asked.status is None
        assert not asked.is_open
        assert not (await line.dials(peer(2), HERE, peer(1))).is_open

    virtual_time.run(main())


@pytest.mark.parametrize("limit", [b"", circuit_v2._number(1, 120) + circuit_v2._number(2, 1 << 17)])
def test_a_place_whose_circuits_carry_next_to_nothing_is_none(limit: bytes) -> None:
    """Check that a relay whose circuits carry next to nothing is not used: they are too low for weights."""
    place = circuit_v2.field(3, circuit_v2._number(1, 2_000_000_000)) + (circuit_v2.field(4, limit) if limit else b"")
    answer = circuit_v2._number(1, circuit_v2.STATUS) + place + circuit_v2._number(5, CircuitStatus.OK)

    async def main() -> None:
        wire = Wire(peer(1), THERE)
        wire._unread = circuit_v2.framed(answer)

        async def connect(relay: PeerId, addresses: Sequence[str]) -> None:
            pass

        async def open_stream(relay: PeerId, protocol: str) -> tuple[FarEnd, Any]:
            return FarEnd(relay, THERE), wire

        async def protect(relay: PeerId, purpose: str) -> None:
            pass

        daemon = cast(Any, SimpleNamespace(connect=connect, open_stream=open_stream, protect=protect))
        with pytest.raises(NetworkError, match="only small amounts of data") if limit else contextlib.nullcontext():
            await reserve(daemon, peer(1), [THERE])

    virtual_time.run(main())


def test_once_the_owner_gives_nothing_circuits_end_and_guests_go_elsewhere() -> None:
    async def main() -> None:
        line = Line()
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK
        before = [await line.dials(peer(number), HERE, peer(1)) for number in (2, 3)]
        before[0].sends(b"passes")
        await asyncio.sleep(0.1)
        line.rates.gives = False
        assert await line.reserves(peer(1), THERE) == CircuitStatus.RESOURCE_LIMIT_EXCEEDED
        assert (await line.dials(peer(4), HERE, peer(1))).status == CircuitStatus.RESOURCE_LIMIT_EXCEEDED
        before[0].sends(b"does not")
        await asyncio.sleep(0.1)
        assert [each.is_open for each in before] == [False, True]  # only the one that carries nothing
        assert line.rates.given_bytes == line.rates.up.total_bytes * 2 == 2 * len(b"passes")
        line.rates.gives = True
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK

    virtual_time.run(main())


def test_p2pd_is_to_keep_the_connections_that_a_relay_serves() -> None:
    """Check that places and circuits are protected: p2pd closes old connections when it has too many."""

    async def main() -> None:
        line = Line()
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK
        circuit = await line.dials(peer(2), HERE, peer(1))
        assert line.protected == [(peer(1), "place", PROTECTING), (peer(2), "circuit", PROTECTING)]
        circuit.close()
        await asyncio.sleep(0.1)
        assert line.protected[2:] == [(peer(2), "circuit", 0)]

    virtual_time.run(main())


def test_a_bulk_transfer_gathers_while_small_messages_pass_at_once() -> None:
    async def main() -> None:
        line = Line()
        assert await line.reserves(peer(1), THERE) == CircuitStatus.OK
        circuit = await line.dials(peer(2), HERE, peer(1))
        clock, before = asyncio.get_running_loop().time, len(line.led[-1].heard)
        for size, gathers in ((100, False), (GATHER_FROM_BYTES, True), (READ_BYTES, False)):
            began, pauses = clock(), circuit.pauses
            circuit.sends(bytes(size))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            circuit.sends(b"more")
            while len(line.led[-1].heard) < before + size + 4:
                await asyncio.sleep(GATHER_S / 100)
            assert (circuit.pauses > pauses) is gathers
            assert clock() - began == pytest.approx(GATHER_S if gathers else 0.0, abs=GATHER_S / 10)
            before = len(line.led[-1].heard)
        circuit.close()

    virtual_time.run(main())


def test_a_server_keeps_connections_for_all_that_it_relays_for() -> None:
    assert FOR_A_SERVER.connections > FOR_A_SERVER.places + 2 * FOR_A_SERVER.circuits
    assert LIMITS.connections == NO_RELAY.connections == 0
