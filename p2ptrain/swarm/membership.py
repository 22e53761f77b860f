"""Membership: live peers, what they last announced, and how they behaved.

A peer is live while its presence record, or its last message, is fresh. A failure causes a pause that doubles with
every failure in a row; a protocol violation causes a much longer one. One success ends both. A peer that could not be
reached may still call this one: it was away and is back. While no other partner can be called, pauses after failures
are short (``peer_info.LONE_PAUSE_S``), and those that failed may call.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, KeysView, Sequence
from random import Random
from typing import TypeVar

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import EXCHANGING, PeerState, Presence
from p2ptrain.swarm.offences import Offences
from p2ptrain.swarm.peer_info import FAR_S, NEVER, QUARANTINE_S, FailureKind, PeerInfo
from p2ptrain.swarm.rules import HEARD_LIFETIME_S, MAX_KNOWN

Item = TypeVar("Item")

STRANGERS = 8.0
"""Calls to strangers of which the answered ones are counted. If 1,000 false records come upon 31 peers that have met
few of each other, the run ends 97 outer steps early (two simulated runs); with 64 calls, 242 (one)."""


class Membership:
    """Live peers and their info. Bounded; iterates by peer id, so that a seed decides everything.

    Most events ask for the live peers, so these are kept in order, and a heap of alarms tells which may have gone.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._known: dict[PeerId, PeerInfo] = {}
        self._live: list[PeerInfo] = []  # live and not leaving, by peer id
        self._order: list[PeerId] = []  # their ids, in the same order
        self._unrecorded: set[PeerId] = set()  # of these, those without a presence record
        self._alarms: list[tuple[float, PeerId]] = []  # one per peer; not after its time, which only grows
        self._lapsed: dict[PeerId, PeerInfo] = {}  # no longer live, not yet forgotten
        self._paused: dict[PeerId, PeerInfo] = {}  # peers that may have a pause
        self._joining: set[PeerId] = set()  # live peers that cannot be offered an exchange: joining, or keepers
        self._furthest = 0.0  # no live peer has more progress
        self._offences = Offences()
        self._answered = self._called = 1.0  # strangers' answers to our calls, and these calls
        self.strangers_met = 0
        """Calls to peers never heard before that were answered, since the start."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def peers(self) -> KeysView[PeerId]:
        return self._known.keys()

    def get(self, peer: PeerId) -> PeerInfo | None:
        return self._known.get(peer)

    @property
    def stranger_share(self) -> float:
        """Share of calls to peers never heard before that were answered, 0 to 1, of about the last ``STRANGERS``."""
        return self._answered / self._called

    def see(self, presence: Presence, live_until: float) -> bool:
        """Add a record with a valid signature. Return True for a peer's first one; a peer that only sent messages has
        none."""
        if presence.peer == self._me:
            return False
        known = self._known.get(presence.peer)
        if known is None:
            known = self._begin(presence.peer)
        before = known.presence
        if before is not None and presence.issued_at <= before.issued_at:
            return False
        known.presence = presence
        self._unrecorded.discard(known.peer)
        known.settled = presence.settled
        self._update(known, presence.state, presence.step, presence.progress, live_until)
        return before is None

    def hear(
        self, peer: PeerId, state: PeerState, step: int, progress: float, now: float, settled: bool | None = None
    ) -> None:
        """Add what a peer said about itself in a message. ``settled``: None if it did not say."""
        known = self._known.get(peer) or self._begin(peer)
        if settled is not None:
            known.settled = settled
        if not known.was_heard:
            known.was_heard = True
            if known.calls:
                self._count_stranger(answered=True)
        known.hear(now)
        self._update(known, state, step, progress, now + HEARD_LIFETIME_S)

    def pause(self, peer: PeerId, until: float, now: float) -> None:
        if known := self._known.get(peer):
            known.pause(until, now)
            self._paused[peer] = known

    def pause_for_others(self, peer: PeerId, until: float, now: float) -> None:
        """Do not call a partner, if there are others, even while these are engaged."""
        known = self._known.get(peer)
        if known is not None and self.partners(now, excluding=(peer,)):
            known.pause(until, now)
            known.lone_until = max(known.lone_until, until)
            self._paused[peer] = known

    def called(self, peer: PeerId, now: float) -> None:
        """Record an offer, and pause at ``MAX_CALLS``: a peer called more often declines without reading."""
        known = self._known.get(peer)
        if known is not None and (until := known.call(now)):
            self.pause(peer, until, now)

    def record_failure(self, peer: PeerId, now: float, failure: FailureKind, held_s: float = 0.0) -> None:
        """Record a failed conversation, in which the peer had our fragments engaged for ``held_s`` seconds."""
        known = self._known.get(peer)
        if failure in (FailureKind.OFFENCE, FailureKind.FAR):  # remembered for unknown peers, too
            until = self._offences.add(peer, now, FAR_S if failure is FailureKind.FAR else QUARANTINE_S)
            if known is None:
                return
            known.lone_until = known.barred_until = max(known.barred_until, until)
        elif known is None:
            return
        else:
            if failure is FailureKind.UNANSWERED and known.calls and not known.was_heard:
                self._count_stranger(answered=False)
            until = known.record_failure(failure, now, held_s)
        if failure is not FailureKind.UNANSWERED:
            known.distrusted_until = max(known.distrusted_until, until)
        self.pause(peer, until, now)

    def answers(self, peer: PeerId) -> bool:
        """Report whether the last offer to it was answered."""
        known = self._known.get(peer)
        return known is not None and known.unanswered == 0

    def times_unrelated(self, peer: PeerId) -> int:
        """Return the number of exchanges in which its weights were unrelated to ours; each commit halves it."""
        known = self._known.get(peer)
        return known.unrelated if known is not None else 0

    def count_unrelated(self, peer: PeerId) -> None:
        if known := self._known.get(peer):
            known.unrelated += 1

    def record_success(self, peer: PeerId) -> None:
        if known := self._known.get(peer):
            known.record_success()
            if known.alarm > known.live_until:  # it was only kept for the pause
                self._set_alarm(known, known.live_until)

    def is_distrusted(self, peer: PeerId, now: float) -> bool:
        known = self._known.get(peer)
        if known is None:
            return self._offences.until(peer) > now
        return known.barred_until > now or (known.distrusted_until > now and self.has_ready_partner(now))

    def has_ready_partner(self, now: float) -> bool:
        """Report whether any live peer can be called now: one that can exchange and has no pause."""
        return len(self._unready(now)) < len(self.live(now))

    def expire(self, now: float) -> list[PeerId]:
        """Forget peers that are no longer live and have no pause; return those of them that had not said goodbye."""
        if self._alarms and self._alarms[0][0] <= now:
            self._unlist_expired(now)
        if not self._lapsed:
            return []
        lapsed, self._lapsed = self._lapsed, {}
        gone = []
        for known in lapsed.values():
            if known.not_before > now:
                self._set_alarm(known, known.not_before)
            else:
                self._forget(known.peer)
                if known.state is not PeerState.LEAVING:
                    gone.append(known.peer)
        return sorted(gone)

    def live(self, now: float) -> list[PeerInfo]:
        """Return the live peers that are not leaving, by peer id. The list must be neither changed nor kept."""
        if self._alarms and self._alarms[0][0] <= now:
            self._unlist_expired(now)
        return self._live

    def partners(self, now: float, excluding: Iterable[PeerId] = ()) -> list[PeerInfo]:
        excluded = set(excluding)
        able = [known for known in self.live(now) if known.state in EXCHANGING]
        ready = [known for known in able if known.not_before <= now] or [
            known for known in able if known.lone_until <= now
        ]
        return [known for known in ready if known.peer not in excluded]

    def ready(self, peer: PeerId, now: float) -> PeerInfo | None:
        """Return this peer if it is live, can exchange and has no pause."""
        known = self._known.get(peer)
        is_ready = known is not None and known.listed and known.state in EXCHANGING and known.not_before <= now
        return known if is_ready else None

    def draw(self, random: Random, now: float, excluding: Iterable[PeerId] = ()) -> PeerInfo | None:
        """Return ``random.choice(partners(now, excluding))``, or None, without iterating over the partners."""
        live, unready = self.live(now), self._unready(now)
        if len(unready) == len(live):
            alone = self.partners(now, excluding)
            return random.choice(alone) if alone else None
        out = unready.union(peer for peer in excluding if self._is_listed(peer))
        if len(out) >= len(live):
            return None
        place = random.choice(range(len(live) - len(out)))
        return live[_skipping(self._places(out), place)]

    def none_beyond(self, progress: float, now: float) -> bool:
        """Report whether no live peer claims more progress than this."""
        if self._furthest > progress:  # may belong to a peer that is gone
            self._furthest = max((known.progress for known in self.live(now)), default=0.0)
        return self._furthest <= progress

    def next_change(self, now: float) -> float | None:
        self._unlist_expired(now)
        if not self._paused:
            return None
        self._paused = {peer: known for peer, known in self._paused.items() if known.not_before > now}
        paused = [known for known in self._paused.values() if known.listed]
        ends = [known.not_before for known in paused]
        if not self.has_ready_partner(now):
            ends += [known.lone_until for known in paused if known.lone_until > now]
        return min(ends, default=None)

    def sample(self, random: Random, count: int, now: float, excluding: PeerId) -> tuple[Presence, ...]:
        """Draw some live peers' records to pass on."""
        live = self.live(now)
        without = self._unrecorded | {excluding} if self._is_listed(excluding) else self._unrecorded
        others = len(live) - len(without)
        places = self._places(without)
        drawn = (live[_skipping(places, each)].presence for each in draw(random, range(others), min(count, others)))
        return tuple(presence for presence in drawn if presence is not None)

    def records(self, now: float) -> list[Presence]:
        return [known.presence for known in self.live(now) if known.presence]

    def _count_stranger(self, answered: bool) -> None:
        if self._called >= STRANGERS:
            self._called, self._answered = self._called / 2, self._answered / 2
        self._called += 1
        self._answered += answered
        self.strangers_met += answered

    def _unready(self, now: float) -> set[PeerId]:
        """Return the live peers that cannot exchange yet or have a pause."""
        paused = {peer for peer, known in self._paused.items() if known.not_before > now and known.listed}
        return paused | self._joining

    def _begin(self, peer: PeerId) -> PeerInfo:
        if len(self._known) >= MAX_KNOWN:
            self._forget_stalest()
        known = self._known[peer] = PeerInfo(peer, live_until=-NEVER)
        if until := self._offences.until(peer):
            known.not_before = known.lone_until = known.distrusted_until = known.barred_until = until
            self._paused[peer] = known
        return known

    def _update(self, known: PeerInfo, state: PeerState, step: int, progress: float, live_until: float) -> None:
        known.state, known.step, known.progress = state, step, progress
        if progress > self._furthest:
            self._furthest = progress
        if live_until > known.live_until:
            known.live_until = live_until
        if known.alarm > known.live_until:
            self._lapsed.pop(known.peer, None)
            self._set_alarm(known, known.live_until)
        if known.listed is (state is PeerState.LEAVING):
            self._unlist(known) if known.listed else self._list(known)
        if state in (PeerState.JOINING, PeerState.KEEPING):
            self._joining.add(known.peer)
        else:
            self._joining.discard(known.peer)

    def _list(self, known: PeerInfo) -> None:
        known.listed = True
        place = bisect_left(self._order, known.peer)
        self._order.insert(place, known.peer)
        self._live.insert(place, known)
        if known.presence is None:
            self._unrecorded.add(known.peer)

    def _unlist(self, known: PeerInfo) -> None:
        known.listed = False
        place = bisect_left(self._order, known.peer)
        del self._order[place], self._live[place]
        self._joining.discard(known.peer)
        self._unrecorded.discard(known.peer)

    def _is_listed(self, peer: PeerId) -> bool:
        known = self._known.get(peer)
        return known is not None and known.listed

    def _places(self, peers: Iterable[PeerId]) -> list[int]:
        return sorted(bisect_left(self._order, peer) for peer in peers)

    def _set_alarm(self, known: PeerInfo, time: float) -> None:
        known.alarm = time
        heapq.heappush(self._alarms, (time, known.peer))

    def _unlist_expired(self, now: float) -> None:
        alarms = self._alarms
        while alarms and alarms[0][0] <= now:
            time, peer = heapq.heappop(alarms)
            known = self._known.get(peer)
            if known is None or known.alarm != time:  # an alarm that was replaced
                continue
            if known.live_until > now:
                self._set_alarm(known, known.live_until)
                continue
            if known.listed:
                self._unlist(known)
            if known.not_before > now:
                self._set_alarm(known, known.not_before)
            else:
                known.alarm = NEVER
                self._lapsed[peer] = known

    def _forget(self, peer: PeerId) -> None:
        known = self._known.pop(peer)
        self._paused.pop(peer, None)
        if known.listed:
            self._unlist(known)

    def _forget_stalest(self) -> None:
        """Make room: forget the peer whose alarm comes first once all alarms are up to date."""
        alarms = self._alarms
        while alarms:
            time, peer = heapq.heappop(alarms)
            known = self._known.get(peer)
            if known is None or known.alarm != time:
                continue
            if known.live_until > time:
                self._set_alarm(known, known.live_until)
                continue
            self._forget(peer)
            return


def _skipping(places: list[int], index: int) -> int:
    for place in places:
        if place > index:
            break
        index += 1
    return index


def draw(random: Random, items: Sequence[Item], count: int) -> list[Item]:
    """Draw like ``random.sample(items, count)``, without its generality, which takes longer than everything else."""
    pool, drawn = list(items), []
    for left in range(len(pool), len(pool) - count, -1):
        bits, place = left.bit_length(), left
        while place >= left:
            place = random.getrandbits(bits)
        drawn.append(pool[place])
        pool[place] = pool[left - 1]
    return drawn
