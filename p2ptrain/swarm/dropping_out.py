"""When a peer that was in step is a newcomer again, beside having slept (``Peer``)."""

from __future__ import annotations

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.rules import OUT_OF_STEP_S, OUT_OF_STEP_STEPS


def dropped_out(standing: CoreState, in_step_at: float, now: float) -> str:
    """Drop out of step if we must: why; empty when we need not.

    Args:
        in_step_at: when we last were in step for certain.
    """
    if standing.strangers and not standing.is_lost and standing.is_odd(now):
        _be_lost(standing)
        return "whomever we meet has other weights"
    if standing.settled and now - in_step_at >= OUT_OF_STEP_S and _is_cut_off(standing, in_step_at, now):
        standing.drop_out()
        return f"nothing was exchanged for {now - in_step_at:.0f} s"
    return ""


def _be_lost(standing: CoreState) -> None:
    """It is our weights that are odd: whom we took for liars may give us theirs. A newcomer that has trained for too
    long before anybody had a place for it is lost as well, and was never in step.
    """
    standing.is_lost = True
    for peer in standing.strangers:
        standing.members.praise(peer)
    if standing.settled:
        standing.drop_out()


def _is_cut_off(standing: CoreState, in_step_at: float, now: float) -> bool:
    """For so long that we would take everybody for a liar."""
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
