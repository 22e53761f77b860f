"""Simulated peers: the protocol core and a learner, with effects performed on a heap instead of sockets.

There is no algorithm here. A message sent at t arrives at t + latency; a swap is complete on one side when the other
side's payload has arrived and its own was sent; a payload takes its size over the link's bandwidth besides. Failures
are decisions of ``Conditions``. The asyncio driver over in-memory links keeps the same times, and ends bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from p2ptrain.errors import RemoteError
from p2ptrain.ids import LinkId, PeerId, RunId
from p2ptrain.ports import Notebook
from p2ptrain.sim.world import World
from p2ptrain.swarm import Peer, PeerState, Presence
from p2ptrain.swarm.events import (
    Adopt,
    Announce,
    BeginTraining,
    Close,
    Commit,
    Donate,
    Donated,
    Effect,
    Event,
    Finished,
    LeaveRequested,
    LinkFailed,
    Lookup,
    Note,
    Open,
    PeersSeen,
    Proceed,
    Pull,
    Pulled,
    Received,
    Send,
    Started,
    Swap,
    SwapDone,
    WakeAt,
    Woke,
)
from p2ptrain.swarm.messages import Accept, Message, Offer, WeightsReply
from p2ptrain.train.learner import Difference, Encoded, Learner


class Conditions(Protocol):
    """How the network behaves."""

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float: ...

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether a link can be opened now."""

    def drops_swap(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether this payload is lost on its way: both sides' exchange fails."""


@dataclass(frozen=True, slots=True)
class Calm:
    """Nothing fails; every direction of every pair has its own latency, so that no two events fall together."""

    latencies_s: dict[tuple[PeerId, PeerId], float]

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        return self.latencies_s[sender, receiver]

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        return True

    def drops_swap(self, sender: PeerId, receiver: PeerId) -> bool:
        return False


@dataclass(slots=True)
class _End:
    """One side's end of a link."""

    owner: SimulatedPeer
    link: LinkId
    other: _End | None = None
    is_open: bool = True
    swap: Swap | None = None
    encoded: Encoded | None = None
    arrived: Encoded | None = None
    difference: Difference | None = None
    pulled: tuple[WeightsReply, list[bytes]] | None = None


@dataclass(slots=True)
class SimulatedPeer:
    """One peer of the simulation."""

    network: SimulatedNetwork
    peer: PeerId
    core: Peer
    learner: Learner
    step_s: Callable[[], float]
    """Seconds of the next inner step."""
    notebook: Notebook
    ends: dict[LinkId, _End] = field(default_factory=dict)
    inbound_serial: int = 0
    wake: int = 0
    """Serial of the valid wake-up; older ones are ignored."""
    begun: bool = False
    finished: str = ""

    @property
    def _world(self) -> World:
        return self.network.world

    def start(self) -> None:
        self._world.after(self.step_s(), self._train)
        self.handle(Started())

    def leave(self) -> None:
        self.handle(LeaveRequested())

    def handle(self, event: Event) -> None:
        if self.finished and not isinstance(event, Received):
            return
        for effect in self.core.handle(event, self._world.now):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Open():
                self._open(effect)
            case Send():
                self._send(effect.link, effect.message)
            case Swap():
                self._swap(effect)
            case Commit():
                end = self.ends[effect.link]
                assert end.swap is not None
                assert end.difference is not None
                self.learner.deliver(
                    effect.link, end.difference, end.swap.mine, end.swap.theirs, effect.progress_displacement
                )
            case Proceed():
                self.learner.proceed(effect.step)
                self._world.after(0.0, self._go_on)
            case Pull():
                self.ends[effect.link].pulled = (effect.reply, [])
            case Adopt():
                end = self.ends[effect.link]
                assert end.pulled is not None
                reply, parts = end.pulled
                self.learner.adopt(effect.link, reply.step, reply.progress, [bytearray(part) for part in parts])
            case Donate():
                self._donate(effect.link)
            case Close():
                self._close(effect.link)
            case Announce():
                self.network.directory[self.peer] = self._presence(effect)
            case Lookup():
                self._world.after(self.network.lookup_s, self._looked_up)
            case WakeAt():
                self.wake += 1
                self._world.at(effect.time, self._woke, self.wake)
            case BeginTraining():
                self.begun = True
            case Finished():
                self.finished = effect.why
            case Note():
                self.notebook.note(effect.kind, peer=effect.peer, why=effect.why)
            case _:
                assert_never(effect)

    # --- the trainer --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """One inner step ends now and the next begins; before the start and after the end, only take in what came."""
        for event in self.learner.advance() if self.begun else self.learner.settle():
            self.handle(event)
        if not self.finished and not self.learner.is_waiting:
            self._world.after(self.step_s(), self._train)

    def _go_on(self) -> None:
        """The learner waited for its partners: the next inner step begins now."""
        was_waiting = self.learner.is_waiting
        for event in self.learner.settle():
            self.handle(event)
        if was_waiting and not self.finished and not self.learner.is_waiting:
            self._world.after(self.step_s(), self._train)

    # --- links --------------------------------------------------------------------------------------------------------

    def _open(self, effect: Open) -> None:
        mine = _End(self, effect.link)
        self.ends[effect.link] = mine
        partner = self.network.peers.get(effect.link.peer)
        if partner is None or not self.network.conditions.reaches(self.peer, effect.link.peer):
            self._world.after(0.0, self._fail, mine, "unreachable")
            return
        partner.inbound_serial += 1
        theirs = _End(partner, LinkId(self.peer, partner.inbound_serial, outbound=False), other=mine)
        mine.other = theirs
        partner.ends[theirs.link] = theirs
        self._send(effect.link, effect.message)

    def _send(self, link: LinkId, message: Message) -> None:
        end = self.ends.get(link)
        if end is not None and end.is_open and end.other is not None:
            self._world.after(self._latency(end), end.other.owner._receive, end.other, message)

    def _receive(self, end: _End, message: Message) -> None:
        if not end.is_open:
            return
        if isinstance(message, Offer | Accept | WeightsReply) and message.known:
            self.handle(PeersSeen(self.network.live(message.known), from_lookup=False))
        self.handle(Received(end.link, message))

    def _swap(self, effect: Swap) -> None:
        end = self.ends[effect.link]
        end.swap = effect
        end.encoded = self.learner.encode(effect.fragments)
        other = end.other
        assert other is not None
        if self.network.conditions.drops_swap(self.peer, other.owner.peer):
            self._world.after(self._latency(end), self._lose, end)
            return
        self._world.after(self._latency(end), other.owner._take_payload, other, end.encoded)
        self._world.after(0.0, self._complete_swap, end)

    def _lose(self, end: _End) -> None:
        """The connection breaks: both sides notice."""
        if end.other is not None:
            end.other.owner._fail(end.other, "connection lost")
        self._fail(end, "connection lost")

    def _take_payload(self, end: _End, payload: Encoded) -> None:
        end.arrived = payload
        self._complete_swap(end)

    def _complete_swap(self, end: _End) -> None:
        if not end.is_open or end.encoded is None or end.arrived is None or end.difference is not None:
            return
        try:
            end.difference = self.learner.difference(end.encoded, end.arrived.parts)
        except RemoteError as error:
            self._fail(end, str(error), their_fault=True)
            return
        self.handle(SwapDone(end.link, end.encoded.size_bytes, end.arrived.size_bytes, end.difference.distance))

    def _donate(self, link: LinkId) -> None:
        end = self.ends[link]
        assert end.other is not None
        parts = self.learner.weights()
        self._world.after(self._latency(end), end.other.owner._take_weights, end.other, parts)
        self._world.after(0.0, self.handle, Donated(link, sum(map(len, parts))))

    def _take_weights(self, end: _End, parts: list[bytes]) -> None:
        if not end.is_open or end.pulled is None:
            return
        end.pulled[1].extend(parts)
        self.handle(Pulled(end.link, sum(map(len, parts))))

    def _close(self, link: LinkId) -> None:
        end = self.ends.pop(link, None)
        if end is None:
            return
        end.is_open = False
        if end.other is not None:
            self._world.after(self._latency(end), end.other.owner._fail, end.other, "it closed the connection")

    def _fail(self, end: _End, why: str, their_fault: bool = False) -> None:
        if end.is_open:
            end.is_open = False
            self.ends.pop(end.link, None)
            self.handle(LinkFailed(end.link, why, their_fault))

    def _latency(self, end: _End) -> float:
        return self.network.conditions.latency_s(self.peer, end.link.peer)

    # --- directory and time -------------------------------------------------------------------------------------------

    def _presence(self, effect: Announce) -> Presence:
        return Presence(
            peer=self.peer,
            run=self.network.run,
            addresses=(),
            state=PeerState(effect.state),
            step=effect.step,
            progress=effect.progress,
            nickname="",
            issued_at=self._world.now,
            lifetime_s=self.network.lifetime_s,
        )

    def _looked_up(self) -> None:
        self.handle(PeersSeen(self.network.live(list(self.network.directory.values()))))

    def _woke(self, serial: int) -> None:
        if serial == self.wake:
            self.handle(Woke())


@dataclass(slots=True)
class SimulatedNetwork:
    """All peers, their directory, and how the network between them behaves."""

    world: World
    run: RunId
    conditions: Conditions
    lookup_s: float = 0.05
    lifetime_s: float = 75.0
    peers: dict[PeerId, SimulatedPeer] = field(default_factory=dict)
    directory: dict[PeerId, Presence] = field(default_factory=dict)

    def live(self, records: Sequence[Presence]) -> tuple[tuple[Presence, float], ...]:
        """Records that still count, with the time until which they do."""
        now = self.world.now
        return tuple(
            (record, record.issued_at + record.lifetime_s)
            for record in records
            if record.issued_at + record.lifetime_s > now
        )
