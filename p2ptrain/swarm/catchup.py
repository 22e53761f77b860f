"""Catching up: a peer that was never in step pulls a donor's weights; a donor gives them, one newcomer at a time.

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

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.claims import ahead_of, believed, is_far
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import Adopt, Close, Donate, LinkFailed, Open, Pull, Send, Unfit
from p2ptrain.swarm.matching import choose_partner, implausible_progress, implausible_step, must_catch_up
from p2ptrain.swarm.messages import Decline, DeclineReason, PeerState, WeightsReply, WeightsRequest
from p2ptrain.swarm.peer_info import Fault, PeerInfo
from p2ptrain.swarm.rules import (
    ASLEEP_S,
    GIVING_WINDOW_S,
    MAX_DONATIONS,
    MAX_KNOWN,
    UNREAD_S,
)
from p2ptrain.swarm.slow_partners import SlowPartnerPenalty

SHORT_PAUSE_S, LONG_PAUSE_S = 1.0, 20.0
"""Before a donor that declined is asked again: its one place may be free at any moment, and its distrust of who broke
off an exchange be over in two seconds; but each time that it is not, twice as late, to the longer one. Guesses."""
LONGEST_PAUSE_S = 120.0
"""After weights that did not come, however long they were waited for; doubles with each time that a donor's did not."""


@dataclass(frozen=True, slots=True)
class PullUnderWay:
    """Our own pull. ``adopting``: the weights are here and handed to the trainer."""

    link: LinkId
    deadline: float
    furthest: float
    """The progress (tokens) of whoever said that it is furthest, of those whom others bear out."""
    steps: int
    """Outer steps that those about as far as the donor say they have made, the donor among them (``steps_near``)."""
    replied_at: float | None = None
    adopting: bool = False


def steps_near(donor: PeerInfo, believed: Sequence[PeerInfo], near: float) -> int:
    """The outer steps of those believed who are about as far as the donor: a median of what they announced.

    The donor's own word is one of them, and of two in the middle the larger one counts: so a minority that names few
    cannot make an honest donor's count implausible. Who is elsewhere says nothing of how many it takes to be there.

    Args:
        near: so many tokens apart.
    """
    return median_high([each.step for each in believed if abs(each.progress - donor.progress) <= near])


class CatchUp:
    """Pulling and donating of one peer."""

    def __init__(self, standing: CoreState) -> None:
        self._standing = standing
        self.pull: PullUnderWay | None = None
        self._donations: dict[LinkId, float] = {}  # link -> deadline
        self._begun: dict[LinkId, float] = {}  # link -> when the donation began
        self._overtime = SlowPartnerPenalty(standing)
        self._declined: dict[PeerId, int] = {}  # how often in a row; who declined last comes last
        self._given: dict[PeerId, deque[float]] = {}  # when we began to give to whom; who came last comes last

    @property
    def is_receiving(self) -> bool:
        """A donor agreed: its weights come, or are here. Until then we go on as before: to be asked costs nothing, and
        who says that it is ahead and gives nobody its weights must not keep others from exchanging."""
        return self.pull is not None and self.pull.replied_at is not None

    def donor_exists(self, now: float) -> bool:
        """Somebody live is so far ahead that we must not exchange but pull."""
        return bool(ahead_of(self._standing, now))

    def why_none(self, now: float) -> str:
        """Why nobody gave us weights."""
        if not ahead_of(self._standing, now):
            return "nobody answered"
        if not believed(self._standing, now):
            return "others contradict whoever claims to be far ahead"
        return "no peer has weights to give just now"

    def donors(self, now: float) -> dict[PeerId, tuple[str, ...]]:
        """Whose copies of the weights count: all whom we believe to be ahead and do not distrust, in random order, with
        their addresses.

        Who is busy gives no promise, and answers for its copies all the same. So does who is in step and about as far
        as they are, though not so far ahead of us that we must have its weights: a young swarm may have one donor.
        """
        standing = self._standing
        ahead = believed(standing, now)
        if not ahead:
            return {}
        near = standing.rules.catch_up_tokens / 2
        least, most = min(known.progress for known in ahead) - near, max(known.progress for known in ahead) + near
        beside = [
            known
            for known in standing.members.live(now)
            if known.settled and known.state is not PeerState.JOINING and least <= known.progress <= most
        ]
        ready = [known for known in dict.fromkeys((*ahead, *beside)) if known.distrusted_until <= now]
        return {known.peer: known.addresses for known in standing.random.sample(ready, len(ready))}

    def begin(self, now: float) -> None:
        """Ask a donor for its weights if we must catch up and one is free."""
        standing = self._standing
        ahead = believed(standing, now)
        ready = [known for known in ahead if known.may_be_asked(now)]
        furthest = max((known.progress for known in ready), default=0.0)
        newest = [known for known in ready if known.progress >= furthest - standing.rules.catch_up_tokens]
        donor = choose_partner(newest, standing.random)
        if donor is None:
            return
        link = standing.new_link(donor.peer)
        most, steps = max(known.progress for known in ahead), steps_near(donor, ahead, standing.rules.catch_up_tokens)
        self.pull = PullUnderWay(link, now + standing.deadlines.reply_s(), most, steps)
        request = WeightsRequest(
            standing.rules.run, standing.rules.protocol, standing.worth, standing.deadlines.seconds_per_byte()
        )
        standing.emit(Open(link, donor.addresses, request))
        standing.note("catching up", donor.peer, f"it is {donor.progress - standing.worth:.0f} tokens ahead")

    def replied(self, link: LinkId, reply: WeightsReply, now: float) -> None:
        """The donor agreed: receive."""
        standing = self._standing
        if self.pull is None or self.pull.link != link:
            standing.emit(Close(link))
            return
        if standing.settled:  # meanwhile, by an exchange
            self.pull = None
            standing.emit(Close(link))
            return
        why = implausible_progress(reply.progress, standing.progress, settled=False, rules=standing.rules)
        if self.is_receiving or why:
            self.failed(LinkFailed(link, why or "it replied twice", their_fault=True), now)
            return
        if why := implausible_step(reply.step, self.pull.steps, standing.rules):
            self.failed(LinkFailed(link, why), now)  # others may have said what is not so, as well as it
            return
        known = standing.members.get(link.peer)
        is_near = known is not None and not is_far(known.progress, standing)
        if standing.is_lost and is_near and is_far(reply.progress, standing):
            self.failed(LinkFailed(link, "its weights are further than it announced"), now)
            return
        if known is not None and reply.progress < known.progress - standing.rules.catch_up_tokens:
            self.failed(LinkFailed(link, "its weights are older than it announced"), now)
            return
        if reply.progress < standing.worth:
            self.failed(LinkFailed(link, "its weights are older than ours"), now)  # we train meanwhile
            return
        if implausible_progress(reply.progress, self.pull.furthest, settled=True, rules=standing.rules):
            self.failed(LinkFailed(link, "its weights are further than anybody announced"), now)
            return
        deadline = now + standing.deadlines.payload_s(standing.rules.weights_bytes, reply.seconds_per_byte)
        standing.emit(Pull(link, replace(reply, progress=self._unended(reply.progress))))
        self.pull = replace(self.pull, deadline=deadline, replied_at=now)
        self._declined.pop(link.peer, None)

    def _unended(self, progress: float) -> float:
        """What a donor says of its weights' progress, and never by its word alone that the run is over: where nobody
        announced that it is near the end, one outer step is left."""
        assert self.pull is not None
        rules = self._standing.rules
        is_announced = self.pull.furthest + rules.catch_up_tokens >= rules.tokens_per_peer
        return progress if is_announced else min(progress, rules.tokens_per_peer - rules.tokens_per_outer_step)

    def declined(self, link: LinkId, decline: Decline, now: float) -> None:
        """The donor would not: leave it alone for a moment."""
        standing = self._standing
        standing.emit(Close(link))
        if self.pull is not None and self.pull.link == link:
            self.pull = None
            times = self._declined[link.peer] = self._declined.pop(link.peer, 0) + 1
            if len(self._declined) > MAX_KNOWN:
                del self._declined[next(iter(self._declined))]
            pause_s = min(SHORT_PAUSE_S * 2.0 ** min(times - 1, 10), LONG_PAUSE_S)
            standing.members.pause(link.peer, now + pause_s * standing.random.uniform(0.5, 1.5))
            standing.note("skipped", link.peer, decline.reason.value)

    def pulled(self, link: LinkId, received_bytes: int) -> None:
        """The weights are here: let the trainer adopt them. No deadline any more, the rest is local."""
        standing = self._standing
        if self.pull is None or self.pull.link != link:
            return
        standing.counters.received_bytes += received_bytes
        self.pull = replace(self.pull, deadline=float("inf"), adopting=True)
        standing.emit(Adopt(link))
        standing.emit(Close(link))

    def adopted(self, link: LinkId) -> None:
        """Our weights are the donor's now: we are in step."""
        self.pull = None
        self._standing.settled = True
        self._standing.find_company()
        self._standing.counters.pulls += 1
        self._standing.members.praise(link.peer)
        self._standing.note("caught up", link.peer)

    def unfit(self, event: Unfit, now: float) -> None:
        """Its weights are worth nothing: another donor's. It may be whom they came from that is at fault, or us. Nobody
        is, where they came after our own end."""
        if self.pull is None or self.pull.link != event.link:
            return
        self.pull = None
        if self._standing.state is PeerState.FINISHING:
            self._standing.note("skipped", event.link.peer, event.why)
        else:
            self._standing.blame(LinkFailed(event.link, event.why), Fault.BROKEN, now)

    def requested(self, link: LinkId, request: WeightsRequest, now: float) -> None:
        """Somebody wants our weights."""
        standing = self._standing
        refusal = self._refusal(link.peer, request, now)
        if refusal is not None:
            standing.emit(Send(link, Decline(refusal, standing.state, standing.step, standing.progress)))
            standing.emit(Close(link))
            return
        patience_s = standing.deadlines.payload_s(standing.rules.weights_bytes, request.seconds_per_byte)
        self._donations[link] = now + patience_s
        self._begun[link] = now
        self._remember(link.peer, now)
        known = standing.known_to_pass_on(now, link.peer)
        reply = WeightsReply(standing.step, standing.progress, standing.deadlines.seconds_per_byte(), known)
        standing.emit(Send(link, reply))
        standing.emit(Donate(link))

    def donated(self, link: LinkId, sent_bytes: int, now: float) -> None:
        """The newcomer has taken everything."""
        if self._end_donation(link, now):
            self._standing.counters.donations += 1
            self._standing.counters.sent_bytes += sent_bytes
            self._standing.emit(Close(link))
            self._standing.note("gave weights", link.peer)

    def failed(self, event: LinkFailed, now: float) -> bool:
        """A link of ours ended early. True when it was one of these."""
        standing = self._standing
        if self.pull is not None and self.pull.link == event.link and not self.pull.adopting:
            fault = Fault.BROKEN if self.is_receiving else Fault.UNANSWERED
            if self.pull.replied_at is not None:  # so long it kept us from exchanging: so long we exchange first
                self._pause(event.link.peer, now - self.pull.replied_at, now)
            self.pull = None
        elif self._end_donation(event.link, now):
            fault = Fault.BROKEN
        else:
            return False
        standing.emit(Close(event.link))
        standing.blame(event, fault, now)
        return True

    def _pause(self, donor: PeerId, held_s: float, now: float) -> None:
        known = self._standing.members.get(donor)
        longest_s = LONGEST_PAUSE_S * 2.0 ** min(known.broken + known.unanswered if known else 0, 16)
        self._standing.members.pause(donor, now + min(held_s, longest_s))

    def hold_on(self, now: float, seconds: float) -> None:
        """We were held up for so long, and what was sent in time may lie unread. Nobody held us meanwhile but we."""
        self._begun = {link: since + seconds for link, since in self._begun.items()} if seconds < ASLEEP_S else {}
        self._donations = {link: until if until > now else now + UNREAD_S for link, until in self._donations.items()}
        if self.pull is not None and self.pull.replied_at is not None:
            self.pull = replace(self.pull, replied_at=self.pull.replied_at + seconds)
        if self.pull is not None and self.pull.deadline <= now:
            self.pull = replace(self.pull, deadline=now + UNREAD_S)

    def expire(self, now: float) -> None:
        """Give up on donors and newcomers whose deadline has passed."""
        if self.pull is None and not self._donations:
            return
        waiting = dict(self._donations)
        if self.pull is not None:
            waiting[self.pull.link] = self.pull.deadline
        for link, deadline in waiting.items():
            if deadline <= now:
                self._standing.deadlines.missed()
                asked = self.pull is not None and self.pull.link == link and not self.is_receiving
                why = "no answer" if asked else "weights did not pass within the deadline"
                self.failed(LinkFailed(link, why), now)

    def next_deadline(self) -> float:
        own = self.pull.deadline if self.pull is not None else float("inf")
        return min(own, *self._donations.values()) if self._donations else own

    def holds(self, link: LinkId) -> bool:
        return link in self._donations or (self.pull is not None and self.pull.link == link)

    def drop(self) -> None:
        """We are leaving: close everything."""
        links = list(self._donations)
        if self.pull is not None and not self.pull.adopting:
            links.append(self.pull.link)
            self.pull = None
        self._donations.clear()
        self._begun.clear()
        for link in links:
            self._standing.emit(Close(link))

    def _refusal(self, peer: PeerId, request: WeightsRequest, now: float) -> DeclineReason | None:
        standing = self._standing
        if request.run != standing.rules.run:
            return DeclineReason.OTHER_RUN
        if request.protocol != standing.rules.protocol:
            return DeclineReason.OTHER_PROTOCOL
        if standing.state is PeerState.LEAVING:
            return DeclineReason.LEAVING
        if standing.members.is_distrusted(peer, now):
            return DeclineReason.DISTRUSTED
        if not must_catch_up(False, request.progress, standing.progress, standing.rules):
            return DeclineReason.NOT_BEHIND
        if standing.state is PeerState.JOINING or self.is_receiving or standing.is_lost:
            return DeclineReason.NO_WEIGHTS
        is_full = len(self._donations) >= MAX_DONATIONS or not standing.gives
        if is_full or self._has_enough(peer, now) or self._overtime.waits(peer, now):
            return DeclineReason.BUSY
        return None

    def _end_donation(self, link: LinkId, now: float) -> bool:
        """Its place is free again; False: it had none."""
        if self._donations.pop(link, None) is None:
            return False
        self._overtime.gave(link.peer, now - self._begun.pop(link, now), now)  # we slept meanwhile: it has no time
        return True

    def _has_enough(self, peer: PeerId, now: float) -> bool:
        """It began to take our weights so often lately that it is not weights that it wants."""
        given, most = self._given.get(peer), self._standing.rules.given_to_one
        return given is not None and len(given) == most and given[0] > now - GIVING_WINDOW_S

    def _remember(self, peer: PeerId, now: float) -> None:
        given = self._given.pop(peer, None) or deque(maxlen=self._standing.rules.given_to_one)
        given.append(now)
        self._given[peer] = given
        if len(self._given) > MAX_KNOWN:
            del self._given[next(iter(self._given))]
