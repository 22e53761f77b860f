"""Who says that it is far ahead of us, and whom of those we believe.

A newcomer takes the weights of whoever is ahead; one that lies about that would have it take any. So a claim counts as
far as others bear it out, and as nobody who must know better contradicts it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.matching import catch_up_bound, implausible_progress, must_catch_up
from p2ptrain.swarm.messages import PeerState
from p2ptrain.swarm.peer_info import PeerInfo
from p2ptrain.swarm.rules import SUPPORTERS


def supported(
    ahead: Sequence[PeerInfo], near: float, others: Sequence[PeerInfo] = (), was_in_step: bool = False
) -> Sequence[PeerInfo]:
    """Those whose claim others are near: who alone says that it is far ahead of everybody is no donor.

    A claim that as many make as contradict it counts, or two young peers that met could keep others out of an old swarm
    of two; and so does one that ``SUPPORTERS`` others bear out, or a crowd of those who could not catch up yet, or of
    liars, could keep them out of any.

    Args:
        ahead: live peers that are far enough ahead to give us their weights.
        near: so many tokens apart, the claims support each other.
        others: live peers that are about where we are, if that says anything of where the swarm is.
        was_in_step: our own progress says so too, and is one more that contradicts.

    Returns:
        All of them where nobody has support and nobody contradicts: a swarm of two has no majority.
    """
    needed = min(SUPPORTERS, (len(ahead) + len(others) + was_in_step - 1) // 2)
    claims = sorted(known.progress for known in (*ahead, *others))

    def support(claim: float) -> int:
        return bisect_right(claims, claim + near) - bisect_left(claims, claim - near) - 1

    borne_out = [known for known in ahead if support(known.progress) >= needed]
    return borne_out if borne_out or others else ahead


def ahead_of(standing: CoreState, now: float) -> list[PeerInfo]:
    """Live peers that say they are so far ahead that we must not exchange with them, but pull."""
    if standing.settled or not standing.rules.exchanges:  # alone by choice: nobody's weights are ours
        return []
    mine = standing.worth
    if standing.members.none_beyond(mine + catch_up_bound(mine, standing.rules), now):
        return []
    ahead = [
        known
        for known in standing.members.live(now)
        if known.state is not PeerState.JOINING
        and must_catch_up(standing.settled, mine, known.progress, standing.rules)
        and not implausible_progress(known.progress, standing.progress, settled=False, rules=standing.rules)
    ]
    if not standing.is_lost:
        return ahead
    in_step = [known for known in ahead if known.settled]
    return [known for known in in_step if not is_far(known.progress, standing)] or in_step or ahead


def is_far(progress: float, standing: CoreState) -> bool:
    """Nobody honest is so far from us, where our weights are odd; unless the swarm went on without us."""
    return bool(implausible_progress(progress, standing.progress, settled=True, rules=standing.rules))


def believed(standing: CoreState, now: float) -> Sequence[PeerInfo]:
    """Of those who say that they are ahead, whom others bear out.

    Whoever is where we are contradicts them: anybody, if we were in step here; else who is in step itself, since
    others may be newcomers like us.
    """
    ahead = ahead_of(standing, now)
    if not ahead:
        return []
    if standing.is_lost:  # our own place says nothing of where the swarm is
        return supported(ahead, standing.rules.catch_up_tokens)
    near, mine = catch_up_bound(standing.progress, standing.rules), standing.progress
    here = [
        known
        for known in standing.members.live(now)
        if known.state is not PeerState.JOINING
        and abs(known.progress - mine) <= near
        and (standing.was_in_step or known.settled)
    ]
    return supported(ahead, near, here, standing.was_in_step)


def is_left_behind(standing: CoreState, now: float) -> bool:
    """A swarm is ahead of us: whom we meet meanwhile is a newcomer too, and to meet it puts neither in step.

    A swarm is two at least. One that says it is ahead, and gives nobody its weights, must not keep a young swarm from
    getting in step, which is what contradicts it.
    """
    return len(believed(standing, now)) > 1
