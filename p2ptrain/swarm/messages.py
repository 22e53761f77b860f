"""Messages between peers, as plain data; ``p2ptrain.wire`` encodes them and checks every limit and type.

A conversation is one stream. Its first frame decides its kind::

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
    JOINING = "joining"
    """Looks for peers or pulls weights; cannot exchange yet."""
    TRAINING = "training"
    """Trains and exchanges."""
    FINISHING = "finishing"
    """Reached the run's end; only exchanges until the swarm agrees."""
    LEAVING = "leaving"
    """Is about to stop; accepts no offers."""
    KEEPING = "keeping"
    """Holds some fragments, averages others' weights into them and gives them to newcomers; does not train."""


EXCHANGING = (PeerState.TRAINING, PeerState.FINISHING)
"""States in which a peer exchanges."""


class DeclineReason(StrEnum):
    """Reason to decline an offer or a request. The other side's owner reads the text."""

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
    KEEPING = "it does not train, and calls by itself"


@dataclass(frozen=True, slots=True)
class Presence:
    """A peer's signed, short-lived presence record: its entry in the directory, also passed on in offers."""

    peer: PeerId
    run: RunId
    addresses: tuple[str, ...]
    """Multiaddresses without the ``/p2p/`` part, best first."""
    state: PeerState
    step: int  # outer steps done
    progress: float  # tokens of all peers
    settled: bool
    """Whether it has been in step with the swarm; otherwise it says nothing about where the swarm is."""
    nickname: str
    """Display name chosen by the owner; never trusted. At most 32 characters; may be empty."""
    issued_at: float  # seconds since the epoch, by the issuer's clock
    lifetime_s: float
    """Seconds after ``issued_at`` for which the record is valid."""
    signature: bytes = b""
    """Ed25519 over all other fields, by the key that ``peer`` is the hash of."""
    since: float = 0.0
    """Start of the issuing process, in seconds since the epoch: of two with one key, the older one goes on."""
    keeps: tuple[tuple[int, int], ...] = ()
    """Fragments that a keeper holds, as ranges (``keeping.Ranges``); empty in every other state."""


MAX_RATIO = 16.0
"""Maximum ratio of two mixing weights: whatever throughput a partner claims, it moves us by at most 16/17 of the
difference. Equal to ``progress.RATE_SLACK``. Guess: measure the throughput ratios of one swarm."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One side's numbers for an exchange. Both sides compute the mixing coefficients from the same two Terms."""

    step: int  # outer steps done
    progress: float
    """Tokens of all peers, averaged in exchanges."""
    weight: float
    """Mixing weight w; the larger one moves less (``share``)."""
    clip_radius: float
    """Maximum L2 norm of a fragment's difference that may move this side's weights; the smaller of both counts. May be
    inf."""
    settled: bool
    state: PeerState
    partners: int = 1
    """Partners that mix the same snapshot concurrently; the larger of both sides' numbers counts."""
    seconds_per_byte: float = 0.0
    """Patience per payload byte in seconds; the larger of both sides' numbers counts."""
    max_decrease: float = inf
    """Maximum (tokens) by which the exchange may lower this side's progress; both sides' changes are cut in proportion.
    May be inf."""
    max_increase: float = inf
    """Maximum (tokens) by which the exchange may raise this side's progress; cuts both sides' changes likewise. May be
    inf."""
    counted_at: float = 0.0
    """This side's progress when it first counted the other one as a peer that trains."""
    peers: float = 1.0
    """Number of peers that train, as this side counts them."""

    def weight_of(self, theirs: Terms) -> float:
        """Return a partner's mixing weight as it counts beside ours. Both sides compute the same ratio."""
        return min(max(theirs.weight, self.weight / MAX_RATIO), self.weight * MAX_RATIO)

    def share(self, theirs: Terms) -> float:
        """Return the share of the difference to move by: ``2 / (1 + k) * w_theirs / (w_mine + w_theirs)``.

        k is the number of partners that mix a snapshot concurrently. For equal weights the share is 1 / (1 + k): the
        Metropolis weights of a graph (Xiao and Boyd, 2004), stable for any k. With all n - 1 others at once, it is that
        of the mean. A keeper moves nobody, and moves itself as if weights were equal (``swarm.keeping``).
        """
        if theirs.state is PeerState.KEEPING:
            return 0.0
        if self.state is PeerState.KEEPING:
            return 1.0 / (1 + max(self.partners, theirs.partners))
        weight, partners = self.weight_of(theirs), max(self.partners, theirs.partners)
        return 2.0 / (1 + partners) * (weight / (self.weight + weight))


def is_keeper(terms: Terms | None) -> bool:
    return terms is not None and terms.state is PeerState.KEEPING


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer to exchange these fragments."""

    run: RunId
    protocol: int
    fragments: tuple[int, ...]
    terms: Terms
    round: int = 0
    """Outer step that planned this exchange on both sides; 0 for an unplanned one."""
    known: tuple[Presence, ...] = ()
    """A few live peers, so that membership spreads without the directory too."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Acceptance of some offered fragments. Both sides send at once after it."""

    fragments: tuple[int, ...]
    """A non-empty, ordered subset of the offered fragments."""
    terms: Terms
    known: tuple[Presence, ...] = ()


@dataclass(frozen=True, slots=True)
class Decline:
    reason: DeclineReason
    state: PeerState
    step: int
    progress: float
    known: tuple[Presence, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Confirmation that the payload arrived whole and its difference is finite. Both sides' confirmations make the
    commit."""


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """Request for all slow weights, by a peer that is behind."""

    run: RunId
    protocol: int
    progress: float
    seconds_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightsReply:
    """Announcement of all fragments in fp32, which follow."""

    step: int
    progress: float
    seconds_per_byte: float = 0.0
    counted_at: float = 0.0
    """The donor's progress when it first counted the newcomer as a peer that trains."""
    known: tuple[Presence, ...] = ()


Message = Offer | Accept | Decline | Acknowledge | WeightsRequest | WeightsReply
