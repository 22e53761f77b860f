"""What peers say to each other. Plain data; ``p2ptrain.wire`` turns it into bytes and checks every cap and type.

A conversation is one stream. Its first frame says what it is for::

    exchange   Offer -> Accept | Decline ; then each way: payload, Acknowledge
    catch-up   WeightsRequest -> WeightsReply | Decline ; then donor to newcomer: payload

``docs/PROTOCOL.md`` has both as tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from p2ptrain.base.ids import PeerId, RunId


class PeerState(StrEnum):
    """What a peer tells the others about itself."""

    JOINING = "joining"
    """It looks for peers or pulls weights; it cannot exchange yet."""
    TRAINING = "training"
    """It trains and exchanges."""
    FINISHING = "finishing"
    """It reached the run's end and only exchanges, until the swarm agrees."""
    LEAVING = "leaving"
    """It is going away; do not offer."""


class DeclineReason(StrEnum):
    """Why an offer or a request was turned down. The text is what the other side's owner reads."""

    BUSY = "busy"
    CROSSING = "our offers crossed"
    CATCHING_UP = "it is catching up"
    CATCH_UP_FIRST = "we are behind and must catch up first"
    IMPLAUSIBLE_PROGRESS = "implausible progress"
    OTHER_RUN = "another run"
    OTHER_PROTOCOL = "another protocol version"
    DISTRUSTED = "it does not trust us for now"
    LEAVING = "leaving"
    NO_WEIGHTS = "it has no weights to give"
    NOT_BEHIND = "we are not behind it"
    NOT_YET = "it has not come to this outer step yet"
    NOT_PLANNED = "it planned this outer step without us"


@dataclass(frozen=True, slots=True)
class Presence:
    """A peer's signed, short-lived note that it is alive: its entry in the directory, also passed on in offers."""

    peer: PeerId
    run: RunId
    addresses: tuple[str, ...]
    """Multiaddresses without the ``/p2p/`` part, best first."""
    state: PeerState
    step: int
    """Outer steps done."""
    progress: float
    """Tokens per peer."""
    settled: bool
    """As in ``Terms``. Who was never in step says nothing of where the swarm is."""
    nickname: str
    """Chosen by its owner, shown to people, trusted by nobody. At most 32 characters; may be empty."""
    issued_at: float
    """Seconds since the epoch by the issuer's clock."""
    lifetime_s: float
    """How long after ``issued_at`` the note counts."""
    signature: bytes = b""
    """Ed25519 over all the other fields, by the key that ``peer`` is the hash of."""


LARGEST_RATIO = 16.0
"""Of two mixing weights: whatever a partner says of its speed, it moves us by no more than 16/17 of the difference. As
``matching.RATE_SLACK``: what computers of one swarm may differ by."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One side's numbers for an exchange. Both sides compute the mixing coefficients from the same two Terms."""

    step: int
    """Outer steps done."""
    progress: float
    """Tokens per peer, averaged in exchanges like the weights."""
    weight: float
    """Mixing weight w; the displacement's share is w_theirs / (w_mine + w_theirs)."""
    clip_radius: float
    """Largest L2 norm of a fragment's difference that may move this side's weights; the smaller of both counts. May be
    inf."""
    settled: bool
    """False until the peer has once been in step with the swarm."""
    state: PeerState
    partners: int = 1
    """With how many the same snapshot is mixed at once; the larger of both sides' numbers counts."""
    seconds_per_byte: float = 0.0
    """How long this side is prepared to wait for a payload; the larger of both sides' numbers counts. So whose line is
    fast waits for whose is slow."""
    fall: float = inf
    """Most (tokens) that the exchange may lower this side's progress by; both sides' moves are cut in proportion. May
    be inf."""

    def weight_of(self, theirs: Terms) -> float:
        """A partner's mixing weight as it counts beside ours: both sides come to the same ratio."""
        return min(max(theirs.weight, self.weight / LARGEST_RATIO), self.weight * LARGEST_RATIO)


@dataclass(frozen=True, slots=True)
class Offer:
    """Let us exchange these fragments."""

    run: RunId
    protocol: int
    fragments: tuple[int, ...]
    terms: Terms
    round: int = 0
    """The outer step that planned this exchange on both sides; 0 for one that nobody planned."""
    known: tuple[Presence, ...] = ()
    """A few live peers, so that membership spreads without the directory too."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Yes, these of them. Both sides send at once from here on."""

    fragments: tuple[int, ...]
    """A non-empty, ordered subset of what was offered."""
    terms: Terms
    known: tuple[Presence, ...] = ()


@dataclass(frozen=True, slots=True)
class Decline:
    """No, and why."""

    reason: DeclineReason
    state: PeerState
    step: int
    progress: float
    known: tuple[Presence, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Your payload arrived whole and its difference to mine is finite. Both sides' acknowledgements make the commit."""


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """I am behind: send me your slow weights."""

    run: RunId
    protocol: int
    progress: float
    seconds_per_byte: float = 0.0
    """As in ``Terms``."""


@dataclass(frozen=True, slots=True)
class WeightsReply:
    """Here they come: every fragment, fp32."""

    step: int
    progress: float
    seconds_per_byte: float = 0.0
    """As in ``Terms``."""
    known: tuple[Presence, ...] = ()


Message = Offer | Accept | Decline | Acknowledge | WeightsRequest | WeightsReply
