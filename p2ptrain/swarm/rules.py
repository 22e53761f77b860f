"""Numbers that the protocol core works by: fields set by the manifest, and constants with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from p2ptrain.base.ids import PROTOCOL_VERSION, RunId
from p2ptrain.swarm.topology import Topology


@dataclass(frozen=True)
class SwarmRules:
    """Protocol parameters of a run, its codec and its model size. Every peer of a run has the same."""

    run: RunId
    fragment_bytes: tuple[int, ...]
    """Encoded size of each fragment; its length is the number of fragments."""
    weights_bytes: int
    """Size of all fragments in fp32, which a donor sends to a newcomer."""
    run_tokens: float
    """Progress at which the run ends: tokens of all peers together."""
    tokens_per_outer_step: float
    """Tokens of one peer's H inner steps."""
    exchanges_per_step: int
    """Exchanges that a peer initiates per outer step. It serves about as many."""
    due_in_phase: bool
    """Whether exchanges are due when the trainer says so within an inner phase, instead of all after an outer step."""
    fragments_per_exchange: int
    streams: int
    """Tensors that a fragment stands for: with two, the upper half of the numbers are the second stream's fragments."""
    free: tuple[int, ...]
    """Fragments exchanged beside training with any free partner. The shell adds committed displacements to those of the
    weights before the trainer does."""
    beside: tuple[int, ...]
    """Fragments exchanged beside training with the partners that the topology plans for an outer step."""
    between: tuple[int, ...]
    """Fragments exchanged with planned partners while the trainer waits."""
    topology: Topology
    """Pairs that may exchange, and planned pairs."""
    partners: int  # planned at a time, for topology ``random``
    work_weights: bool
    """Whether a peer's mixing weight is its tokens per second, instead of equal for all."""
    catch_up_outer_steps: float
    """Outer steps behind beyond which a peer that was never settled pulls weights instead of exchanging."""
    begins_at_zero: bool
    """Whether weights grow from zero, as in the simulator's quadratics. Distances then mainly show how much longer one
    peer has trained, and cannot expose adversarial peers."""
    final_disagreement: float
    """Maximum distance of recent exchanges at which the final gossip ends."""
    final_gossip_s: float  # at most, even if others still train
    protocol: int = PROTOCOL_VERSION

    @cached_property
    def fragments(self) -> int:
        return len(self.fragment_bytes) // self.streams

    @cached_property
    def everything(self) -> frozenset[int]:
        """All fragments of the weights."""
        return frozenset(range(self.fragments))

    @cached_property
    def can_be_kept(self) -> bool:
        """Whether any two peers may exchange any fragment of the weights at any time, as keepers must."""
        return self.streams == 1 and self.topology == "random" and self.everything == frozenset(self.free)

    @cached_property
    def exchanges(self) -> bool:
        return self.exchanges_per_step > 0 or bool(self.beside or self.between)

    @cached_property
    def given_to_one(self) -> int:
        """Times per hour that one newcomer may begin to take our weights."""
        return max(GIVEN_TO_ONE, min(GIVEN_BYTES // max(self.weights_bytes, 1), MAX_GIVEN))

    @cached_property
    def judges_distances(self) -> bool:
        """Whether a partner's distance says something about it; pseudo-gradients differ by their whole length."""
        return self.streams == 1 and not self.begins_at_zero

    @cached_property
    def plans(self) -> bool:
        """Whether peers must know all others in order to plan the same pairs."""
        return self.topology != "random" or bool(self.beside or self.between)

    @cached_property
    def most_per_exchange(self) -> int:
        """Maximum number of fragments in one unplanned exchange: ``fragments_per_exchange`` of every stream."""
        return self.fragments_per_exchange * max(1, len(self.free) // self.fragments)


@dataclass(frozen=True)
class ProgressBounds:
    """Bounds on progress in tokens of all peers. In one outer step of every peer, progress grows by ``step``."""

    rules: SwarmRules
    peers: float = 1.0
    """Number of peers that train (``peer_count.PeerCount``)."""

    @cached_property
    def step(self) -> float:
        return self.rules.tokens_per_outer_step * self.peers

    @cached_property
    def catch_up(self) -> float:
        """Distance behind others beyond which a peer that was never settled pulls."""
        return self.rules.catch_up_outer_steps * self.step

    @cached_property
    def beginner(self) -> float:
        """Progress up to which a peer is a beginner."""
        return BEGINNER_STEPS * self.step

    @cached_property
    def implausible_distance(self) -> float:
        """Distance ahead of ours above which a claim is implausible: a quarter of the run, at least 32 outer steps.
        Guess: measure the spread of progress in real swarms."""
        return max(0.25 * self.rules.run_tokens, 32 * self.step)

    @cached_property
    def ceiling(self) -> float:
        """Maximum plausible progress. Peers end with an outer step, and may count more peers than this one does."""
        return self.rules.run_tokens + self.implausible_distance


ANNOUNCE_PERIOD_S = 20.0
"""Interval between presence announcements: three within a record's lifetime, so that two lost stores do not hide a
peer."""

PRESENCE_LIFETIME_S = 75.0
"""Lifetime of a presence record: between the 60 and 90 s that hivemind's DHT was measured to serve well."""

LOOKUP_PERIOD_S = 20.0
"""Interval between directory lookups while some peer's record is known."""

CROWDED_LOOKUP_PERIOD_S = 40.0
"""Interval between directory lookups in a swarm of which only some peers are kept."""

LONELY_LOOKUP_PERIOD_S = 2.0
"""Interval between directory lookups while no peer's record is known."""

ASLEEP_S = 30.0
"""Delay of a requested wake-up above which the computer slept or the process was stopped. A false alarm costs one
lookup if nobody is far ahead. Guess: measure delays on busy machines."""

HELD_UP_S = 0.5
"""Delay of a wake-up above which this peer was held up, by its disk or other programs. Messages may have come meanwhile
and be unread. Guess: measure delays on busy machines."""

UNREAD_S = 1.0
"""Extension of deadlines that passed while this peer was held up. Guess: measure how long unread messages take."""

OUT_OF_STEP_S = 60.0
OUT_OF_STEP_STEPS = 2
"""Time and outer steps without an exchange, while others are implausibly far ahead, after which a peer pulls like a
newcomer. One exchange with an honest peer keeps an adversarial peer from using this. Guess: measure how long
connections fail."""

ROUND_PATIENCE_S = 30.0
ROUND_PATIENCE_STEPS = 4.0
"""Patience of a waiting trainer for partners that have not reached its outer step: the longer of these seconds and this
many of its own outer steps. Recipes that wait were published for machines of equal speed. Guess: measure the spread of
outer step durations."""

ROUND_RECALL_S = 1.0
"""First pause before a partner that has not come is asked again; it doubles each time. The partner's run may have
ended, or its plan may no longer include us. An answer costs a round trip. Guess: measure waiting times with other
pauses."""

SEARCH_PATIENCE_S = 20.0
"""Time without an answer from the directory after which a starting peer trains alone. It keeps searching."""

HEARD_LIFETIME_S = 60.0
"""Time after a message for which a peer counts as live, even if its record is not renewed."""

ENOUGH_PEERS = 32
"""Peers to draw partners from. In larger swarms not all are kept, because arrivals and departures would be most of the
work; a minute later the kept ones are others. Recipes that plan with everybody keep all. Guess: compare mixing with
other numbers."""

FRESH_PEERS = 8
"""Unknown peers added with each lookup even if enough are kept, so that nobody stays unknown to all."""

MAX_KNOWN = 512
"""Memory bound on membership; the directory's bound on one lookup is lower."""

PASS_ON = 4
"""Known peers passed on in an offer or accept (under 1 KB each)."""

MAX_EXCHANGES = 4
"""Concurrent exchanges, inbound and outbound together (they hold disjoint fragments)."""

MAX_DONATIONS = 1
"""Newcomers served concurrently; a donor's upload is shared with its exchanges. Guess: measure joins with other
numbers."""

GIVEN_TO_ONE, GIVEN_BYTES, MAX_GIVEN, GIVING_WINDOW_S = 6, 64 << 20, 60, 3600.0
"""Limits on how often one newcomer may begin to take our weights: the first number or, for small models, as many times
as amount to the second number in bytes, at most the third number; then the window in seconds. A whole model is the
largest thing that a stranger may ask of us. A connection that breaks six pulls needs another donor. Small models are
for trying things out, and a run of seconds is far ahead after each restart. Guess: count the pulls of real
newcomers."""

SUPPORTERS = 2
"""Other peers that must claim about as much progress as a donor, if so many are known. Two of eight may collude."""

MIN_UNRELATED = 2
"""Minimum number of unrelated partners in a row, besides a majority of live peers, before our weights count as
outliers. Fewer adversarial peers cannot make a peer adopt weights. Guess: simulate adversarial minorities in small
swarms."""

BEGINNER_STEPS = 3
"""Own outer steps below which a peer neither blames partners for unrelated weights nor is blamed for its own. Two steps
at the full rate were measured to be longer than a tiny model's weights. Guess: measure the first steps of larger
models."""

YOUNG_STEPS = 8
"""Own outer steps below which one partner with unrelated weights, far ahead and with more than twice as many outer
steps, makes a peer take weights from those ahead, if others corroborate their claims: it loses few outer steps. Guess:
count unrelated weights in the first outer steps of uneven computers."""

FINAL_PACE_S = 0.25
"""Pause between two exchanges of the final gossip, so that finished peers leave the others some time to train."""

GOODBYE_S = 2.0
"""Time that a leaving peer waits for exchanges that may already be committed on the other side."""

MAX_CALLS, CALLS_PER_S = 40.0, 3.0
"""Calls from one peer to another: this many at once, and per second in the long run. A tiny model's outer steps are so
short on one machine that two peers would call each other twenty times a second and be declined as a flood. An exchange
between homes takes seconds. Guess: measure call rates of real swarms."""
