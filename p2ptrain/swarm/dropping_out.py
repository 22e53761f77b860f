"""Reasons for which a settled peer becomes a newcomer again, besides sleeping (``Peer``)."""

from __future__ import annotations

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.rules import OUT_OF_STEP_S, OUT_OF_STEP_STEPS


def dropped_out(standing: CoreState, in_step_at: float, now: float) -> str:
    """Drop out of step if necessary, and return why; return an empty string otherwise.

    Args:
        in_step_at: when this peer was last in step for certain.
    """
    if standing.strangers and not standing.is_lost and standing.is_odd(now):
        _be_lost(standing)
        return "our weights differ from those of most peers"
    if standing.settled and now - in_step_at >= OUT_OF_STEP_S and _is_cut_off(standing, in_step_at, now):
        standing.drop_out()
        return f"nothing was exchanged for {now - in_step_at:.0f} s"
    return ""


def _be_lost(standing: CoreState) -> None:
    """Record that our weights are outliers, and trust again the peers blamed for theirs: they may be donors.

    A newcomer that trained too long before any donor had a place for it is lost too, and was never settled.
    """
    standing.is_lost = True
    for peer in standing.strangers:
        standing.members.praise(peer)
    if standing.settled:
        standing.drop_out()


def _is_cut_off(standing: CoreState, in_step_at: float, now: float) -> bool:
    """Report whether this peer exchanged nothing for so long that it would judge all others implausible."""
    mine, rules = standing.progress, standing.rules
    return (
        rules.exchanges
        and now - in_step_at >= OUT_OF_STEP_STEPS * standing.seconds_per_outer_step
        and not standing.members.none_beyond(mine + rules.implausible_distance, now)
        and any(
            implausible_progress(known.progress, mine, settled=True, rules=rules)
            and not implausible_progress(known.progress, mine, settled=False, rules=rules)
            for known in standing.members.live(now)
        )
    )
