"""Claims of peers to be far ahead, which of them are corroborated, and when this peer drops out of step.

A newcomer takes the weights of a peer ahead, so a false claim could make it take any weights. A claim counts as far as
other peers corroborate it and no peer in a position to know contradicts it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import PeersSeen
from p2ptrain.swarm.matching import catch_up_bound, implausible_progress, must_catch_up
from p2ptrain.swarm.messages import PeerState
from p2ptrain.swarm.peer_info import PeerInfo
from p2ptrain.swarm.rules import MIN_UNRELATED, OUT_OF_STEP_S, OUT_OF_STEP_STEPS, SUPPORTERS


def supported(
    ahead: Sequence[PeerInfo], near: float, others: Sequence[PeerInfo] = (), was_in_step: bool = False
) -> Sequence[PeerInfo]:
    """Return the peers ahead whose claims are corroborated by claims of as much or more.

    A claim counts if at least as many peers make it as contradict it, so that two young peers cannot keep others out of
    an old swarm of two; or if ``SUPPORTERS`` others make it, so that a crowd of newcomers cannot. If no claim is
    corroborated and none contradicted, all count: a swarm of two has no majority.

    Args:
        ahead: live peers that are far enough ahead to give this peer their weights.
        near: tokens by which a claim may exceed one that corroborates it.
        others: live peers about as far as this peer, if their position says where the swarm is.
        was_in_step: whether this peer's own progress is one more contradiction.
    """
    needed = min(SUPPORTERS, (len(ahead) + len(others) + was_in_step - 1) // 2)
    claims = sorted(known.progress for known in (*ahead, *others))

    def support(claim: float) -> int:
        return len(claims) - bisect_left(claims, claim - near) - 1

    borne_out = [known for known in ahead if support(known.progress) >= needed]
    return borne_out if borne_out or others else ahead


def ahead_of(core: CoreState, now: float) -> list[PeerInfo]:
    """Return live peers that claim to be so far ahead that this peer must pull instead of exchanging."""
    if core.settled or not core.rules.exchanges:  # alone by choice: takes nobody's weights
        return []
    mine = core.effective_progress
    if core.members.none_beyond(mine + catch_up_bound(mine, core.bounds), now):
        return []
    ahead = [
        known
        for known in core.members.live(now)
        if known.state is not PeerState.JOINING
        and must_catch_up(core.settled, mine, known.progress, core.bounds)
        and not implausible_progress(known.progress, core.progress, settled=False, bounds=core.bounds)
    ]
    if core.overtakers:
        return [known for known in ahead if known.progress - core.progress > core.bounds.beginner]
    if not core.is_outlier:
        return ahead
    in_step = [known for known in ahead if known.settled]
    return [known for known in in_step if not is_far(known.progress, core)] or in_step or ahead


def is_far(progress: float, core: CoreState) -> bool:
    """Report whether this progress is implausibly far ahead of ours.

    If our weights are outliers, an honest peer is that far ahead only if the swarm went on without us.
    """
    return bool(implausible_progress(progress, core.progress, settled=True, bounds=core.bounds))


def believed(core: CoreState, now: float) -> Sequence[PeerInfo]:
    """Return the peers ahead whose claims are corroborated.

    Peers about as far as this peer contradict them: all if this peer was settled here, else only settled ones.
    """
    ahead = ahead_of(core, now)
    if not ahead:
        return []
    if core.is_outlier:  # Own progress says nothing about where the swarm is.
        return supported(ahead, core.bounds.catch_up)
    mine = core.progress
    near = core.bounds.beginner if core.overtakers else catch_up_bound(mine, core.bounds)
    says = core.was_in_step and not core.overtakers  # whether own progress says where the swarm is
    here = [
        known
        for known in core.members.live(now)
        if known.state is not PeerState.JOINING and abs(known.progress - mine) <= near and (says or known.settled)
    ]
    return supported(ahead, core.bounds.catch_up if core.overtakers else near, here, says)


def is_left_behind(core: CoreState, now: float) -> bool:
    """Report whether a swarm is ahead, so that an exchange with another newcomer makes neither side settled.

    A single peer that claims to be ahead but gives no weights must not keep a young swarm from becoming settled.
    """
    return len(believed(core, now)) > 1


def drop_out_if_due(core: CoreState, in_step_at: float, now: float) -> str:
    """Drop out of step if necessary, and return why, else an empty string. ``in_step_at``: when last in step."""
    if core.overtakers:
        core.overtakers &= {known.peer for known in core.members.live(now)}
        if not core.is_young:
            core.overtakers.clear()
        if not core.overtakers:  # as before
            core.settled = True
        elif core.settled:
            core.settled = False
            return "others were much faster in our first outer steps"
    if core.unrelated_peers and not core.is_outlier:
        live = [known for known in core.members.live(now) if known.state is not PeerState.KEEPING]
        core.unrelated_peers &= {known.peer for known in live}
        if len(core.unrelated_peers) >= max(MIN_UNRELATED, (len(live) + 1) // 2 + 1):  # us included; half is not most
            _become_outlier(core)
            return "our weights differ from those of most peers"
    patience_s = max(OUT_OF_STEP_S, OUT_OF_STEP_STEPS * core.seconds_per_outer_step)
    if core.settled and now - in_step_at >= patience_s and _far_ahead(core, now):
        core.drop_out()
        return f"nothing was exchanged for {now - in_step_at:.0f} s"
    if core.settled:
        core.outnumbered_since = min(core.outnumbered_since, now) if _is_outnumbered(core, now) else inf
        if now - core.outnumbered_since >= patience_s:
            core.drop_out()
            return "most others are far ahead"
    return ""


def _become_outlier(core: CoreState) -> None:
    """Record that our weights are outliers. The peers blamed for theirs may be donors, so trust them again."""
    core.is_outlier = True
    for peer in core.unrelated_peers:
        core.members.record_success(peer)
    if core.settled:
        core.drop_out()


def _far_ahead(core: CoreState, now: float) -> list[PeerInfo]:
    """Return the live peers that are implausibly far ahead, although not beyond the run's end."""
    mine, bounds = core.progress, core.bounds
    if not core.rules.exchanges or core.members.none_beyond(mine + bounds.implausible_distance, now):
        return []
    return [
        known
        for known in core.members.live(now)
        if is_far(known.progress, core) and not implausible_progress(known.progress, mine, settled=False, bounds=bounds)
    ]


def _is_outnumbered(core: CoreState, now: float) -> bool:
    """Report whether at least half left us and those beside us behind, as after a cut that we were not alone behind.

    Of the settled peers that we heard from, at least ``SUPPORTERS`` are implausibly far ahead, and at least as many as
    are not, ourselves included: of two equal parts the one behind loses less.
    """
    ahead = sum(known.was_heard and known.settled for known in _far_ahead(core, now))
    return ahead >= SUPPORTERS and ahead >= 1 + sum(
        known.was_heard and known.settled and abs(known.progress - core.progress) <= core.bounds.implausible_distance
        for known in core.members.live(now)
    )


def ended_before(core: CoreState, event: PeersSeen, now: float) -> str:
    """Return how many peers announced the run's end and left, if nobody but other beginners is left; else empty.

    Anybody can write such a record, so this peer trains all the same.
    """
    end, live = core.rules.run_tokens, core.members.live(now)
    seen = (*event.finished, *(each for each, _ in event.records))
    ended = {each.peer for each in seen if each.state is PeerState.LEAVING and each.progress >= end}
    ended -= {core.me, *(known.peer for known in live)}
    is_beginner = core.progress == 0
    is_left = ended and core.progress < end and (is_beginner or not live)
    return f"{len(ended):,} of its peers announced its end and left" if is_left else ""
