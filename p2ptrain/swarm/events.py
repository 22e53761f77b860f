"""Events that can happen to a peer, and effects that it can ask its shell to perform: two closed lists.

``Peer.handle(event, now) -> list[Effect]``. The shells (``p2ptrain.net``, ``sim``) perform the effects in
order and feed events back; they decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.swarm.messages import Message, Offer, Presence, WeightsReply, WeightsRequest

# --- Events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The shell is ready; look for the swarm."""


@dataclass(frozen=True, slots=True)
class PeersSeen:
    """A directory lookup ended, or a message passed presence records on."""

    records: tuple[tuple[Presence, float], ...]
    """Records with valid signatures, each with the time (own clock) until which it counts."""
    from_lookup: bool = True
    in_directory: int = 0
    """Peers in the directory by this lookup's estimate; 0: as many as it returned."""
    finished: tuple[Presence, ...] = ()
    """Last records, live or expired, of peers that trained to the run's end and left, with valid signatures."""


@dataclass(frozen=True, slots=True)
class LookupFailed:
    """No node of the directory answered."""


@dataclass(frozen=True, slots=True)
class OuterStepDone:
    """The trainer ended an outer step: every free fragment has a new snapshot. Exchanges are due now or were before."""

    step: int
    progress: float
    tokens: int
    """Tokens that this peer itself trained on in this outer step."""


@dataclass(frozen=True, slots=True)
class ExchangeDue:
    """The trainer reached a point of its inner phase where an exchange is due; fast weights have a new snapshot."""


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """The trainer ended an inner phase and waits: what its recipe mixes now has a snapshot."""

    step: int  # the outer step that the phase leads to
    progress: float


@dataclass(frozen=True, slots=True)
class TrainingEnded:
    """The trainer reached the run's end; from now on it only applies displacements."""

    step: int
    progress: float


@dataclass(frozen=True, slots=True)
class Received:
    """A control message arrived on a link; the first message of an inbound link opens it."""

    link: LinkId
    message: Message
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SwapDone:
    """Both payloads have been transferred, the digests match, and the difference is finite."""

    link: LinkId
    sent_bytes: int
    received_bytes: int
    distance: float
    """||theirs - mine|| / ||mine|| over the exchanged fragments: the disagreement as this pair measures it."""
    norm: float = 0.0
    """||mine||; 0 if there are no weights to measure."""
    fingerprint: bytes = b""
    """Fingerprint of the received bytes; empty if there are none."""
    sketched: float = 0.0
    """``distance`` as both sides announced it before the swap; 0 if they did not. If payloads wrapped, ``distance``
    says nothing."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The trainer added the displacement: its fragments are free again."""

    link: LinkId
    progress: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """A donor's weights have arrived, whole and finite."""

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
    """The trainer rejected the donor's weights, because they are useless, do not improve its own as they must, or it
    reached its end. Its weights are unchanged."""

    link: LinkId
    why: str


@dataclass(frozen=True, slots=True)
class Donated:
    """The newcomer has received all weights."""

    link: LinkId
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """A link ended before its conversation did."""

    link: LinkId
    why: str
    their_fault: bool = False
    """Whether the other side broke the protocol (garbage, a wrong digest, NaN), as opposed to a network failure."""
    unbegun: bool = False
    """Whether the other side ended it in good order before any byte of its payload had arrived."""
    misfit: bool = False
    """Whether their payload did not fit the agreed step widths, which this side has learnt from."""
    unrelated: bool = False
    """Whether their weights and ours are unrelated, and this side cannot tell whose are the wrong ones."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The time requested by the last ``WakeAt`` has come."""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The owner wants to stop, or ``Conclude`` is done."""

    gives_on: bool = False
    """Whether newcomers may finish the downloads under way."""


@dataclass(frozen=True, slots=True)
class Giving:
    """The owner begins or stops giving weights to newcomers; while it does not, they hear that this peer is busy."""

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
    """Encode the published copy of these fragments, send it, receive theirs, and compute the difference."""

    link: LinkId
    fragments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Hand the displacement to the trainer, which applies it between two inner steps."""

    link: LinkId
    progress_displacement: float  # tokens of all peers
    share: float
    """Share of the difference by which this peer moves towards the partner."""
    clip_radius: float
    """Maximum L2 norm of a fragment's difference that may move the weights; may be inf."""
    finished: bool
    """Whether either side has finished the run."""
    sent_bytes: int
    received_bytes: int
    keeper_step: int | None = None
    """Outer steps that a keeper's weights stand for from now on; None: this peer trains."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of peers that train has changed: the trainer multiplies its own tokens by it from now on."""

    peers: float


@dataclass(frozen=True, slots=True)
class Proceed:
    """Let a waiting trainer go on: every displacement that it waited for has been handed to it or will not come."""

    step: int
    """The outer step that the trainer waits at; at any other it does not wait any more."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Receive all fragments from the donor, in fp32."""

    link: LinkId
    reply: WeightsReply


@dataclass(frozen=True, slots=True)
class Adopt:
    """Hand the pulled weights to the trainer, which replaces its own."""

    link: LinkId
    progress: float
    """Progress (tokens) to continue from."""
    left_behind: bool = False
    """Whether this peer trained beside the donor, or others only claim so: the trainer rejects weights that do not
    improve its loss on held-out text."""


@dataclass(frozen=True, slots=True)
class Donate:
    """Send all fragments of the slow weights, in fp32."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Close:
    """Close the link and discard its data: the conversation is over or no longer wanted."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish this peer's presence. The shell adds addresses, nickname, times and the signature."""

    state: str
    step: int
    progress: float
    settled: bool
    finished: bool = False
    """Whether this peer trained to the run's end and leaves: the directory also keeps the record among the finished."""
    keeps: tuple[tuple[int, int], ...] = ()
    """Fragments that a keeper holds, as ranges (``keeping.Ranges``)."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask the directory for live peers; answer with PeersSeen or LookupFailed."""

    finished: bool = False
    """Whether to ask for finished peers, too."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send Woke at this time. Replaces the previous request."""

    time: float


@dataclass(frozen=True, slots=True)
class BeginTraining:
    """Start training. After an Adopt, the trainer already holds a donor's weights."""


@dataclass(frozen=True, slots=True)
class Conclude:
    """Save and evaluate, then answer with LeaveRequested: the final gossip is over, and the weights are final."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Save and exit: nothing is left to do."""

    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """Note for the event log: ``exchanged``, ``skipped``, ``failed``, ``joined``, … The shell logs and counts it."""

    kind: str
    peer: PeerId | None = None
    why: str = ""
    seconds: float = 0.0
    """Duration of an exchange since both sides agreed; 0 if they did not."""
    sent_bytes: int = 0
    received_bytes: int = 0
    distance: float = 0.0


Effect = (
    Open
    | Send
    | Swap
    | Commit
    | Counted
    | Proceed
    | Pull
    | Adopt
    | Donate
    | Close
    | Announce
    | Lookup
    | WakeAt
    | BeginTraining
    | Conclude
    | Finished
    | Note
)
