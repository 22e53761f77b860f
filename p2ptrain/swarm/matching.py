"""Whether to exchange, with whom, and on which terms: pure decisions, each a short list of checks in order."""

from __future__ import annotations

from math import isfinite
from random import Random

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import DeclineReason, Offer, PeerState
from p2ptrain.swarm.peer_info import PeerInfo
from p2ptrain.swarm.rules import BEGINNER_STEPS, MAX_EXCHANGES, SwarmRules


def choose_partner(candidates: list[PeerInfo], random: Random) -> PeerInfo | None:
    """Return a uniformly random candidate; the randomness is what makes gossip mix."""
    return random.choice(candidates) if candidates else None


def implausible_progress(theirs: float, mine: float, settled: bool, rules: SwarmRules) -> str:
    """Say why a reported progress is implausible or must not be mixed with ours; return an empty string if it may.

    Args:
        theirs, mine: tokens per peer.
        settled: whether this peer is in step with the swarm. No honest peer is then far ahead of it, whatever it
            claims; a peer that is not settled may be far behind the peers it asks.
    """
    if not isfinite(theirs) or theirs < 0:
        return f"progress {theirs}"
    if theirs > rules.progress_ceiling:
        return f"progress {theirs:.0f} is beyond the run's end at {rules.tokens_per_peer:.0f}"
    if settled and theirs - mine > rules.implausible_distance:
        return f"progress {theirs:.0f} is too far ahead of ours, {mine:.0f}"
    return ""


def implausible_step(theirs: int, others: int, rules: SwarmRules) -> str:
    """Say why a donor's count of outer steps must not be adopted; return an empty string if it may.

    If outer steps are planned, a peer that is behind or ahead meets nobody: a newcomer that adopted a false count would
    train alone and consider itself settled, permanently.

    Args:
        others: count of the peers that are as far as the donor.
    """
    if rules.plans:  # All make the same steps together; what was announced is older than the reply.
        least = others - rules.catch_up_outer_steps
        most = others + rules.implausible_distance / rules.tokens_per_outer_step
    else:
        least, most = 0.0, STEPS_SLACK * (others + BEGINNER_STEPS)
    can_be = least <= theirs <= min(most, MOST_STEPS)
    return "" if can_be else f"it claims {theirs} outer steps, but equally far peers have made {others}"


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
    """Return why no offer of this sender can be accepted now, planned or not. The first check that applies decides."""
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
    """Answer an unplanned offer: the fragments to exchange, or a reason to decline. The first check that applies
    decides.

    Args:
        crossing: we have an unanswered offer to the sender; the smaller peer id's offer wins.
        offering: we have a recent unanswered offer to another peer. Accepting now would break one of two agreements
            and, if offers run in a circle, all of them, forever. An answer takes one round trip; an offer unanswered
            for longer does not make this peer busy.
        engaged: an exchange with the sender is under way. A second one would only let it hold more of our fragments.
        free: our free fragments, longest waiting first.
        under_way: exchanges that this peer is engaged in.
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
    """Report whether a peer must pull: it was never settled and is further behind than the bound. A merely slow peer is
    not."""
    return not settled and others - progress > catch_up_bound(progress, rules)


def catch_up_bound(progress: float, rules: SwarmRules) -> float:
    """Return how far behind (tokens) a peer that was never settled may be and still exchange.

    A beginner pulls from any peer past its first outer steps: after a few of them at the full rate, weights may be
    unrelated to the initial ones, so both sides would refuse each other.
    """
    begins = progress <= rules.beginner_tokens
    return min(rules.catch_up_tokens, rules.beginner_tokens) if begins else rules.catch_up_tokens


STEPS_SLACK = 100
"""Multiple of the outer steps of peers with equal progress that a donor may have made. Progress is averaged, and the
fastest peer of a swarm makes most of it. Guess: measure the spread of step counts in real swarms."""
MOST_STEPS = 2**40
"""Maximum count of outer steps, far below the largest number that a message holds."""


def work_weight(rate: float) -> float:
    """Return the mixing weight for this many tokens per second; almost zero before a peer has trained."""
    return min(max(rate, LEAST_WEIGHT), LARGEST_WEIGHT)


LEAST_WEIGHT, LARGEST_WEIGHT = 1e-3, 1e6
"""Bounds of a work weight in tokens per second, far outside of what computers reach. Guess: measure throughputs."""
