"""Who is here: live peers, what they last said of themselves, and how they behaved.

A peer is live while its presence record, or its last message to us, is fresh. A peer that failed us is left alone for a
while that doubles with every failure in a row; a peer that broke the protocol for much longer. One success clears it.
Whom we merely could not reach may call us all the while: it was away, and it is back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from p2ptrain.ids import PeerId
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.rules import HEARD_LIFETIME_S, MAX_KNOWN

FAILURE_PAUSE_S = (2.0, 120.0)  # first and longest pause after network failures in a row. Guess
QUARANTINE_S = (30.0, 3600.0)  # the same after broken protocol. Guess


class Fault(Enum):
    """How a conversation with a peer failed."""

    UNANSWERED = "our call came to nothing"
    BROKEN = "it had our fragments or weights engaged, and let us wait for nothing"
    OFFENCE = "it broke the protocol"


@dataclass(frozen=True, slots=True)
class Known:
    """What we know of one peer."""

    peer: PeerId
    live_until: float
    state: PeerState = PeerState.TRAINING
    step: int = 0
    progress: float = 0.0
    presence: Presence | None = None
    unanswered: int = 0
    """Calls of ours in a row that came to nothing, ..."""
    broken: int = 0
    """... exchanges and pulls in a row that it broke off, ..."""
    offences: int = 0
    """... and breaches of the protocol, ever."""
    not_before: float = 0.0
    """Do not call it until then ..."""
    distrusted_until: float = 0.0
    """... nor let it engage anything of ours until then."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.presence.addresses if self.presence else ()


class Membership:
    """Live peers and their record with us. Bounded; iterates by peer id, so that a seed decides everything."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._known: dict[PeerId, Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, peer: PeerId) -> Known | None:
        return self._known.get(peer)

    def see(self, presence: Presence, live_until: float) -> bool:
        """Take in a record whose signature holds. True for a peer's first: one that only spoke to us has none yet."""
        if presence.peer == self._me:
            return False
        known = self._known.get(presence.peer)
        if known is not None and known.presence is not None and presence.issued_at <= known.presence.issued_at:
            return False
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._forget_stalest()
            known = Known(peer=presence.peer, live_until=live_until)
        self._known[presence.peer] = replace(
            known,
            live_until=max(known.live_until, live_until),
            state=presence.state,
            step=presence.step,
            progress=presence.progress,
            presence=presence,
        )
        return known.presence is None

    def hear(self, peer: PeerId, state: PeerState, step: int, progress: float, now: float) -> None:
        """Take in what a peer said of itself in a message."""
        known = self._known.get(peer)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._forget_stalest()
            known = Known(peer=peer, live_until=now)
        self._known[peer] = replace(
            known,
            live_until=max(known.live_until, now + HEARD_LIFETIME_S),
            state=state,
            step=step,
            progress=progress,
        )

    def pause(self, peer: PeerId, until: float) -> None:
        """Leave a peer alone for a moment, with no blame: it was busy."""
        if known := self._known.get(peer):
            self._known[peer] = replace(known, not_before=max(known.not_before, until))

    def blame(self, peer: PeerId, now: float, fault: Fault) -> None:
        """A conversation with this peer failed."""
        known = self._known.get(peer)
        if known is None:
            return
        known = replace(
            known,
            unanswered=known.unanswered + int(fault is Fault.UNANSWERED),
            broken=known.broken + int(fault is Fault.BROKEN),
            offences=known.offences + int(fault is Fault.OFFENCE),
        )
        times = {Fault.UNANSWERED: known.unanswered, Fault.BROKEN: known.broken, Fault.OFFENCE: known.offences}[fault]
        first, longest = QUARANTINE_S if fault is Fault.OFFENCE else FAILURE_PAUSE_S
        until = now + min(first * 2 ** min(times - 1, 16), longest)
        distrusted_until = 0.0 if fault is Fault.UNANSWERED else until
        self._known[peer] = replace(
            known,
            not_before=max(known.not_before, until),
            distrusted_until=max(known.distrusted_until, distrusted_until),
        )

    def praise(self, peer: PeerId) -> None:
        """An exchange with this peer committed."""
        if known := self._known.get(peer):
            self._known[peer] = replace(known, unanswered=0, broken=0, not_before=0.0, distrusted_until=0.0)

    def is_distrusted(self, peer: PeerId, now: float) -> bool:
        """It may not engage our fragments or weights."""
        known = self._known.get(peer)
        return known is not None and known.distrusted_until > now

    def expire(self, now: float) -> list[PeerId]:
        """Forget peers that are no longer live and owe us nothing; name those who were live until now."""
        gone = [peer for peer, known in self._known.items() if known.live_until <= now and known.not_before <= now]
        for peer in gone:
            del self._known[peer]
        return sorted(gone)

    def live(self, now: float) -> list[Known]:
        """Peers that are here, by peer id; leaving ones are not."""
        return [
            self._known[peer]
            for peer in sorted(self._known)
            if self._known[peer].live_until > now and self._known[peer].state is not PeerState.LEAVING
        ]

    def partners(self, now: float, excluding: Iterable[PeerId] = ()) -> list[Known]:
        """Live peers that can exchange and need not be left alone."""
        excluded = set(excluding)
        ready = (PeerState.TRAINING, PeerState.FINISHING)
        return [
            known
            for known in self.live(now)
            if known.state in ready and known.not_before <= now and known.peer not in excluded
        ]

    def next_change(self, now: float) -> float | None:
        """When the next live peer need no longer be left alone."""
        times = [known.not_before for known in self.live(now) if known.not_before > now]
        return min(times, default=None)

    def sample(self, random: Random, count: int, now: float, excluding: PeerId) -> tuple[Presence, ...]:
        """A few live peers' records to pass on."""
        records = [known.presence for known in self.live(now) if known.presence and known.peer != excluding]
        return tuple(random.sample(records, min(count, len(records))))

    def records(self, now: float) -> list[Presence]:
        """All live peers' records, for the cache on disk."""
        return [known.presence for known in self.live(now) if known.presence]

    def _forget_stalest(self) -> None:
        stalest = min(self._known.values(), key=lambda known: (known.live_until, known.peer))
        del self._known[stalest.peer]
