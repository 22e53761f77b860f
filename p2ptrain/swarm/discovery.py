"""Discovery: how one peer finds others and is found, and how many it keeps in mind.

Presence is announced and looked up in the directory now and then, each at its own pace; messages pass records on
between lookups. In a crowd a peer keeps no more records than partners can be drawn from, and looks up less often.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import Announce, Lookup, PeersSeen
from p2ptrain.swarm.membership import draw
from p2ptrain.swarm.messages import Presence
from p2ptrain.swarm.rules import (
    ANNOUNCE_PERIOD_S,
    CROWDED_LOOKUP_PERIOD_S,
    ENOUGH_PEERS,
    FRESH_PEERS,
    LONELY_LOOKUP_PERIOD_S,
    LOOKUP_PERIOD_S,
)


class Discovery:
    """When to announce and to look up, and which of the records found to keep."""

    def __init__(self, standing: CoreState) -> None:
        self._standing = standing
        self._announce_at = float("inf")  # until the first time
        self._lookup_at = float("inf")
        self._announced_settled = False
        self._crowded = False  # there are more peers than we keep in mind: who comes and goes is no news

    def announce(self, now: float) -> None:
        """Say where we stand; again when the period is over."""
        self._announce_at = now + ANNOUNCE_PERIOD_S
        standing = self._standing
        self._announced_settled = standing.settled
        standing.emit(Announce(standing.state, standing.step, standing.progress, standing.settled))

    def look_up(self, now: float) -> None:
        """Ask who else is here; sooner again where nobody is known."""
        if not self._standing.members.records(now):  # who only called us cannot be called, nor cached
            period = LONELY_LOOKUP_PERIOD_S
        else:
            period = CROWDED_LOOKUP_PERIOD_S if self._crowded else LOOKUP_PERIOD_S
        self._lookup_at = now + period * self._standing.random.uniform(0.75, 1.25)
        self._standing.emit(Lookup())

    def seen(self, event: PeersSeen) -> None:
        """Records came, by a lookup or by a message: keep those that are wanted."""
        members = self._standing.members
        for presence, live_until in self._wanted(event):
            if presence.run == self._standing.rules.run and members.see(presence, live_until) and not self._crowded:
                self._standing.note("found", presence.peer)

    def expire(self, now: float) -> None:
        """Forget who gave no sign of life. One that said goodbye is not lost."""
        lost = self._standing.members.expire(now)
        if lost and not self._crowded:
            for peer in lost:
                self._standing.note("lost", peer, "no sign of life")

    def keep_up(self, now: float) -> None:
        """Announce and look up where it is time to; and say at once that we are in step: newcomers want to know."""
        if now >= self._announce_at or (self._standing.settled and not self._announced_settled):
            self.announce(now)
        if now >= self._lookup_at:
            self.look_up(now)

    def next_due(self) -> float:
        """When ``keep_up`` has something to do."""
        return min(self._announce_at, self._lookup_at)

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
        if room == 0:
            return [dated for dated in records if dated[0].peer in known]
        strangers = [dated for dated in records if dated[0].peer not in known]
        if event.from_lookup:
            self._crowded = len(strangers) > room
        if len(strangers) <= room:
            return records
        return [dated for dated in records if dated[0].peer in known] + draw(self._standing.random, strangers, room)
