"""The number of peers that train, by which each peer multiplies its own tokens to estimate the run's total. Pure.

Let n peers train, and let each add n times its own tokens to its progress. Averaging conserves the sum of all progress,
so the mean grows by all peers' tokens: progress estimates the run's total.

Anybody can write presence records, so only peers that sent this one a message count fully. The others, *strangers*,
count by the share of strangers that answered when this peer called them. They raise n at most twofold with each own
outer step, and only if one of them answered in it and half of those last called did. If fewer did, n halves, down to
the peers met: a crowd of false records whose owner answers raises n only until as many other calls have failed.
Where exchanges are planned, as on a ring, most peers never call each other, and no answer is asked for.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.membership import Membership
from p2ptrain.swarm.messages import PeerState

AT_ONCE = 64.0
"""Peers that a peer without live ones may count in an outer step. Founders of a swarm start together, and a peer that
slept finds others that it has forgotten."""
RISE = 2.0
"""Maximum factor by which strangers raise the number with an own outer step; a thousand founders are counted after
four steps."""
LEAST_SHARE = 0.5
"""Share of strangers that must answer for the others to raise the number. Guess: count unanswered calls in real
swarms."""
MAX_PEERS = 2.0**22
"""Maximum count, that of ``presence_buckets.MAX_LEVEL``."""


@dataclass(slots=True)
class PeerCount:
    """Estimate of the number of peers that train, this one included."""

    peers: float = 1.0
    in_directory: int = 0
    """Peers of the run in all states, this one included, by the last lookup; 0 if all are kept."""
    _most: float = AT_ONCE
    """Maximum count, unless this peer met more."""
    _strangers_met: int = 0
    """``Membership.strangers_met`` after the last own outer step."""

    def outer_step_done(self, members: Membership, plans: bool, now: float) -> None:
        """Let strangers raise the number again if one of them answered since the last outer step.

        If fewer than half of those called answered, the number halves. If a call failed and nobody known has ever
        answered, this peer is alone among false records.

        Args:
            plans: whether exchanges are planned (``SwarmRules.plans``).
        """
        is_doubtful = members.stranger_share < LEAST_SHARE
        may_rise = plans or (members.strangers_met > self._strangers_met and not is_doubtful)
        self._strangers_met = members.strangers_met
        if may_rise:
            self._most = RISE * self.peers
        elif members.stranger_share < 1.0 and not any(known.was_heard for known in members.live(now)):
            self._most = 1.0
        else:
            self._most = self.peers / RISE if is_doubtful else self.peers

    def update(self, members: Membership, now: float, liars: Container[PeerId] = (), is_training: bool = True) -> bool:
        """Count again, without ``liars``, whose claims were implausible. Return whether the number changed.

        ``is_training``: whether this peer counts itself; the count is at least 1.

        A peer that did not answer our last call does not count: the record of a killed one outlives it.
        """
        live = members.live(now)
        if not live:
            self._most = AT_ONCE
        strangers, met, excluded = 0.0, 0, 0
        for known in live:
            if known.state is PeerState.TRAINING:
                if known.unanswered or known.barred_until > now or known.peer in liars:
                    excluded += 1
                elif known.was_heard:
                    met += 1
                else:
                    strangers += 1
        if self.in_directory - 1 > len(live) > 0:
            training = (self.in_directory - 1) * (met + strangers + excluded) / len(live)
            strangers = max(training - met - excluded, strangers)
        most = max(self._most, 1.0 + met)
        counted = min(1.0 + met + strangers * members.stranger_share, most, MAX_PEERS)
        counted = counted if is_training else max(counted - 1.0, 1.0)
        changed, self.peers = counted != self.peers, counted
        return changed
