"""Whether to exchange, with whom, and on which terms: pure decisions, each a short list of checks in order."""

from __future__ import annotations

from math import isfinite
from random import Random

from p2ptrain.ids import PeerId
from p2ptrain.swarm.membership import Known
from p2ptrain.swarm.messages import DeclineReason, Offer, PeerState, Terms
from p2ptrain.swarm.rules import MAX_EXCHANGES, SwarmRules

RATE_SLACK = 16.0
"""A partner's progress may grow this many times as fast as ours before it is implausible. Progress is averaged, so even
a much faster computer's grows at about the swarm's mean rate. A guess, on the generous side."""


def choose_partner(candidates: list[Known], random: Random) -> Known | None:
    """A uniformly random one; the randomness is what makes gossip mix."""
    return random.choice(candidates) if candidates else None


def implausible_progress(theirs: float, mine: float, settled: bool, rules: SwarmRules) -> str:
    """Why a reported progress cannot be true or must not move ours; empty when it can.

    A distance bound applies between settled peers only: a newcomer's distance is what catching up is for.
    """
    if not isfinite(theirs) or theirs < 0:
        return f"progress {theirs}"
    if theirs > rules.progress_ceiling:
        return f"progress {theirs:.0f} lies beyond the run's end at {rules.tokens_per_peer:.0f}"
    if settled and abs(theirs - mine) > rules.implausible_distance:
        return f"progress {theirs:.0f} is too far from ours, {mine:.0f}"
    return ""


def implausible_growth(theirs: float, before: float, seconds: float, my_rate: float, rules: SwarmRules) -> str:
    """Why progress cannot have grown so much since we last heard of it; empty when it can.

    Honest progress may fall (it is averaged with slower peers'), so only growth is bounded.

    Args:
        theirs, before: tokens per peer, now and when last heard.
        seconds: since last heard.
        my_rate: our own progress in tokens per second; 0 when not known.
    """
    allowed = rules.catch_up_tokens + RATE_SLACK * my_rate * seconds
    if my_rate > 0 and theirs - before > allowed:
        return f"progress grew by {theirs - before:.0f} tokens in {seconds:.1f} s"
    return ""


def answer(
    offer: Offer,
    sender: PeerId,
    *,
    me: PeerId,
    state: PeerState,
    settled: bool,
    progress: float,
    quarantined: bool,
    implausible: str,
    crossing: bool,
    offering: bool,
    free: list[int],
    under_way: int,
    rules: SwarmRules,
) -> tuple[int, ...] | DeclineReason:
    """Answer an offer: the fragments to exchange, or why not. The first check that speaks decides.

    Args:
        crossing: we have an unanswered offer to the sender; the smaller peer id's offer wins.
        offering: we have a fresh offer under way to somebody else. To accept now would break our word to one of the
            two, and where offers run in a circle, all words at once, for ever. An answer comes within a round trip;
            an offer that stays unanswered for longer does not make us busy.
        free: our free fragments.
        under_way: exchanges we are engaged in.
    """
    if offer.run != rules.run:
        return DeclineReason.OTHER_RUN
    if offer.protocol != rules.protocol:
        return DeclineReason.OTHER_PROTOCOL
    if state is PeerState.LEAVING:
        return DeclineReason.LEAVING
    if quarantined:
        return DeclineReason.QUARANTINED
    if implausible:
        return DeclineReason.IMPLAUSIBLE_PROGRESS
    if state is PeerState.JOINING:
        return DeclineReason.CATCHING_UP
    if must_catch_up(settled, progress, offer.terms.progress, rules):
        return DeclineReason.CATCHING_UP
    if must_catch_up(offer.terms.settled, offer.terms.progress, progress, rules):
        return DeclineReason.CATCH_UP_FIRST
    if crossing and me < sender:
        return DeclineReason.CROSSING
    if offering and not crossing:
        return DeclineReason.BUSY
    both = tuple(sorted(set(offer.fragments) & set(free)))
    if not both or under_way >= MAX_EXCHANGES:
        return DeclineReason.BUSY
    return both


def must_catch_up(settled: bool, progress: float, others: float, rules: SwarmRules) -> bool:
    """A peer that never was in step and is further behind than the bound pulls weights. A merely slow one does not."""
    return not settled and others - progress > rules.catch_up_tokens


def progress_displacement(mine: Terms, theirs: Terms, fragments: int, rules: SwarmRules) -> float:
    """What an exchange adds to our progress: averaged like the weights, by the share of fragments exchanged, bounded.

    The bound limits what one liar can do to everyone's schedule, and is the same on both sides.
    """
    share = theirs.weight / (mine.weight + theirs.weight)
    moved = share * (theirs.progress - mine.progress) * fragments / len(rules.fragment_bytes)
    bound = rules.catch_up_tokens
    return max(-bound, min(moved, bound))
