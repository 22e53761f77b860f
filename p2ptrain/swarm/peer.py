"""The door into the protocol core: ``Peer.handle(event, now) -> effects``.

::

    state       entered when                                  leaves when
    ----------  --------------------------------------------  ---------------------------------------------------------
    JOINING     started; or a pull is under way               nobody is ahead, the pull is adopted, or patience ends
    TRAINING    the trainer may run                           the trainer reaches the end; we must catch up (JOINING)
    FINISHING   the trainer reached the run's end             recent exchanges agree, nobody is left, or patience ends
    LEAVING     finished, or the owner asked                  exchanges that may be committed elsewhere are resolved
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from random import Random
from typing import assert_never

from p2ptrain.ids import LinkId, PeerId
from p2ptrain.swarm.catchup import CatchUp
from p2ptrain.swarm.events import (
    Adopted,
    Announce,
    Applied,
    BeginTraining,
    Close,
    Donated,
    Effect,
    Event,
    ExchangeDue,
    Finished,
    LeaveRequested,
    LinkFailed,
    Lookup,
    LookupFailed,
    Open,
    OuterStepDone,
    PeersSeen,
    PhaseDone,
    Pulled,
    Received,
    Started,
    SwapDone,
    TrainingEnded,
    WakeAt,
    Woke,
)
from p2ptrain.swarm.exchange import ExchangeState
from p2ptrain.swarm.exchanging import Exchanging
from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.membership import Fault, Membership, draw
from p2ptrain.swarm.messages import (
    Accept,
    Acknowledge,
    Decline,
    Message,
    Offer,
    PeerState,
    Presence,
    WeightsReply,
    WeightsRequest,
)
from p2ptrain.swarm.rules import (
    ANNOUNCE_PERIOD_S,
    CROWDED_LOOKUP_PERIOD_S,
    ENOUGH_PEERS,
    FINAL_PACE_S,
    FRESH_PEERS,
    GOODBYE_S,
    LONELY_LOOKUP_PERIOD_S,
    LOOKUP_PERIOD_S,
    OUT_OF_STEP_S,
    OUT_OF_STEP_STEPS,
    SEARCH_PATIENCE_S,
    SwarmRules,
)
from p2ptrain.swarm.standing import Counters, Standing

NEVER = float("inf")
OFFERED = ExchangeState.OFFERED

AGREEMENTS = 3
"""So many exchanges in a row must measure no more than the final disagreement, with as many partners or all there are:
peers that keep meeting in the same pairs agree with nobody else."""

LONELY_S = 5.0
"""A finished peer that could not exchange for this long, and knows nobody who still trains, has nobody left."""


class Peer:
    """One peer's protocol state. Holds no tensor, opens no socket, reads no clock.

    Args:
        me: our own peer id.
        rules: the run's numbers.
        random: the only source of randomness; a seed decides everything.
        step, progress: where a resumed peer stands.
    """

    def __init__(self, me: PeerId, rules: SwarmRules, random: Random, step: int = 0, progress: float = 0.0) -> None:
        self._standing = Standing(me, rules, random, Membership(me), step=step, progress=progress)
        self._exchanging = Exchanging(self._standing)
        self._catch_up = CatchUp(self._standing)
        self._training = False  # BeginTraining was emitted
        self._ended = False  # the trainer reached the run's end
        self._announce_at = NEVER
        self._lookup_at = NEVER
        self._search_until = NEVER
        self._caught_up_at = 0.0
        self._finish_by = NEVER
        self._gossip_at = NEVER
        self._leave_by = NEVER
        self._leaving_why = ""
        self._stopped = False
        self._crowded = False  # there are more peers than we keep in mind: who comes and goes is no news
        self._last_step_at: float | None = None
        self._wake_at = NEVER
        self._next_timer = 0.0  # nothing has a deadline before

    # --- what shells may read ---------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        return self._standing.counters

    @property
    def state(self) -> PeerState:
        return self._standing.state

    @property
    def settled(self) -> bool:
        return self._standing.settled

    def live_peers(self, now: float) -> list[PeerId]:
        """Who is here besides us."""
        return [known.peer for known in self._standing.members.live(now)]

    def donors(self, now: float) -> dict[PeerId, tuple[str, ...]]:
        """Who else could give us weights, in random order, and their addresses."""
        return self._catch_up.donors(now)

    def live_records(self, now: float) -> list[Presence]:
        """Their records, for the cache on disk."""
        return self._standing.members.records(now)

    # --- the door ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; return what the shell must do, in order.

        Args:
            event: what happened.
            now: seconds on a monotonic clock.
        """
        if self._stopped:
            return [Close(event.link)] if isinstance(event, Received) else []
        self._dispatch(event, now)
        if not isinstance(event, PeersSeen) or event.from_lookup:  # else the message that passed them on comes next
            self._run_timers(now)
            self._sleep(now)
        effects = self._standing.effects
        self._standing.effects = []
        return effects

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Started():
                self._started(now)
            case PeersSeen():
                self._peers_seen(event, now)
            case LookupFailed():
                self._standing.note("lonely", why="nobody could be asked for peers")
            case OuterStepDone():
                self._outer_step_done(event, now)
            case ExchangeDue():
                self._exchanging.one_due(now)
            case PhaseDone():
                self._standing.progress = event.progress
                self._exchanging.phase_done(event.step, now)
            case TrainingEnded():
                self._training_ended(event, now)
            case Received():
                self._received(event.link, event.message, now)
            case SwapDone():
                self._exchanging.swapped(event, now)
            case Applied():
                self._standing.progress = event.progress
                self._exchanging.applied(event.link, now)
            case Pulled():
                self._exchanging.abandon()
                self._catch_up.pulled(event.link, event.received_bytes)
            case Adopted():
                self._adopted(event, now)
            case Donated():
                self._catch_up.donated(event.link, event.sent_bytes)
            case LinkFailed():
                self._link_failed(event, now)
            case Woke():
                self._wake_at = NEVER
            case LeaveRequested():
                self._leave(now, "stopped by its owner")
            case _:
                assert_never(event)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _received(self, link: LinkId, message: Message, now: float) -> None:
        match message:
            case Offer() | WeightsRequest() if self._exchanging.book.get(link) or self._catch_up.holds(link):
                self._violation(link, "a second opening message on one link", now)
            case Offer() | WeightsRequest() if link.outbound:
                self._violation(link, "an opening message in reply to ours", now)
            case Accept() | Acknowledge() if self._catch_up.holds(link):
                self._violation(link, "an answer to an offer where weights were asked for", now)
            case WeightsReply() if self._exchanging.book.get(link):
                self._violation(link, "weights in reply to an offer", now)
            case Decline() if (exchange := self._exchanging.book.get(link)) and exchange.state is not OFFERED:
                self._violation(link, "it declined what it had accepted", now)
            case Offer():
                self._exchanging.offered(link, message, now)
                if message.run == self._standing.rules.run and message.protocol == self._standing.rules.protocol:
                    self._hear(link.peer, message.terms.state, message.terms.step, message.terms.progress, now)
            case WeightsRequest():
                self._catch_up.requested(link, message, now)
            case Accept():
                self._exchanging.accepted(link, message, now)
                self._hear(link.peer, message.terms.state, message.terms.step, message.terms.progress, now)
            case Decline():
                self._hear(link.peer, message.state, message.step, message.progress, now)
                if self._catch_up.holds(link):
                    self._catch_up.declined(link, message, now)
                else:
                    self._exchanging.declined(link, message, now)
            case Acknowledge():
                self._exchanging.acknowledged(link, now)
                self._gossip_at = now + self._final_pause_s() if self._ended else NEVER
            case WeightsReply():
                self._catch_up.replied(link, message, now)
            case _:
                assert_never(message)

    def _hear(self, peer: PeerId, state: PeerState, step: int, progress: float, now: float) -> None:
        """Believe what a peer says of itself only as far as it can be true."""
        ceiling = self._standing.rules.progress_ceiling
        if 0 <= progress <= ceiling:  # False for NaN
            self._standing.members.hear(peer, state, step, progress, now)

    def _link_failed(self, event: LinkFailed, now: float) -> None:
        standing = self._standing
        if self._catch_up.failed(event, now):
            return
        if self._exchanging.book.get(event.link) is not None:
            self._exchanging.failed(event, now)
        elif event.their_fault and not standing.members.is_distrusted(event.link.peer, now):
            standing.blame(event, Fault.OFFENCE, now)  # garbage in place of an opening message

    def _violation(self, link: LinkId, why: str, now: float) -> None:
        event = LinkFailed(link, why, their_fault=True)
        self._exchanging.failed(event, now)
        self._catch_up.failed(event, now)
        self._standing.emit(Close(link))

    # --- joining ----------------------------------------------------------------------------------------------------

    def _started(self, now: float) -> None:
        self._search_until = now + SEARCH_PATIENCE_S
        self._announce(now)
        self._lookup(now)

    def _peers_seen(self, event: PeersSeen, now: float) -> None:
        members = self._standing.members
        for presence, live_until in self._wanted(event):
            if presence.run == self._standing.rules.run and members.see(presence, live_until) and not self._crowded:
                self._standing.note("found", presence.peer)
        alone = not self._training and self._catch_up.pull is None and not self._catch_up.donor_exists(now)
        if alone and event.from_lookup:
            self._begin(now)

    def _wanted(self, event: PeersSeen) -> Sequence[tuple[Presence, float]]:
        """The records of peers that we know, and as many others, at random, as are enough.

        In a crowd lookups bring them; what messages pass on is older, and only wanted when few are left.
        """
        known, records = self._standing.members.peers, event.records
        if event.from_lookup:
            room = max(ENOUGH_PEERS - len(known), FRESH_PEERS)
        else:
            room = max((ENOUGH_PEERS // 2 if self._crowded else ENOUGH_PEERS) - len(known), 0)
        if self._standing.rules.plans or (len(records) <= room and not event.from_lookup):
            return records
        strangers = [dated for dated in records if dated[0].peer not in known]
        if event.from_lookup:
            self._crowded = len(strangers) > room
        if len(strangers) <= room:
            return records
        return [dated for dated in records if dated[0].peer in known] + draw(self._standing.random, strangers, room)

    def _keep_in_step(self, now: float) -> None:
        """Pull while somebody is so far ahead that we must; while no donor is free, go on as before."""
        standing = self._standing
        if self._ended or self._catch_up.pull is not None:
            return
        in_doubt = standing.settled and standing.rules.exchanges and now - self._in_step_at >= OUT_OF_STEP_S
        if in_doubt and self._is_out_of_step(now):
            standing.settled = False
            standing.note("out of step", why=f"nothing was exchanged for {now - self._in_step_at:.0f} s")
        if not standing.settled and self._catch_up.begin(now):
            if standing.state is PeerState.TRAINING:
                self._exchanging.drop_unsettled()
                self._enter(PeerState.JOINING, now)
        elif self._training:
            self._enter(PeerState.TRAINING, now)

    def _is_out_of_step(self, now: float) -> bool:
        """We were frozen or cut off for so long that we would take everybody for a liar: we are a newcomer again."""
        standing = self._standing
        mine, rules = standing.progress, standing.rules
        return (
            now - self._in_step_at >= OUT_OF_STEP_STEPS * standing.seconds_per_outer_step
            and not standing.members.none_beyond(mine + rules.implausible_distance, now)
            and any(
                implausible_progress(known.progress, mine, settled=True, rules=rules)
                and not implausible_progress(known.progress, mine, settled=False, rules=rules)
                for known in standing.members.live(now)
            )
        )

    @property
    def _in_step_at(self) -> float:
        """When we last were in step for certain."""
        return max(self._exchanging.last_commit_at, self._caught_up_at)

    def _adopted(self, event: Adopted, now: float) -> None:
        self._standing.step = event.step
        self._standing.progress = event.progress
        self._catch_up.adopted(event.link)
        self._standing.usual.forget()
        self._caught_up_at = now
        if self._standing.state is PeerState.JOINING:  # not when the owner, or the run's end, came first
            self._begin(now)

    def _begin(self, now: float) -> None:
        if not self._training:
            self._training = True
            self._last_step_at = now
            self._standing.emit(BeginTraining())
        self._enter(PeerState.TRAINING, now)

    # --- training and its end ---------------------------------------------------------------------------------------

    def _outer_step_done(self, event: OuterStepDone, now: float) -> None:
        standing = self._standing
        standing.step, standing.progress = event.step, event.progress
        standing.counters.outer_steps += 1
        if self._last_step_at is not None and now > self._last_step_at:
            standing.rate = event.tokens / (now - self._last_step_at)
            standing.seconds_per_outer_step = now - self._last_step_at
        self._last_step_at = now
        self._exchanging.step_done(now)

    def _training_ended(self, event: TrainingEnded, now: float) -> None:
        if self._ended or self._standing.state is PeerState.LEAVING:
            return
        self._standing.step, self._standing.progress = event.step, event.progress
        self._ended = True
        self._standing.settled = True  # whatever is ahead of us now is no further than the end
        self._catch_up.drop()
        self._exchanging.training_ended()
        self._enter(PeerState.FINISHING, now)
        self._finish_by = now + self._standing.rules.final_gossip_s
        self._exchanging.last_commit_at = now
        self._exchanging.distances = []
        self._gossip_at = now

    def _finished_why(self, now: float) -> str:
        """Why the final gossip is over; empty while it is not."""
        standing, exchanging = self._standing, self._exchanging
        if not standing.rules.exchanges:
            return "this recipe exchanges nothing"
        live = standing.members.live(now)
        near = takewhile(lambda met: met[1] <= standing.rules.final_disagreement, reversed(exchanging.distances))
        agreeing = [peer for peer, _ in near]
        agreed = len(agreeing) >= AGREEMENTS and len(set(agreeing)) >= min(AGREEMENTS, len(live))
        agreed = agreed and not exchanging.book.engaged()  # what we just accepted, we also do
        alone = not len(exchanging.book) and now >= exchanging.last_commit_at + LONELY_S
        if (agreed or alone) and all(known.state is PeerState.FINISHING for known in live):
            return "the swarm agrees" if agreed else "nobody is left to exchange with"
        if now >= self._finish_by:
            return "waited long enough for the others"
        return ""

    def _leave(self, now: float, why: str) -> None:
        if self._leave_by < NEVER:
            return
        self._leaving_why = why
        self._enter(PeerState.LEAVING, now)
        self._catch_up.drop()
        self._exchanging.drop_unsettled()
        self._forget_stillborn()
        self._leave_by = now + GOODBYE_S
        self._stop_if_resolved(now)

    def _forget_stillborn(self) -> None:
        """What was opened only now and is closed again is not opened at all: nobody need hear of it."""
        effects = self._standing.effects
        opened = {effect.link for effect in effects if isinstance(effect, Open)}
        stillborn = opened & {effect.link for effect in effects if isinstance(effect, Close)}
        self._standing.effects = [
            effect for effect in effects if not (isinstance(effect, Open | Close) and effect.link in stillborn)
        ]

    def _stop_if_resolved(self, now: float) -> None:
        """Stop once no partner can hold a commit that we do not; or when it takes too long."""
        resolved = not len(self._exchanging.book) and self._catch_up.pull is None
        if (resolved or now >= self._leave_by) and not self._stopped:
            self._stopped = True
            self._standing.emit(Finished(self._leaving_why))

    # --- timers -----------------------------------------------------------------------------------------------------

    def _run_timers(self, now: float) -> None:
        if now >= self._next_timer:
            self._exchanging.expire(now)
            self._catch_up.expire(now)
        for peer in self._standing.members.expire(now):
            if not self._crowded:
                self._standing.note("lost", peer, "no sign of life")
        if self._standing.state is PeerState.LEAVING:
            self._stop_if_resolved(now)
            return
        if now >= self._announce_at:
            self._announce(now)
        if now >= self._lookup_at:
            self._lookup(now)
        if now >= self._search_until and not self._training and self._catch_up.pull is None:
            busy = self._catch_up.donor_exists(now)
            why = "no peer has weights to give just now" if busy else "nobody answered"
            self._standing.note("alone", why=f"{why}; training starts and the search goes on")
            self._begin(now)
        self._keep_in_step(now)
        if self._ended:
            if why := self._finished_why(now):
                self._standing.note("finished", why=why)
                self._leave(now, why)
                return
            if now >= self._gossip_at and not len(self._exchanging.book):
                self._gossip_at = now + self._final_pause_s()
                self._exchanging.make_due(now)
        self._exchanging.seek(now)

    def _final_pause_s(self) -> float:
        """Random, or two that just exchanged would call each other at once, and again."""
        return FINAL_PACE_S * self._standing.random.uniform(0.75, 1.25)

    def _sleep(self, now: float) -> None:
        """Ask to be woken when the next timer is due."""
        if self._stopped:
            return
        exchanging = self._exchanging
        times = [exchanging.next_deadline(), self._catch_up.next_deadline(), self._leave_by]
        if self._standing.state is not PeerState.LEAVING:
            times += (self._announce_at, self._lookup_at, self._finish_by)
            if not len(exchanging.book):  # else it waits for the exchange's end
                times.append(self._gossip_at)
            if not self._training and self._catch_up.pull is None:
                times.append(self._search_until)
            if exchanging.is_due or self._standing.state is PeerState.JOINING:
                times.append(self._standing.members.next_change(now) or NEVER)
        wake_at = min(times)
        self._next_timer = wake_at
        if wake_at != self._wake_at and wake_at < NEVER:
            self._wake_at = wake_at
            self._standing.emit(WakeAt(wake_at))

    def _announce(self, now: float) -> None:
        self._announce_at = now + ANNOUNCE_PERIOD_S
        standing = self._standing
        standing.emit(Announce(standing.state, standing.step, standing.progress))

    def _lookup(self, now: float) -> None:
        if not self._standing.members.records(now):  # who only called us cannot be called, nor cached
            period = LONELY_LOOKUP_PERIOD_S
        else:
            period = CROWDED_LOOKUP_PERIOD_S if self._crowded else LOOKUP_PERIOD_S
        self._lookup_at = now + period * self._standing.random.uniform(0.75, 1.25)
        self._standing.emit(Lookup())

    def _enter(self, state: PeerState, now: float) -> None:
        if self._standing.state is not state:
            self._standing.state = state
            self._announce(now)
