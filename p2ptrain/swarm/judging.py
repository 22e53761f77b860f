"""Judging partners by their weights: what is not mixed, what is learnt from what was, and the resulting pauses.

The bounds and their reasons are in ``p2ptrain.swarm.trust``; this module applies them to one peer's exchanges. Recipes
whose distances say nothing about a partner judge nobody (``SwarmRules.judges_distances``).
"""

from __future__ import annotations

from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import LinkFailed, SwapDone
from p2ptrain.swarm.exchange import Exchange
from p2ptrain.swarm.peer_info import Fault
from p2ptrain.swarm.rules import BEGINNER_STEPS
from p2ptrain.swarm.trust import TIMES_STRANGE, Replays, are_strange, per_fragment


class Judge:
    """Judgements of one peer about its partners' weights."""

    def __init__(self, standing: CoreState) -> None:
        self._standing = standing
        self._replays = Replays()

    def lie(self, exchange: Exchange, done: SwapDone) -> LinkFailed | None:
        """Say why these weights must not be mixed; return None if they may."""
        link, rules = done.link, self._standing.rules
        if not rules.judges_distances:
            return None
        if are_strange(done.distance) or are_strange(done.sketched):
            if exchange.theirs is not None and exchange.theirs.settled:
                self._standing.meet_stranger(link.peer)
            why, can_tell = "its weights have nothing in common with ours", self._can_tell_who_is_strange(exchange)
            is_lie = can_tell and self._standing.members.estranged(link.peer) >= TIMES_STRANGE
            return LinkFailed(link, why, their_fault=is_lie)
        if done.distance > rules.final_disagreement and self._replays.is_one(link.peer, done.fingerprint):
            return LinkFailed(link, "it sends the same weights repeatedly", their_fault=True)
        return None

    def _can_tell_who_is_strange(self, exchange: Exchange) -> bool:
        """Report whether this peer can tell which of the two sides has unrelated weights.

        Only a settled peer can. Two beginners cannot: without a warm-up the first steps are longer than the weights, so
        a peer that began a second earlier looks unrelated. Nor can peers so far apart in progress that a newcomer would
        pull instead of mixing: if outer steps take milliseconds, two settled peers may be that far apart.
        """
        standing, theirs = self._standing, exchange.theirs
        if theirs is None or not standing.settled:
            return False
        began = min(standing.counters.outer_steps, theirs.step) >= BEGINNER_STEPS
        return began and abs(theirs.progress - exchange.mine.progress) <= standing.rules.catch_up_tokens

    def mixed(self, exchange: Exchange, now: float) -> None:
        """Record the distance of a committed exchange. A partner beyond our radius was clipped and gets a pause."""
        standing, peer = self._standing, exchange.link.peer
        if not standing.rules.judges_distances:
            return
        self._replays.mixed(peer, exchange.fingerprint)
        standing.usual.measured(peer, exchange.difference, per_fragment(exchange.norm, len(exchange.fragments)))
        if exchange.difference > exchange.mine.clip_radius:
            standing.counters.clipped += 1
            standing.members.blame(peer, now, Fault.FAR)
            standing.note("clipped", peer, f"its weights differed from ours by {100 * exchange.distance:.0f} %")
