"""Whether to exchange, with whom, and on which terms: pure decisions, each a short list of checks in order."""

from __future__ import annotations

from math import isfinite
from random import Random

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import DeclineReason, Offer, PeerState
from p2ptrain.swarm.peer_info import PeerInfo
from p2ptrain.swarm.rules import BEGINNER_STEPS, MAX_EXCHANGES, SwarmRules


def choose_partner(candidates: list[PeerInfo], random: Random) -> PeerInfo | None:
    """A uniformly random one; the randomness is what makes gossip mix."""
    return random.choice(candidates) if candidates else None


def implausible_progress(theirs: float, mine: float, settled: bool, rules: SwarmRules) -> str:
    """Why a reported progress cannot be true or must not meet ours; empty when it can.

    Args:
        theirs, mine: tokens per peer.
        settled: we are in step with the swarm. Nobody honest is then far ahead of us, whatever it says of itself; a
            peer that is not in step yet may be far behind whoever it asks.
    """
    if not isfinite(theirs) or theirs < 0:
        return f"progress {theirs}"
    if theirs > rules.progress_ceiling:
        return f"progress {theirs:.0f} lies beyond the run's end at {rules.tokens_per_peer:.0f}"
    if settled and theirs - mine > rules.implausible_distance:
        return f"progress {theirs:.0f} is too far ahead of ours, {mine:.0f}"
    return ""


def implausible_step(theirs: int, others: int, rules: SwarmRules) -> str:
    """Why a donor's count of outer steps cannot be taken over with its weights; empty when it can.

    Where outer steps are planned, who is behind or ahead meets nobody: a newcomer that took over a false count would
    train alone, in step by its own word, and for good.

    Args:
        others: the count of those who are as far as it.
    """
    if rules.plans:  # all make the same ones, together; what was announced is older than the reply
        least = others - rules.catch_up_outer_steps
        most = others + rules.implausible_distance / rules.tokens_per_outer_step
    else:
        least, most = 0.0, STEPS_SLACK * (others + BEGINNER_STEPS)
    can_be = least <= theirs <= min(most, MOST_STEPS)
    return "" if can_be else f"{theirs} outer steps, where others have made {others}"


def refusal(
    offer: Offer,
    *,
    state: PeerState,
    settled: bool,
    progress: float,
    distrusted: bool,
    implausible: str,
    rules: SwarmRules,
) -> DeclineReason | None:
    """Why no offer of this sender can be accepted now, whatever it is for. The first check that speaks decides."""
    if offer.run != rules.run:
        return DeclineReason.OTHER_RUN
    if offer.protocol != rules.protocol:
        return DeclineReason.OTHER_PROTOCOL
    if state is PeerState.LEAVING:
        return DeclineReason.LEAVING
    if distrusted:
        return DeclineReason.DISTRUSTED
    if implausible:
        return DeclineReason.IMPLAUSIBLE_PROGRESS
    if state is PeerState.JOINING:
        return DeclineReason.CATCHING_UP
    if must_catch_up(settled, progress, offer.terms.progress, rules):
        return DeclineReason.CATCHING_UP
    if must_catch_up(offer.terms.settled, offer.terms.progress, progress, rules):
        return DeclineReason.CATCH_UP_FIRST
    return None


def answer(
    offer: Offer,
    sender: PeerId,
    *,
    me: PeerId,
    crossing: bool,
    offering: bool,
    engaged: bool,
    free: list[int],
    under_way: int,
    rules: SwarmRules,
) -> tuple[int, ...] | DeclineReason:
    """Answer an offer that nobody planned: the fragments to exchange, or why not. The first check that speaks decides.

    Args:
        crossing: we have an unanswered offer to the sender; the smaller peer id's offer wins.
        offering: we have a fresh offer under way to somebody else. To accept now would break our word to one of the
            two, and where offers run in a circle, all words at once, for ever. An answer comes within a round trip;
            an offer that stays unanswered for longer does not make us busy.
        engaged: an exchange with the sender is under way. A second one at once would only let it hold more of ours.
        free: our free fragments, those that waited longest first.
        under_way: exchanges we are engaged in.
    """
    if crossing and me < sender:
        return DeclineReason.CROSSING
    if offering and not crossing:
        return DeclineReason.BUSY
    offered = set(offer.fragments)
    both = [fragment for fragment in free if fragment in offered][: rules.most_per_exchange]
    if engaged or not both or under_way >= MAX_EXCHANGES:
        return DeclineReason.BUSY
    return tuple(sorted(both))


def must_catch_up(settled: bool, progress: float, others: float, rules: SwarmRules) -> bool:
    """A peer that never was in step and is further behind than the bound pulls weights. A merely slow one does not."""
    return not settled and others - progress > catch_up_bound(progress, rules)


def catch_up_bound(progress: float, rules: SwarmRules) -> float:
    """How far behind (tokens) a peer may be that never was in step, and exchange all the same.

    Who only begins takes the weights of anybody who no longer does: after a few outer steps at the full rate they may
    have nothing in common with its initial ones, and it would be refused by all, and refuse them.
    """
    begins = progress <= rules.beginner_tokens
    return min(rules.catch_up_tokens, rules.beginner_tokens) if begins else rules.catch_up_tokens


STEPS_SLACK = 100
"""A donor may have made so many times as many outer steps as others of its progress. A guess: progress is averaged, and
the fastest of a swarm makes most of it."""
MOST_STEPS = 2**40
"""Nobody makes more. Far below the largest number that a message holds, which nobody must come to."""


def work_weight(rate: float) -> float:
    """The mixing weight of a peer that trains on so many tokens per second; next to nothing before it has trained."""
    return min(max(rate, LEAST_WEIGHT), LARGEST_WEIGHT)


LEAST_WEIGHT, LARGEST_WEIGHT = 1e-3, 1e6
"""Bounds of a work weight, tokens per second. Guesses far outside of what computers do."""
