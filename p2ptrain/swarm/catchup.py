"""Catching up: a newcomer pulls a donor's weights, and a donor gives them to one newcomer at a time.

::

    newcomer   Open(WeightsRequest) -> WeightsReply -> Pull -> Pulled -> Adopt -> Adopted: settled
                                    -> Decline, failure, deadline, Unfit: another donor, or wait and look again
    donor      WeightsRequest -> Send(WeightsReply), Donate -> Donated | failure
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.claims import ahead_of, believed, is_far
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import Adopt, Close, Donate, LinkFailed, Open, Pull, Send, Unfit
from p2ptrain.swarm.judging import SlowPartnerPenalty
from p2ptrain.swarm.keeping import held_by, words
from p2ptrain.swarm.matching import (
    catch_up_bound,
    choose_partner,
    implausible_progress,
    implausible_step,
    must_catch_up,
)
from p2ptrain.swarm.messages import Decline, DeclineReason, PeerState, WeightsReply, WeightsRequest
from p2ptrain.swarm.peer_info import FailureKind, PeerInfo
from p2ptrain.swarm.progress import entry_progress
from p2ptrain.swarm.rules import ASLEEP_S, GIVING_WINDOW_S, MAX_DONATIONS, MAX_KNOWN, UNREAD_S

SHORT_PAUSE_S, LONG_PAUSE_S = 1.0, 20.0
"""First and longest pause before a donor that declined is asked again; each decline in a row doubles it. The donor's
only place may become free at any moment. Guess: measure how long donors stay busy."""
LONGEST_PAUSE_S = 120.0
"""Longest pause after a pull that failed, however long it took; each failure of this donor in a row doubles it."""


@dataclass(frozen=True, slots=True)
class PullUnderWay:
    """State of this peer's own pull. ``adopting``: the weights have arrived and the trainer has them."""

    link: LinkId
    deadline: float
    furthest: float
    """Largest progress (tokens) among the corroborated claims."""
    steps: int
    """Outer steps announced by peers about as far as the donor, the donor included (``steps_near``)."""
    replied_at: float | None = None
    progress: float = 0.0
    """Progress (tokens) of the weights, after the reply."""
    counted_at: float = 0.0
    """The donor's progress when it first counted this peer, after the reply."""
    adopting: bool = False


def steps_near(donor: PeerInfo, believed: Sequence[PeerInfo], near: float) -> int:
    """Return the median of the outer steps announced by corroborated peers within ``near`` tokens of the donor.

    The donor is included and the larger of two middle values counts, so that a minority that announces few steps cannot
    make an honest donor's count implausible.
    """
    return median_high([each.step for each in believed if abs(each.progress - donor.progress) <= near])


class CatchUp:
    def __init__(self, core: CoreState) -> None:
        self._core = core
        self.pull: PullUnderWay | None = None
        self._donations: dict[LinkId, float] = {}  # deadline by link
        self._begun: dict[LinkId, float] = {}  # start of the donation by link
        self._slow_partners = SlowPartnerPenalty(core)
        self._declined: BoundedDict[PeerId, int] = BoundedDict(MAX_KNOWN)  # declines in a row
        self._given: BoundedDict[PeerId, deque[float]] = BoundedDict(MAX_KNOWN)  # when donations to this peer began

    @property
    def is_giving(self) -> bool:
        return bool(self._donations)

    @property
    def is_receiving(self) -> bool:
        """Whether a donor has agreed, so that its weights are arriving or here.

        Until then this peer exchanges as before, so that a peer that gives no weights cannot stop it.
        """
        return self.pull is not None and self.pull.replied_at is not None

    def why_none(self, now: float) -> str:
        if not ahead_of(self._core, now):
            return "no peer answered"
        if not believed(self._core, now):
            return "others contradict the peers that claim to be far ahead"
        if lacking := self._not_held(now):
            return f"no peer holds fragments {words(lacking)}"
        return "no peer can give weights at the moment"

    def donors(self, now: float) -> dict[PeerId, tuple[str, ...]]:
        """Return the peers whose copies of the weights count, in random order, with their addresses.

        These are all corroborated peers ahead that are not distrusted, busy ones included, and settled peers about as
        far as we are: a young swarm may have only one donor that is far enough ahead.
        """
        ready = self._ready_donors(now)
        drawn = self._core.random.sample(ready, len(ready)) if ready else []
        return {known.peer: known.addresses for known in drawn}

    def keepers(self, now: float) -> dict[PeerId, frozenset[int]]:
        """Return the fragments of each donor that holds only some."""
        keeping, everything = PeerState.KEEPING, self._core.rules.everything
        return {known.peer: held_by(known, everything) for known in self._ready_donors(now) if known.state is keeping}

    def _not_held(self, now: float) -> frozenset[int]:
        """Return the fragments that this peer wants and that no donor holds."""
        wanted, everything = self._core.held, self._core.rules.everything
        return wanted.difference(*(held_by(known, everything) for known in self._ready_donors(now)))

    def _ready_donors(self, now: float) -> list[PeerInfo]:
        core = self._core
        ahead = believed(core, now)
        if not ahead:
            return []
        near = catch_up_bound(core.effective_progress, core.bounds) / 2
        least, most = min(known.progress for known in ahead) - near, max(known.progress for known in ahead) + near
        beside = [
            known
            for known in core.members.live(now)
            if known.settled and known.state is not PeerState.JOINING and least <= known.progress <= most
        ]
        return [known for known in dict.fromkeys((*ahead, *beside)) if known.distrusted_until <= now]

    def begin(self, now: float) -> None:
        core = self._core
        ahead = believed(core, now)
        ready = [known for known in ahead if known.may_be_asked(now)]
        furthest = max((known.progress for known in ready), default=0.0)
        newest = [known for known in ready if known.progress >= furthest - core.bounds.catch_up]
        if any(known.state is PeerState.KEEPING for known in ready):
            if self._not_held(now):
                return
            newest = self._holding_most(newest)
        donor = choose_partner(newest, core.random)
        if donor is None:
            return
        link = core.new_link(donor.peer)
        most, steps = max(known.progress for known in ahead), steps_near(donor, ahead, core.bounds.catch_up)
        self.pull = PullUnderWay(link, now + core.deadlines.reply_s(), most, steps)
        request = WeightsRequest(
            core.rules.run, core.rules.protocol, core.effective_progress, core.deadlines.seconds_per_byte()
        )
        core.emit(Open(link, donor.addresses, request))
        core.note("catching up", donor.peer, f"it is {donor.progress - core.effective_progress:,.0f} tokens ahead")

    def _holding_most(self, donors: Sequence[PeerInfo]) -> list[PeerInfo]:
        """Return the donors that hold most of what this peer wants: the others give the rest."""
        wanted, everything = self._core.held, self._core.rules.everything
        most = [len(held_by(known, everything) & wanted) for known in donors]
        return [known for known, held in zip(donors, most, strict=True) if held == max(most) > 0]

    def replied(self, link: LinkId, reply: WeightsReply, now: float) -> None:
        core = self._core
        if self.pull is None or self.pull.link != link:
            core.emit(Close(link))
            return
        if core.settled:  # by an exchange that committed meanwhile
            self.pull = None
            core.emit(Close(link))
            return
        why = implausible_progress(reply.progress, core.progress, settled=False, bounds=core.bounds)
        if self.is_receiving or why:
            self.failed(LinkFailed(link, why or "it replied twice", their_fault=True), now)
            return
        if why := implausible_step(reply.step, self.pull.steps, core.bounds):
            self.failed(LinkFailed(link, why), now)  # no offence: the other claims may be the false ones
            return
        known = core.members.get(link.peer)
        is_near = known is not None and not is_far(known.progress, core)
        if core.is_outlier and is_near and is_far(reply.progress, core):
            self.failed(LinkFailed(link, "its weights are further ahead than it announced"), now)
            return
        if known is not None and reply.progress < known.progress - core.bounds.catch_up:
            self.failed(LinkFailed(link, "its weights are older than it announced"), now)
            return
        if reply.progress < core.effective_progress:
            self.failed(LinkFailed(link, "its weights are older than ours"), now)  # this peer trains meanwhile
            return
        if implausible_progress(reply.progress, self.pull.furthest, settled=True, bounds=core.bounds):
            self.failed(LinkFailed(link, "its weights are further ahead than any peer announced"), now)
            return
        deadline = now + core.deadlines.payload_s(core.rules.weights_bytes, reply.seconds_per_byte)
        core.emit(Pull(link, reply))
        progress = self._unended(reply.progress)
        self.pull = replace(
            self.pull, deadline=deadline, replied_at=now, progress=progress, counted_at=reply.counted_at
        )
        self._declined.pop(link.peer, None)

    def _unended(self, progress: float) -> float:
        """Leave at least one outer step, unless somebody announced the run's end: the donor alone cannot claim it."""
        assert self.pull is not None
        end, bounds = self._core.rules.run_tokens, self._core.bounds
        is_announced = self.pull.furthest + bounds.catch_up >= end
        return progress if is_announced else min(progress, end - bounds.step)

    def declined(self, link: LinkId, decline: Decline, now: float) -> None:
        core = self._core
        core.emit(Close(link))
        if self.pull is not None and self.pull.link == link:
            self.pull = None
            times = self._declined[link.peer] = self._declined.get(link.peer, 0) + 1
            pause_s = min(SHORT_PAUSE_S * 2.0 ** min(times - 1, 10), LONG_PAUSE_S)
            core.members.pause(link.peer, now + pause_s * core.random.uniform(0.5, 1.5), now)
            core.note("skipped", link.peer, decline.reason.value)

    def pulled(self, link: LinkId, received_bytes: int) -> None:
        """Hand the received weights to the trainer. The rest is local and has no deadline."""
        core = self._core
        if self.pull is None or self.pull.link != link:
            return
        core.counters.received_bytes += received_bytes
        self.pull = replace(self.pull, deadline=float("inf"), adopting=True)
        progress = self.pull.progress
        if core.progress > 0 and not (core.was_in_step or core.is_outlier):  # others may count this peer already
            progress = entry_progress(self.pull.counted_at, core.progress, progress)
        core.emit(Adopt(link, progress, left_behind=core.takes_only_better))
        core.emit(Close(link))

    def adopted(self, link: LinkId) -> None:
        self.pull = None
        self._core.settled = True
        self._core.record_related()
        self._core.overtakers.clear()
        self._core.counters.pulls += 1
        self._core.members.record_success(link.peer)
        self._core.note("caught up", link.peer)

    def unfit(self, event: Unfit, now: float) -> None:
        """Try another donor after useless weights. Nobody is at fault if they arrived after this peer's own end, or if
        they only do not improve those of a young peer, which then exchanges as before."""
        core = self._core
        if self.pull is None or self.pull.link != event.link:
            return
        self.pull = None
        if core.state is PeerState.FINISHING:
            core.note("skipped", event.link.peer, event.why)
        elif core.is_young:
            core.note("skipped", event.link.peer, event.why)
            core.members.pause(event.link.peer, now + LONG_PAUSE_S, now)
            if core.overtakers:
                core.overtakers.clear()
                core.settled, core.is_counted = True, False
        else:
            core.record_failure(LinkFailed(event.link, event.why), FailureKind.BROKEN, now)

    def requested(self, link: LinkId, request: WeightsRequest, now: float) -> None:
        core = self._core
        refusal = self._refusal(link.peer, request, now)
        if refusal is not None:
            core.emit(Send(link, Decline(refusal, core.state, core.step, core.progress)))
            core.emit(Close(link))
            return
        patience_s = core.deadlines.payload_s(core.rules.weights_bytes, request.seconds_per_byte)
        self._donations[link] = now + patience_s
        self._begun[link] = now
        self._remember(link.peer, now)
        known = core.known_to_pass_on(now, link.peer)
        seconds_per_byte = core.deadlines.seconds_per_byte()
        reply = WeightsReply(core.step, core.told_progress, seconds_per_byte, core.counted_at(link.peer), known)
        core.emit(Send(link, reply))
        core.emit(Donate(link))

    def donated(self, link: LinkId, sent_bytes: int, now: float) -> None:
        if self._end_donation(link, now):
            self._core.counters.donations += 1
            self._core.counters.sent_bytes += sent_bytes
            self._core.emit(Close(link))
            self._core.note("gave weights", link.peer)

    def failed(self, event: LinkFailed, now: float) -> bool:
        """Handle a link that ended early. Return True if it belonged to a pull or donation."""
        core = self._core
        if self.pull is not None and self.pull.link == event.link and not self.pull.adopting:
            failure = FailureKind.BROKEN if self.is_receiving else FailureKind.UNANSWERED
            # Exchange for as long as the pull prevented exchanges before the next one.
            if self.pull.replied_at is not None:
                self._pause(event.link.peer, now - self.pull.replied_at, now)
            self.pull = None
        elif self._end_donation(event.link, now):
            failure = FailureKind.BROKEN
        else:
            return False
        core.emit(Close(event.link))
        core.record_failure(event, failure, now)
        return True

    def _pause(self, donor: PeerId, held_s: float, now: float) -> None:
        known = self._core.members.get(donor)
        longest_s = LONGEST_PAUSE_S * 2.0 ** min(known.broken + known.unanswered if known else 0, 16)
        self._core.members.pause(donor, now + min(held_s, longest_s), now)

    def extend_deadlines(self, now: float, seconds: float) -> None:
        self._begun = {link: since + seconds for link, since in self._begun.items()} if seconds < ASLEEP_S else {}
        self._donations = {link: until if until > now else now + UNREAD_S for link, until in self._donations.items()}
        if self.pull is not None and self.pull.replied_at is not None:
            self.pull = replace(self.pull, replied_at=self.pull.replied_at + seconds)
        if self.pull is not None and self.pull.deadline <= now:
            self.pull = replace(self.pull, deadline=now + UNREAD_S)

    def expire(self, now: float) -> None:
        if self.pull is None and not self._donations:
            return
        waiting = dict(self._donations)
        if self.pull is not None:
            waiting[self.pull.link] = self.pull.deadline
        for link, deadline in waiting.items():
            if deadline <= now:
                self._core.deadlines.missed()
                asked = self.pull is not None and self.pull.link == link and not self.is_receiving
                why = "no answer" if asked else "the weights were not transferred within the deadline"
                self.failed(LinkFailed(link, why), now)

    def next_deadline(self) -> float:
        own = self.pull.deadline if self.pull is not None else float("inf")
        return min(own, *self._donations.values()) if self._donations else own

    def holds(self, link: LinkId) -> bool:
        return link in self._donations or (self.pull is not None and self.pull.link == link)

    def drop(self) -> None:
        """Close every link, because this peer leaves or finishes."""
        links = list(self._donations)
        if self.pull is not None and not self.pull.adopting:
            links.append(self.pull.link)
            self.pull = None
        self._donations.clear()
        self._begun.clear()
        for link in links:
            self._core.emit(Close(link))

    def _refusal(self, peer: PeerId, request: WeightsRequest, now: float) -> DeclineReason | None:
        core = self._core
        if request.run != core.rules.run:
            return DeclineReason.OTHER_RUN
        if request.protocol != core.rules.protocol:
            return DeclineReason.OTHER_PROTOCOL
        if core.state is PeerState.LEAVING:
            return DeclineReason.LEAVING
        if core.members.is_distrusted(peer, now):
            return DeclineReason.DISTRUSTED
        if not must_catch_up(False, request.progress, core.progress, core.bounds):
            return DeclineReason.NOT_BEHIND
        if core.state is PeerState.JOINING or self.is_receiving or core.is_outlier:
            return DeclineReason.NO_WEIGHTS
        is_full = len(self._donations) >= MAX_DONATIONS or not core.gives
        if is_full or self._has_enough(peer, now) or self._slow_partners.waits(peer, now):
            return DeclineReason.BUSY
        return None

    def _end_donation(self, link: LinkId, now: float) -> bool:
        if self._donations.pop(link, None) is None:
            return False
        self._slow_partners.gave(link.peer, now - self._begun.pop(link, now), now)  # not timed if it spanned a sleep
        return True

    def _has_enough(self, peer: PeerId, now: float) -> bool:
        given, most = self._given.get(peer), self._core.rules.given_to_one
        return given is not None and len(given) == most and given[0] > now - GIVING_WINDOW_S

    def _remember(self, peer: PeerId, now: float) -> None:
        given = self._given.get(peer) or deque(maxlen=self._core.rules.given_to_one)
        given.append(now)
        self._given[peer] = given
