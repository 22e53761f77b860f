"""What is known of one other peer, and the pauses that its failures cause."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.messages import PeerState, Presence
from p2ptrain.swarm.rules import CALLS_PER_S, MAX_CALLS

# First and longest pause after failures in a row. Guess: measure how long network failures last.
FAILURE_PAUSE_S = (2.0, 120.0)
QUARANTINE_S = (30.0, 3600.0)  # the same after protocol violations. Guess: measure how long faulty hardware offends
# The same after clipped weights, as when two halves of a swarm reunite. Guess: measure such reunions.
FAR_S = (30.0, 600.0)
WITHDRAWALS_FORGIVEN = 1
"""Offers in a row that a peer may withdraw after our Accept was sent. A peer that waited too long exchanges with
another, which may be our own slowness; one that offers only to withdraw would hold our fragments each time. Guess:
count withdrawals of honest peers."""
REST = 4.0
"""Pause of a peer that held us in vain or for too long (``judging``), as a multiple of that time; so it takes at
most a fifth of our time. Guess: compare swarms with other values."""
LONE_PAUSE_S = 0.5
"""Pause of a partner while no other one can be called. Pauses make room for others; without others they only lose
exchanges. Guess: compare swarms of two on a busy machine with other values."""
MISFITS_FORGIVEN = 3
"""Payloads of a peer that may misfit the agreed step widths before it is paused for that: each one teaches half an
octave (``codec.steps.PACE``). Each exchange that fits forgets half of them. Measured: of three tiny peers in lockstep
none needed more than one, in 14 runs (docs/SECURITY.md)."""

NEVER = float("inf")


class FailureKind(Enum):
    UNANSWERED = "our call failed or was not answered"
    BROKEN = "it broke off after our fragments or weights were engaged"
    OFFENCE = "it broke the protocol"
    FAR = "its weights were beyond our radius"
    WITHDRAWN = "it withdrew its offer before any byte of its payload"
    MISFIT = "its payload did not fit the agreed step widths"
    UNRELATED = "its weights and ours are unrelated, and either may be wrong"


@dataclass(slots=True, eq=False)
class PeerInfo:
    """What is known of one peer. Written by ``Membership`` only."""

    peer: PeerId
    live_until: float
    state: PeerState = PeerState.TRAINING
    step: int = 0
    progress: float = 0.0
    settled: bool = False
    """Whether it claims to be in step with the swarm."""
    presence: Presence | None = None
    was_heard: bool = False
    """Whether it ever sent us a message; anybody can write a record."""
    unanswered: int = 0
    """Our calls in a row that failed or stayed unanswered."""
    broken: int = 0
    """Exchanges and pulls in a row that it broke off. Offences are kept apart (``offences``)."""
    withdrawn: int = 0  # offers in a row
    misfits: int = 0  # halved by each commit
    unrelated: int = 0
    """Exchanges in which its weights were unrelated to ours, halved by each commit."""
    calls: float = 0.0
    """Our recent calls, as of ``called_at``, drained at ``CALLS_PER_S``."""
    called_at: float = 0.0
    paced_until: float = 0.0
    """End of the pause because we sent it enough offers, whatever becomes of them."""
    not_before: float = 0.0
    """End of the time in which we do not call it."""
    lone_until: float = 0.0
    """End of the time in which we do not call it while no other partner can be called. Not after ``not_before``."""
    distrusted_until: float = 0.0
    """End of the time in which it may not engage anything of ours."""
    barred_until: float = 0.0
    """End of the part of both that follows protocol violations and weights beyond our radius."""
    counted_at: float | None = None
    """Our progress when we first counted it as a peer that trains; None if we do not."""
    listed: bool = False  # live and not leaving
    alarm: float = NEVER  # next check of its liveness

    def may_be_asked(self, now: float) -> bool:
        """Report whether it may be asked for its weights: pacing holds back offers only."""
        return self.not_before <= max(now, self.paced_until)

    def pause(self, until: float, now: float) -> None:
        """Do not call it before ``until``, or ``LONE_PAUSE_S`` from now while no other partner can be called.

        Calls that it does not answer double the latter, until it is heard again.
        """
        lone_s = LONE_PAUSE_S * 2 ** min(max(self.unanswered - 1, 0), 16)
        self.lone_until = max(self.lone_until, min(until, now + lone_s))
        self.not_before = max(self.not_before, until)

    def hear(self, now: float) -> None:
        """End the part of a lone partner's pause that waits for a sign of life."""
        self.lone_until = min(self.lone_until, max(now + LONE_PAUSE_S, self.barred_until, self.paced_until))

    def call(self, now: float) -> float:
        """Record an offer to it. Return the end of the pause if it has had enough offers, else 0."""
        self.calls = min(max(self.calls - (now - self.called_at) * CALLS_PER_S, 0.0) + 1.0, MAX_CALLS)
        self.called_at = now
        if self.calls > MAX_CALLS - 1.0:
            self.paced_until = now + 1.0 / CALLS_PER_S
            return self.paced_until
        return 0.0

    def record_failure(self, failure: FailureKind, now: float, held_s: float = 0.0) -> float:
        """Record a failure after it held our fragments for ``held_s``. Return the end of the pause, 0 if forgiven."""
        first, longest = FAILURE_PAUSE_S
        if failure is FailureKind.WITHDRAWN:  # not doubled: fast peers withdraw from a slow one often
            self.withdrawn += 1
            return now + max(first, REST * held_s) if self.withdrawn > WITHDRAWALS_FORGIVEN else 0.0
        if failure is FailureKind.UNRELATED:  # not doubled: beginners meet often until their weights settle
            return now + first
        if failure is FailureKind.MISFIT:
            self.misfits += 1
            if self.misfits <= MISFITS_FORGIVEN:
                return 0.0
            failure = FailureKind.BROKEN
        self.unanswered += failure is FailureKind.UNANSWERED
        self.broken += failure is FailureKind.BROKEN
        times = self.broken if failure is FailureKind.BROKEN else self.unanswered
        until: float = now + min(first * 2 ** min(times - 1, 16), longest)
        return until

    def record_success(self) -> None:
        self.unanswered = self.broken = self.withdrawn = 0
        self.misfits //= 2
        self.unrelated //= 2
        self.not_before = self.lone_until = self.paced_until
        self.distrusted_until = self.barred_until = 0.0

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.presence.addresses if self.presence else ()
