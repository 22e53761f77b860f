"""When a peer that was in step is a newcomer again, beside having slept (``Peer``)."""

from __future__ import annotations

from p2ptrain.swarm.matching import implausible_progress
from p2ptrain.swarm.rules import OUT_OF_STEP_S, OUT_OF_STEP_STEPS
from p2ptrain.swarm.standing import Standing


def dropped_out(standing: Standing, in_step_at: float, now: float) -> str:
    """Drop out of step if we must: why; empty when we need not.

    Args:
        in_step_at: when we last were in step for certain.
    """
    if not standing.settled:
        return ""
    why = ""
    if now - in_step_at >= OUT_OF_STEP_S and _is_cut_off(standing, in_step_at, now):
        why = f"nothing was exchanged for {now - in_step_at:.0f} s"
    elif standing.strangers and standing.is_odd(now):
        standing.is_lost = True
        why = "whomever we meet has other weights"
    if why:
        standing.drop_out()
    return why


def _is_cut_off(standing: Standing, in_step_at: float, now: float) -> bool:
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
