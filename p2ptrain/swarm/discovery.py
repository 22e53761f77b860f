"""Discovery: how a peer finds others and is found, and how many peers it keeps.

Presence is announced and looked up in the directory at regular intervals; messages pass presence records on in between.
In a large swarm a peer keeps only as many records as it needs to draw partners, and looks up less often.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import Announce, Lookup, PeersSeen
from p2ptrain.swarm.keeping import ranges_of
from p2ptrain.swarm.membership import draw
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.rules import (
    ANNOUNCE_PERIOD_S,
    CROWDED_LOOKUP_PERIOD_S,
    ENOUGH_PEERS,
    FRESH_PEERS,
    LONELY_LOOKUP_PERIOD_S,
    LOOKUP_PERIOD_S,
)


class Discovery:
    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._announce_at = float("inf")  # until the first announcement
        self._lookup_at = float("inf")
        self._announced_settled = False
        self.has_answer = False
        """Whether a lookup was answered."""
        self.is_crowded = False
        """Whether there are more peers than are kept, so that arrivals and departures are not news."""

    def announce(self, now: float) -> None:
        self._announce_at = now + ANNOUNCE_PERIOD_S
        core = self._core
        self._announced_settled = core.settled
        finished = core.has_ended and core.state is PeerState.LEAVING
        keeps = ranges_of(core.held) if core.state is PeerState.KEEPING else ()
        core.emit(Announce(core.state, core.step, core.told_progress, core.settled, finished, keeps))

    def look_up(self, now: float) -> None:
        if not self._core.members.records(now):  # peers known only by their calls cannot be dialed or cached
            period = LONELY_LOOKUP_PERIOD_S
        else:
            period = CROWDED_LOOKUP_PERIOD_S if self.is_crowded else LOOKUP_PERIOD_S
        self._lookup_at = now + period * self._core.random.uniform(0.75, 1.25)
        self._core.emit(Lookup(finished=not self.has_answer))

    def seen(self, event: PeersSeen) -> None:
        self.has_answer |= event.from_lookup
        members = self._core.members
        last = self._core.rules.fragments - 1
        for presence, live_until in self._choose(event):
            if presence.keeps and presence.keeps[-1][1] > last:  # fragments that this run does not have
                continue
            is_new = presence.run == self._core.rules.run and members.see(presence, live_until)
            if is_new and presence.state is not PeerState.LEAVING and not self.is_crowded:
                self._core.note("found", presence.peer)

    def expire(self, now: float) -> None:
        """Forget peers without a sign of life. A peer that said goodbye is not reported as lost."""
        lost = self._core.members.expire(now)
        if lost and not self.is_crowded:
            for peer in lost:
                self._core.note("lost", peer, "no sign of life")

    def keep_up(self, now: float) -> None:
        """Announce and look up when due. Newcomers look for donors, so announce at once that this peer is settled."""
        if now >= self._announce_at or (self._core.settled and not self._announced_settled):
            self.announce(now)
        if now >= self._lookup_at:
            self.look_up(now)

    def next_due(self) -> float:
        return min(self._announce_at, self._lookup_at)

    def _choose(self, event: PeersSeen) -> Sequence[tuple[Presence, float]]:
        """Choose the records of known peers, and enough random others.

        In a large swarm records passed on by messages, older than those of lookups, are used only if few are left.
        """
        known, records = self._core.members.peers, event.records
        if event.from_lookup:
            room = max(ENOUGH_PEERS - len(known), FRESH_PEERS)
        else:
            room = max((ENOUGH_PEERS // 2 if self.is_crowded else ENOUGH_PEERS) - len(known), 0)
        if self._core.rules.plans or (len(records) <= room and not event.from_lookup):
            return records
        if room == 0:
            return [dated for dated in records if dated[0].peer in known]
        unknown = [dated for dated in records if dated[0].peer not in known]
        if event.from_lookup:
            self.is_crowded = len(unknown) > room
        if len(unknown) <= room:
            return records
        return [dated for dated in records if dated[0].peer in known] + draw(self._core.random, unknown, room)
