"""Protocol cores around one table: a heap, latencies, and a filter that can hold back any message. No torch, no I/O."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from run_rules import RUN, run_rules

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm import Peer, PeerState, Presence, SwarmRules
from p2ptrain.swarm.events import (
    Adopt,
    Adopted,
    Announce,
    Applied,
    BeginTraining,
    Close,
    Commit,
    Conclude,
    Counted,
    Donate,
    Donated,
    Effect,
    Event,
    Finished,
    LeaveRequested,
    LinkFailed,
    Lookup,
    LookupFailed,
    Note,
    Open,
    OuterStepDone,
    PeersSeen,
    PhaseDone,
    Proceed,
    Pull,
    Pulled,
    Received,
    Send,
    Started,
    Swap,
    SwapDone,
    TrainingEnded,
    Unfit,
    WakeAt,
    Woke,
)
from p2ptrain.swarm.messages import Acknowledge, Message

RULES = run_rules()


def presence(
    peer: str,
    progress: float = 0.0,
    state: PeerState = PeerState.TRAINING,
    at: float = 1.0,
    settled: bool = True,
    step: int = 0,
) -> Presence:
    return Presence(PeerId(peer), RUN, ("/ip4/127.0.0.1/tcp/1",), state, step, progress, settled, "", at, 75.0)


@dataclass
class Seat:
    """One peer: its core, its trainer's state, and its link ends."""

    core: Peer
    progress: float = 0.0
    peers: float = 1.0
    step: int = 0
    begun: bool = False
    finished: str = ""
    frozen: bool = False
    dead: bool = False
    wake: int = 0
    inbound: int = 0
    ends: dict[LinkId, tuple[PeerId, LinkId]] = field(default_factory=dict)
    swaps: dict[LinkId, Swap] = field(default_factory=dict)
    arrived: set[LinkId] = field(default_factory=set)
    snapshots: list[tuple[int, ...]] = field(default_factory=list)
    """Fragments of each exchange under way that has not committed."""
    waits_since: float | None = None
    """Time since which the trainer has waited for its partners."""
    waited_s: list[float] = field(default_factory=list)


class Table:
    """Performs effects with fixed latencies. ``trace`` holds a readable line for every message and note."""

    def __init__(self, *names: str, rules: SwarmRules = RULES, seed: int = 0, latency: float = 0.01) -> None:
        self.now = 0.0
        self.latency = latency
        self.apply_s = 0.02
        self.swap_s = 0.05
        self.evaluation_s = 0.0
        """Duration of the last reading of the held-out text, after the final gossip."""
        self.rules = rules
        self.trained = 0.0
        """Sum of what training added to the progress of all."""
        self.trace: list[str] = []
        self.notes: list[Note] = []
        """Notes of all peers, in order."""
        self.records: dict[PeerId, Presence] = {}
        self.finished: dict[PeerId, Presence] = {}
        """Records that the directory keeps of peers that trained to the end."""
        self.announced: dict[PeerId, list[bool]] = defaultdict(list)
        """For each announcement, whether it said that its peer is settled."""
        self.directory_answers = True
        self.holds_back: Callable[[PeerId, PeerId, object], bool] = lambda sender, receiver, what: False
        self.apart: Callable[[PeerId, PeerId], tuple[float, float]] = lambda me, partner: (0.001, 0.0)
        """Result of a swap: the distance, and the norm of our own weights."""
        self.fingerprint: Callable[[PeerId, PeerId], bytes] = lambda me, partner: b""
        """Fingerprint of the partner's message."""
        self.worthless: set[PeerId] = set()
        """Donors whose weights do worse than our own."""
        self.lag_s: Callable[[PeerId, LinkId], float] = lambda sender, link: 0.0
        """Delay on top of the latency, for all that a peer sends over its end of this link."""
        self._heap: list = []
        self._serial = 0
        self.seats: dict[PeerId, Seat] = {}
        for name in names:
            self.seat(name, seed=seed)

    def seat(self, name: str, seed: int = 0, **position) -> Seat:
        peer = PeerId(name)
        seat = Seat(Peer(peer, self.rules, Random(f"{seed}/{name}"), **position), **position)
        self.seats[peer] = seat
        return seat

    def __getitem__(self, name: str) -> Seat:
        return self.seats[PeerId(name)]

    # --- driving ----------------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        for name in names or tuple(self.seats):
            self.handle(PeerId(name), Started())

    def step(self, *names: str, tokens: float = 10.0) -> None:
        """End an outer step of these peers now."""
        for name in names or tuple(self.seats):
            seat = self[name]
            seat.step += 1
            seat.progress += tokens * seat.peers
            self.trained += tokens * seat.peers
            self.handle(PeerId(name), OuterStepDone(seat.step, seat.progress, int(tokens)))

    def end_phase(self, *names: str, tokens: float = 10.0) -> None:
        """End an inner phase of these peers, which then wait for what their recipe mixes between two phases."""
        for name in names or tuple(self.seats):
            seat = self[name]
            seat.waits_since = self.now
            self.handle(PeerId(name), PhaseDone(seat.step + 1, seat.progress + tokens * seat.peers))

    def end_training(self, *names: str) -> None:
        for name in names or tuple(self.seats):
            seat = self[name]
            self.handle(PeerId(name), TrainingEnded(seat.step, seat.progress))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, callback, arguments = heapq.heappop(self._heap)
            callback(*arguments)
        self.now = until

    def after(self, delay: float, callback: Callable, *arguments) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.now + delay, self._serial, callback, arguments))

    def kill(self, name: str) -> None:
        """Kill the process: its links break at the other ends."""
        seat = self[name]
        seat.dead = True
        for link in list(seat.ends):
            other, their_link = seat.ends.pop(link)
            self.after(self.latency, self._break, other, their_link, "connection reset")

    def handle(self, peer: PeerId, event: Event) -> None:
        seat = self.seats[peer]
        if seat.dead or seat.frozen:
            return
        for effect in seat.core.handle(event, self.now):
            if isinstance(effect, WakeAt):
                assert effect.time > self.now, "a core that is woken for nothing asks again, at once and for ever"
            self._perform(peer, seat, effect)

    # --- effects ----------------------------------------------------------------------------------------------------

    def _perform(self, peer: PeerId, seat: Seat, effect: Effect) -> None:
        match effect:
            case Open():
                other = self.seats.get(effect.link.peer)
                if other is None or other.dead:
                    self.after(self.latency, self.handle, peer, LinkFailed(effect.link, "unreachable"))
                    return
                other.inbound += 1
                their_link = LinkId(peer, other.inbound, outbound=False)
                seat.ends[effect.link] = (effect.link.peer, their_link)
                other.ends[their_link] = (peer, effect.link)
                self._send(peer, seat, effect.link, effect.message)
            case Send():
                self._send(peer, seat, effect.link, effect.message)
            case Swap():
                seat.swaps[effect.link] = effect
                seat.snapshots.append(effect.fragments)
                if effect.link in seat.ends:
                    other, their_link = seat.ends[effect.link]
                    if not self.holds_back(peer, other, effect):
                        self.after(self.latency + self.swap_s, self._arrive, other, their_link)
                self._complete(peer, effect.link)
            case Counted():
                seat.peers = effect.peers
            case Commit():
                seat.snapshots.remove(seat.swaps.pop(effect.link).fragments)
                self.after(self.apply_s, self._apply, peer, effect)
            case Pull():
                pass
            case Adopt():
                self.after(self.apply_s, self._adopt, peer, effect)
            case Donate():
                if effect.link in seat.ends:
                    other, their_link = seat.ends[effect.link]
                    if not self.holds_back(peer, other, effect):
                        self.after(self.latency + self.swap_s, self.handle, other, Pulled(their_link, 4000))
                        self._donor_step = seat.step
                        self.after(self.latency + self.swap_s, self.handle, peer, Donated(effect.link, 4000))
            case Close():
                swap = seat.swaps.get(effect.link)
                if swap is not None and seat.core._exchanges.book.get(effect.link) is None:
                    seat.swaps.pop(effect.link)
                    seat.snapshots.remove(swap.fragments)
                if effect.link in seat.ends:
                    other, their_link = seat.ends.pop(effect.link)
                    lag_s = self.latency + self.lag_s(peer, effect.link)
                    self.after(lag_s, self._break, other, their_link, "it closed", swap is None)
            case Announce():
                state, at = PeerState(effect.state), 1.0 + self.now
                self.records[peer] = presence(peer, effect.progress, state, at, effect.settled, effect.step)
                self.announced[peer].append(effect.settled)
                if effect.finished:
                    self.finished[peer] = self.records[peer]
            case Lookup():
                self.after(0.03, self._looked_up, peer, effect.finished)
            case WakeAt():
                seat.wake += 1
                self.after(effect.time - self.now, self._woke, peer, seat.wake)
            case BeginTraining():
                seat.begun = True
                self._log(peer, "begins")
            case Proceed():
                if seat.waits_since is not None and effect.step == seat.step + 1:
                    seat.waited_s.append(self.now - seat.waits_since)
                    seat.waits_since = None
                    self.after(self.apply_s, self.step, str(peer))
            case Conclude():
                self.after(self.evaluation_s, self.handle, peer, LeaveRequested(gives_on=True))
            case Finished():
                seat.finished = effect.why
                self._log(peer, f"finished: {effect.why}")
            case Note():
                self.notes.append(effect)
                self._log(peer, " ".join(filter(None, [effect.kind, effect.peer or "", effect.why])))

    def _send(self, peer: PeerId, seat: Seat, link: LinkId, message: Message) -> None:
        if link not in seat.ends:
            return
        other, their_link = seat.ends[link]
        self._log(peer, f"-> {other}: {type(message).__name__}")
        if not self.holds_back(peer, other, message):
            behind_s = 1e-6 if isinstance(message, Acknowledge) else 0.0  # behind the payload, whatever is rounded
            self.after(self.latency + self.lag_s(peer, link) + behind_s, self._deliver, other, their_link, message)

    def _deliver(self, peer: PeerId, link: LinkId, message: Message) -> None:
        if link in self.seats[peer].ends:
            self.handle(peer, Received(link, message))

    def _arrive(self, peer: PeerId, link: LinkId) -> None:
        self.seats[peer].arrived.add(link)
        self._complete(peer, link)

    def _complete(self, peer: PeerId, link: LinkId) -> None:
        seat = self.seats[peer]
        if link in seat.arrived and link in seat.swaps and link in seat.ends:
            distance, norm = self.apart(peer, link.peer)
            self.handle(peer, SwapDone(link, 1000, 1000, distance, norm, self.fingerprint(peer, link.peer)))

    def _apply(self, peer: PeerId, commit: Commit) -> None:
        seat = self.seats[peer]
        if seat.dead or seat.frozen:
            return
        seat.progress += commit.progress_displacement
        self.handle(peer, Applied(commit.link, seat.progress))

    def _adopt(self, peer: PeerId, effect: Adopt) -> None:
        if effect.left_behind and effect.link.peer in self.worthless:
            self.handle(peer, Unfit(effect.link, "its weights do worse than ours"))
            return
        seat = self.seats[peer]
        seat.progress, seat.step = effect.progress, self._donor_step
        self.handle(peer, Adopted(effect.link, seat.step, seat.progress))

    def _break(self, peer: PeerId, link: LinkId, why: str, unbegun: bool = False) -> None:
        if self.seats[peer].ends.pop(link, None):
            seat = self.seats[peer]
            if link in seat.swaps:
                seat.snapshots.remove(seat.swaps.pop(link).fragments)
            self.handle(peer, LinkFailed(link, why, unbegun=unbegun))

    def _looked_up(self, peer: PeerId, with_finished: bool) -> None:
        if not self.directory_answers:
            self.handle(peer, LookupFailed())
            return
        dated = ((r, r.issued_at - 1.0 + r.lifetime_s) for r in self.records.values())
        live = tuple((r, until) for r, until in dated if until > self.now)
        finished = tuple(self.finished.values()) if with_finished else ()
        self.handle(peer, PeersSeen(live, in_directory=len(live), finished=finished))

    def _woke(self, peer: PeerId, serial: int) -> None:
        if serial == self.seats[peer].wake:
            self.handle(peer, Woke())

    def _log(self, peer: PeerId, what: str) -> None:
        self.trace.append(f"{self.now:.3f} {peer} {what}")
