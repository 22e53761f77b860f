"""Whether to exchange, with whom, and on which terms: pure decisions, each a short list of checks in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from random import Random

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import DeclineReason, Offer, PeerState, Terms
from p2ptrain.swarm.peer_info import PeerInfo
from p2ptrain.swarm.rules import BEGINNER_STEPS, MAX_EXCHANGES, ProgressBounds, SwarmRules

STEPS_SLACK = 100
"""Multiple of the outer steps of peers with equal progress that a donor may have made. Progress is averaged, and the
fastest peer of a swarm makes most of it. Guess: measure the spread of step counts in real swarms."""
MAX_STEPS = 2**40
"""Maximum count of outer steps, far below the largest number that a message holds."""
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e6
"""Bounds of a work weight in tokens per second, far outside of what computers reach. Guess: measure throughputs."""


def choose_partner(candidates: list[PeerInfo], random: Random) -> PeerInfo | None:
    """Return a uniformly random candidate; the randomness is what makes gossip mix."""
    return random.choice(candidates) if candidates else None


def implausible_progress(theirs: float, mine: float, settled: bool, bounds: ProgressBounds) -> str:
    """Say why a reported progress must not be mixed with ours; return an empty string if it may.

    No honest peer is far ahead of a settled one. A peer that is not settled may be far behind the peers it asks.
    """
    if not isfinite(theirs) or theirs < 0:
        return f"progress {theirs}"
    if theirs > bounds.ceiling:
        return f"progress {theirs:,.0f} is beyond the run's end at {bounds.rules.run_tokens:,.0f}"
    if settled and theirs - mine > bounds.implausible_distance:
        return f"progress {theirs:,.0f} is too far ahead of ours, {mine:,.0f}"
    return ""


def implausible_step(theirs: int, others: int, bounds: ProgressBounds) -> str:
    """Say why a donor's count of outer steps must not be adopted; return an empty string if it may.

    If outer steps are planned, a newcomer that adopted a false count would meet nobody and train alone permanently.
    ``others``: count of the peers that are as far as the donor.
    """
    if bounds.rules.plans:  # All make the same steps together; what was announced is older than the reply.
        least = others - bounds.rules.catch_up_outer_steps
        most = others + bounds.implausible_distance / bounds.step
    else:
        least, most = 0.0, STEPS_SLACK * (others + BEGINNER_STEPS)
    can_be = least <= theirs <= min(most, MAX_STEPS)
    return "" if can_be else f"it claims {theirs} outer steps, but equally far peers have made {others}"


@dataclass(frozen=True, slots=True)
class Violation:
    """An offer that breaks the protocol."""

    why: str


@dataclass(frozen=True, slots=True)
class PlannedView:
    """What this peer knows about a planned exchange that it is offered (``Rounds.view``)."""

    fragments: tuple[int, ...] | None
    """Fragments of the open round; None if this peer has not reached the outer step."""
    will_offer: bool
    """Whether this peer plans the sender and has reached the outer step or will."""
    is_skipped: bool
    """Whether the trainer skips the sender in this round for having been slow."""
    can_meet: bool
    """Whether the round is open, not over for the sender, and before its deadline."""


@dataclass(frozen=True, slots=True)
class OfferView:
    """What this peer knows about itself and the sender when an offer arrives."""

    me: PeerId
    bounds: ProgressBounds
    state: PeerState
    settled: bool
    progress: float
    effective_progress: float  # as in ``CoreState``
    distrusts_sender: bool
    is_crossing: bool
    """Whether we have an unanswered offer to the sender; the smaller peer id's offer wins."""
    is_offering: bool
    """Whether we have a recent unanswered offer to any peer that answered the last one. A sender with a smaller peer id
    is accepted all the same, and our offer withdrawn: if offers run in a circle, one of them is accepted. If all were
    declined, eight peers whose outer steps last as long as an exchange made a third as many exchanges (simulated). An
    answer takes one round trip; an offer unanswered for longer does not make this peer busy."""
    is_engaged: bool
    """Whether an exchange with the sender is under way, or others come first after a slow one. A second exchange would
    only let it hold more of our fragments."""
    free_fragments: Sequence[int]  # longest waiting first
    exchanges: int  # that this peer is engaged in
    planned: PlannedView | None  # None for an unplanned offer


Answer = tuple[int, ...] | DeclineReason | Violation
"""Decision about an offer: the fragments to exchange, a reason to decline, or a violation."""


def answer(offer: Offer, sender: PeerId, view: OfferView) -> Answer:
    """Decide about an offer. The first check that applies decides."""
    bounds, terms = view.bounds, offer.terms
    rules = bounds.rules
    if why := unfair_weight(terms, rules):
        return Violation(why)
    if offer.run != rules.run:
        return DeclineReason.OTHER_RUN
    if offer.protocol != rules.protocol:
        return DeclineReason.OTHER_PROTOCOL
    if view.state is PeerState.LEAVING:
        return DeclineReason.LEAVING
    if view.state is PeerState.KEEPING:
        return DeclineReason.KEEPING
    if view.distrusts_sender:
        return DeclineReason.DISTRUSTED
    if implausible_progress(terms.progress, view.progress, view.settled, bounds):
        return DeclineReason.IMPLAUSIBLE_PROGRESS
    if view.state is PeerState.JOINING:
        return DeclineReason.CATCHING_UP
    if must_catch_up(view.settled, view.effective_progress, terms.progress, bounds):
        return DeclineReason.CATCHING_UP
    if must_catch_up(terms.settled, terms.progress, view.effective_progress, bounds):
        return DeclineReason.CATCH_UP_FIRST
    our_offer_wins = view.is_crossing and view.me < sender
    if view.planned is not None:
        return _answer_planned(offer, view.planned, our_offer_wins)
    if our_offer_wins:
        return DeclineReason.CROSSING
    if view.is_offering and not view.is_crossing and view.me < sender:
        return DeclineReason.BUSY
    offered = set(offer.fragments)
    both = [fragment for fragment in view.free_fragments if fragment in offered][: rules.most_per_exchange]
    if view.is_engaged or not both or view.exchanges >= MAX_EXCHANGES:
        return DeclineReason.BUSY
    return tuple(sorted(both))


def _answer_planned(offer: Offer, planned: PlannedView, our_offer_wins: bool) -> tuple[int, ...] | DeclineReason:
    """Decide about an offer for a planned exchange, after the checks that all offers share.

    The sender's trainer waits after "not yet", so a sender that this peer will not call gets another reason.
    """
    if not planned.will_offer:
        return DeclineReason.NOT_PLANNED
    if planned.is_skipped:
        return DeclineReason.BUSY
    if planned.fragments is None:
        return DeclineReason.NOT_YET
    if planned.fragments != offer.fragments or not planned.can_meet:
        return DeclineReason.NOT_PLANNED
    return DeclineReason.CROSSING if our_offer_wins else planned.fragments


def unfair_weight(terms: Terms, rules: SwarmRules) -> str:
    """Say why a peer may not claim its mixing weight; return an empty string if it may."""
    is_fair = rules.work_weights or terms.weight == 1.0
    return "" if is_fair else f"it claims a mixing weight of {terms.weight:g}"


def must_catch_up(settled: bool, progress: float, others: float, bounds: ProgressBounds) -> bool:
    """Report whether a peer must pull: never settled, and further behind than the bound."""
    return not settled and others - progress > catch_up_bound(progress, bounds)


def catch_up_bound(progress: float, bounds: ProgressBounds) -> float:
    """Return how far behind (tokens) a peer that was never settled may be and still exchange.

    A beginner's weights may be unrelated to those after a few outer steps at the full rate, so it pulls earlier.
    """
    begins = progress <= bounds.beginner
    return min(bounds.catch_up, bounds.beginner) if begins else bounds.catch_up


def work_weight(rate: float) -> float:
    """Return the mixing weight for this many tokens per second; almost zero before a peer has trained."""
    return min(max(rate, MIN_WEIGHT), MAX_WEIGHT)
