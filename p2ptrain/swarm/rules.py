"""The numbers the protocol core works by: some from the manifest, the others constants with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from p2ptrain.base.ids import PROTOCOL_VERSION, RunId
from p2ptrain.swarm.topology import Topology


@dataclass(frozen=True)
class SwarmRules:
    """What one run, its codec and its model size mean for the protocol. Every peer of a run has the same.

    What follows from the fields is asked at every event, and computed once.
    """

    run: RunId
    fragment_bytes: tuple[int, ...]
    """Encoded size of each fragment; its length is the number of fragments."""
    weights_bytes: int
    """Size of all fragments in fp32: what a donor sends to a newcomer."""
    tokens_per_peer: float
    """The run ends at this progress."""
    tokens_per_outer_step: float
    """H inner steps' tokens of one peer."""
    exchanges_per_step: int = 1
    """Exchanges a peer initiates per outer step. It serves about as many."""
    due_in_phase: bool = False
    """They fall due where the trainer says so within an inner phase, and not all after an outer step."""
    fragments_per_exchange: int = 1
    streams: int = 1
    """Tensors that a fragment stands for: with two, the upper half of the numbers are the second stream's fragments."""
    free: tuple[int, ...] | None = None
    """Fragments exchanged beside training with whoever is there; None: all."""
    beside: tuple[int, ...] = ()
    """Fragments exchanged beside training with the partners that the topology plans for an outer step."""
    between: tuple[int, ...] = ()
    """Fragments exchanged with planned partners while the trainer waits."""
    topology: Topology = "random"
    """Who may meet whom, and who is planned to."""
    partners: int = 1
    """Planned at once, with topology ``random``."""
    work_weights: bool = False
    """Two peers' weights count by the tokens per second that each trains on, instead of equally."""
    catch_up_outer_steps: float = 8.0
    """A peer that never was in step and is further behind than this pulls weights instead of exchanging."""
    begins_at_zero: bool = False
    """The weights grow from nothing, as those of the simulator's quadratics do: how far apart two peers are says at
    first how much longer one has trained, and nothing of a lie."""
    final_disagreement: float = 0.005
    """The final gossip ends when recent exchanges measured at most this distance."""
    final_gossip_s: float = 60.0
    """... or this long after our own end, whoever still trains."""
    protocol: int = PROTOCOL_VERSION

    @cached_property
    def fragments(self) -> int:
        """F: slices of the parameters."""
        return len(self.fragment_bytes) // self.streams

    @cached_property
    def exchanges(self) -> bool:
        """Whether peers of this run exchange anything."""
        return self.exchanges_per_step > 0 or bool(self.beside or self.between)

    @cached_property
    def given_to_one(self) -> int:
        """Times an hour that one newcomer may begin to take our weights."""
        return max(GIVEN_TO_ONE, min(GIVEN_BYTES // max(self.weights_bytes, 1), MOST_GIVEN))

    @cached_property
    def judges_distances(self) -> bool:
        """Whether how far off a partner is says something of it: pseudo-gradients differ by all their length."""
        return self.streams == 1 and not self.begins_at_zero

    @cached_property
    def plans(self) -> bool:
        """Whether peers have to know everybody, to plan alike who meets whom."""
        return self.topology != "random" or bool(self.beside or self.between)

    @cached_property
    def free_fragments(self) -> tuple[int, ...]:
        """The fragments that any two peers may exchange at any time."""
        return tuple(range(len(self.fragment_bytes))) if self.free is None else self.free

    @cached_property
    def most_per_exchange(self) -> int:
        """Fragment numbers in one exchange that nobody planned: ``fragments_per_exchange`` of every stream."""
        return self.fragments_per_exchange * max(1, len(self.free_fragments) // self.fragments)

    @cached_property
    def catch_up_tokens(self) -> float:
        """The bound of ``catch_up_outer_steps`` in progress."""
        return self.catch_up_outer_steps * self.tokens_per_outer_step

    @cached_property
    def beginner_tokens(self) -> float:
        """The progress of ``BEGINNER_STEPS`` outer steps."""
        return BEGINNER_STEPS * self.tokens_per_outer_step

    def is_fair(self, weight: float) -> bool:
        """Whether a peer may ask to be weighed so: where all count equally, all say 1."""
        return self.work_weights or weight == 1.0

    @cached_property
    def implausible_distance(self) -> float:
        """Progress further than this from ours is a lie: a quarter of the run, at least 32 outer steps. A guess."""
        return max(0.25 * self.tokens_per_peer, 32 * self.tokens_per_outer_step)

    @cached_property
    def progress_ceiling(self) -> float:
        """No honest peer is further than the end, one outer step and a little averaging beyond it."""
        return self.tokens_per_peer + 4 * self.tokens_per_outer_step


ANNOUNCE_PERIOD_S = 20.0
"""Presence is renewed this often: three times within its lifetime, so that two lost stores do not hide a peer."""

PRESENCE_LIFETIME_S = 75.0
"""How long a presence record counts: between the 60 and 90 s that hivemind's DHT was measured to serve well."""

LOOKUP_PERIOD_S = 20.0
"""The directory is asked this often once some peer's record is known, ..."""

CROWDED_LOOKUP_PERIOD_S = 40.0
"""... this often in a swarm of which only some are kept in mind, ..."""

LONELY_LOOKUP_PERIOD_S = 2.0
"""... and this often while none is."""

ASLEEP_S = 30.0
"""A peer that is woken so much later than it asked for was not running: its computer slept, or it was stopped. A guess;
where nobody is far ahead it costs a lookup to be wrong."""

HELD_UP_S = 0.5
"""One that is woken so much later was held up for a moment, by its disk or other programs. What it waits for may have
come meanwhile and lie unread, ..."""

UNREAD_S = 1.0
"""... so deadlines that passed have so much more time. Guesses."""

OUT_OF_STEP_S = 60.0
OUT_OF_STEP_STEPS = 2
"""A peer that exchanged nothing for so long, in seconds and in outer steps, while others are implausibly far ahead, was
cut off: it pulls like a newcomer. Guesses; one exchange with an honest peer keeps a liar from using this."""

ROUND_PATIENCE_S = 30.0
ROUND_PATIENCE_STEPS = 4.0
"""How long a waiting trainer waits for partners that have not come to its outer step: the longer of so many seconds and
of so many of its own outer steps. Guesses; recipes that wait were published for machines that are equally fast."""

ROUND_RECALL_S = 1.0
"""After so long a partner that has not come is asked again, then after twice that, and so on: its run may have ended,
or its plan be without us by now. A guess; an answer costs a round trip."""

SEARCH_PATIENCE_S = 20.0
"""A starting peer whose directory does not answer trains alone after this long (it goes on searching)."""

HEARD_LIFETIME_S = 60.0
"""A peer we talked with counts as live for this long even when its record is not renewed."""

ENOUGH_PEERS = 32
"""Peers to draw partners from: of larger swarms not everybody is kept in mind, or coming and going would be most of the
work. All of them are others a minute later. A guess; recipes that plan with everybody keep all."""

FRESH_PEERS = 8
"""Strangers taken in with each lookup all the same: so that nobody stays unknown to all."""

MAX_KNOWN = 512
"""Memory bound on membership; the directory's bound on one lookup is lower."""

PASS_ON = 4
"""Known peers passed on in an offer or accept (under 1 KB each)."""

MAX_EXCHANGES = 4
"""Exchanges under way at once, ours and others' together (they hold disjoint fragments)."""

MAX_DONATIONS = 1
"""Newcomers served at once. A guess; a donor's upload is shared by its exchanges."""

GIVEN_TO_ONE, GIVEN_BYTES, MOST_GIVEN, GIVING_WINDOW_S = 6, 64 << 20, 60, 3600.0
"""Times that one newcomer may begin to take our weights, or as often as they are so many bytes, at most how often, and
in how long: a whole model is the largest thing that a stranger may ask of us. A line so bad that six pulls break needs
another donor. Small models are what people try things out with, and a run of seconds is far ahead after each restart.
Guesses."""

SUPPORTERS = 2
"""So many others must claim about as much progress as a donor does, where so many are known. Two of eight may lie
together."""

LEAST_STRANGERS = 2
"""Once most who are here, and so many at the least, had weights in a row with nothing in common with ours, ours are the
odd ones. Fewer liars make nobody take weights anew. A guess."""

BEGINNER_STEPS = 3
"""Who has made fewer outer steps of its own blames nobody whose weights are strange to it, and is not blamed for its
own. Two steps at the full rate were measured to be longer than a tiny model's weights; one more is a guess."""

FINAL_PACE_S = 0.25
"""Pause between two exchanges of the final gossip, so that finished peers leave the others some time to train."""

GOODBYE_S = 2.0
"""How long a leaving peer waits for exchanges that may already be committed on the other side."""

MOST_CALLS, CALLS_PER_S = 40.0, 3.0
"""Of one peer to another: so many at once, and so many a second for long. A tiny model's outer steps take so little on
one machine that two peers would call each other twenty times a second, and be turned down as a flood. An exchange takes
seconds between homes. A guess."""
