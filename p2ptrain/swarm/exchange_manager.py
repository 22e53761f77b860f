"""Exchanges from offer to application: drives the state machine of ``p2ptrain.swarm.exchange``."""

from __future__ import annotations

from math import inf

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.claims import is_left_behind
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import Close, Commit, LinkFailed, Note, Open, Send, Swap, SwapDone
from p2ptrain.swarm.exchange import Exchange, ExchangeBook, ExchangeState
from p2ptrain.swarm.judging import Judge, SlowPartnerPenalty
from p2ptrain.swarm.keeping import KeeperPosition
from p2ptrain.swarm.matching import Answer, OfferView, Violation, answer, implausible_progress
from p2ptrain.swarm.meeting import MeetingEvent
from p2ptrain.swarm.messages import (
    EXCHANGING,
    Accept,
    Acknowledge,
    Decline,
    DeclineReason,
    Offer,
    PeerState,
    Terms,
    is_keeper,
)
from p2ptrain.swarm.partners import MOMENTARY, choose, own_terms, pause_after, pause_for_others
from p2ptrain.swarm.peer_info import FailureKind, PeerInfo
from p2ptrain.swarm.progress import progress_displacement
from p2ptrain.swarm.rounds import HURRIED_S, Rounds
from p2ptrain.swarm.rules import MAX_EXCHANGES, MAX_KNOWN, UNREAD_S

ROUTINE = (DeclineReason.NOT_YET, DeclineReason.CROSSING)
"""Decline reasons of a planned partner that comes later or whose offer goes first: it will send its own offer."""
MAX_OFFERS = 2
"""Unanswered unplanned offers: a second one only once the first is late (``Exchange.late_at``)."""
CHOICE = 4
"""Offered fragments per exchanged fragment, if enough are free, because the partner has other fragments engaged. Offers
of exactly enough were declined twice per exchange (simulated: 16 fragments, 4 an exchange)."""


class ExchangeManager:
    def __init__(self, core: CoreState) -> None:
        self._core = core
        free = core.rules.free if core.keeps is None else core.keeps
        self.book = ExchangeBook(free, core.rules.fragments)
        self.position = KeeperPosition()
        """What a keeper's partners said last."""
        self.rounds = Rounds(core)
        self._judge = Judge(core)
        self._slow_partners = SlowPartnerPenalty(core)
        self._due = 0  # exchanges still due in this outer step
        self._committed_since_step = True
        self._turned_away: BoundedDict[PeerId, None] = BoundedDict(MAX_KNOWN)
        """Callers that we were too busy for and have not exchanged with since, longest waiting first."""
        self.last_commit_at = 0.0
        self.distances: list[tuple[PeerId, float]] = []  # of the last commits, newest last

    def step_done(self, now: float) -> None:
        """Begin the exchanges of this outer step, and drop those still due from the last one."""
        if not self._committed_since_step:
            self._core.counters.solo_steps += 1
        self._committed_since_step = False
        if not self._core.rules.due_in_phase:
            self._due = self._core.rules.exchanges_per_step if self._core.rules.free else 0
        self._open_round(self._core.step, self._core.rules.beside, False, now)
        self.seek(now)

    def one_due(self, now: float) -> None:
        self._due = min(self._due + 1, self._core.rules.exchanges_per_step)
        self.seek(now)

    def phase_done(self, step: int, now: float) -> None:
        self._open_round(step, self._core.rules.between, True, now)

    def training_ended(self, now: float) -> None:
        """Prepare the final gossip, which averages the slow weights with any partner, whatever the recipe mixed."""
        self.book.limit(range(self._core.rules.fragments))
        self.last_commit_at = now
        self.distances = []

    def make_due(self, now: float) -> None:
        """Make one exchange due without an outer step, for the final gossip and for keepers."""
        self._due = max(self._due, 1)
        self.seek(now)

    def keeper_pace_s(self, now: float) -> float:
        """Return the seconds between two exchanges that a keeper begins."""
        return self.position.pace_s(any(each.state is PeerState.FINISHING for each in self._core.members.live(now)))

    def seek(self, now: float) -> None:
        """Offer what is due: to a caller that we were too busy for, else to a random partner.

        One offer at a time, or two once the first is unanswered for unusually long: a frozen partner must not keep this
        peer from the others.

        A random partner is likely the one that was just met. So eight peers whose outer steps last hardly longer than
        an exchange (bench/scenarios/short_steps.toml) passed 1.5 % of them alone; with callers first, .2 %.
        """
        core = self._core
        if self._due == 0 or core.is_outlier or core.state_for_partners not in (*EXCHANGING, PeerState.KEEPING):
            return
        offers = self.book.offers(0)
        if len(offers) >= MAX_OFFERS or any(offer.late_at < inf for offer in offers) or len(self.book) >= MAX_EXCHANGES:
            return
        free = self.book.free_fragments()[: CHOICE * core.rules.most_per_exchange]
        if not free:
            return
        partner = self._next_turned_away(now) or choose(core, self.book.partners(), now)
        if partner is not None:
            self._turned_away.pop(partner.peer, None)
            self._offer(partner, tuple(sorted(free)), own_terms(core, partner.peer), 0, now)

    def _next_turned_away(self, now: float) -> PeerInfo | None:
        engaged = self.book.partners()
        waiting = (self._core.members.ready(peer, now) for peer in self._turned_away if peer not in engaged)
        return next((known for known in waiting if known is not None), None)

    def call_planned(self, now: float) -> None:
        """Offer to all partners that this outer step planned."""
        for planned, peer in self.rounds.take_due(now):
            known = self._core.members.get(peer)
            if known is None or self._core.members.is_distrusted(peer, now) or self._core.is_outlier:
                planned.move(peer, MeetingEvent.ABSENT)
                continue
            planned.move(peer, MeetingEvent.CALL)
            terms = own_terms(self._core, peer, len(planned.meetings))
            hurried = not self.rounds.decide_waiting(planned, peer)
            self._offer(known, planned.fragments, terms, planned.step, now, hurried)
        self.rounds.proceed_if_over()

    def offered(self, link: LinkId, offer: Offer, now: float) -> Answer:
        """Accept or decline an offer, and return the decision. A violation is left to the caller."""
        core = self._core
        offers = self.book.offers(offer.round)
        crossing = next((each for each in offers if each.link.peer == link.peer), None)
        prompt = core.deadlines.prompt_reply_s()
        view = OfferView(
            me=core.me,
            bounds=core.bounds,
            state=core.state_for_partners,
            settled=core.settled,
            progress=core.progress,
            effective_progress=core.effective_progress,
            distrusts_sender=core.members.is_distrusted(link.peer, now),
            is_crossing=crossing is not None,
            is_offering=any(
                now - offer.started_at < prompt and core.members.answers(offer.link.peer) for offer in offers
            ),
            is_engaged=self.book.is_engaged_with(link.peer)
            or (self._slow_partners.waits(link.peer, now) and core.members.has_ready_partner(now)),
            free_fragments=self.book.free_fragments(),
            exchanges=len(self.book) - len(offers),
            planned=self.rounds.view(offer, link.peer, now) if offer.round else None,
        )
        reply = answer(offer, link.peer, view)
        if isinstance(reply, Violation):
            return reply
        core.record_claim(link.peer, offer.terms.progress)
        planned = self.rounds.find(offer.round, offer.fragments) if offer.round else None
        if isinstance(reply, DeclineReason):
            if planned is not None and reply is DeclineReason.CROSSING:
                planned.move(link.peer, MeetingEvent.CROSSING)
            core.counters.offers_refused += 1
            if reply is DeclineReason.BUSY and not offer.round:
                self._turned_away[link.peer] = None
            if not (offer.round and reply in ROUTINE):
                core.note("refused", link.peer, reply.value)
            core.emit(Send(link, Decline(reply, core.state_for_partners, core.step, core.progress, known=())))
            core.emit(Close(link))
            return reply
        for withdrawn in offers:  # it crossed theirs, which wins, or stays unanswered
            if withdrawn is crossing or not offer.round:
                self._withdraw(withdrawn)
        if planned is not None:
            planned.move(link.peer, MeetingEvent.OFFER)
        mine = own_terms(core, link.peer, len(planned.meetings) if planned is not None else 1)
        exchange = Exchange(link, reply, mine, now, now, round=offer.round)
        core.emit(Send(link, Accept(reply, mine, known=core.known_to_pass_on(now, link.peer))))
        self._swap(exchange, reply, offer.terms, now)
        return reply

    def accepted(self, link: LinkId, accept: Accept, now: float) -> None:
        """Begin the swap. Its fragments are still free, because accepting an offer withdraws our own."""
        core = self._core
        exchange = self.book.get(link)
        if exchange is None:  # dropped meanwhile
            core.emit(Close(link))
            return
        most = len(exchange.fragments) if exchange.round else core.rules.most_per_exchange
        is_offered = set(accept.fragments) <= set(exchange.fragments) and len(accept.fragments) <= most
        if exchange.state is not ExchangeState.OFFERED or not is_offered:
            self.failed(LinkFailed(link, "it accepted what was not offered", their_fault=True), now)
            return
        core.deadlines.replied(now - exchange.started_at)
        core.record_claim(link.peer, accept.terms.progress)
        if why := implausible_progress(accept.terms.progress, core.progress, core.settled, core.bounds):
            self.failed(LinkFailed(link, why), now)
            return
        if exchange.round:
            self.rounds.move(exchange, MeetingEvent.ACCEPT)
        else:
            for other in self.book.offers(0):
                if other is not exchange:
                    self._withdraw(other)
            self._due = max(self._due - 1, 0)
        self._swap(exchange, accept.fragments, accept.terms, now)

    def declined(self, link: LinkId, decline: Decline, now: float) -> None:
        core = self._core
        exchange = self.book.remove(link)
        core.emit(Close(link))
        if exchange is None:
            return
        core.counters.offers_declined += 1
        core.deadlines.replied(now - exchange.started_at)
        if exchange.round and decline.reason in ROUTINE:
            self.rounds.postpone(exchange, decline.reason, now)
            self.call_planned(now)
            return
        core.note("skipped", link.peer, decline.reason.value)
        if exchange.round:
            self.rounds.ended(exchange, MeetingEvent.REFUSAL, now)
            return
        core.members.pause(link.peer, now + pause_after(core, decline.reason, exchange), now)
        if core.is_keeper and decline.reason not in MOMENTARY:  # wait for the next one to fall due
            self._due = 0
        self.seek(now)

    def swapped(self, done: SwapDone, now: float) -> None:
        """Acknowledge the partner's payload, unless its weights must not be mixed."""
        core = self._core
        exchange = self.book.get(done.link)
        if exchange is None or exchange.state is not ExchangeState.SWAPPING:
            return
        core.counters.sent_bytes += done.sent_bytes
        core.counters.received_bytes += done.received_bytes
        if rejection := self._judge.reject_reason(exchange, done):
            self._judge.rejected(exchange, done)
            self.failed(rejection, now)
            return
        exchange.confirm(done)
        core.emit(Send(done.link, Acknowledge()))

    def acknowledged(self, link: LinkId, now: float) -> bool:
        """Commit, because both sides have everything. Return whether there was something to commit."""
        core = self._core
        exchange = self.book.get(link)
        if exchange is None:
            core.emit(Close(link))
            return False
        if exchange.state is not ExchangeState.CONFIRMING or exchange.theirs is None:
            self.failed(LinkFailed(link, "it acknowledged too early", their_fault=True), now)
            return False
        seconds = now - exchange.swap_started_at
        core.members.record_success(link.peer)
        if exchange.is_timed:
            self._slow_partners.exchanged(exchange, now)
            core.deadlines.transferred(max(exchange.sent_bytes, exchange.received_bytes), seconds)
        core.counters.exchanges_ok += 1
        mine, theirs = exchange.mine, exchange.theirs
        self.book.commit(exchange)
        if not is_keeper(theirs):  # which tells a trainer nothing about where the swarm is
            core.record_related()
            core.overtakers.discard(link.peer)
            core.settled = core.settled or not (core.overtakers or is_left_behind(core, now))
            self._committed_since_step = True
            self._turned_away.pop(link.peer, None)
            self.last_commit_at = now
            self.distances = [*self.distances[-15:], (link.peer, exchange.distance)]
        moved = progress_displacement(mine, theirs, len(exchange.fragments), core.rules)
        # We may have trained since the terms were agreed on, and all would refuse a peer far beyond the run's end.
        most = max(core.rules.run_tokens - core.progress, 0.0) if core.trusts_progress(link.peer) else 0.0
        moved = min(moved, most)
        # Agreed on before this peer's end: nothing would raise its progress again.
        if core.state is PeerState.FINISHING:
            moved = max(moved, 0.0)
        if core.is_keeper:
            core.step, progress = self.position.exchanged(link.peer, theirs, now)
            moved = progress - core.progress
        elif not is_keeper(theirs):
            moved = core.budget.take(moved, link.peer)
        core.unapplied[link] = moved
        core.progress += moved
        core.emit(
            Commit(
                link,
                progress_displacement=moved,
                share=mine.share(theirs),
                clip_radius=min(mine.clip_radius, theirs.clip_radius),
                finished=PeerState.FINISHING in (mine.state, theirs.state),
                sent_bytes=exchange.sent_bytes,
                received_bytes=exchange.received_bytes,
                keeper_step=core.step if core.is_keeper else None,
            )
        )
        core.emit(Close(link))
        core.emit(
            Note(
                kind="exchanged",
                peer=link.peer,
                seconds=seconds,
                sent_bytes=exchange.sent_bytes,
                received_bytes=exchange.received_bytes,
                distance=exchange.distance,
            )
        )
        if not (exchange.round or core.is_keeper or is_keeper(theirs)) and (
            pause_s := pause_for_others(core, mine, theirs, seconds)
        ):
            core.members.pause_for_others(link.peer, now + pause_s, now)
        self._judge.mixed(exchange, now)
        self.rounds.ended(exchange, MeetingEvent.COMMIT, now)
        self.seek(now)
        return True

    def applied(self, link: LinkId, now: float) -> None:
        if self.book.remove(link) is not None:
            self.seek(now)

    def failed(self, event: LinkFailed, now: float) -> None:
        """Discard the exchange of a failed link, record the failure, and try another partner."""
        core = self._core
        exchange = self.book.get(event.link)
        if exchange is None or exchange.state is ExchangeState.COMMITTED:
            return
        self.book.remove(event.link)
        core.emit(Close(event.link))
        if exchange.state is ExchangeState.OFFERED:
            core.counters.offers_unanswered += 1
            failure, ending = FailureKind.UNANSWERED, MeetingEvent.REFUSAL
            self.rounds.unanswered(exchange, now)
        else:
            withdrawn = event.unbegun and exchange.state is ExchangeState.SWAPPING and not event.link.outbound
            core.counters.offers_withdrawn += withdrawn
            core.counters.exchanges_failed += not withdrawn
            failure, ending = _failure_of(event, withdrawn), MeetingEvent.FAILURE
            if exchange.is_timed:
                self._slow_partners.exchanged(exchange, now)
            if event.link.outbound and not exchange.round:  # still due, with another partner, in this outer step
                self._due = min(self._due + 1, core.rules.exchanges_per_step)
        if exchange.state is ExchangeState.CONFIRMING:
            core.counters.half_commits += 1
        core.record_failure(event, failure, now, exchange.swapped_s(now))
        self.rounds.ended(exchange, ending, now)
        self.seek(now)

    def extend_deadlines(self, now: float, seconds: float) -> None:
        """Extend deadlines after this peer was held up: messages sent in time may still be unread."""
        self.rounds.extend_deadlines(seconds)
        for exchange in self.book:
            exchange.skip(seconds)
            if exchange.deadline <= now:
                exchange.deadline = now + UNREAD_S

    def expire(self, now: float) -> None:
        for exchange in self.book:
            if exchange.deadline <= now:
                if not exchange.hurried:
                    self._core.deadlines.missed()
                waited = now - (exchange.swap_started_at or exchange.started_at)
                self.failed(LinkFailed(exchange.link, f"no answer for {waited:.1f} s"), now)
            elif exchange.late_at <= now:
                exchange.late_at = inf
                self.seek(now)
        self.rounds.expire(now)
        self.call_planned(now)

    def drop_unsettled(self) -> None:
        """Close exchanges that no partner can have committed, because this peer leaves or is about to catch up."""
        for exchange in self.book:
            if exchange.state in (ExchangeState.OFFERED, ExchangeState.SWAPPING):
                self.book.remove(exchange.link)
                self._core.emit(Close(exchange.link))
        for blocking in (False, True):
            self.rounds.close(blocking)

    def abandon(self) -> None:
        """Close all uncommitted exchanges: a difference to replaced weights must not be added to the new ones."""
        self.drop_unsettled()
        for exchange in self.book:
            if exchange.state is not ExchangeState.CONFIRMING:
                continue
            self.book.remove(exchange.link)
            self._core.counters.exchanges_failed += 1
            self._core.counters.half_commits += 1
            self._core.emit(Close(exchange.link))

    def next_deadline(self) -> float:
        return min(self.book.next_deadline(), self.rounds.next_deadline())

    @property
    def is_due(self) -> bool:
        return self._due > 0

    def _open_round(self, step: int, fragments: tuple[int, ...], blocking: bool, now: float) -> None:
        if fragments:
            self.rounds.open(step, fragments, blocking, now)
            self.call_planned(now)

    def _offer(
        self, partner: PeerInfo, fragments: tuple[int, ...], mine: Terms, round_: int, now: float, hurried: bool = False
    ) -> None:
        core, link = self._core, self._core.new_link(partner.peer)
        if not round_:  # offers of a round are not rate-limited
            core.members.called(partner.peer, now)
        deadline = now + (HURRIED_S if hurried else core.deadlines.reply_s())
        late_at = now + core.deadlines.prompt_reply_s() if not round_ else inf
        self.book.put(Exchange(link, fragments, mine, now, deadline, late_at, round=round_, hurried=hurried))
        known = core.known_to_pass_on(now, partner.peer)
        offer = Offer(core.rules.run, core.rules.protocol, fragments, mine, round_, known)
        core.emit(Open(link, partner.addresses, offer))

    def _withdraw(self, offer: Exchange) -> None:
        self.book.remove(offer.link)
        self._core.emit(Close(offer.link))

    def _swap(self, exchange: Exchange, fragments: tuple[int, ...], theirs: Terms, now: float) -> None:
        core = self._core
        size = sum(core.rules.fragment_bytes[fragment] for fragment in fragments)
        patience_s = core.deadlines.payload_s(size, theirs.seconds_per_byte)
        exchange.swap(fragments, theirs, now, now + patience_s)
        self.book.put(exchange)
        core.emit(Swap(exchange.link, fragments))


def _failure_of(event: LinkFailed, withdrawn: bool) -> FailureKind:
    if withdrawn:
        return FailureKind.WITHDRAWN
    if event.unrelated:
        return FailureKind.UNRELATED
    return FailureKind.MISFIT if event.misfit else FailureKind.BROKEN
