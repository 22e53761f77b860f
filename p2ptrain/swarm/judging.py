"""Judging partners by their weights and by the time that they take, and the resulting pauses.

The bounds and their reasons are in ``p2ptrain.swarm.trust``; this module applies them to one peer's exchanges. Recipes
whose distances say nothing about a partner judge nobody (``SwarmRules.judges_distances``).
"""

from __future__ import annotations

from p2ptrain.base.bounded import BoundedDict
from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.core_state import CoreState
from p2ptrain.swarm.events import LinkFailed, SwapDone
from p2ptrain.swarm.exchange import Exchange
from p2ptrain.swarm.messages import Terms, is_keeper
from p2ptrain.swarm.peer_info import REST, FailureKind
from p2ptrain.swarm.rules import BEGINNER_STEPS, MAX_KNOWN
from p2ptrain.swarm.trust import TIMES_UNRELATED, Replays, are_unrelated, per_fragment


class Judge:
    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._replays = Replays()

    def reject_reason(self, exchange: Exchange, done: SwapDone) -> LinkFailed | None:
        """Return the failure that says why these weights must not be mixed, or None if they may."""
        link, rules = done.link, self._core.rules
        if not rules.judges_distances:
            return None
        kept = self._core.is_keeper or is_keeper(exchange.theirs)  # one side does not move, and may send the same again
        if _are_unrelated(done):
            why = "its weights have nothing in common with ours"
            if not self._can_tell_who_is_unrelated(exchange):
                return LinkFailed(link, why, unrelated=True)
            times = self._core.members.times_unrelated(link.peer) + 1
            return LinkFailed(link, why, their_fault=times >= TIMES_UNRELATED)
        if not kept and done.distance > rules.final_disagreement and self._replays.is_one(link.peer, done.fingerprint):
            return LinkFailed(link, "it sends the same weights repeatedly", their_fault=True)
        return None

    def rejected(self, exchange: Exchange, done: SwapDone) -> None:
        if not _are_unrelated(done):
            return
        if is_keeper(exchange.theirs):  # does not train, so its weights say nothing about ours
            self._core.members.count_unrelated(done.link.peer)
            return
        if exchange.theirs is not None and exchange.theirs.settled and self._have_begun(exchange.theirs):
            self._core.record_unrelated(done.link.peer)
        if self._can_tell_who_is_unrelated(exchange):
            self._core.members.count_unrelated(done.link.peer)
        if self._is_overtaken(exchange):
            self._core.overtakers.add(done.link.peer)

    def _is_overtaken(self, exchange: Exchange) -> bool:
        """Report whether a partner made many outer steps before this peer made its first ones.

        Two slow computers that begin beside a fast one may exchange with each other first, which settles them.
        """
        core, theirs = self._core, exchange.theirs
        own = core.counters.outer_steps
        return (
            theirs is not None
            and core.is_young
            and (core.settled or bool(core.overtakers))
            and theirs.step >= 2 * own + BEGINNER_STEPS
            and theirs.progress - core.progress > core.bounds.beginner
        )

    def _can_tell_who_is_unrelated(self, exchange: Exchange) -> bool:
        """Report whether this peer can tell which of the two sides has unrelated weights.

        Beginners cannot. Nor can peers so far apart in progress that a newcomer would pull instead of mixing, as
        settled peers may be if outer steps take milliseconds.
        """
        core, theirs = self._core, exchange.theirs
        if theirs is None or not core.settled:
            return False
        apart = abs(theirs.progress - exchange.mine.progress)
        return self._have_begun(theirs) and apart <= core.bounds.catch_up

    def _have_begun(self, theirs: Terms) -> bool:
        """Report whether neither side is a beginner: without a warm-up the first steps are longer than the weights."""
        core = self._core
        return min(core.step if core.is_keeper else core.counters.outer_steps, theirs.step) >= BEGINNER_STEPS

    def mixed(self, exchange: Exchange, now: float) -> None:
        """Record the distance of a committed exchange. A partner beyond our radius was clipped and gets a pause."""
        core, peer = self._core, exchange.link.peer
        if not core.rules.judges_distances or is_keeper(exchange.theirs):
            return
        self._replays.mixed(peer, exchange.fingerprint)
        core.distance_stats.measured(peer, exchange.difference, per_fragment(exchange.norm, len(exchange.fragments)))
        if exchange.difference > exchange.mine.clip_radius:
            core.counters.clipped += 1
            core.members.record_failure(peer, now, FailureKind.FAR)
            core.note("clipped", peer, f"its weights differed from ours by {100 * exchange.distance:.0f} %")


def _are_unrelated(done: SwapDone) -> bool:
    return are_unrelated(done.distance) or are_unrelated(done.sketched)


class SlowPartnerPenalty:
    """Pauses of partners that hold fragments or the only place for a newcomer longer than necessary, unknown ones
    included.

    A slow partner may be honest, so this is not an offence. A partner that held us for too long waits ``REST`` times as
    long, whichever side calls, so it takes at most a fifth of our time beyond its due. A peer ten times slower than the
    others still spends most of its time in exchanges, because each of its partners pauses independently.

    If the trainer waits for partners, only what exceeds the training time of an outer step counts. So slow connections
    are met in every round with long inner phases, and no partner takes more than half of a trainer's time and a fifth
    of the rest.

    Args:
        of_trainers: whether the trainer is what a partner holds.
    """

    def __init__(self, core: CoreState, of_trainers: bool = False) -> None:
        self._core = core
        self._of_trainers = of_trainers
        self._until: BoundedDict[PeerId, float] = BoundedDict(MAX_KNOWN)

    def exchanged(self, exchange: Exchange, now: float) -> None:
        """Record that an exchange's fragments are free again, whether or not its payloads were transferred."""
        size = sum(self._core.rules.fragment_bytes[fragment] for fragment in exchange.fragments)
        self._held(exchange.link.peer, size, now - exchange.swap_started_at, now)

    def gave(self, peer: PeerId, seconds: float, now: float) -> None:
        self._held(peer, self._core.rules.weights_bytes, seconds, now)

    def waits(self, peer: PeerId, now: float) -> bool:
        return self._until.get(peer, now) > now

    def _held(self, peer: PeerId, size: int, seconds: float, now: float) -> None:
        too_long_s = self._core.deadlines.too_long_s(size, seconds)
        if self._of_trainers:
            too_long_s -= self._core.seconds_per_outer_step
        if too_long_s <= 0:
            return
        until = self._until[peer] = max(self._until.get(peer, now), now + REST * too_long_s)
        self._core.members.pause(peer, until, now)
