"""A scenario: who takes part, on which lines, what they learn, and what happens to them. One TOML file.

``[outer]`` and ``[codec]`` are the manifest's own sections, so that what was simulated can be run. Every number without
a source here is a guess.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from p2ptrain.manifest.schema import FRAGMENT_ALIGNMENT, NEEDS_EVERYBODY, Codec, Outer, Swarm
from p2ptrain.manifest.section import Section
from p2ptrain.manifest.sources import BYTE_VOCABULARY
from p2ptrain.recipes import RECIPES

MAX_PEERS = 100_000
"""More is a typing mistake: 10,000 take 1.5 GB."""

MEGABIT = 1e6 / 8
"""Bytes."""

GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,24}$")]
"""A name for a group of peers: 1 to 24 letters, digits, dashes."""


class Run(Section):
    """How long, and with which seed."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Decides everything that is drawn."""

    outer_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """The run ends at the tokens per peer of this many outer steps; or give tokens_per_peer."""

    tokens_per_peer: int | None = Field(default=None, ge=1, le=10**15)
    """Training tokens per peer at which the run ends, as in a manifest; or give outer_steps."""

    seconds: float | None = Field(default=None, gt=0)
    """Simulated seconds after which the simulation is broken off, if it has not ended."""

    failed_exchanges: float = Field(default=0.0, ge=0, lt=1)
    """Share of all swaps whose connection breaks before the payload is through; beside the peers' own loss. Where a
    recipe averages over everybody, of each peer's part in each attempt (``sim.averages``)."""

    split: Literal["validation", "test"] = "validation"
    """What losses are measured on, by learners that have data: validation for tuning, test for final numbers."""

    points: int = Field(default=100, ge=1, le=1000)
    """Points of a curve in the report, evenly over the run's outer steps."""


Forgery = Literal["scaled", "flipped", "random"]
"""Lies in well-formed payloads: of its weights times ``liars.SCALE``, of their negative, of normally distributed
weights of the same length."""

Lie = Literal["progress", "garbage", "silent", "stalling", "nan", "stale", "scaled", "flipped", "random"]
"""progress: it claims to be at the run's end. garbage: its payloads are random bytes. silent: it never answers.
stalling: it agrees to exchange, and never sends its payload. nan: its payloads are not finite. stale: it sends the
first payload that it made, for ever."""

NEED_WEIGHTS = ("nan", "stale", *get_args(Forgery))
"""Lies that only a learner with weights can tell."""


class BytesLearner(Section):
    """No weights at all: steps, tokens and bytes are counted, losses are not."""

    kind: Literal["bytes"]
    """bytes."""

    parameters: int = Field(default=135_000_000, ge=1, le=10**13)
    """Size of the model that is not there."""

    tokens_per_step: int = Field(default=1, ge=1, le=2**24)
    """Tokens of one inner step."""

    disagreement: float = Field(default=0.01, ge=0, le=1)
    """What every exchange measures; above swarm.final_disagreement the final gossip ends by its time limit."""


class QuadraticLearner(Section):
    """Noisy gradient descent on a diagonal quadratic; each peer's optimum lies a little off the common one."""

    kind: Literal["quadratic"]
    """quadratic."""

    parameters: int = Field(default=4096, ge=1, le=10**8)
    """Dimensions."""

    tokens_per_step: int = Field(default=1, ge=1, le=2**24)
    """What an inner step counts in progress."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Of the inner SGD; at most 2 over the largest curvature."""

    smallest_curvature: float = Field(default=0.05, gt=0)
    """Curvatures lie evenly, on a logarithmic scale, from this ..."""

    largest_curvature: float = Field(default=1.0, gt=0)
    """... to this."""

    noise: float = Field(default=0.1, ge=0)
    """Standard deviation of each gradient element's noise."""

    spread: float = Field(default=0.1, ge=0)
    """Standard deviation of a peer's optimum around the common one, an element: how unlike the peers' data are."""


class LanguageModelLearner(Section):
    """A real small Llama on the shipped text, read as bytes; on it the simulator learns what the real peer would."""

    kind: Literal["lm"]
    """lm."""

    hidden_size: int = Field(default=64, ge=16, le=4096, multiple_of=16)
    """Width of the residual stream."""

    intermediate_size: int = Field(default=192, ge=16, le=16_384)
    """Width inside the feed-forward blocks."""

    layers: int = Field(default=2, ge=1, le=64)
    """Transformer blocks."""

    heads: int = Field(default=2, ge=1, le=64)
    """Attention heads a block."""

    sequence_length: int = Field(default=64, ge=8, le=4096)
    """Bytes a sequence."""

    sequences_per_step: int = Field(default=4, ge=1, le=65_536)
    """Sequences an inner step."""

    data: Literal["iid", "shards"] = "iid"
    """iid (every peer reads all of the text in its own order) or shards (each reads its own part of it alone)."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Of the inner steps."""

    learning_rate: float = Field(default=3e-3, gt=0, le=1)
    """Peak of the inner learning rate."""

    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """As in a manifest."""

    warmup_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Of the run, in which the learning rate rises."""

    final_learning_rate_fraction: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end as a fraction of the peak."""

    curve_sequences: int = Field(default=128, ge=1)
    """Held-out sequences that a point of the curve is measured on; the last one on all."""

    @property
    def tokens_per_step(self) -> int:
        """Of one inner step."""
        return self.sequence_length * self.sequences_per_step

    @property
    def parameters(self) -> int:
        """Weights of the model: embedding, blocks and norms."""
        attention, feed_forward = 4 * self.hidden_size, 3 * self.intermediate_size
        block = self.hidden_size * (attention + feed_forward + 2)
        return BYTE_VOCABULARY * self.hidden_size + self.layers * block + self.hidden_size


class Freeze(Section):
    """A pause in which a machine sleeps."""

    at_s: float = Field(ge=0)
    """When it falls asleep."""

    for_s: float = Field(gt=0)
    """For how long."""


class Group(Section):
    """Peers that are alike."""

    name: GroupName | None = None
    """What the report calls the group; peers-1, peers-2, … where it has none."""

    count: int = Field(ge=1, le=MAX_PEERS)
    """How many."""

    step_s: float = Field(gt=0, le=1e6)
    """Seconds of an inner step."""

    step_jitter: float = Field(default=0.0, ge=0, lt=1)
    """Each step takes between 1 - this and 1 + this times step_s."""

    up_mbit_s: float | None = Field(default=None, gt=0)
    """Upstream of its access line in Mbit/s; unlimited if left out."""

    down_mbit_s: float | None = Field(default=None, gt=0)
    """Downstream in Mbit/s; unlimited if left out."""

    latency_s: float = Field(default=0.02, ge=0, le=60)
    """One way to the middle of the network; two peers' latencies add up."""

    loss: float = Field(default=0.0, ge=0, lt=1)
    """Share of its swaps whose connection breaks by its fault."""

    arrives_at_s: float = Field(default=0.0, ge=0)
    """When the first of them starts."""

    arrives_over_s: float = Field(default=0.0, ge=0)
    """The others start at random times within so many seconds of it."""

    leaves_at_s: float | None = Field(default=None, gt=0)
    """When they go; without it they stay to the end."""

    stays_s: float | None = Field(default=None, gt=0)
    """Mean time after which one of them goes, at random (exponential)."""

    leaves: Literal["cleanly", "killed"] = "cleanly"
    """How they go: cleanly (it says goodbye) or killed (its links break)."""

    returns_after_s: float | None = Field(default=None, ge=0)
    """So long after one went, another like it, without any weights, comes in its place."""

    freezes: list[Freeze] = Field(default_factory=list, max_length=100)
    """When all of them sleep: nothing happens in them, and nothing passes their lines."""

    lie: Lie | None = None
    """progress (claims the run's end), garbage (sends random bytes), silent (never answers), stalling (never sends),
    nan (sends what is not finite), stale (sends its first payload for ever), or weights that are scaled, flipped
    (negated) or random."""


class Pace(Section):
    """How many inner steps each peer makes between two outer steps."""

    policy: Literal["fixed", "by_speed", "straggler", "rank"] = "fixed"
    """fixed (H for all), by_speed (slow computers fewer: outer steps take all equally long), straggler (narrow lines
    fewer: GASLoC's rule) or rank (codec.rank and H fall and rise with the rank of everybody's average: DiLoCoX's)."""


class Scenario(Section):
    """Everything that a simulation is made of."""

    run: Run
    learner: Annotated[BytesLearner | QuadraticLearner | LanguageModelLearner, Field(discriminator="kind")]
    outer: Outer
    codec: Codec
    swarm: Swarm = Swarm(catch_up_outer_steps=20, final_disagreement=0.02, final_gossip_s=60.0)
    pace: Pace = Pace()
    peers: list[Group] = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        faults = [*_run_faults(self), *_learner_faults(self), *_outer_faults(self), *_peer_faults(self)]
        faults += _rank_faults(self)
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def tokens_per_outer_step(self) -> int:
        """H inner steps' tokens."""
        return self.outer.inner_steps * self.learner.tokens_per_step

    @property
    def tokens_per_peer(self) -> int:
        """The run's end."""
        if self.run.tokens_per_peer is not None:
            return self.run.tokens_per_peer
        return (self.run.outer_steps or 0) * self.tokens_per_outer_step

    @property
    def needs_everybody(self) -> bool:
        """Whether an average is over all peers at once: then they go in lockstep, without a protocol."""
        outer = self.outer
        return outer.recipe in NEEDS_EVERYBODY and (outer.recipe, outer.topology) != ("diloco", "complete")

    @property
    def total_peers(self) -> int:
        """Those that come in others' places not counted."""
        return sum(group.count for group in self.peers)

    def named(self) -> list[tuple[str, Group]]:
        """The groups and what they are called."""
        return [(group.name or f"peers-{place}", group) for place, group in enumerate(self.peers, start=1)]


def _run_faults(scenario: Scenario) -> list[str]:
    run = scenario.run
    if (run.outer_steps is None) == (run.tokens_per_peer is None):
        return ["run.outer_steps: give either outer_steps or tokens_per_peer, the run's end"]
    if scenario.tokens_per_peer < scenario.tokens_per_outer_step:
        return [
            f"run.tokens_per_peer: {run.tokens_per_peer} ends the run before its first outer step, which takes "
            f"{scenario.tokens_per_outer_step} tokens"
        ]
    return []


def _learner_faults(scenario: Scenario) -> list[str]:
    learner = scenario.learner
    if isinstance(learner, LanguageModelLearner) and learner.hidden_size % (2 * learner.heads):
        return [f"learner.heads: {learner.heads} heads of even width do not make up hidden_size, {learner.hidden_size}"]
    if isinstance(learner, QuadraticLearner):
        if learner.smallest_curvature > learner.largest_curvature:
            return [
                f"learner.smallest_curvature: {learner.smallest_curvature} exceeds learner.largest_curvature, "
                f"{learner.largest_curvature}"
            ]
        if learner.learning_rate * learner.largest_curvature >= 2:
            return [
                f"learner.learning_rate: {learner.learning_rate} diverges; with learner.largest_curvature "
                f"{learner.largest_curvature} it must be below {2 / learner.largest_curvature:g}"
            ]
    return []


def _outer_faults(scenario: Scenario) -> list[str]:
    outer, codec, faults = scenario.outer, scenario.codec, scenario.outer.recipe_faults()
    if scenario.needs_everybody:
        faults += _collective_faults(scenario)
    if outer.topology == "random" and outer.partners >= scenario.total_peers:
        faults.append(
            f"outer.partners: {outer.partners}, and there are only {scenario.total_peers - 1} others to meet at once"
        )
    if outer.fragments_per_exchange > outer.fragments:
        faults.append(
            f"outer.fragments_per_exchange: {outer.fragments_per_exchange} exceeds outer.fragments, {outer.fragments}"
        )
    most = max(1, math.ceil(scenario.learner.parameters / FRAGMENT_ALIGNMENT))
    if outer.fragments > most:
        faults.append(f"outer.fragments: {outer.fragments} is too many for this model; at most {most}")
    if FRAGMENT_ALIGNMENT % codec.block_size:
        faults.append(f"codec.block_size: {codec.block_size} does not divide {FRAGMENT_ALIGNMENT}")
    return faults


def _collective_faults(scenario: Scenario) -> list[str]:
    """What a simulation in lockstep does not have."""
    recipe, faults = scenario.outer.recipe, []
    if RECIPES[recipe].weights_mix is not None and scenario.codec.name.startswith("modular"):
        faults.append(
            f"codec.name: {scenario.codec.name} has a meaning between two peers only, and recipe {recipe} averages over"
            " all; take fp32, bf16, fp16, int8 or int4"
        )
    if scenario.learner.kind == "bytes":
        faults.append(f"learner.kind: bytes counts messages, and recipe {recipe} sends none; take quadratic or lm")
    if scenario.outer.fragments > 1 and recipe != "streaming_diloco":
        faults.append(f"outer.fragments: {scenario.outer.fragments}, and recipe {recipe} averages everything; set 1")
    if recipe == "streaming_diloco" and scenario.outer.fragments > scenario.outer.inner_steps:
        faults.append(
            f"outer.fragments: {scenario.outer.fragments}, and recipe {recipe} sends at most one after each of its"
            f" {scenario.outer.inner_steps} inner steps; some would never be sent"
        )
    for place, group in enumerate(scenario.peers):
        changes = group.leaves_at_s, group.stays_s, group.lie, group.arrives_at_s or None, *group.freezes
        if any(change is not None for change in changes):
            faults.append(
                f"peers[{place}]: recipe {recipe} averages over everybody, who must come, stay and be honest; for"
                " failures there is run.failed_exchanges"
            )
    if scenario.pace.policy not in ("fixed", "rank"):
        faults.append(f"pace.policy: {scenario.pace.policy}, and recipe {recipe} has everybody make as many steps")
    return faults


def _rank_faults(scenario: Scenario) -> list[str]:
    """What policy rank needs."""
    if scenario.pace.policy != "rank":
        return []
    recipe, faults = RECIPES.get(scenario.outer.recipe), []
    mix = recipe.mix("pseudo_gradient") if recipe is not None else None
    everybody = scenario.needs_everybody and mix is not None and mix.who == "all"
    if recipe is not None and (not everybody or recipe.every_step or recipe.delay == "inner_steps"):
        faults.append(
            f"pace.policy: rank, and recipe {recipe.name} has no average of everybody's whole pseudo-gradients between"
            " inner phases; set it to fixed, or take a recipe that has, as dilocox"
        )
    if scenario.codec.gradients != "lowrank":
        faults.append(
            f"codec.gradients: {scenario.codec.gradients} has no rank, and pace.policy is rank; set it to lowrank, or"
            " pace.policy to fixed"
        )
    return faults


def _peer_faults(scenario: Scenario) -> list[str]:
    faults = []
    names = [name for name, _ in scenario.named()]
    faults += [f"peers[{place}].name: {name} is taken" for place, name in enumerate(names) if name in names[:place]]
    if scenario.total_peers > MAX_PEERS:
        faults.append(f"peers: {scenario.total_peers:,} in all, and at most {MAX_PEERS:,} are allowed")
    if all(group.lie for group in scenario.peers):
        faults.append("peers: all of them lie; at least one group must be honest")
    for place, group in enumerate(scenario.peers):
        if scenario.learner.kind == "bytes" and group.lie in NEED_WEIGHTS:
            faults.append(f"peers[{place}].lie: {group.lie} is said with weights, and learner.kind is bytes")
        if group.leaves_at_s is not None and group.leaves_at_s <= group.arrives_at_s:
            faults.append(
                f"peers[{place}].leaves_at_s: {group.leaves_at_s} is not after arrives_at_s, {group.arrives_at_s}"
            )
        if group.leaves_at_s is not None and group.stays_s is not None:
            faults.append(f"peers[{place}].stays_s: give either leaves_at_s or stays_s")
        if group.returns_after_s is not None and group.leaves_at_s is None and group.stays_s is None:
            faults.append(f"peers[{place}].returns_after_s: nobody leaves; give leaves_at_s or stays_s")
        asleep = sorted((freeze.at_s, freeze.at_s + freeze.for_s) for freeze in group.freezes)
        if any(begin < end for (_, end), (begin, _) in pairwise(asleep)):
            faults.append(f"peers[{place}].freezes: they overlap")
    return faults
