"""Choice of partners, this peer's terms for them, and pauses before they are asked again."""

from __future__ import annotations

from math import inf

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.exchange import Exchange
from p2ptrain.swarm.matching import catch_up_bound, choose_partner, implausible_progress, must_catch_up, work_weight
from p2ptrain.swarm.messages import DeclineReason, PeerState, Terms
from p2ptrain.swarm.peer_info import PeerInfo
from p2ptrain.swarm.topology import neighbours

MOMENTARY = (DeclineReason.BUSY, DeclineReason.CROSSING)
BUSY_PAUSE_S = (0.05, 5.0)
"""Bounds of the mean pause before a busy partner is asked again; between them, half a typical exchange. Pauses are
random, so that peers that collide do not collide again."""
DECLINED_PAUSE_S = 2.0
"""Mean pause after any other decline. Its reasons last for seconds at least, and a peer that has caught up calls by
itself. Guess: measure how long these reasons last."""
APART_STEPS = 2.0
"""Outer steps by which two partners' progress differs, because one computes much faster, from which they meet others
before they meet again. If exchanges outlast outer steps, both sides of a pair are free when everybody else is engaged:
four computers of speeds 1, 1, 4 and 20 stayed two pairs, whose progress parted (simulated)."""
OTHERS_FIRST = 1.0
"""Time until they meet again, in durations of their exchange: about when others that are engaged are free."""


def choose(core: CoreState, engaged: set[PeerId], now: float) -> PeerInfo | None:
    """Return a random partner that this peer may meet, other than those it is ``engaged`` with."""
    anybody = core.rules.topology == "random" or core.state is PeerState.FINISHING
    if anybody and core.members.none_beyond(_farthest_in_reach(core), now):
        return core.members.draw(core.random, now, excluding=engaged)
    ready = core.members.partners(now, excluding=engaged)
    near = [known for known in ready if not _is_out_of_reach(core, known)]
    if not anybody:
        roster = [core.me, *(known.peer for known in core.members.live(now))]
        met = neighbours(core.rules.topology, core.me, roster)
        near = [known for known in near if known.peer in met]
    return choose_partner(near, core.random)


def own_terms(core: CoreState, peer: PeerId, partners: int = 1) -> Terms:
    """Return this peer's numbers for an exchange with one of ``partners`` that mix the same snapshot concurrently."""
    return Terms(
        step=core.step,
        progress=core.progress,
        weight=work_weight(core.rate) if core.rules.work_weights else 1.0,
        clip_radius=core.distance_stats.radius(),
        settled=core.settled,
        state=core.state,
        partners=partners,
        seconds_per_byte=core.deadlines.seconds_per_byte(),
        # Progress does not decrease any more.
        max_decrease=inf if core.state is PeerState.FINISHING else core.budget.max_decrease(peer),
        max_increase=core.budget.max_increase,
        counted_at=core.counted_at(peer),
        peers=core.count.peers,
    )


def pause_after(core: CoreState, reason: DeclineReason, declined: Exchange) -> float:
    """Return the seconds to pause before a partner that declined is asked again.

    There is no pause if this peer must pull from it.
    """
    known = core.members.get(declined.link.peer)
    must_pull = known is not None and must_catch_up(core.settled, core.effective_progress, known.progress, core.bounds)
    if must_pull and reason is DeclineReason.CATCH_UP_FIRST:
        return 0.0
    if reason not in MOMENTARY:
        return DECLINED_PAUSE_S * core.random.uniform(0.5, 1.5)
    likely = declined.fragments[: core.rules.most_per_exchange]
    size = sum(core.rules.fragment_bytes[fragment] for fragment in likely)
    typical = core.deadlines.typical_payload_s(size) or BUSY_PAUSE_S[0]
    shortest, longest = BUSY_PAUSE_S
    return min(max(0.5 * typical, shortest), longest) * core.random.uniform(0.5, 1.5)


def pause_for_others(core: CoreState, mine: Terms, theirs: Terms, seconds: float) -> float:
    """Return the seconds to pause for others after an exchange of so many seconds, 0 if progress hardly differs."""
    is_apart = abs(theirs.progress - mine.progress) > APART_STEPS * core.bounds.step
    return OTHERS_FIRST * seconds if is_apart and core.state is PeerState.TRAINING else 0.0


def _is_out_of_reach(core: CoreState, known: PeerInfo) -> bool:
    mine, theirs = core.progress, known.progress
    return must_catch_up(core.settled, mine, theirs, core.bounds) or bool(
        implausible_progress(theirs, mine, core.settled, core.bounds)
    )


def _farthest_in_reach(core: CoreState) -> float:
    bounds = core.bounds
    ahead = bounds.implausible_distance if core.settled else catch_up_bound(core.progress, bounds)
    return min(core.progress + ahead, bounds.ceiling)
