"""One simulated peer: a protocol core and a trainer, with effects performed on a heap instead of sockets.

There is no algorithm here. A message sent at t arrives at t + latency. A payload arrives when its last byte has passed
both access lines, and one latency later; a swap is complete on one side when the other side's payload has arrived and
its own was sent. Failures are decisions of ``Conditions``. The asyncio driver over in-memory links keeps the same
times, and ends bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, assert_never

from p2ptrain.errors import RemoteError
from p2ptrain.ids import LinkId, PeerId
from p2ptrain.ports import Notebook
from p2ptrain.sim.liars import Liar
from p2ptrain.sim.sizes import message_bytes, payload_bytes
from p2ptrain.sim.traffic import Traffic
from p2ptrain.sim.trainer import SimulatedLearner, Trainer
from p2ptrain.sim.transfers import Pipe, Transfer
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

if TYPE_CHECKING:
    from p2ptrain.sim.network import SimulatedNetwork


KILLED = "killed"
"""Why a peer is done whose process just vanished."""


@dataclass(slots=True)
class _End:
    """One side's end of a link."""

    owner: SimulatedPeer
    link: LinkId
    latency_s: float
    """Until what we send arrives."""
    other: _End | None = None
    is_open: bool = True
    breaks: float | None = None
    """The share of its payload at which the swap breaks; decided by whoever swaps first."""
    swap: Swap | None = None
    wishes: Sequence[Any] = ()
    their_wishes: Sequence[Any] = ()
    """What both sides tell before they encode, if the codec wants that; ``wished`` when ours are out."""
    wished: bool = False
    transfer: Transfer | None = None
    """Our payload or weights, while they are on their way."""
    sent: bool = False
    encoded: Any = None
    arrived: Any = None
    """A payload, as the learner made it; as ``difference`` is."""
    difference: Any = None
    pulled: tuple[WeightsReply, list[Sized]] | None = None


class SimulatedPeer:
    """One peer of the simulation.

    Args:
        step_s: seconds of the next inner step.
        up, down: its access line.
        steps_ahead: see ``Trainer``.
        liar: what sits between its core and its links.
    """

    __slots__ = (
        "_backlog",
        "_capacities",
        "_frozen_at",
        "_inbound_serial",
        "_wake_at",
        "_wake_due",
        "core",
        "down",
        "ends",
        "finished",
        "learner",
        "liar",
        "network",
        "notebook",
        "peer",
        "traffic",
        "trainer",
        "up",
        "world",
    )

    def __init__(
        self,
        network: SimulatedNetwork,
        peer: PeerId,
        core: Peer,
        learner: SimulatedLearner,
        step_s: Callable[[], float],
        notebook: Notebook,
        up: Pipe | None = None,
        down: Pipe | None = None,
        steps_ahead: Callable[[], int] | None = None,
        liar: Liar | None = None,
    ) -> None:
        self.network = network
        self.world = network.world
        self.peer = peer
        self.core = core
        self.learner = learner
        self.notebook = notebook
        self.up = up or Pipe(inf)
        self.down = down or Pipe(inf)
        self.liar = liar
        self.trainer = Trainer(network.metronome, learner, step_s, self.handle, steps_ahead)
        self.traffic = Traffic()
        self.ends: dict[LinkId, _End] = {}
        self.finished = ""
        """Why it is done; empty while it is not."""
        self._inbound_serial = 0
        self._wake_at = inf  # what the core asked for
        self._wake_due = inf  # when we look next
        self._frozen_at: float | None = None
        self._capacities = self.up.capacity, self.down.capacity
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # --- what scenarios do to it --------------------------------------------------------------------------------------

    def start(self) -> None:
        self.trainer.start()
        self.handle(Started())

    def leave(self) -> None:
        """Its owner stops it."""
        self._happen(self.handle, (LeaveRequested(),))

    def kill(self) -> None:
        """The process is gone: its links break at the other ends."""
        if not self.finished:
            self._frozen_at = None
            self._end(KILLED)
            for end in list(self.ends.values()):
                self._close(end.link, "connection reset")

    def freeze(self) -> None:
        """The machine sleeps: nothing happens in it and nothing passes its line, until ``thaw``."""
        if not self.finished and self._frozen_at is None:
            self._frozen_at = self.world.now
            self.trainer.freeze()
            self._capacities = self.up.capacity, self.down.capacity
            self._resize(0.0, 0.0)

    def thaw(self) -> None:
        if self._frozen_at is None:
            return
        seconds, self._frozen_at = self.world.now - self._frozen_at, None
        self._resize(*self._capacities)
        self.trainer.thaw(seconds)
        backlog, self._backlog = self._backlog, []
        for action, arguments in backlog:
            self._happen(action, arguments)

    # --- the core -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        if self.finished and not isinstance(event, Received):
            return
        for effect in self.core.handle(event, self.world.now):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        """The most frequent first."""
        match effect:
            case WakeAt():
                self._wake(effect.time)
            case Note():
                self.notebook.note(effect.kind, peer=effect.peer, why=effect.why)
            case Send():
                self._send(effect.link, effect.message)
            case Close():
                self._close(effect.link, "it closed the connection")
            case Open():
                self._open(effect)
            case Swap():
                self._swap(effect)
            case Commit():
                self._commit(effect)
            case Proceed():
                self.learner.proceed(effect.step)
                self._later(0.0, self.trainer.go_on)
            case Announce():
                self._announce(effect)
            case Lookup():
                self._later(self.network.lookup_s, self._looked_up)
            case Pull():
                if (end := self.ends.get(effect.link)) is not None:
                    end.pulled = (effect.reply, [])
            case Adopt():
                self._adopt(effect)
            case Donate():
                self._donate(effect.link)
            case BeginTraining():
                self.trainer.begin()
            case Finished():
                self._end(effect.why)
            case _:
                assert_never(effect)

    def _end(self, why: str) -> None:
        self.finished = why
        self.trainer.stop()
        self.network.ended(self)

    # --- links --------------------------------------------------------------------------------------------------------

    def _open(self, effect: Open) -> None:
        peer = effect.link.peer
        mine = _End(self, effect.link, self.network.conditions.latency_s(self.peer, peer))
        self.ends[effect.link] = mine
        partner = self.network.peers.get(peer)
        if partner is None or not partner.is_up or not self.network.conditions.reaches(self.peer, peer):
            self._later(0.0, self._fail, mine, "unreachable")
            return
        mine.other = partner._accept_link(mine)
        self._send(effect.link, effect.message)

    def _accept_link(self, dialer: _End) -> _End:
        self._inbound_serial += 1
        peer = dialer.owner.peer
        link = LinkId(peer, self._inbound_serial, outbound=False)
        mine = self.ends[link] = _End(self, link, self.network.conditions.latency_s(self.peer, peer), other=dialer)
        return mine

    def _send(self, link: LinkId, message: Message) -> None:
        end = self.ends.get(link)
        if end is None or end.other is None:
            return
        if self.liar is not None:
            message = self.liar.says(message)
        size = message_bytes(message)
        self.traffic.control_up += size
        end.other.owner._later(end.latency_s, end.other.owner._receive, end.other, message, size)

    def _receive(self, end: _End, message: Message, size: int) -> None:
        self.traffic.control_down += size
        if not end.is_open or (self.liar is not None and not self.liar.hears(message)):
            return
        if isinstance(message, Offer | Accept | WeightsReply) and message.known:
            self.handle(PeersSeen(self.network.live(message.known), from_lookup=False))
        self.handle(Received(end.link, message, size))

    def _close(self, link: LinkId, why: str) -> None:
        end = self.ends.pop(link, None)
        if end is None:
            return
        other = self._let_go(end)
        if other is not None and other.is_open:
            other.owner._later(end.latency_s, other.owner._fail, other, why)

    def _fail(self, end: _End, why: str, their_fault: bool = False) -> None:
        if end.is_open:
            self.ends.pop(end.link, None)
            self._let_go(end)
            self.handle(LinkFailed(end.link, why, their_fault))

    @staticmethod
    def _let_go(end: _End) -> _End | None:
        """This end is over; what it knew of the other end. The two hold each other no more, and can be forgotten."""
        end.owner._stop_transfer(end)
        end.is_open = False
        other, end.other = end.other, None
        return other

    # --- swaps --------------------------------------------------------------------------------------------------------

    def _swap(self, effect: Swap) -> None:
        end = self.ends.get(effect.link)
        if end is None:  # it broke while we were frozen
            return
        assert end.other is not None
        if end.swap is None and end.other.swap is None:
            end.breaks = end.other.breaks = self.network.conditions.breaks_swap(self.peer, effect.link.peer)
        end.swap = effect
        if sizes := self.learner.payloads.wish_sizes(effect.fragments):
            end.wishes = self.learner.payloads.wishes(effect.fragments)
            self._start_transfer(end, payload_bytes(sizes), self._wishes_sent)
        else:
            self._send_payload(end)

    def _wishes_sent(self, end: _End) -> None:
        assert end.other is not None
        other = end.other.owner
        other._later(end.latency_s, other._take_wishes, end.other, end.wishes)
        end.wished = True
        if end.their_wishes:
            self._later(0.0, self._send_payload, end)

    def _take_wishes(self, end: _End, wishes: Sequence[Any]) -> None:
        end.their_wishes = wishes
        self._send_payload(end)

    def _send_payload(self, end: _End) -> None:
        """As soon as both sides know what they agree on."""
        if not end.is_open or end.swap is None or end.encoded is not None:
            return
        if end.wishes and not (end.wished and end.their_wishes):
            return
        assert end.other is not None
        question = end.swap.fragments, end.wishes, end.their_wishes
        payload = end.encoded = self.learner.payloads.encode(*question)
        if self.liar is not None:
            lie = self.liar.sends(payload, self.learner.payloads, question)
            if lie is None:
                return
            payload = lie
        size = payload_bytes([len(part) for part in payload.parts])
        if end.breaks is not None and end.other.encoded is None:  # the first payload is the one that breaks
            self._start_transfer(end, size * end.breaks, self._break)
        else:
            self._start_transfer(end, size, self._payload_sent, payload)

    def _break(self, end: _End) -> None:
        self._later(end.latency_s, self._lose, end)

    def _lose(self, end: _End) -> None:
        """The connection breaks: both sides notice."""
        if end.other is not None:
            end.other.owner._happen(end.other.owner._fail, (end.other, "connection lost"))
        self._fail(end, "connection lost")

    def _payload_sent(self, end: _End, payload: Any) -> None:
        assert end.other is not None
        other = end.other.owner
        other._later(end.latency_s, other._take_payload, end.other, payload)
        end.sent = True
        if end.arrived is not None:
            self._later(0.0, self._complete_swap, end)

    def _take_payload(self, end: _End, payload: Any) -> None:
        end.arrived = payload
        self._complete_swap(end)

    def _complete_swap(self, end: _End) -> None:
        if not end.is_open or not end.sent or end.encoded is None or end.arrived is None or end.difference is not None:
            return
        try:
            end.difference = self.learner.payloads.difference(end.encoded, end.arrived.parts)
        except RemoteError as error:
            self._fail(end, str(error), their_fault=True)
            return
        agreeing = sum(map(len, end.wishes))
        sent_bytes, received_bytes = agreeing + end.encoded.size_bytes, agreeing + end.arrived.size_bytes
        measured = end.difference.distance, end.difference.norm, end.difference.fingerprint
        self.handle(SwapDone(end.link, sent_bytes, received_bytes, *measured))

    def _commit(self, effect: Commit) -> None:
        end = self.ends[effect.link]
        assert end.swap is not None
        assert end.difference is not None
        self.trainer.interrupt()
        self.learner.deliver(effect.link, end.difference, end.swap.mine, end.swap.theirs, effect.progress_displacement)

    # --- whole models -------------------------------------------------------------------------------------------------

    def _donate(self, link: LinkId) -> None:
        end = self.ends.get(link)
        if end is not None:
            parts = self.learner.payloads.weights()
            if self.liar is not None:
                parts = self.liar.gives(parts)
            self._start_transfer(end, payload_bytes([len(part) for part in parts]), self._weights_sent, parts)

    def _weights_sent(self, end: _End, parts: Sequence[Sized]) -> None:
        assert end.other is not None
        other = end.other.owner
        other._later(end.latency_s, other._take_weights, end.other, parts)
        self._later(0.0, self.handle, Donated(end.link, sum(map(len, parts))))

    def _take_weights(self, end: _End, parts: Sequence[Sized]) -> None:
        if end.is_open and end.pulled is not None:
            end.pulled[1].extend(parts)
            self.handle(Pulled(end.link, sum(map(len, parts))))

    def _adopt(self, effect: Adopt) -> None:
        end = self.ends[effect.link]
        assert end.pulled is not None
        reply, parts = end.pulled
        copies = [bytearray(part) if isinstance(part, bytes) else part for part in parts]
        self.trainer.interrupt()
        self.learner.adopt(effect.link, reply.step, reply.progress, copies)
        if self.learner.is_waiting:
            self._later(0.0, self.trainer.go_on)

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _start_transfer(self, end: _End, size: float, action: Callable[..., None], *arguments: Any) -> None:
        assert end.other is not None
        down = end.other.owner.down
        end.transfer = self.network.transfers.start(
            self.up, down, size, self._transferred, end, size, action, arguments
        )

    def _transferred(self, end: _End, size: float, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        end.transfer = None
        self._count(end, size)
        action(end, *arguments)

    def _stop_transfer(self, end: _End) -> None:
        if end.transfer is not None:
            self._count(end, self.network.transfers.stop(end.transfer))
            end.transfer = None

    def _count(self, end: _End, size: float) -> None:
        assert end.other is not None
        theirs = end.other.owner.traffic
        if end.swap is not None:
            self.traffic.payload_up += size
            theirs.payload_down += size
        else:
            self.traffic.weights_up += size
            theirs.weights_down += size

    def _resize(self, up: float, down: float) -> None:
        self.network.transfers.resize(self.up, up)
        self.network.transfers.resize(self.down, down)

    # --- directory and time -------------------------------------------------------------------------------------------

    def _announce(self, effect: Announce) -> None:
        if self.liar is not None:
            effect = self.liar.announces(effect)
        presence = Presence(
            peer=self.peer,
            run=self.network.run,
            addresses=self.network.addresses,
            state=PeerState(effect.state),
            step=effect.step,
            progress=effect.progress,
            nickname="",
            issued_at=self.world.now,
            lifetime_s=self.network.lifetime_s,
            signature=self.network.signature,
        )
        sent, received = self.network.directory.announce(presence, self.world.now)
        self.traffic.directory_up += sent
        self.traffic.directory_down += received

    def _looked_up(self) -> None:
        found, sent, received = self.network.directory.lookup(self.peer, self.world.now)
        self.traffic.directory_up += sent
        self.traffic.directory_down += received
        self.handle(PeersSeen(found))

    def _wake(self, time: float) -> None:
        """An alarm that is set later only, as most are, needs no second entry on the heap."""
        self._wake_at = time
        if time < self._wake_due:
            self._wake_due = time
            self.world.at(time, self._happen, self._woke, (time,))

    def _woke(self, due: float) -> None:
        if due != self._wake_due:
            return
        self._wake_due = inf
        if self._wake_at > self.world.now:
            self._wake(self._wake_at)
        else:
            self._wake_at = inf
            self.handle(Woke())

    def _later(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """``action`` is something that happens to this peer."""
        self.world.after(delay, self._happen, action, arguments)

    def _happen(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """It happens now; when the peer is frozen, as soon as it thaws; when it was killed, never."""
        if self._frozen_at is not None:
            self._backlog.append((action, arguments))
        elif self.is_up:
            action(*arguments)

    @property
    def is_up(self) -> bool:
        """Whether its process lives; one that finished still tells callers that it is gone."""
        return self.finished != KILLED
