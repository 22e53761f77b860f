"""Pipeline stages of a model: contiguous runs of its blocks, one for each rank.

A stage is the class of transformers with its list of blocks cut. The first stage has the embeddings, the last the final
norm and the output layer; a stage after the first takes activations as ``inputs_embeds``. Parameters keep their names,
and transformers lists them in the order in which they compute, so the flat vectors of the stages, end to end, are the
flat vector of the whole model.

With tied embeddings the last stage holds a guest: a copy of the input embedding outside its flat vector. Its gradient
is added to the original's in every inner step, and its values are copied anew before.

Dimension letters: D width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module

from p2ptrain.outer.flat import FlatLayout, flatten_module
from p2ptrain.train.memory import STATE_BYTES, layer_values, loss_bytes
from p2ptrain.train.model import FlatModel, build_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from p2ptrain.manifest import Decoder
    from p2ptrain.train.autofit import Placement

GUEST_BYTES = 8
"""Bytes of a parameter of a tied embedding's copy on its device: weight and gradient."""


@dataclass(frozen=True, slots=True)
class StageRange:
    """Position of one stage in the pipeline, and its blocks."""

    index: int
    count: int
    blocks: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class StageModel:
    """One stage of a model, its parameters views of a flat vector of its own."""

    flat: FlatModel
    stage: StageRange
    whole: FlatLayout
    """Layout of the whole model."""
    guest: Tensor | None
    """Copy of the input embedding, [V, D], on the last of several stages if embeddings are tied."""

    @property
    def is_tied(self) -> bool:
        """Whether the first and the last stage share the embedding."""
        config = self.flat.module.config
        return self.stage.count > 1 and bool(config.tie_word_embeddings)

    @property
    def embedding(self) -> Tensor:
        """Input embedding [V, D], on the first stage alone."""
        return _weight(self.flat.module.get_input_embeddings())

    @property
    def output(self) -> Tensor:
        """Weight of the output layer, [V, D], on the last stage alone."""
        return _weight(self.flat.module.get_output_embeddings()) if self.guest is None else self.guest

    @property
    def offset(self) -> int:
        """Elements of the whole flat vector before this stage's."""
        return self.whole.offsets[self.first_parameter]

    @property
    def first_parameter(self) -> int:
        """Number of parameters before this stage's."""
        return self.whole.names.index(self.flat.layout.names[0])


def _weight(part: Any) -> Tensor:
    weight: Tensor = part.weight
    return weight


def stage_model(description: Decoder, seed: int, device: torch.device, stage: StageRange) -> StageModel:
    """Build one stage of the run's model with its part of the initial weights on ``device``.

    The initial weights are one stream of random numbers, so all are drawn, 4 bytes a parameter, and those of other
    stages are dropped: the training of a quarter of the model takes as much.
    """
    module = build_module(description, seed)
    whole = FlatLayout.of(module)
    guest = _prune(module, stage)
    if guest is not None:
        guest = guest.to(device).requires_grad_()
    Module.to(module, device)
    layout = FlatLayout.of(module)
    return StageModel(FlatModel(module, flatten_module(module), layout), stage, whole, guest)


class _BaseParts(NamedTuple):
    """Attributes of a base model in transformers."""

    embedding: str
    positions: str | None  # learned position embedding
    blocks: str
    norm: str

    @classmethod
    def of(cls, base: Module) -> _BaseParts:
        """Find them by their kinds: embeddings, the list of blocks, and what has weights after it."""
        parts = dict(base.named_children())
        blocks = next(name for name, part in parts.items() if isinstance(part, nn.ModuleList))
        embeddings = [name for name, part in parts.items() if isinstance(part, nn.Embedding)]
        weighty = [name for name, part in parts.items() if next(part.parameters(), None) is not None]
        (norm,) = set(weighty) - {blocks, *embeddings}
        return cls(embeddings[0], embeddings[1] if len(embeddings) > 1 else None, blocks, norm)


class _NoPositions(nn.Module):
    """Position embedding of a stage after the first, whose input has the positions in it."""

    def forward(self, positions: Tensor) -> Tensor:
        """Return negative zero, which changes no number that it is added to, not even the sign of a zero."""
        return torch.full((), -0.0, device=positions.device)


def _prune(module: PreTrainedModel, stage: StageRange) -> Tensor | None:
    """Remove what other stages hold; return a copy of the tied embedding on the last of several stages, or None."""
    base: Any = module.base_model
    names = _BaseParts.of(base)
    holds_guest = stage.is_last and not stage.is_first and module.config.tie_word_embeddings
    guest = _weight(module.get_input_embeddings()).detach().clone() if holds_guest else None
    blocks = nn.ModuleList()
    for index in stage.blocks:
        blocks.add_module(str(index), getattr(base, names.blocks)[index])  # keeps its name
    setattr(base, names.blocks, blocks)
    _cut_layer_types(base, stage)
    if not stage.is_first:
        setattr(base, names.embedding, None)
        if names.positions is not None:
            setattr(base, names.positions, _NoPositions())
    if not stage.is_last:
        setattr(base, names.norm, nn.Identity())
    if not stage.is_last or holds_guest:
        module.set_output_embeddings(None)
    return guest


def _cut_layer_types(base: Any, stage: StageRange) -> None:
    """Keep the attention types of the stage's blocks, which the base model looks up by position in its list."""
    if getattr(base.config, "layer_types", None) is not None:
        base.config = copy.copy(base.config)
        base.config.layer_types = [base.config.layer_types[index] for index in stage.blocks]


# --- where to cut -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs of the units of a model: the embeddings, each block, and the final norm with the output layer."""

    seconds: Sequence[Sequence[float]]
    """Seconds of a micro-batch, forward and backward, for each device and unit."""
    state_bytes: Sequence[int]
    """Bytes of weights, gradient and moments of each unit."""
    activation_bytes: Sequence[int]
    """Bytes that each unit keeps of one micro-batch for the backward pass."""


def unit_costs(
    description: Decoder,
    sequence_length: int,
    placement: Placement,
    seconds: Sequence[float],  # ``autofit.block_s`` of each device
) -> UnitCosts:
    """Return the costs of the embeddings, each block, and the final norm with the output layer.

    Blocks take time as the numbers of weights that a token is multiplied by. The estimate of bytes is for several
    stages, and for activations in fp32.
    """
    config = description.config
    table = config.vocab_size * config.hidden_size
    output = STATE_BYTES * description.norm_parameters()
    output += (GUEST_BYTES if config.tie_word_embeddings else STATE_BYTES) * table
    blocks = config.num_hidden_layers
    state = [
        STATE_BYTES * (table + description.position_parameters()),
        *[STATE_BYTES * description.block_parameters()] * blocks,
        output,
    ]
    tokens = placement.micro_batch * sequence_length
    kept = 4 * tokens * (config.hidden_size if placement.recomputes else layer_values(description, sequence_length))
    work = [0, *[description.block_parameters()] * blocks, table]
    times = [[each * own / (work[1] + table) for own in work] for each in seconds]
    return UnitCosts(times, state, [0, *[kept] * blocks, loss_bytes(description, tokens)])


def slowest_stage_s(costs: UnitCosts, stages: Sequence[StageRange]) -> float:
    """Return the seconds of the slowest stage for one micro-batch."""
    return max(
        sum(costs.seconds[each.index][each.blocks.start + (not each.is_first) : each.blocks.stop + 1 + each.is_last])
        for each in stages
    )


def balanced_cut(
    costs: UnitCosts,
    limits_bytes: Sequence[int | None],  # of each device, in the order of the stages; None: no limit
    micro_batches: int,  # of an inner step
) -> tuple[StageRange, ...] | None:
    """Cut so that the slowest stage is as fast as possible and each fits its device; None if no cut fits.

    Each stage has at least one block. Of equally good cuts it takes one whose stages take little time in all. In 1F1B
    (Narayanan et al., arXiv 2104.04473) a stage keeps the activations of at most as many micro-batches as stages
    follow it, and of its own.

    A dynamic program over the cuts, O(S L^2) for L blocks: the best cut of a prefix into s stages is the best over the
    start of the last one.
    """
    count, blocks = len(limits_bytes), len(costs.state_bytes) - 2
    if not 1 <= count <= blocks:
        return None
    best: list[dict[int, tuple[tuple[float, float], list[int]]]] = [{0: ((0.0, 0.0), [0])}]
    for index, limit in enumerate(limits_bytes):
        kept = min(micro_batches, count - index)
        sizes = [state + kept * own for state, own in zip(costs.state_bytes, costs.activation_bytes, strict=True)]
        needs, takes = _sums(sizes), _sums(costs.seconds[index])
        ends: Sequence[int] = [blocks]
        if index < count - 1:
            ends = range(index + 1, blocks - (count - index - 1) + 1)
        found: dict[int, tuple[tuple[float, float], list[int]]] = {}
        for end in ends:
            options = []
            for begin, ((slowest, total), cuts) in best[-1].items():
                units = slice(begin + (begin > 0), end + 1 + (end == blocks))  # unit 0 precedes the blocks
                if begin >= end or (limit is not None and needs[units.stop] - needs[units.start] > limit):
                    continue
                own = takes[units.stop] - takes[units.start]
                options.append(((max(slowest, own), total + own), [*cuts, end]))
            if options:
                found[end] = min(options)
        best.append(found)
    return _stages(best[-1][blocks][1]) if blocks in best[-1] else None


def least_limit(limits_bytes: Sequence[int | None]) -> int | None:
    """Return the least of some devices' memory limits; None: no limit."""
    return min((limit for limit in limits_bytes if limit is not None), default=None)


def _sums(values: Sequence[float]) -> list[float]:
    """Return the sums of all prefixes, that of nothing first."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _stages(cuts: Sequence[int]) -> tuple[StageRange, ...]:
    count = len(cuts) - 1
    return tuple(StageRange(index, count, range(*run)) for index, run in enumerate(pairwise(cuts)))


def divisors_down(number: int) -> Iterator[int]:
    """Yield the divisors of a positive number, the largest first."""
    return (each for each in range(number, 0, -1) if number % each == 0)


def fitting_micro_batch(sequences: int, at_most: int, stages: int) -> int | None:
    """Return the largest micro-batch up to ``at_most`` that divides the step into at least as many as stages.

    All micro-batches of a pipeline have one shape, and 1F1B needs as many as stages. None if there are fewer sequences
    than stages.
    """
    fitting = (each for each in divisors_down(sequences) if each <= at_most and sequences // each >= stages)
    return next(fitting, None)
