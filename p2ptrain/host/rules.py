"""Manifest sections translated to the rules of the learner and of the protocol core, for peer and simulator alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2ptrain import codec, manifest
from p2ptrain.base.ids import RunId
from p2ptrain.codec import Codec, Matrices
from p2ptrain.manifest import OuterSection, SwarmSection
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.outer.fragments import layer_slices, slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES, Mix, Recipe
from p2ptrain.swarm import SwarmRules


class Sizes(Protocol):
    @property
    def streams(self) -> int: ...

    def encoded_sizes(self, fragments: Sequence[int]) -> list[int]: ...

    def weight_sizes(self) -> list[int]: ...

    @property
    def are_zero(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class LearnerRules:
    """Manifest's rules for one outer step."""

    inner_steps: int
    run_tokens: float
    """Progress at which training ends, after the outer step that reaches it."""
    outer: OuterRule
    """Outer rule; recipes that hand over theta do not read it."""
    recipe: Recipe = RECIPES["swarm"]
    exchanges_per_step: int = 1
    """Exchanges that a peer initiates per outer step."""

    @property
    def due(self) -> tuple[int, ...]:
        """Inner steps of a phase after which an exchange falls due; empty: all exchanges follow the outer step.

        Fast weights are mixed in the middle of equal parts of the phase, never at its end: right after an outer step
        they equal the slow ones, and there is nothing of this phase to average. A phase of one step has only its end.
        """
        if self.recipe.mix("fast") is None:
            return ()
        parts = 2 * self.exchanges_per_step
        last = max(self.inner_steps - 1, 1)
        return tuple(min(-(-place * self.inner_steps // parts), last) for place in range(1, parts, 2))


def learner_rules(outer: OuterSection, run_tokens: float) -> LearnerRules:
    """Return the rules of the learner: H, the end, the recipe and its numbers."""
    recipe = RECIPES[outer.recipe]
    momentum = 0.0 if recipe.feedback else outer.momentum
    rule = OuterRule(outer.learning_rate, momentum, outer.nesterov)
    return LearnerRules(outer.inner_steps, run_tokens, rule, recipe, outer.exchanges_per_step)


def codecs_of(section: manifest.CodecSection) -> tuple[Codec, Codec]:
    weights = codec.get(section.name, section.block_size)
    return weights, codec.get_decodable(section.gradients, section.block_size, section.rank, section.adaptive)


def fragments_of(outer: OuterSection, layout: FlatLayout) -> tuple[slice, ...]:
    """Return the fragments of a model, slices of [0, P): a function of the manifest alone, so equal on all peers.

    Raises ManifestError if the model cannot be cut into as many.
    """
    if outer.cut == "layers":
        return layer_slices(layout.unit_lengths, outer.fragments)
    return slices(layout.total, outer.fragments)


def matrices_of(layout: FlatLayout, fragments: Sequence[slice]) -> tuple[Matrices, ...]:
    """Return the matrices in each fragment of a model: a function of the manifest alone, so equal on all peers."""
    return tuple(codec.matrices(layout.shapes, layout.offsets, piece.start, piece.stop) for piece in fragments)


def swarm_rules(
    run: RunId,
    outer: OuterSection,
    swarm: SwarmSection,
    payloads: Sizes,
    run_tokens: float,
    tokens_per_outer_step: float,
) -> SwarmRules:
    """Return the rules of the protocol core: sizes, and which fragments are exchanged when and with whom."""
    recipe = RECIPES[outer.recipe]
    pieces = outer.fragments * payloads.streams

    def numbers(chosen: Callable[[Mix], bool]) -> tuple[int, ...]:
        begins = {"slow": 0, "fast": 0, "pseudo_gradient": outer.fragments}
        mixes = [mix for mix in recipe.mixes if chosen(mix)]
        return tuple(begins[mix.stream] + each for mix in mixes for each in mix.fragments(outer.fragments))

    return SwarmRules(
        run=run,
        fragment_bytes=tuple(payloads.encoded_sizes(range(pieces))),
        weights_bytes=sum(payloads.weight_sizes()),
        run_tokens=run_tokens,
        tokens_per_outer_step=tokens_per_outer_step,
        exchanges_per_step=outer.exchanges_per_step,
        due_in_phase=recipe.mix("fast") is not None,
        fragments_per_exchange=outer.fragments_per_exchange,
        streams=payloads.streams,
        free=numbers(lambda mix: mix.who == "random"),
        beside=numbers(lambda mix: mix.who != "random" and mix.when == "overlapped"),
        between=numbers(lambda mix: mix.when == "blocking"),
        topology=outer.topology,
        partners=outer.partners,
        work_weights=outer.weights == "work",
        begins_at_zero=payloads.are_zero,
        catch_up_outer_steps=float(swarm.catch_up_outer_steps),
        final_disagreement=swarm.final_disagreement,
        final_gossip_s=swarm.final_gossip_s,
    )
