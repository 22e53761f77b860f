"""The two closed lists of the protocol core: what can happen to a peer, and what it can ask its shell to do.

``Peer.handle(event, now) -> list[Effect]``. The shells (``p2ptrain.net``, ``p2ptrain.sim``) perform the effects in
order and feed back events; they decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.messages import Message, Offer, Presence, Terms, WeightsReply, WeightsRequest

# --- Events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The shell is up; look for the swarm."""


@dataclass(frozen=True, slots=True)
class PeersSeen:
    """A directory lookup ended, or a message passed peers on."""

    records: tuple[tuple[Presence, float], ...]
    """Records whose signatures hold, each with the time (our clock) until which it counts."""
    from_lookup: bool = True


@dataclass(frozen=True, slots=True)
class LookupFailed:
    """Nobody could be asked for the directory."""


@dataclass(frozen=True, slots=True)
class OuterStepDone:
    """The trainer ended an outer step: every free fragment has a new snapshot. Exchanges fall due, or did before."""

    step: int
    progress: float
    tokens: int
    """That this peer itself trained on in it."""


@dataclass(frozen=True, slots=True)
class ExchangeDue:
    """The trainer is where in its inner phase an exchange is to begin; fast weights have a new snapshot."""


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """The trainer ended an inner phase and waits: what its recipe mixes now has a snapshot."""

    step: int
    """The outer step that the phase leads to."""
    progress: float


@dataclass(frozen=True, slots=True)
class TrainingEnded:
    """The trainer reached the run's end and only applies displacements from now on."""

    step: int
    progress: float


@dataclass(frozen=True, slots=True)
class Received:
    """A control message arrived on a link (for an inbound link, its first message opens it)."""

    link: LinkId
    message: Message
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SwapDone:
    """Both payloads are through, the digests hold, and the difference is finite."""

    link: LinkId
    sent_bytes: int
    received_bytes: int
    distance: float
    """||theirs - mine|| / ||mine|| over the exchanged fragments: the disagreement as this pair measures it."""
    norm: float = 0.0
    """||mine||; 0 where there are no weights to measure."""
    fingerprint: bytes = b""
    """Of the bytes that came; empty where there are none."""
    sketched: float = 0.0
    """``distance`` as both told before the swap; 0 where nobody told. Of what wrapped ``distance`` says nothing."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The trainer added the displacement: its fragments are free again."""

    link: LinkId
    progress: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """A donor's weights are here, whole and finite."""

    link: LinkId
    received_bytes: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """The trainer replaced its weights by the donor's."""

    link: LinkId
    step: int
    progress: float


@dataclass(frozen=True, slots=True)
class Unfit:
    """The trainer would not take the donor's weights: they are worth nothing, or its own end came first. Its own are as
    they were."""

    link: LinkId
    why: str


@dataclass(frozen=True, slots=True)
class Donated:
    """The newcomer has taken all our weights."""

    link: LinkId
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A link ended before its conversation did."""

    link: LinkId
    why: str
    their_fault: bool = False
    """They broke the protocol (garbage, a wrong digest, NaN), as opposed to the network failing."""
    unbegun: bool = False
    """They ended it in good order, before a byte of their payload had come."""
    misfit: bool = False
    """Their payload came and did not fit the step widths agreed on, which we have learnt from."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The time asked for by the last ``WakeAt`` has come."""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The owner wants to stop."""


@dataclass(frozen=True, slots=True)
class Giving:
    """The owner has weights to give to newcomers from now on, or none: they are told that we are busy."""

    gives: bool


Event = (
    Started
    | PeersSeen
    | LookupFailed
    | OuterStepDone
    | ExchangeDue
    | PhaseDone
    | TrainingEnded
    | Received
    | SwapDone
    | Applied
    | Pulled
    | Adopted
    | Unfit
    | Donated
    | LinkFailed
    | Woke
    | LeaveRequested
    | Giving
)

# --- Effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Dial a peer and send this first message."""

    link: LinkId
    addresses: tuple[str, ...]
    message: Offer | WeightsRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message on an open link."""

    link: LinkId
    message: Message


@dataclass(frozen=True, slots=True)
class Swap:
    """Encode these fragments of what is shown to partners, send them, receive theirs, compute the difference."""

    link: LinkId
    fragments: tuple[int, ...]
    mine: Terms
    theirs: Terms


@dataclass(frozen=True, slots=True)
class Commit:
    """Hand the displacement to the trainer; it applies it between two inner steps."""

    link: LinkId
    progress_displacement: float
    """What to add to progress with it, in tokens per peer."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Every displacement that a waiting trainer waited for has been handed to it, or will not come: go on."""

    step: int
    """The outer step that it waits at; at any other it does not wait any more."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Receive all fragments, fp32, from the donor."""

    link: LinkId
    reply: WeightsReply


@dataclass(frozen=True, slots=True)
class Adopt:
    """Hand the pulled weights to the trainer to replace its own."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Donate:
    """Send all fragments of the slow weights, fp32."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Close:
    """The conversation is over, or not wanted any more: close the link and forget whatever it held."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish our presence. The shell adds addresses, nickname, times and the signature."""

    state: str
    step: int
    progress: float
    settled: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask the directory for live peers; answer with PeersSeen or LookupFailed."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Woke at this time. Replaces the previous request."""

    time: float


@dataclass(frozen=True, slots=True)
class BeginTraining:
    """The trainer may start (or, after an Adopt, already holds a donor's weights)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to do: save and exit."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth a line: ``exchanged``, ``skipped``, ``failed``, ``joined``, … The shell logs and counts it."""

    kind: str
    peer: PeerId | None = None
    why: str = ""
    seconds: float = 0.0
    """Of an exchange, since both had agreed; 0 where they had not."""
    sent_bytes: int = 0
    received_bytes: int = 0
    distance: float = 0.0


Effect = (
    Open
    | Send
    | Swap
    | Commit
    | Proceed
    | Pull
    | Adopt
    | Donate
    | Close
    | Announce
    | Lookup
    | WakeAt
    | BeginTraining
    | Finished
    | Note
)
