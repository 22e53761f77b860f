"""Recipes as data: the known ways of training together, one of which a run follows.

Every method of the DiLoCo family answers six questions, and a recipe is a set of answers::

    WHAT    is mixed between peers                       Mix.stream
    WHEN    relative to the inner phase                  Mix.when, Recipe.delay
    WHO     with whom                                    Mix.who ; the manifest's outer.topology and outer.partners
    OUTER   how an inner phase enters the slow weights   Recipe.outer
    CODEC   in what form weights travel                  the manifest's codec section
    H       how many inner steps between outer steps     the manifest's outer.inner_steps

The last two are numbers of a run and live in its manifest, as do the outer learning rate and momentum.
``docs/ALGORITHMS.md`` has each recipe as a formula; ``docs/RESULTS.md`` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Stream = Literal["slow", "fast", "pseudo_gradient"]
"""Tensors that peers average: the slow weights x, the fast weights theta in the middle of a phase, or the
pseudo-gradients g. Momentum buffers are never exchanged."""

When = Literal["overlapped", "blocking"]
"""Time of an average. Overlapped: during the inner steps. Blocking: between inner phases, while the trainer waits."""

Who = Literal["random", "planned", "all"]
"""Partners of an average. Random: one live idle peer, drawn for every exchange. Planned: the partners that the run's
topology names for this outer step, consistent on both sides. All: the exact mean over all peers."""

OuterForm = Literal["hand_over", "momentum", "consensus", "y_form", "z_form"]
"""Form of the outer step. Hand-over: x becomes theta itself, never subtracted. Momentum: SGD with heavy-ball or
Nesterov momentum on g. Consensus: heavy ball, and the pull towards the partner enters through the buffer. y-form and
z-form: a plain step, mixing, then momentum on the iterates before (y) or after (z) mixing."""

Delay = Literal["none", "phase", "phase_own_fresh", "inner_steps"]
"""Delay of an average of pseudo-gradients: none; one phase; one phase, but the own share fresh; some inner steps, one
fragment after the other."""


@dataclass(frozen=True, slots=True)
class Mix:
    """One average between peers."""

    stream: Stream
    when: When
    who: Who
    share: float = 1.0
    """Share of the parameters that it covers: the first ones of the flat vector, in whole fragments."""

    def fragments(self, count: int) -> range:
        """Return the fragments that it covers, of ``count`` in total."""
        return range(math.ceil(self.share * count))


@dataclass(frozen=True, slots=True)
class Recipe:
    """One set of answers; pure data, interpreted by the trainer, the protocol core and the simulator."""

    name: str
    mixes: tuple[Mix, ...]
    """Averages that peers take; empty: peers train alone."""

    outer: OuterForm
    source: str
    summary: str
    delay: Delay = "none"

    every_step: bool = False
    """Whether peers mix after each inner step; then H must be 1."""

    gradients: bool = False
    """Whether the gradients themselves are averaged before the inner optimizer sees them: one large batch."""

    follow: float = 1.0
    """Share of a displacement by which x moves at once; theta moves by all of it. The rest enters with this phase's
    pseudo-gradient, as if its own steps had made it."""

    feedback: bool = False
    """Whether the outer momentum is the decay of error feedback; then no outer momentum buffer exists."""

    @property
    def exchanges(self) -> bool:
        return bool(self.mixes)

    @property
    def blocks(self) -> bool:
        """Whether the trainer waits for partners between two inner phases."""
        return bool(self.blocking)

    @property
    def blocking(self) -> tuple[Stream, ...]:
        """Streams that are mixed while the trainer waits."""
        return tuple(mix.stream for mix in self.mixes if mix.when == "blocking")

    @property
    def uses_late_gradients(self) -> bool:
        """Whether a peer steps by the pseudo-gradient of the phase before, mixed with partners' since."""
        return self.delay == "phase" and not self.is_collective

    @property
    def mixes_before_step(self) -> bool:
        """Whether the trainer waits before the outer step, which needs the mixed pseudo-gradient, or after it."""
        return "pseudo_gradient" in self.blocking

    @property
    def is_random(self) -> bool:
        """Whether peers choose random partners themselves, at any time."""
        return any(mix.who == "random" for mix in self.mixes)

    @property
    def can_be_kept(self) -> bool:
        """Whether any two peers mix any fragment of the weights, and nothing else, at any time: keepers need that."""
        return [(mix.who, mix.share) for mix in self.mixes] == [("random", 1.0)] and self.weights_mix is not None

    @property
    def is_collective(self) -> bool:
        """Whether some average covers all peers at once: such recipes are simulated, never gossiped."""
        return self.gradients or any(mix.who == "all" for mix in self.mixes)

    @property
    def weights_mix(self) -> Mix | None:
        """Mix of the weights, slow or fast (never both); None if they are not mixed."""
        return self.mix("slow") or self.mix("fast")

    def mixes_at_any_time(self, stream: Stream) -> bool:
        """Report whether peers exchange this stream with random partners, at any time."""
        mix = self.mix(stream)
        return mix is not None and mix.who == "random"

    def mix(self, stream: Stream) -> Mix | None:
        """Return the mix of this stream; None if it is not mixed."""
        return next((mix for mix in self.mixes if mix.stream == stream), None)


_OVERLAPPED_RANDOM = Mix("slow", "overlapped", "random")
_WHO: Mapping[str, Who | None] = {"none": None, "local": "planned", "global": "all"}


def _factored(mix1: str, mix2: str, share: float = 1.0) -> Recipe:
    mixes = []
    if (who := _WHO[mix1]) is not None:
        mixes.append(Mix("slow", "overlapped", who))
    if (who := _WHO[mix2]) is not None:
        mixes.append(Mix("pseudo_gradient", "blocking", who, share))
    name = "factored_gossip" if (mix1, mix2) == ("local", "local") else f"factored_gossip_{mix1}_{mix2}"
    return Recipe(
        name=name if share == 1 else f"{name}_half",
        mixes=tuple(mixes),
        outer="momentum",
        source="Factored Gossip DiLoCo, arXiv 2606.22768; the algebra is our interpretation",
        summary=f"Mix1 of the slow weights ({mix1}) hidden under the inner phase, Mix2 of the pseudo-gradients ({mix2})"
        f"{'' if share == 1 else ' of half of the parameters'} before the outer step.",
    )


_ALL = (
    Recipe(
        name="local",
        mixes=(),
        outer="hand_over",
        source="AdamW, arXiv 1711.05101",
        summary="Plain training on one machine, bit for bit: the reference that a swarm has to beat.",
    ),
    Recipe(
        name="ddp",
        mixes=(Mix("pseudo_gradient", "blocking", "all"),),
        outer="hand_over",
        source="data parallel training",
        summary="All peers' gradients are averaged before every inner step: one large batch.",
        every_step=True,
        gradients=True,
    ),
    Recipe(
        name="dpsgd",
        mixes=(Mix("slow", "blocking", "planned"),),
        outer="hand_over",
        source="D-PSGD, arXiv 1705.09056",
        summary="The weights are averaged with the topology's neighbours after every inner step.",
        every_step=True,
    ),
    Recipe(
        name="ad_psgd",
        mixes=(_OVERLAPPED_RANDOM,),
        outer="hand_over",
        source="AD-PSGD, arXiv 1710.06952",
        summary="After every inner step the weights are averaged in the background with one random peer.",
        every_step=True,
    ),
    Recipe(
        name="diloco",
        mixes=(Mix("pseudo_gradient", "blocking", "all"),),
        outer="momentum",
        source="DiLoCo, arXiv 2311.08105, algorithm 1",
        summary="All peers' pseudo-gradients are averaged, and all peers take the same outer Nesterov step.",
    ),
    Recipe(
        name="streaming_diloco",
        mixes=(Mix("pseudo_gradient", "overlapped", "all"),),
        outer="momentum",
        delay="inner_steps",
        source="Streaming DiLoCo, arXiv 2501.18512",
        summary="DiLoCo one fragment after the other, each average arriving a few inner steps late.",
    ),
    Recipe(
        name="eager_diloco",
        mixes=(Mix("pseudo_gradient", "overlapped", "all"),),
        outer="momentum",
        delay="phase_own_fresh",
        source="Eager Updates for Overlapped Communication in DiLoCo, arXiv 2502.12996",
        summary="DiLoCo with the other peers' share of the average one phase old and the own share fresh.",
    ),
    Recipe(
        name="noloco",
        mixes=(Mix("slow", "blocking", "planned"), Mix("pseudo_gradient", "blocking", "planned")),
        outer="consensus",
        source="NoLoCo, arXiv 2506.10911, equations 2 and 3",
        summary="Weights and pseudo-gradients are averaged in pairs; the pull towards the partner enters the momentum.",
    ),
    Recipe(
        name="gasloc",
        mixes=(Mix("slow", "blocking", "planned"),),
        outer="momentum",
        source="GASLoC, arXiv 2606.11081; without acceleration the momentum is 0",
        summary="A local outer step; then the trainer waits only for its partners and averages with them.",
    ),
    Recipe(
        name="gasloc_y",
        mixes=(Mix("slow", "blocking", "planned"),),
        outer="y_form",
        source="GASLoC, arXiv 2606.11081, accelerated, read as momentum on the iterates before mixing",
        summary="GASLoC with momentum on the iterates before mixing.",
    ),
    Recipe(
        name="gasloc_z",
        mixes=(Mix("slow", "blocking", "planned"),),
        outer="z_form",
        source="GASLoC, arXiv 2606.11081, accelerated, read as momentum on the iterates after mixing",
        summary="GASLoC with momentum on the iterates after mixing.",
    ),
    *(_factored(mix1, mix2) for mix1 in _WHO for mix2 in _WHO if (mix1, mix2) != ("none", "none")),
    _factored("local", "local", 0.5),
    Recipe(
        name="dilocox",
        mixes=(_OVERLAPPED_RANDOM, Mix("pseudo_gradient", "overlapped", "random")),
        outer="momentum",
        delay="phase",
        source="DiLoCoX, arXiv 2506.21263, with random partners in place of its average of all",
        summary="Compressed pseudo-gradients, averaged with random peers during the next phase and used one phase late;"
        " slow weights are averaged beside them.",
    ),
    Recipe(
        name="dilocox_global",
        mixes=(Mix("pseudo_gradient", "overlapped", "all"),),
        outer="momentum",
        delay="phase",
        source="DiLoCoX, arXiv 2506.21263",
        summary="Compressed pseudo-gradients of all peers, averaged during the next phase and used one phase late.",
    ),
    Recipe(
        name="sparseloco",
        mixes=(Mix("pseudo_gradient", "blocking", "all"),),
        outer="momentum",
        feedback=True,
        source="SparseLoCo, arXiv 2508.15706",
        summary="Each peer sends the largest entries of its error feedback; the plain mean of these is the step.",
    ),
    Recipe(
        name="swarm",
        mixes=(Mix("fast", "overlapped", "random"),),
        outer="momentum",
        follow=0.25,
        source="p2ptrain",
        summary="Asynchronous pairwise averaging of the fast weights with random live peers, and local outer steps.",
    ),
    Recipe(
        name="swarm_slow",
        mixes=(_OVERLAPPED_RANDOM,),
        outer="momentum",
        source="p2ptrain",
        summary="A local outer step, then asynchronous pairwise averaging of the slow weights with random live peers.",
    ),
    Recipe(
        name="swarm_gradients",
        mixes=(Mix("pseudo_gradient", "overlapped", "random"),),
        outer="momentum",
        source="p2ptrain",
        summary="A local outer step, corrected by random peers' pseudo-gradients as they arrive.",
    ),
    Recipe(
        name="swarm_both",
        mixes=(_OVERLAPPED_RANDOM, Mix("pseudo_gradient", "overlapped", "random")),
        outer="momentum",
        source="p2ptrain",
        summary="Recipe swarm_slow with a second stream: random peers' pseudo-gradients correct the outer step.",
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
