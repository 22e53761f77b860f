"""The protocol core's only entry point: ``Peer.handle(event, now) -> effects``.

``TRANSITIONS`` holds the table of a peer's states; docs/PROTOCOL.md shows it.
"""

from __future__ import annotations

from enum import Enum
from random import Random
from typing import assert_never

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import events
from p2ptrain.swarm.catchup import CatchUp
from p2ptrain.swarm.claims import ahead_of, drop_out_if_due, ended_before
from p2ptrain.swarm.core_state import CoreState, Counters
from p2ptrain.swarm.deadlines import Stopwatch
from p2ptrain.swarm.discovery import Discovery
from p2ptrain.swarm.exchange_manager import ExchangeManager
from p2ptrain.swarm.final_gossip import FinalGossip
from p2ptrain.swarm.keeper_schedule import HolderWatch, KeeperSchedule
from p2ptrain.swarm.membership import Membership
from p2ptrain.swarm.message_router import MessageRouter
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.peer_info import NEVER
from p2ptrain.swarm.rules import ASLEEP_S, GOODBYE_S, HELD_UP_S, SEARCH_PATIENCE_S, SwarmRules
from p2ptrain.swarm.transitions import Transition, TransitionTable


class PeerEvent(Enum):
    """Events that change a peer's state. The values appear in docs/PROTOCOL.md."""

    START = "the peer starts"
    TRAIN = "the trainer may run"
    KEEP = "a keeper has its fragments"
    PULL = "a donor agreed to give its weights"
    TRAINING_ENDS = "the trainer reaches the run's end"
    LEAVE = "the owner stops the peer, or its final loss is read"


TRANSITIONS: TransitionTable[PeerState, PeerEvent] = TransitionTable(
    "peer",
    Transition((None,), PeerEvent.START, PeerState.JOINING, "look for other peers"),
    Transition(
        (PeerState.JOINING,),
        PeerEvent.TRAIN,
        PeerState.TRAINING,
        "a lookup shows nobody far ahead, the pulled weights are adopted, the search takes too long, or the pull of a "
        "peer that trained before fails",
    ),
    Transition(
        (PeerState.JOINING,),
        PeerEvent.KEEP,
        PeerState.KEEPING,
        "the pulled fragments are adopted, or a keeper that had them before may begin as a trainer may",
    ),
    Transition(
        (PeerState.TRAINING, PeerState.KEEPING),
        PeerEvent.PULL,
        PeerState.JOINING,
        "drop exchanges in OFFERED and SWAPPING",
    ),
    Transition(
        (PeerState.JOINING, PeerState.TRAINING),
        PeerEvent.TRAINING_ENDS,
        PeerState.FINISHING,
        "drop the pull; begin the final gossip",
    ),
    Transition(
        (PeerState.JOINING, PeerState.TRAINING, PeerState.KEEPING, PeerState.FINISHING),
        PeerEvent.LEAVE,
        PeerState.LEAVING,
        "drop exchanges in OFFERED and SWAPPING; stop when the others are resolved, or at the deadline",
    ),
)


class Peer:
    """One peer's protocol state. Holds no tensor, opens no socket, reads no clock.

    Args:
        me: this peer's own id.
        rules: the run's numbers.
        random: the only source of randomness; a seed decides everything.
        step, progress: position of a resumed peer.
        keeps: fragments that it holds as a keeper, which needs ``rules.can_be_kept``; None: it holds all and trains.
    """

    def __init__(
        self,
        me: PeerId,
        rules: SwarmRules,
        random: Random,
        step: int = 0,
        progress: float = 0.0,
        keeps: frozenset[int] | None = None,
    ) -> None:
        if keeps is not None and not (rules.can_be_kept and keeps and keeps <= rules.everything):
            raise ValueError(f"fragments {keeps} of {rules.fragments} cannot be kept")
        self._core = CoreState(
            me, rules, random, Membership(me), step=step, progress=progress, was_in_step=progress > 0, keeps=keeps
        )
        self._core.state = TRANSITIONS.to(None, PeerEvent.START)
        self._exchanges = ExchangeManager(self._core)
        self._catch_up = CatchUp(self._core)
        self._discovery = Discovery(self._core)
        self._final_gossip = FinalGossip(self._core, self._exchanges)
        self._router = MessageRouter(self._core, self._exchanges, self._catch_up, self._final_gossip)
        self._keeper = KeeperSchedule(self._core, self._exchanges)
        self._holders = HolderWatch(self._core)
        self._training = False  # BeginTraining was emitted, or a keeper has its fragments
        self._search_until = NEVER
        self._caught_up_at = 0.0
        self._awaits_lookup = False  # slept: the known peers may be outdated
        self._conclude_by = NEVER
        self._leave_by = NEVER
        self._gives_on = False
        self._leaving_why = ""
        self._stopped = False
        self._stopwatch = Stopwatch()
        self._wake_at = NEVER
        self._next_timer = 0.0  # nothing has a deadline before

    # --- what shells may read ---------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        return self._core.counters

    @property
    def state(self) -> PeerState:
        return self._core.state

    @property
    def settled(self) -> bool:
        return self._core.settled

    @property
    def exchanges_under_way(self) -> int:
        """Number of exchanges that both sides agreed on and that are not over."""
        return self._exchanges.book.under_way()

    def live_peers(self, now: float) -> list[PeerId]:
        return [known.peer for known in self._core.members.live(now)]

    def peers_that_answer(self, now: float) -> int:
        """Return the number of live peers without those that did not answer our last two calls: a killed peer's record
        lasts a minute longer."""
        return sum(known.unanswered < 2 for known in self._core.members.live(now))

    def donors(self, now: float) -> dict[PeerId, tuple[str, ...]]:
        """Return the peers that could give this one weights, in random order, with their addresses."""
        return self._catch_up.donors(now)

    @property
    def held(self) -> frozenset[int]:
        """Fragments of the weights that this peer holds, or wants before it has any."""
        return self._core.held

    def keepers(self, now: float) -> dict[PeerId, frozenset[int]]:
        """Return the fragments of each donor that holds only some."""
        return self._catch_up.keepers(now)

    def live_records(self, now: float) -> list[Presence]:
        return self._core.members.records(now)

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        """Handle one event and return what the shell must do, in order. ``now``: seconds on a monotonic clock."""
        if self._stopped:
            return [events.Close(event.link)] if isinstance(event, events.Received) else []
        if (late_s := now - self._wake_at) >= HELD_UP_S:
            self._exchanges.extend_deadlines(now, late_s)
            self._catch_up.extend_deadlines(now, late_s)
        if late_s >= ASLEEP_S:
            self._slept(late_s, now)
        if late_s >= HELD_UP_S:
            self._wake_at = now  # count a delay once
        core = self._core
        core.budget.expected(core.rate * core.count.peers * self._stopwatch.trained_s(now))
        self._dispatch(event, now)
        passed_on = isinstance(event, events.PeersSeen) and not event.from_lookup
        if not passed_on:  # the message that passed the records on comes next
            self._run_timers(now)
            self._sleep(now)
        effects, self._core.effects = self._core.effects, []
        return effects

    def _dispatch(self, event: events.Event, now: float) -> None:
        match event:
            case events.Started():
                self._search_until = now + SEARCH_PATIENCE_S
                self._discovery.announce(now)
                self._discovery.look_up(now)
            case events.PeersSeen():
                self._peers_seen(event, now)
            case events.LookupFailed():
                self._awaits_lookup = False
                self._core.note("lonely", why="no node of the directory answered")
            case events.OuterStepDone():
                self._outer_step_done(event, now)
            case events.ExchangeDue():
                self._exchanges.one_due(now)
            case events.PhaseDone():
                self._core.trained_to(event.progress)
                self._stopwatch.wait(now)
                self._exchanges.phase_done(event.step, now)
            case events.TrainingEnded():
                self._training_ended(event, now)
            case events.Received():
                self._router.received(event.link, event.message, now)
            case events.SwapDone():
                self._exchanges.swapped(event, now)
            case events.Applied():
                self._core.unapplied.pop(event.link, None)
                self._core.trained_to(event.progress)
                self._exchanges.applied(event.link, now)
            case events.Pulled():
                self._exchanges.abandon()
                self._catch_up.pulled(event.link, event.received_bytes)
            case events.Adopted():
                self._adopted(event, now)
            case events.Unfit():
                self._catch_up.unfit(event, now)
            case events.Donated():
                self._catch_up.donated(event.link, event.sent_bytes, now)
            case events.LinkFailed():
                self._router.failed(event, now)
            case events.Woke():
                self._wake_at = NEVER
            case events.Giving():
                self._core.gives = event.gives
            case events.LeaveRequested():
                self._leave(event.gives_on, now)
            case _:
                assert_never(event)

    # --- joining ----------------------------------------------------------------------------------------------------

    def _peers_seen(self, event: events.PeersSeen, now: float) -> None:
        is_first = event.from_lookup and not self._discovery.has_answer
        self._discovery.seen(event)
        self._awaits_lookup &= not event.from_lookup
        alone = not self._training and self._catch_up.pull is None and not ahead_of(self._core, now)
        if event.from_lookup:
            self._core.count.in_directory = event.in_directory if self._discovery.is_crowded else 0
            self._core.count_peers(now)
        is_first_and_alone = is_first and self._catch_up.pull is None and not ahead_of(self._core, now)
        if is_first_and_alone and (why := ended_before(self._core, event, now)):
            self._core.note("ended before", why=why)
        if event.from_lookup:
            self._holders.look(now)
        if alone and event.from_lookup:
            self._begin(now)

    def _keep_in_step(self, now: float) -> None:
        """Pull while a peer is so far ahead that this one must; go on as before while no donor gives."""
        core, catch_up = self._core, self._catch_up
        if self._final_gossip.has_begun:
            return
        if catch_up.pull is None:
            in_step_at = max(self._exchanges.last_commit_at, self._caught_up_at)
            if why := drop_out_if_due(core, in_step_at, now):
                core.note("out of step", why=why)
            if not core.settled and not self._awaits_lookup:
                catch_up.begin(now)
        if catch_up.is_receiving:
            if core.state in (PeerState.TRAINING, PeerState.KEEPING):
                self._exchanges.drop_unsettled()
                self._enter(PeerEvent.PULL, now)
        elif self._training and core.state is PeerState.JOINING:
            self._enter(PeerEvent.KEEP if core.is_keeper else PeerEvent.TRAIN, now)

    def _slept(self, seconds: float, now: float) -> None:
        """Drop out of step after a sleep: pull like a newcomer if the others are far ahead.

        A new lookup asks who they are, because the first peer to call after a wake-up may be adversarial.
        """
        core = self._core
        self._stopwatch.skip(seconds)
        if core.settled and core.rules.exchanges and not self._final_gossip.has_begun:
            core.drop_out()
            core.note("slept", why=f"{seconds:.0f} s")
            self._awaits_lookup = True
            self._discovery.look_up(now)

    def _adopted(self, event: events.Adopted, now: float) -> None:
        self._core.adopted(event.step, event.progress, now)
        self._catch_up.adopted(event.link)
        self._core.distance_stats.forget()
        self._exchanges.rounds.reset()
        self._exchanges.position.forget()
        self._core.implausible_claims.clear()
        self._caught_up_at = now
        if self._core.state is PeerState.JOINING:  # not if the owner's stop or the run's end came first
            if event.progress >= self._core.rules.run_tokens:
                self._core.note("run ended", event.link.peer)
            self._begin(now)

    def _begin(self, now: float) -> None:
        if self._core.is_keeper:
            self._begin_to_keep(now)
            return
        if not self._training:
            self._training = True
            core = self._core
            core.is_counted = not (core.was_in_step or core.settled or ahead_of(core, now))
            self._stopwatch.begin(now)
            self._core.emit(events.BeginTraining())
        self._enter(PeerEvent.TRAIN, now)

    def _begin_to_keep(self, now: float) -> None:
        """Begin as a keeper, unless it has no weights yet: it founds no run."""
        core = self._core
        if core.progress <= 0:
            return
        if not self._training:
            self._training = True
            self._keeper.begin(now)
            core.emit(events.BeginTraining())
        self._enter(PeerEvent.KEEP, now)

    # --- training and its end ---------------------------------------------------------------------------------------

    def _outer_step_done(self, event: events.OuterStepDone, now: float) -> None:
        core = self._core
        core.step = event.step
        core.trained_to(event.progress)
        core.counters.outer_steps += 1
        if lap := self._stopwatch.lap(now):
            took_s, core.seconds_per_outer_step = lap
            core.rate = event.tokens / took_s
        core.budget.trained(event.tokens * core.count.peers)
        if not self._awaits_lookup:  # after a sleep nobody is known, and the last count is the best
            core.count.outer_step_done(core.members, core.rules.plans, now)
            core.count_peers(now)
        self._exchanges.step_done(now)

    def _training_ended(self, event: events.TrainingEnded, now: float) -> None:
        if self._final_gossip.has_begun or self._core.state is PeerState.LEAVING:
            return
        self._core.step = event.step
        self._core.trained_to(event.progress)
        self._core.has_ended = True
        self._core.settled = True  # nothing ahead is further than the end
        self._training = True  # also if the peer was paused after its end, and this core is new
        self._catch_up.drop()
        self._exchanges.training_ended(now)
        self._enter(PeerEvent.TRAINING_ENDS, now)
        self._final_gossip.begin(now)

    def _end_gossip(self, why: str, now: float) -> None:
        """Exchange nothing more. The weights are final once no partner can hold a commit that this peer does not."""
        self._core.note("finished", why=why)
        self._core.is_over, self._leaving_why = True, why
        self._exchanges.drop_unsettled()
        self._core.drop_unused_links()
        self._conclude_by = now + GOODBYE_S

    def _conclude_if_resolved(self, now: float) -> None:
        if self._conclude_by < NEVER and (not len(self._exchanges.book) or now >= self._conclude_by):
            self._conclude_by = NEVER
            self._exchanges.abandon()
            self._core.emit(events.Conclude())

    def _leave(self, gives_on: bool, now: float) -> None:
        """Leave; a second request, without ``gives_on``, ends the wait for newcomers."""
        if self._leave_by < NEVER and (gives_on or not self._gives_on):
            return
        if self._leave_by == NEVER:
            self._leaving_why = self._leaving_why or "stopped by its owner"
            self._enter(PeerEvent.LEAVE, now)
        self._gives_on = gives_on
        if not gives_on:
            self._catch_up.drop()
        self._exchanges.drop_unsettled()
        self._core.drop_unused_links()
        self._leave_by = now + (max(self._core.rules.final_gossip_s, GOODBYE_S) if gives_on else GOODBYE_S)
        self._stop_if_resolved(now)

    def _stop_if_resolved(self, now: float) -> None:
        """Stop once no partner can hold a commit that this peer does not, or at the deadline."""
        resolved = not len(self._exchanges.book) and self._catch_up.pull is None and not self._catch_up.is_giving
        if (resolved or now >= self._leave_by) and not self._stopped:
            self._stopped = True
            self._catch_up.drop()
            self._core.emit(events.Finished(self._leaving_why))

    # --- timers -----------------------------------------------------------------------------------------------------

    def _run_timers(self, now: float) -> None:
        if now >= self._next_timer:
            self._exchanges.expire(now)
            self._catch_up.expire(now)
        self._discovery.expire(now)
        if self._core.state is PeerState.LEAVING:
            self._stop_if_resolved(now)
            return
        self._discovery.keep_up(now)
        if now >= self._search_until and not self._training and self._catch_up.pull is None:
            why = self._catch_up.why_none(now)
            if self._core.is_keeper:
                self._keeper.wait(why)
                self._search_until = now + SEARCH_PATIENCE_S
            elif self._core.progress < self._core.rules.run_tokens:  # else there is nothing left to train
                self._core.note("alone", why=f"{why}; training starts and the search continues")
            self._begin(now)
        self._keep_in_step(now)
        if self._final_gossip.has_begun and not self._core.is_over:
            if why := self._final_gossip.why_over(now):
                self._end_gossip(why, now)
            else:
                self._final_gossip.keep_up(now)
        self._conclude_if_resolved(now)
        self._keeper.keep_up(now)
        self._exchanges.seek(now)

    def _sleep(self, now: float) -> None:
        if self._stopped:
            return
        exchanges, state = self._exchanges, self._core.state
        wake_at = min(exchanges.next_deadline(), self._catch_up.next_deadline(), self._leave_by)
        if state is not PeerState.LEAVING:
            ends_at = self._conclude_by if self._core.is_over else self._final_gossip.next_due()
            wake_at = min(wake_at, self._discovery.next_due(), self._keeper.next_due(), ends_at)
            if not self._training and self._catch_up.pull is None:
                wake_at = min(wake_at, self._search_until)
            if exchanges.is_due or state is PeerState.JOINING:
                wake_at = min(wake_at, self._core.members.next_change(now) or NEVER)
        self._next_timer = wake_at
        if wake_at != self._wake_at and wake_at < NEVER:
            self._wake_at = wake_at
            self._core.emit(events.WakeAt(wake_at))

    def _enter(self, event: PeerEvent, now: float) -> None:
        self._core.state = TRANSITIONS.to(self._core.state, event)
        self._discovery.announce(now)
