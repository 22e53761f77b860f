"""A scenario: peers, their lines, their learner, and events. One TOML file.

``sim.learning`` defines ``[learner]``. ``[outer]`` and ``[codec]`` are the manifest's own sections, so that a simulated
run can be run for real. Numbers without a source have not been measured; volunteers' computers would settle them.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from p2ptrain.base.codec_names import FRAGMENT_ALIGNMENT
from p2ptrain.manifest.schema import (
    NEEDS_EVERYBODY,
    UNREAD,
    CodecSection,
    OuterSection,
    SwarmSection,
)
from p2ptrain.manifest.section import Section
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm import keeping
from sim.learning import BytesLearner, LanguageModelLearner, QuadraticLearner

MAX_PEERS = 100_000
"""Largest number of peers; more is a typing mistake: 10,000 take 1.5 GB."""

MEGABIT = 1e6 / 8
"""Bytes per megabit."""

MAX_SECONDS = 1e9
"""Longest time, 30 years: more is a typing mistake, and adding a step to it would be rounded away."""

MAX_WEIGHTS = 4 * 10**9
"""Most weights of all peers together. About five copies are held (weights, momenta, averages): 80 GB."""

Moment = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
"""Seconds since the beginning."""

Duration = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
"""Seconds, more than 0."""

Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
"""Rate of a line in Mbit/s, from a bit to a petabit per second: beyond that, times are rounded to zero or infinity."""

GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,24}$")]
"""A name for a group of peers: 1 to 24 letters, digits, dashes."""


class RunSettings(Section):
    """Length and seed of the simulation."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of all random numbers."""

    outer_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """Outer steps of every honest peer whose tokens end the run; or give tokens."""

    tokens: int | None = Field(default=None, ge=1, le=10**15)
    """Training tokens of all peers together at which the run ends, as in a manifest; or give outer_steps."""

    seconds: Duration | None = None
    """Simulated seconds after which the simulation stops, if the run has not ended."""

    failed_exchanges: float = Field(default=0.0, ge=0, lt=1)
    """Share of all swaps whose connection breaks before the payload is through, besides the peers' own loss. If a
    recipe averages over all peers, the share of peers' parts that fail in each attempt (``sim.lockstep.averages``)."""

    split: Literal["validation", "test"] = "validation"
    """Data for held-out losses, if the learner has data: validation for tuning, test for final numbers."""

    points: int = Field(default=100, ge=1, le=1000)
    """Points of a curve in the report, evenly spaced over the run's outer steps."""


Forgery = Literal["scaled", "flipped", "random"]
"""Falsified weights in well-formed payloads: multiplied by ``adversaries.SCALE``, negated, or replaced by normally
distributed weights of equal norm."""

Lie = Literal["progress", "behind", "garbage", "silent", "stalling", "nan", "stale", "scaled", "flipped", "random"]
"""Behaviours of an adversarial peer. progress: claims to be at the run's end. behind: claims progress 0. garbage:
payloads are random bytes. silent: never answers. stalling: agrees to exchange and never sends its payload. nan:
payloads are not finite. stale: sends its first payload forever."""

NEED_WEIGHTS = ("nan", "stale", *get_args(Forgery))
"""Lies that need a learner with weights."""


class Freeze(Section):
    """A time in which a machine sleeps."""

    at_s: Moment
    """Time at which it falls asleep."""

    for_s: Duration
    """Duration of the sleep."""


class Group(Section):
    """A group of equal peers."""

    name: GroupName | None = None
    """Name of the group in the report, 1 to 24 letters, digits, dashes; peers-1, peers-2, … by default."""

    count: int = Field(ge=1, le=MAX_PEERS)
    """Number of peers."""

    step_s: float = Field(ge=1e-6, le=1e6)
    """Seconds of an inner step, from a microsecond to eleven days."""

    step_jitter: float = Field(default=0.0, ge=0, lt=1)
    """Relative spread of step times: each takes between 1 - this and 1 + this times step_s."""

    up_mbit_s: Rate | None = None
    """Upstream bandwidth of the access line in Mbit/s; unlimited if left out."""

    down_mbit_s: Rate | None = None
    """Downstream bandwidth in Mbit/s; unlimited if left out."""

    latency_s: float = Field(default=0.02, ge=0, le=60)
    """One-way latency to the middle of the network; the latencies of two peers add up."""

    loss: float = Field(default=0.0, ge=0, lt=1)
    """Share of a peer's swaps whose connection breaks because of its own line."""

    arrives_at_s: Moment = 0.0
    """Time at which the first of them starts."""

    arrives_over_s: Moment = 0.0
    """Seconds after it within which the others start, at random times."""

    leaves_at_s: Duration | None = None
    """Time at which they leave; if left out, they stay to the end."""

    stays_s: Duration | None = None
    """Mean time after which a peer leaves, at random (exponential); an inner step or more."""

    leaves: Literal["cleanly", "killed"] = "cleanly"
    """Manner of leaving: cleanly (says goodbye) or killed (links break)."""

    returns_after_s: Moment | None = None
    """Seconds after which a replacement without weights arrives for a peer that left."""

    freezes: list[Freeze] = Field(default_factory=list, max_length=100)
    """Times at which all of them sleep: nothing happens in them, and nothing passes their lines."""

    lie: Lie | None = None
    """progress (claims the run's end), behind (claims progress 0), garbage (sends random bytes), silent (never
    answers), stalling (never sends), nan (sends values that are not finite), stale (sends its first payload forever),
    or weights that are scaled, flipped (negated) or random."""

    keeps: str | None = None
    """Fragments that all of them hold as keepers, such as 0-3,7: they average others' weights and do not train."""

    @property
    def is_honest_trainer(self) -> bool:
        return self.lie is None and self.keeps is None


class InnerSteps(Section):
    """Rule for the number of inner steps per outer step."""

    policy: Literal["fixed", "by_speed", "straggler", "rank"] = "fixed"
    """fixed (H for all), by_speed (slower computers make fewer, so that outer steps take equally long), straggler
    (narrow lines make fewer: GASLoC's rule) or rank (codec.rank and H follow the average's rank: DiLoCoX's rule)."""


class Scenario(Section):
    """Complete description of a simulation."""

    run: RunSettings
    learner: Annotated[BytesLearner | QuadraticLearner | LanguageModelLearner, Field(discriminator="kind")]
    outer: OuterSection
    codec: CodecSection
    swarm: SwarmSection = SwarmSection(catch_up_outer_steps=20, final_disagreement=0.02, final_gossip_s=60.0)
    pace: InnerSteps = InnerSteps()
    peers: list[Group] = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        faults = [*_run_faults(self), *self.learner.faults(), *_outer_faults(self), *_peer_faults(self)]
        faults += _rank_faults(self)
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def tokens_per_outer_step(self) -> int:
        """Tokens of H inner steps."""
        return self.outer.inner_steps * self.learner.tokens_per_step

    @property
    def run_tokens(self) -> int:
        """Tokens of all peers at the run's end; of each one if the recipe exchanges nothing."""
        if self.run.tokens is not None:
            return self.run.tokens
        honest = sum(group.count for group in self.peers if group.is_honest_trainer)
        return (self.run.outer_steps or 0) * self.tokens_per_outer_step * (honest if self.trains_together else 1)

    @property
    def trains_together(self) -> bool:
        """Whether the tokens of all peers count towards one run; without exchanges each peer has its own."""
        recipe = RECIPES.get(self.outer.recipe)
        return recipe is None or recipe.exchanges

    @property
    def needs_everybody(self) -> bool:
        """Whether the recipe averages over all peers at once; they then step in lockstep, without a protocol."""
        outer = self.outer
        return outer.recipe in NEEDS_EVERYBODY and (outer.recipe, outer.topology) != ("diloco", "complete")

    @property
    def total_peers(self) -> int:
        """Number of peers, without replacements."""
        return sum(group.count for group in self.peers)

    def named(self) -> list[tuple[str, Group]]:
        return [(group.name or f"peers-{place}", group) for place, group in enumerate(self.peers, start=1)]


def _run_faults(scenario: Scenario) -> list[str]:
    run = scenario.run
    if (run.outer_steps is None) == (run.tokens is None):
        return ["run.outer_steps: give either outer_steps or tokens"]
    if scenario.run_tokens < scenario.tokens_per_outer_step:
        return [
            f"run.tokens: {run.tokens} ends the run before its first outer step, which takes "
            f"{scenario.tokens_per_outer_step} tokens"
        ]
    return []


def _outer_faults(scenario: Scenario) -> list[str]:
    outer, codec = scenario.outer, scenario.codec
    faults = outer.recipe_faults() + codec.recipe_faults(outer.recipe)
    if scenario.needs_everybody:
        faults += _collective_faults(scenario)
    if scenario.trains_together:
        faults += _partner_faults(scenario, told=any(fault.startswith("outer.partners: ") for fault in faults))
    if outer.fragments_per_exchange > outer.fragments:
        faults.append(
            f"outer.fragments_per_exchange: {outer.fragments_per_exchange} exceeds outer.fragments, {outer.fragments}"
        )
    most = max(1, math.ceil(scenario.learner.parameters / FRAGMENT_ALIGNMENT))
    if outer.fragments > most:
        faults.append(f"outer.fragments: {outer.fragments} is too many for this model; at most {most}")
    if FRAGMENT_ALIGNMENT % codec.block_size:
        faults.append(f"codec.block_size: {codec.block_size} does not divide {FRAGMENT_ALIGNMENT}")
    if outer.cut == "layers" and scenario.learner.kind != "lm":
        faults.append(f"outer.cut: layers, but learner.kind {scenario.learner.kind} has none; use even, or kind lm")
    return faults


def _partner_faults(scenario: Scenario, told: bool) -> list[str]:
    """List whether peers lack partners; ``told`` suppresses a second line about their number."""
    others = scenario.total_peers - 1
    if others == 0:
        return [
            "peers: a single peer has no partners; give a count of 2 or another group, or set outer.recipe to local"
        ]
    if scenario.outer.partners > others and not told:
        return [f"outer.partners: {scenario.outer.partners} is too many for {scenario.total_peers} peers"]
    return []


def _collective_faults(scenario: Scenario) -> list[str]:
    """List what a simulation in lockstep does not support."""
    recipe, faults = scenario.outer.recipe, []
    mixes_weights = RECIPES[recipe].weights_mix is not None
    if not mixes_weights and scenario.codec.name not in UNREAD:
        faults.append(
            f"codec.name: {scenario.codec.name} has no effect, because recipe {recipe} averages no weights; set it to"
            " fp32 or int8, which are ignored; codec.gradients is the codec of pseudo-gradients"
        )
    if mixes_weights and scenario.codec.name.startswith("modular"):
        faults.append(
            f"codec.name: {scenario.codec.name} works between two peers only, and recipe {recipe} averages over"
            " all; use fp32, bf16, fp16, int8 or int4"
        )
    if scenario.learner.kind == "bytes":
        faults.append(f"learner.kind: bytes counts messages, and recipe {recipe} sends none; use quadratic or lm")
    if scenario.outer.fragments > 1 and recipe != "streaming_diloco":
        faults.append(
            f"outer.fragments: {scenario.outer.fragments} must be 1: recipe {recipe} averages everything at once"
        )
    if recipe == "streaming_diloco" and scenario.outer.fragments > scenario.outer.inner_steps:
        faults.append(
            f"outer.fragments: {scenario.outer.fragments} is too many: recipe {recipe} sends at most one after each of"
            f" its {scenario.outer.inner_steps} inner steps, and some would never be sent"
        )
    changing = [
        name
        for name, group in scenario.named()
        if group.freezes or group.arrives_at_s or (group.leaves_at_s, group.stays_s, group.lie) != (None, None, None)
    ]
    if changing:
        faults.append(
            f"peers: recipe {recipe} averages over all peers, which must arrive at once, stay and be honest,"
            f" unlike {', '.join(changing)}; for failures, use run.failed_exchanges"
        )
    if scenario.pace.policy not in ("fixed", "rank"):
        faults.append(f"pace.policy: {scenario.pace.policy}, but recipe {recipe} gives all peers one number of steps")
    return faults


def _rank_faults(scenario: Scenario) -> list[str]:
    """List what pace.policy rank and codec.adaptive need and lack."""
    if scenario.codec.adaptive and scenario.learner.kind == "bytes":
        return ["codec.adaptive: true, but learner.kind bytes has no weights whose rank could fall; leave it out"]
    if scenario.pace.policy != "rank":
        return []
    if scenario.outer.recipe == "dilocox":
        return ["pace.policy: rank, but the peers of recipe dilocox have ranks of their own; set codec.adaptive = true"]
    recipe, faults = RECIPES.get(scenario.outer.recipe), []
    mix = recipe.mix("pseudo_gradient") if recipe is not None else None
    everybody = scenario.needs_everybody and mix is not None and mix.who == "all"
    if recipe is not None and (not everybody or recipe.every_step or recipe.delay == "inner_steps"):
        faults.append(
            f"pace.policy: rank, but recipe {recipe.name} has no average of all peers' whole pseudo-gradients between"
            " inner phases; set it to fixed, or use a recipe with such an average, as dilocox_global"
        )
    if scenario.codec.gradients != "lowrank":
        faults.append(
            f"codec.gradients: {scenario.codec.gradients} has no rank, but pace.policy is rank; set it to lowrank, or"
            " pace.policy to fixed"
        )
    return faults


def _keeper_faults(scenario: Scenario) -> list[str]:
    faults, outer = [], scenario.outer
    for place, group in enumerate(scenario.peers):
        if group.keeps is None:
            continue
        what, recipe = f"peers[{place}].keeps", RECIPES.get(outer.recipe)
        if recipe is None or not recipe.can_be_kept or outer.topology != "random":
            faults.append(f"{what}: needs a recipe whose peers exchange weights with any partner, and topology random")
        if scenario.learner.kind == "bytes":
            faults.append(f"{what}: keepers need weights, but learner.kind is bytes")
        if group.lie is not None:
            faults.append(f"{what}: give either keeps or lie")
        try:
            held = keeping.parse(group.keeps)
        except ValueError as error:
            faults.append(f"{what}: {error}")
        else:
            if max(held) >= outer.fragments:
                faults.append(f"{what}: the last fragment is {outer.fragments - 1}")
    return faults


def _peer_faults(scenario: Scenario) -> list[str]:
    faults = []
    names = [name for name, _ in scenario.named()]
    faults += [f"peers[{place}].name: {name} is taken" for place, name in enumerate(names) if name in names[:place]]
    if scenario.total_peers > MAX_PEERS:
        faults.append(f"peers: {scenario.total_peers:,} in all, but at most {MAX_PEERS:,} are allowed")
    weights = 0 if scenario.learner.kind == "bytes" else scenario.learner.parameters * scenario.total_peers
    if weights > MAX_WEIGHTS:
        faults.append(
            f"learner: all peers together have {weights:,} weights, but at most {MAX_WEIGHTS:,} are allowed; use a"
            " smaller model, fewer peers or kind bytes"
        )
    if not any(group.is_honest_trainer for group in scenario.peers):
        faults.append("peers: every group has a lie or keeps fragments; at least one group must be honest and train")
    faults += _keeper_faults(scenario)
    for place, group in enumerate(scenario.peers):
        if scenario.learner.kind == "bytes" and group.lie in NEED_WEIGHTS:
            faults.append(f"peers[{place}].lie: {group.lie} needs weights, but learner.kind is bytes")
        if group.leaves_at_s is not None and group.leaves_at_s <= group.arrives_at_s:
            faults.append(
                f"peers[{place}].leaves_at_s: {group.leaves_at_s} is not after arrives_at_s, {group.arrives_at_s}"
            )
        if group.leaves_at_s is not None and group.stays_s is not None:
            faults.append(f"peers[{place}].stays_s: give either leaves_at_s or stays_s")
        if group.stays_s is not None and group.stays_s < group.step_s:
            faults.append(
                f"peers[{place}].stays_s: {group.stays_s} is less than an inner step, {group.step_s}; hardly any"
                " peer would complete one"
            )
        if group.returns_after_s is not None and group.leaves_at_s is None and group.stays_s is None:
            faults.append(f"peers[{place}].returns_after_s: no peer leaves; give leaves_at_s or stays_s")
        asleep = sorted((freeze.at_s, freeze.at_s + freeze.for_s) for freeze in group.freezes)
        if any(begin < end for (_, end), (begin, _) in pairwise(asleep)):
            faults.append(f"peers[{place}].freezes: two of them overlap")
    return faults
