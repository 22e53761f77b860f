"""What we know of one peer, and what its faults cost it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.rules import CALLS_PER_S, MOST_CALLS

FAILURE_PAUSE_S = (2.0, 120.0)  # first and longest pause after network failures in a row. Guess
QUARANTINE_S = (30.0, 3600.0)  # the same after broken protocol. Guess
FAR_S = (30.0, 600.0)  # the same after weights that had to be clipped: two halves of a swarm that meet again. Guess
FORGIVEN = 1
"""Offers in a row that a peer may take back with our Accept on its way. Who waits too long for an answer goes on with
another, which no more tells of it than our being slow does; who offers only to take back would hold our fragments each
time. A guess."""
REST = 4.0
"""Whoever held us in vain, or for too long (``overtime``), is left alone for so many times as long: a fifth of our time
at the most. A guess."""
MISFITS_FORGIVEN = 3
"""Payloads of a peer that may not fit the step widths agreed on before it is left alone for that: each one teaches half
an octave (``codec.steps.PACE``). The half of them is forgotten with every exchange that fits. Our measurement: of three
tiny peers in lockstep none needed more than one, in 14 runs (docs/SECURITY.md)."""

NEVER = float("inf")


class Fault(Enum):
    """How a conversation with a peer failed."""

    UNANSWERED = "our call came to nothing"
    BROKEN = "it had our fragments or weights engaged, and let us wait for nothing"
    OFFENCE = "it broke the protocol"
    FAR = "its weights lay further off than our radius"
    WITHDRAWN = "it ended what it had offered, before a byte of its payload"
    MISFIT = "its payload did not fit the step widths agreed on"


@dataclass(slots=True, eq=False)
class PeerInfo:
    """What we know of one peer. ``Membership`` alone writes to it."""

    peer: PeerId
    live_until: float
    state: PeerState = PeerState.TRAINING
    step: int = 0
    progress: float = 0.0
    settled: bool = False
    """It says that it is in step with the swarm."""
    presence: Presence | None = None
    unanswered: int = 0
    """Calls of ours in a row that came to nothing, ..."""
    broken: int = 0
    """... and exchanges and pulls in a row that it broke off. Offences are kept apart (``offences``)."""
    withdrawn: int = 0
    """Offers in a row that it took back."""
    misfits: int = 0
    """Exchanges whose payloads did not fit; each committed one took back half of them."""
    strange: int = 0
    """Exchanges in which its weights had nothing in common with ours; each committed one took back half of them."""
    calls: float = 0.0
    """Of ours lately, as of ``called_at``: what an allowance of ``CALLS_PER_S`` has not yet made up for."""
    called_at: float = 0.0
    paced_until: float = 0.0
    """We have made it offers enough until then, whatever comes of them."""
    not_before: float = 0.0
    """Do not call it until then ..."""
    distrusted_until: float = 0.0
    """... nor let it engage anything of ours until then."""
    listed: bool = False
    """It is live, and not leaving."""
    alarm: float = NEVER
    """When its liveness is looked at next."""

    def may_be_asked(self, now: float) -> bool:
        """For its weights: pacing holds back offers only."""
        return self.not_before <= max(now, self.paced_until)

    def call(self, now: float) -> float:
        """We make it an offer. Until when it has had enough of them; 0: it has not."""
        self.calls = min(max(self.calls - (now - self.called_at) * CALLS_PER_S, 0.0) + 1.0, MOST_CALLS)
        self.called_at = now
        if self.calls > MOST_CALLS - 1.0:
            self.paced_until = now + 1.0 / CALLS_PER_S
            return self.paced_until
        return 0.0

    def blame(self, fault: Fault, now: float, held_s: float = 0.0) -> float:
        """The network failed between us, or it left us in the lurch. Until when to leave it alone; 0: forgiven.

        Args:
            held_s: for how long it had our fragments engaged.
        """
        first, longest = FAILURE_PAUSE_S
        if fault is Fault.WITHDRAWN:  # not longer each time: of a slow peer the fast take back again and again
            self.withdrawn += 1
            return now + max(first, REST * held_s) if self.withdrawn > FORGIVEN else 0.0
        if fault is Fault.MISFIT:
            self.misfits += 1
            if self.misfits <= MISFITS_FORGIVEN:
                return 0.0
            fault = Fault.BROKEN
        self.unanswered += fault is Fault.UNANSWERED
        self.broken += fault is Fault.BROKEN
        times = self.broken if fault is Fault.BROKEN else self.unanswered
        until: float = now + min(first * 2 ** min(times - 1, 16), longest)
        return until

    def praise(self) -> None:
        """An exchange with it committed."""
        self.unanswered = self.broken = self.withdrawn = 0
        self.misfits //= 2
        self.strange //= 2
        self.not_before, self.distrusted_until = self.paced_until, 0.0

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.presence.addresses if self.presence else ()
