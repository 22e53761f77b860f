"""A plain version of ``swarm.membership`` without its speed; the real one must always agree with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.offences import Offences
from p2ptrain.swarm.peer_info import (
    FAILURE_PAUSE_S,
    FAR_S,
    LONE_PAUSE_S,
    MISFITS_FORGIVEN,
    QUARANTINE_S,
    REST,
    WITHDRAWALS_FORGIVEN,
    FailureKind,
)
from p2ptrain.swarm.rules import CALLS_PER_S, HEARD_LIFETIME_S, MAX_CALLS

ABLE = (PeerState.TRAINING, PeerState.FINISHING)


@dataclass
class Entry:
    peer: PeerId
    live_until: float
    state: PeerState = PeerState.TRAINING
    progress: float = 0.0
    settled: bool = False
    presence: Presence | None = None
    times: dict[FailureKind, int] | None = None
    not_before: float = 0.0
    lone_until: float = 0.0
    distrusted_until: float = 0.0
    barred_until: float = 0.0
    calls: list[float] = field(default_factory=list)
    paced_until: float = 0.0


class PlainMembership:
    """Membership that looks at all peers every time."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.known: dict[PeerId, Entry] = {}
        self.offences = Offences()

    def entry(self, peer: PeerId, live_until: float) -> Entry:
        until = self.offences.until(peer)
        new = Entry(peer, live_until, not_before=until, lone_until=until, distrusted_until=until, barred_until=until)
        return self.known.setdefault(peer, new)

    def see(self, presence: Presence, live_until: float) -> bool:
        if presence.peer == self.me:
            return False
        entry = self.entry(presence.peer, live_until)
        before = entry.presence
        if before is not None and presence.issued_at <= before.issued_at:
            return False
        entry.live_until = max(entry.live_until, live_until)
        entry.presence, entry.state, entry.progress = presence, presence.state, presence.progress
        entry.settled = presence.settled
        return before is None

    def hear(
        self, peer: PeerId, state: PeerState, step: int, progress: float, now: float, settled: bool | None
    ) -> None:
        entry = self.entry(peer, now)
        entry.settled = entry.settled if settled is None else settled
        entry.live_until = max(entry.live_until, now + HEARD_LIFETIME_S)
        entry.lone_until = min(entry.lone_until, max(now + LONE_PAUSE_S, entry.barred_until, entry.paced_until))
        entry.state, entry.progress = state, progress

    def called(self, peer: PeerId, now: float) -> None:
        if entry := self.known.get(peer):
            entry.calls = [at for at in entry.calls if now - at < MAX_CALLS / CALLS_PER_S] + [now]
            level = 0.0
            for before, at in zip([entry.calls[0], *entry.calls], entry.calls, strict=False):
                level = min(max(level - (at - before) * CALLS_PER_S, 0.0) + 1.0, MAX_CALLS)
            if level > MAX_CALLS - 1.0:
                entry.paced_until = now + 1.0 / CALLS_PER_S
                self.pause(peer, entry.paced_until, now)

    def pause(self, peer: PeerId, until: float, now: float) -> None:
        if entry := self.known.get(peer):
            unanswered = (entry.times or {}).get(FailureKind.UNANSWERED, 0)
            lone_s = LONE_PAUSE_S * 2.0 ** max(unanswered - 1, 0)
            entry.lone_until = max(entry.lone_until, min(until, now + lone_s))
            entry.not_before = max(entry.not_before, until)

    def record_failure(self, peer: PeerId, now: float, failure: FailureKind, held_s: float = 0.0) -> None:
        until = 0.0
        if failure in (FailureKind.OFFENCE, FailureKind.FAR):
            until = self.offences.add(peer, now, QUARANTINE_S if failure is FailureKind.OFFENCE else FAR_S)
        if (entry := self.known.get(peer)) is None:
            return
        if failure not in (FailureKind.OFFENCE, FailureKind.FAR):
            entry.times = {**dict.fromkeys(FailureKind, 0), **(entry.times or {})}
            entry.times[failure] += 1
            first, longest = FAILURE_PAUSE_S
            if failure in (FailureKind.WITHDRAWN, FailureKind.MISFIT):
                if entry.times[failure] <= (
                    WITHDRAWALS_FORGIVEN if failure is FailureKind.WITHDRAWN else MISFITS_FORGIVEN
                ):
                    return
                if failure is FailureKind.MISFIT:
                    failure = FailureKind.BROKEN
                    entry.times[failure] += 1
            if failure is FailureKind.WITHDRAWN:
                until = now + max(first, REST * held_s)
            elif failure is FailureKind.UNRELATED:
                until = now + first
            else:
                until = now + min(first * 2 ** min(entry.times[failure] - 1, 16), longest)
        if failure in (FailureKind.OFFENCE, FailureKind.FAR):
            entry.barred_until = max(entry.barred_until, until)
            entry.lone_until = max(entry.lone_until, entry.barred_until)
        self.pause(peer, until, now)
        if failure is not FailureKind.UNANSWERED:
            entry.distrusted_until = max(entry.distrusted_until, until)

    def record_success(self, peer: PeerId) -> None:
        if entry := self.known.get(peer):
            times = {**dict.fromkeys(FailureKind, 0), **(entry.times or {})}
            forgotten = {FailureKind.UNANSWERED: 0, FailureKind.BROKEN: 0, FailureKind.WITHDRAWN: 0}
            entry.times = {**times, **forgotten, FailureKind.MISFIT: times[FailureKind.MISFIT] // 2}
            entry.not_before = entry.lone_until = entry.paced_until
            entry.distrusted_until = entry.barred_until = 0.0

    def is_distrusted(self, peer: PeerId, now: float) -> bool:
        known = self.known.get(peer)
        if known is None:
            return self.offences.until(peer) > now
        return known.barred_until > now or (known.distrusted_until > now and not self.is_alone(now))

    def is_alone(self, now: float) -> bool:
        return not any(entry.state in ABLE and entry.not_before <= now for entry in self.live(now))

    def expire(self, now: float) -> list[PeerId]:
        gone = sorted(e.peer for e in self.known.values() if e.live_until <= now and e.not_before <= now)
        ended = [self.known.pop(peer) for peer in gone]
        return [entry.peer for entry in ended if entry.state is not PeerState.LEAVING]

    def live(self, now: float) -> list[Entry]:
        here = (self.known[peer] for peer in sorted(self.known))
        return [entry for entry in here if entry.live_until > now and entry.state is not PeerState.LEAVING]

    def partners(self, now: float, excluding: set[PeerId]) -> list[Entry]:
        able = [entry for entry in self.live(now) if entry.state in ABLE and entry.peer not in excluding]
        if self.is_alone(now):
            return [entry for entry in able if entry.lone_until <= now]
        return [entry for entry in able if entry.not_before <= now]

    def draw(self, random: Random, now: float, excluding: set[PeerId]) -> Entry | None:
        candidates = self.partners(now, excluding)
        return random.choice(candidates) if candidates else None

    def none_beyond(self, progress: float, now: float) -> bool:
        return all(entry.progress <= progress for entry in self.live(now))

    def next_change(self, now: float) -> float | None:
        paused = [entry for entry in self.live(now) if entry.not_before > now]
        lone = [entry.lone_until for entry in paused if entry.lone_until > now and self.is_alone(now)]
        return min([*lone, *(entry.not_before for entry in paused)], default=None)

    def sample(self, random: Random, count: int, now: float, excluding: PeerId) -> tuple[Presence, ...]:
        records = [e.presence for e in self.live(now) if e.presence and e.peer != excluding]
        return tuple(random.sample(records, min(count, len(records))))

    def records(self, now: float) -> list[Presence]:
        return [entry.presence for entry in self.live(now) if entry.presence]
