"""Rounds: the exchanges that both sides planned for one outer step.

A round opens when a peer reaches its outer step. The peer offers to each planned partner; a partner that has not
reached the step declines, and sends its own offer when it does. So the later peer finds the earlier one waiting, and
nobody polls. A round that the trainer waits for is over when every partner's exchange has committed or failed, or at
its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.deadlines import UNNOTICED_S
from p2ptrain.swarm.events import Proceed
from p2ptrain.swarm.exchange import Exchange
from p2ptrain.swarm.judging import SlowPartnerPenalty
from p2ptrain.swarm.matching import PlannedView
from p2ptrain.swarm.meeting import OVER, TRANSITIONS, Meeting, MeetingEvent
from p2ptrain.swarm.messages import DeclineReason, Offer, PeerState
from p2ptrain.swarm.rules import MAX_KNOWN, ROUND_PATIENCE_S, ROUND_PATIENCE_STEPS, ROUND_RECALL_S
from p2ptrain.swarm.topology import planned_partners

HURRIED_S = 1.0
"""Time to answer for a partner that lately did not, or broke a commitment: an intercontinental round trip and a busy
machine (as ``deadlines.PROMPT_BOUNDS_S``). If it were shorter, an honest partner's answer would be late, and both would
blame each other. Guess: measure answer times on busy machines."""

MAX_IGNORED = 64
"""Maximum number of rounds in which a commitment is ignored: a trainer then waits in vain in one round of 65. Guess:
measure the delays that unreliable partners cause."""

MAX_OURS = 3
"""Broken commitments of one peer that count from rounds in which nobody answered. After an hour without a connection
this peer waits for all partners again within seven rounds; if all break commitments, they delay one round of eight.
Guess: measure how long connections fail."""

EXCHANGES_TO_FORGIVE = 16
"""Exchanges after which one broken commitment of the partner is forgotten. With a value of one, a peer that comes in
every other round would be waited for in all the others. Guess: measure how often honest partners are late."""


@dataclass(slots=True)
class _Broken:
    """Broken commitments of one peer."""

    times: int = 0
    ignored: int = 0
    """Coming rounds in which the peer's commitments are ignored."""
    kept: int = 0
    """Commitments kept since the last broken one was forgiven."""


class RoundCommitments:
    """Commitments that the trainer still waits for; a peer that announces itself makes one, too.

    After a broken one, the peer is not waited for in the next round, then in three, seven, and so on. If it comes
    anyway, it is met. A peer that leaves for a minute does not restore its credit.
    """

    def __init__(self) -> None:
        self._broken: BoundedDict[PeerId, _Broken] = BoundedDict(MAX_KNOWN)

    def broke(self, peer: PeerId, perhaps_ours: bool = False) -> None:
        """Record a broken commitment: the peer did not come, or did not answer.

        ``perhaps_ours``: no other of several partners did either, so our connection may be the cause (``MAX_OURS``).
        """
        broken = self._broken.get(peer) or _Broken()
        broken.times = max(broken.times, min(broken.times + 1, MAX_OURS)) if perhaps_ours else broken.times + 1
        broken.ignored = min(2 ** min(broken.times, 16) - 1, MAX_IGNORED)
        self._broken[peer] = broken

    def take(self, peer: PeerId) -> bool:
        """Take a commitment: return whether our trainer waits for the peer. Each False uses up one round."""
        if not self.are_void(peer):
            return True
        self._broken[peer].ignored -= 1
        return False

    def are_void(self, peer: PeerId) -> bool:
        """Report whether ``take`` will return False."""
        return peer in self._broken and self._broken[peer].ignored > 0

    def kept(self, peer: PeerId) -> None:
        broken = self._broken.get(peer)
        if broken is None:
            return
        broken.kept += 1
        if broken.kept == EXCHANGES_TO_FORGIVE:
            broken.kept = 0
            broken.times -= 1
            if not broken.times:
                del self._broken[peer]


@dataclass(slots=True)
class Round:
    """The planned exchanges of one outer step."""

    step: int
    fragments: tuple[int, ...]
    is_blocking: bool
    deadline: float
    recall_at: float
    """When the awaited partners are asked again, all at once, after ``recall_pause_s``."""
    recall_pause_s: float = ROUND_RECALL_S
    meetings: dict[PeerId, Meeting] = field(default_factory=dict)
    offered_again: set[PeerId] = field(default_factory=set)
    """Partners whose offer overtook its answer and that got a second offer."""
    ignored: set[PeerId] = field(default_factory=set)
    """Partners whose commitments are ignored in this round."""
    tried: set[PeerId] = field(default_factory=set)  # called, or came
    silent: set[PeerId] = field(default_factory=set)
    """Tried partners that the trainer waited for in vain."""
    dragged: set[PeerId] = field(default_factory=set)  # took suspiciously long
    skipped: set[PeerId] = field(default_factory=set)
    """Partners that the trainer skips in this round, because they dragged lately."""

    def move(self, peer: PeerId, event: MeetingEvent) -> None:
        to = self.meetings[peer] = TRANSITIONS.to(self.meetings[peer], event)
        if to in (Meeting.CALLED, Meeting.MEETING):
            self.tried.add(peer)

    @property
    def is_over(self) -> bool:
        return all(meeting in OVER for meeting in self.meetings.values())


NEVER_PLANNED = (PeerState.FINISHING, PeerState.KEEPING)
"""States of peers that no outer step plans."""


class Rounds:
    """At most two open rounds: one beside training, one that the trainer waits for."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._slow_partners = SlowPartnerPenalty(core, of_trainers=True)
        self._open: list[Round] = []
        self._arrival_commitments = RoundCommitments()
        """Commitments to come."""
        self._swap_commitments = RoundCommitments()
        """Commitments not to drag once both sides have agreed."""
        self._last_opened = {True: 0, False: 0}
        """Outer step of the last round that the trainer waited for (True) and of the last one beside training
        (False)."""

    def open(self, step: int, fragments: tuple[int, ...], blocking: bool, now: float) -> None:
        """Open the round of the outer step that this peer has reached. The round of an earlier one lapses."""
        core = self._core
        self.close(blocking)
        patience_s = max(ROUND_PATIENCE_S, ROUND_PATIENCE_STEPS * core.seconds_per_outer_step)
        due = self._fragments_due(step, fragments)
        fresh = Round(step, due, blocking, now + patience_s, now + ROUND_RECALL_S)
        if fresh.fragments and core.state is PeerState.TRAINING:
            fresh.meetings = dict.fromkeys(self._planned(step, now), Meeting.DUE)
        if blocking:
            fresh.skipped = {peer for peer in fresh.meetings if not self._swap_commitments.take(peer)}
        self._open.append(fresh)
        self._last_opened[blocking] = step
        self.proceed_if_over()

    def close(self, blocking: bool) -> None:
        """Forget a round; a waiting trainer goes on."""
        for lapsed in [each for each in self._open if each.is_blocking is blocking]:
            self._end(lapsed)
            if blocking:
                self._core.emit(Proceed(lapsed.step))

    def take_due(self, now: float) -> list[tuple[Round, PeerId]]:
        """Return the partners to call now, and skip those that lately delayed the trainer for too long."""
        due = [(each, peer) for each in self._open for peer, at in each.meetings.items() if at is Meeting.DUE]
        for each, peer in due:
            if each.is_blocking and self._is_skipped(peer, each, now):
                self._miss(each, peer, MeetingEvent.SLOW, "it recently kept us waiting for too long")
        return [(each, peer) for each, peer in due if each.meetings[peer] is Meeting.DUE]

    def _is_skipped(self, peer: PeerId, found: Round | None, now: float) -> bool:
        """Report whether a planned partner is left out for having been slow.

        One that takes nearly all of the agreed time, or breaks off then, returns ever more rarely.
        """
        drags = peer in found.skipped if found is not None else self._swap_commitments.are_void(peer)
        return drags or self._slow_partners.waits(peer, now)

    def view(self, offer: Offer, sender: PeerId, now: float) -> PlannedView:
        """Return what the answer to an offer for a planned exchange depends on."""
        found = self.find(offer.round, offer.fragments)
        is_late = found is not None and found.is_blocking and found.deadline <= now
        meeting = None if found is None else found.meetings.get(sender)
        return PlannedView(
            fragments=None if found is None else found.fragments,
            will_offer=found is not None or self._shall_offer(offer, sender, now),
            is_skipped=set(offer.fragments) <= set(self._core.rules.between) and self._is_skipped(sender, found, now),
            can_meet=not is_late and meeting not in (None, Meeting.MEETING, Meeting.MET, Meeting.FAILED),
        )

    def _shall_offer(self, offer: Offer, sender: PeerId, now: float) -> bool:
        """Report whether this peer will reach the outer step and plan the sender."""
        core = self._core
        kinds = ((True, core.rules.between), (False, core.rules.beside))
        blocking = next((kind for kind, streams in kinds if set(offer.fragments) <= set(streams)), None)
        if blocking is None or core.state is not PeerState.TRAINING:
            return False
        # A round can be over before its outer step is.
        passed = max(self._last_opened[blocking], core.step)
        return offer.round > passed and sender in self._planned(offer.round, now)

    def reset(self) -> None:
        """Forget past rounds: the adopted weights may belong to an earlier outer step."""
        self._last_opened = {True: 0, False: 0}

    def find(self, step: int, fragments: tuple[int, ...]) -> Round | None:
        return next((r for r in self._open if r.step == step and set(fragments) <= set(r.fragments)), None)

    def move(self, exchange: Exchange, event: MeetingEvent) -> None:
        found = self.find(exchange.round, exchange.fragments)
        if found is not None and exchange.link.peer in found.meetings:
            found.move(exchange.link.peer, event)

    def postpone(self, exchange: Exchange, reason: DeclineReason, now: float) -> None:
        """Handle a partner's decline for now: wait for its own offer, or offer once more.

        If its offer overtook its "not yet", we declined it and it waits for ours. We offer again only once per round,
        so that a partner cannot cause endless offers.
        """
        found, peer = self.find(exchange.round, exchange.fragments), exchange.link.peer
        if found is None or peer not in found.meetings:
            return
        overtaken = found.meetings[peer] is Meeting.CROSSED and reason is DeclineReason.NOT_YET
        if found.is_blocking and found.deadline <= now:
            self._give_up(found, peer)
        elif overtaken and peer not in found.offered_again:
            found.offered_again.add(peer)
            found.move(peer, MeetingEvent.OVERTAKEN)
        elif found.is_blocking and reason is DeclineReason.CROSSING and self._core.me < peer:  # ours goes first
            self._miss(found, peer, MeetingEvent.DOUBTED, reason.value)
        elif found.is_blocking and not self.decide_waiting(found, peer):
            why = "it announced that it will come, but did not come the last time"
            self._miss(found, peer, MeetingEvent.DOUBTED, why)
        else:
            found.move(peer, MeetingEvent.LATER)
            found.recall_at = max(found.recall_at, now + found.recall_pause_s)

    def decide_waiting(self, planned: Round, peer: PeerId) -> bool:
        """Decide once per round whether the trainer waits for this partner; if not, it has ``HURRIED_S``."""
        if planned.is_blocking and peer not in planned.ignored and not self._arrival_commitments.take(peer):
            planned.ignored.add(peer)
        return peer not in planned.ignored

    def unanswered(self, exchange: Exchange, now: float) -> None:
        """Record that our offer was not answered or could not be delivered.

        That breaks no commitment if the partner had only a moment, if the call failed at once, or if this peer slept.
        """
        found, peer = self.find(exchange.round, exchange.fragments), exchange.link.peer
        is_late = exchange.deadline <= now or now - exchange.started_at > UNNOTICED_S
        if found is not None and is_late and exchange.is_timed and peer not in found.ignored:
            found.silent.add(peer)

    def _end(self, over: Round) -> None:
        """Close a round. If all of several partners broke their commitments, the cause may be on our side."""
        self._open.remove(over)
        for commitments, broken in ((self._arrival_commitments, over.silent), (self._swap_commitments, over.dragged)):
            for peer in sorted(broken):
                commitments.broke(peer, perhaps_ours=len(over.tried) > 1 and broken >= over.tried)

    def ended(self, exchange: Exchange, event: MeetingEvent, now: float) -> None:
        """Record the end of an exchange: COMMIT, REFUSAL or FAILURE. The trainer may then go on."""
        if not exchange.round:
            return
        peer, found = exchange.link.peer, self.find(exchange.round, exchange.fragments)
        self.move(exchange, event)
        held = found if found is not None and found.is_blocking and event is not MeetingEvent.REFUSAL else None
        if held is not None and exchange.is_timed:
            self._slow_partners.exchanged(exchange, now)
        if held is not None and exchange.dragged(now):
            held.dragged.add(peer)
        elif event is MeetingEvent.COMMIT:
            self._swap_commitments.kept(peer)
        if event is MeetingEvent.COMMIT:
            self._arrival_commitments.kept(peer)
        self.proceed_if_over()

    def extend_deadlines(self, seconds: float) -> None:
        for each in self._open:
            each.deadline += seconds
            each.recall_at += seconds

    def expire(self, now: float) -> None:
        """Ask awaited partners again, or stop waiting for them. Called partners have their own deadline."""
        for each in [each for each in self._open if each.is_blocking]:
            late = [peer for peer, at in each.meetings.items() if at is Meeting.AWAITED]
            if each.deadline <= now:
                for peer in late:
                    self._give_up(each, peer)
            elif late and each.recall_at <= now:
                for peer in late:
                    each.move(peer, MeetingEvent.RECALL)
                each.recall_pause_s *= 2
                each.recall_at = now + each.recall_pause_s

    def _give_up(self, lapsing: Round, peer: PeerId) -> None:
        self._arrival_commitments.broke(peer)
        self._miss(lapsing, peer, MeetingEvent.PATIENCE, "it did not reach this outer step in time")

    def _miss(self, found: Round, peer: PeerId, event: MeetingEvent, why: str) -> None:
        found.move(peer, event)
        self._core.note("skipped", peer, why)

    def proceed_if_over(self) -> None:
        for each in [each for each in self._open if each.is_blocking and each.is_over]:
            self._end(each)
            self._core.emit(Proceed(each.step))

    def next_deadline(self) -> float:
        if not self._open:
            return float("inf")
        waiting = [each for each in self._open if each.is_blocking and Meeting.AWAITED in each.meetings.values()]
        return min((min(each.deadline, each.recall_at) for each in waiting), default=float("inf"))

    def _planned(self, step: int, now: float) -> tuple[PeerId, ...]:
        """Return our partners at this outer step. Joining peers count: they may have begun to train meanwhile."""
        core, rules = self._core, self._core.rules
        here = [known for known in core.members.live(now) if known.state not in NEVER_PLANNED]
        roster = [core.me, *(known.peer for known in here)]
        return planned_partners(rules.topology, rules.partners, core.me, roster, rules.run, step)

    def _fragments_due(self, step: int, fragments: tuple[int, ...]) -> tuple[int, ...]:
        """Return the fragments whose turn it is: ``fragments_per_exchange`` of every stream, in turn."""
        rules = self._core.rules
        window = rules.fragments_per_exchange
        if window >= rules.fragments:
            return fragments
        turn = {(step * window + place) % rules.fragments for place in range(window)}
        return tuple(fragment for fragment in fragments if fragment % rules.fragments in turn)
