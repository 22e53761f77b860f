"""Meeting: the states of one planned partner in a round, and what changes them.

docs/PROTOCOL.md shows ``TRANSITIONS``; ``p2ptrain.swarm.rounds`` drives it.
"""

from __future__ import annotations

from enum import Enum, auto

from p2ptrain.swarm.transitions import Transition, TransitionTable


class Meeting(Enum):
    DUE = auto()
    CALLED = auto()
    CROSSED = auto()
    AWAITED = auto()
    MEETING = auto()
    MET = auto()
    MISSED = auto()
    FAILED = auto()


class MeetingEvent(Enum):
    """Events that change a planned partner's state. The values appear in docs/PROTOCOL.md."""

    CALL = "our Offer is sent"
    ABSENT = "the partner is no longer known, or distrusted, or our weights are outliers"
    SLOW = "the partner recently delayed our trainer for too long"
    OFFER = "its Offer, which we accept"
    CROSSING = "its Offer crosses ours, which wins"
    ACCEPT = "its Accept"
    LATER = "Decline `not yet` or `crossed`"
    OVERTAKEN = "Decline `not yet`, which its Offer overtook"
    DOUBTED = "Decline `not yet` or `crossed` that cannot be true, or from a partner whose commitments are ignored"
    REFUSAL = "another Decline, no answer, or a failure"
    RECALL = "the pause before the next Offer is over"
    PATIENCE = "patience ends"
    COMMIT = "the exchange commits"
    FAILURE = "the exchange fails"


TRANSITIONS: TransitionTable[Meeting, MeetingEvent] = TransitionTable(
    "planned partner",
    Transition(
        (Meeting.DUE,),
        MeetingEvent.CALL,
        Meeting.CALLED,
        "the partner is known and trusted, and our weights are not outliers",
    ),
    Transition((Meeting.DUE,), MeetingEvent.ABSENT, Meeting.MISSED, "no Offer is sent"),
    Transition((Meeting.DUE,), MeetingEvent.SLOW, Meeting.MISSED, "only in a round that the trainer waits for"),
    Transition(
        (Meeting.DUE, Meeting.CALLED, Meeting.AWAITED, Meeting.MISSED),
        MeetingEvent.OFFER,
        Meeting.MEETING,
        "answer Accept; an unanswered Offer of ours is withdrawn; from MISSED only before patience ends",
    ),
    Transition(
        (Meeting.CALLED, Meeting.CROSSED),
        MeetingEvent.CROSSING,
        Meeting.CROSSED,
        "answer `our offers crossed`: our peer id is the smaller",
    ),
    Transition((Meeting.CALLED, Meeting.CROSSED), MeetingEvent.ACCEPT, Meeting.MEETING, "the exchange begins"),
    Transition(
        (Meeting.CALLED, Meeting.CROSSED),
        MeetingEvent.LATER,
        Meeting.AWAITED,
        "the partner committed itself to send an Offer",
    ),
    Transition(
        (Meeting.CALLED, Meeting.CROSSED),
        MeetingEvent.DOUBTED,
        Meeting.MISSED,
        "only in a round that the trainer waits for",
    ),
    Transition(
        (Meeting.CROSSED,),
        MeetingEvent.OVERTAKEN,
        Meeting.DUE,
        "once per round and partner: it has come meanwhile and waits for our Offer",
    ),
    Transition(
        (Meeting.CALLED, Meeting.CROSSED),
        MeetingEvent.REFUSAL,
        Meeting.MISSED,
        "a missing answer can break a commitment",
    ),
    Transition(
        (Meeting.AWAITED,),
        MeetingEvent.RECALL,
        Meeting.DUE,
        "only in a round that the trainer waits for; the pause doubles",
    ),
    Transition(
        (Meeting.CALLED, Meeting.CROSSED, Meeting.AWAITED),
        MeetingEvent.PATIENCE,
        Meeting.MISSED,
        "a broken commitment; in CALLED and CROSSED when Decline `not yet` or `crossed` comes after that",
    ),
    Transition((Meeting.MEETING,), MeetingEvent.COMMIT, Meeting.MET, "the partner is done"),
    Transition(
        (Meeting.MEETING,), MeetingEvent.FAILURE, Meeting.FAILED, "the partner has no other exchange in this round"
    ),
)

OVER = (Meeting.MET, Meeting.MISSED, Meeting.FAILED)
"""States that nobody waits for."""
