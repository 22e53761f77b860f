"""One simulated peer: a protocol core and a trainer; effects go to an event queue instead of sockets.

There is no algorithm here. ``sim.link`` holds what passes between two peers and how long that takes; ``Conditions``
decides failures. The asyncio driver over in-memory links keeps the same times and ends bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, assert_never

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.ports import Notebook
from p2ptrain.swarm import PRESENCE_LIFETIME_S, Peer, PeerState, Presence
from p2ptrain.swarm.events import (
    Adopt,
    Announce,
    BeginTraining,
    Close,
    Commit,
    Conclude,
    Counted,
    Donate,
    Effect,
    Event,
    Finished,
    LeaveRequested,
    Lookup,
    Note,
    Open,
    PeersSeen,
    Proceed,
    Pull,
    Received,
    Send,
    Started,
    Swap,
    WakeAt,
    Woke,
)
from sim.adversaries import Adversary
from sim.link import LinkEnd
from sim.sizes import SimulatedTraffic
from sim.trainer import SimulatedLearner, SimulatedTrainer
from sim.transfers import Pipe

if TYPE_CHECKING:
    from sim.network import SimulatedNetwork

ADDRESSES = ("/ip4/203.0.113.77/tcp/40404",)
"""Addresses of every peer; only the length matters."""

SIGNATURE = bytes(64)
"""Signature of every presence record; only the length matters."""

KILLED = "killed"
"""Ending of a peer whose process vanished."""


class SimulatedPeer:
    """One peer of the simulation.

    Args:
        step_s: returns the seconds of the next inner step.
        up, down: directions of its access line.
        adversary: changes what an adversarial peer says, sends and hears.
    """

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
        adversary: Adversary | None = None,
    ) -> None:
        self.network = network
        self.world = network.world
        self.peer = peer
        self.core = core
        self.learner = learner
        self.notebook = notebook
        self.up = up or Pipe(inf)
        self.down = down or Pipe(inf)
        self.adversary = adversary
        self.trainer = SimulatedTrainer(network.step_batcher, learner, step_s, self.handle)
        self.traffic = SimulatedTraffic()
        self.ends: dict[LinkId, LinkEnd] = {}
        self.finished = ""
        """Reason why the peer is done; empty until then."""
        self._inbound_serial = 0
        self._wake_at = inf  # time that the core asked for
        self._wake_due = inf  # time of the next scheduled check
        self._frozen_at: float | None = None
        self._capacities = self.up.capacity, self.down.capacity
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # --- scenario events ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.trainer.start()
        self.handle(Started())

    def leave(self) -> None:
        self.happen(self.handle, (LeaveRequested(),))

    def kill(self) -> None:
        """Kill the process: its links break at the other ends."""
        if not self.finished:
            self._frozen_at = None
            self._end(KILLED)
            for end in list(self.ends.values()):
                end.close("connection reset", in_order=False)

    def freeze(self) -> None:
        """Suspend the machine: nothing happens in it and nothing passes its line until ``thaw``."""
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
            self.happen(action, arguments)

    def _resize(self, up: float, down: float) -> None:
        self.network.transfers.resize(self.up, up)
        self.network.transfers.resize(self.down, down)

    # --- the core -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        if self.finished and not isinstance(event, Received):
            return
        for effect in self.core.handle(event, self.world.now):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        """Perform one effect; the most frequent kinds come first."""
        match effect:
            case WakeAt():
                self._wake(effect.time)
            case Note():
                size = effect.sent_bytes + effect.received_bytes
                self.notebook.note(
                    effect.kind, peer=effect.peer, why=effect.why, seconds=effect.seconds, size_bytes=size
                )
            case Send():
                if (end := self.ends.get(effect.link)) is not None:
                    end.send(effect.message)
            case Close():
                if (end := self.ends.get(effect.link)) is not None:
                    end.close("it closed the connection")
            case Open():
                self._open(effect)
            case Swap():
                if (end := self.ends.get(effect.link)) is not None:  # the link may have broken while we were frozen
                    end.begin(effect)
            case Commit():
                self._commit(effect)
            case Proceed():
                self.learner.inbox.proceed(effect.step)
                self.later(0.0, self.trainer.go_on)
            case Counted():
                self.trainer.catch_up()
                self.learner.peers = effect.peers
            case Announce():
                self._announce(effect)
            case Lookup():
                self.later(self.network.lookup_s, self._looked_up)
            case Pull():
                if (end := self.ends.get(effect.link)) is not None:
                    end.pulled = (effect.reply, [])
            case Adopt():
                self._adopt(effect)
            case Donate():
                if (end := self.ends.get(effect.link)) is not None:
                    end.donate()
            case BeginTraining():
                self.trainer.begin()
            case Conclude():
                self.later(0.0, self.handle, LeaveRequested())
            case Finished():
                self._end(effect.why)
            case _:
                assert_never(effect)

    def _end(self, why: str) -> None:
        self.finished = why
        self.trainer.stop()
        self.network.on_end(self)

    # --- links --------------------------------------------------------------------------------------------------------

    def _open(self, effect: Open) -> None:
        peer = effect.link.peer
        mine = LinkEnd(self, effect.link, self.network.conditions.latency_s(self.peer, peer))
        self.ends[effect.link] = mine
        partner = self.network.peers.get(peer)
        if partner is None or not partner.is_up:
            self.later(0.0, mine.fail, "unreachable")
            return
        mine.other = partner._accept_link(mine)
        mine.send(effect.message)

    def _accept_link(self, dialer: LinkEnd) -> LinkEnd:
        self._inbound_serial += 1
        peer = dialer.owner.peer
        link = LinkId(peer, self._inbound_serial, outbound=False)
        mine = self.ends[link] = LinkEnd(self, link, self.network.conditions.latency_s(self.peer, peer), other=dialer)
        return mine

    # --- results of exchanges and donations ---------------------------------------------------------------------------

    def _commit(self, effect: Commit) -> None:
        end = self.ends[effect.link]
        assert end.difference is not None
        self.trainer.interrupt()
        self.learner.inbox.deliver(effect, end.difference)

    def _adopt(self, effect: Adopt) -> None:
        end = self.ends[effect.link]
        assert end.pulled is not None
        reply, parts = end.pulled
        copies: list[Any] = [bytearray(part) if isinstance(part, bytes) else part for part in parts]
        self.trainer.interrupt()
        self.learner.inbox.adopt(effect.link, reply.step, effect.progress, copies, effect.left_behind)
        if self.learner.is_waiting:
            self.later(0.0, self.trainer.go_on)

    # --- directory and time -------------------------------------------------------------------------------------------

    def _announce(self, effect: Announce) -> None:
        if self.adversary is not None:
            effect = self.adversary.announces(effect)
        presence = Presence(
            peer=self.peer,
            run=self.network.run,
            addresses=ADDRESSES,
            state=PeerState(effect.state),
            step=effect.step,
            progress=effect.progress,
            settled=effect.settled,
            nickname="",
            issued_at=self.world.now,
            lifetime_s=PRESENCE_LIFETIME_S,
            signature=SIGNATURE,
            keeps=effect.keeps,
        )
        sent, received = self.network.directory.announce(presence, self.world.now)
        self.traffic.directory_up += sent
        self.traffic.directory_down += received

    def _looked_up(self) -> None:
        found, sent, received = self.network.directory.lookup(self.peer, self.world.now)
        self.traffic.directory_up += sent
        self.traffic.directory_down += received
        self.handle(PeersSeen(found, in_directory=self.network.directory.size(self.peer)))

    def _wake(self, time: float) -> None:
        """Set the alarm; most calls set it later, which needs no second entry in the queue."""
        self._wake_at = time
        if time < self._wake_due:
            self._wake_due = time
            self.world.at(time, self.happen, self._woke, (time,))

    def _woke(self, due: float) -> None:
        if due != self._wake_due:
            return
        self._wake_due = inf
        if self._wake_at > self.world.now:
            self._wake(self._wake_at)
        else:
            self._wake_at = inf
            self.handle(Woke())

    def later(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action`` after ``delay`` seconds; deferred until ``thaw`` if frozen, dropped if killed."""
        self.world.after(delay, self.happen, action, arguments)

    def happen(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call ``action`` now; after ``thaw`` if the peer is frozen, never if it was killed."""
        if self._frozen_at is not None:
            self._backlog.append((action, arguments))
        elif self.is_up:
            action(*arguments)

    @property
    def is_up(self) -> bool:
        """Whether the process is alive; a finished peer still answers that it has left."""
        return self.finished != KILLED
