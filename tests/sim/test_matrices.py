"""Low-rank messages use the model's matrices, in a swarm and in lockstep, and cost as much as a real peer's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from p2ptrain.base.ids import RunId
from p2ptrain.codec import CodecTerms, LowRankCodec
from p2ptrain.host.payloads import Payloads, Snapshot
from p2ptrain.host.rules import codecs_of, fragments_of, matrices_of
from p2ptrain.outer.flat import FlatLayout
from p2ptrain.outer.fragments import slices
from p2ptrain.train.model import build_module
from sim.learner_pool import swarm_rules_of
from sim.learning import LanguageModelLearner
from sim.lm.language import LanguageLearnerPool, description, make_pool
from sim.lockstep.ensemble import EnsembleSimulation, Lossy
from sim.scenario import Scenario
from sim.step_times import RankStepTimes, effective_rank

RANK = 2
OUTER: dict[str, Any] = {
    "inner_steps": 6,
    "learning_rate": 0.7,
    "momentum": 0.5,
    "nesterov": True,
    "topology": "random",
    "partners": 1,
    "weights": "equal",
    "fragments_per_exchange": 1,
}


def scenario(recipe: str, fragments: int, cut: str = "even", **changes: Any) -> Scenario:
    pairs = recipe.startswith("swarm")
    return Scenario.model_validate(
        {
            "run": {"outer_steps": 2, "points": 1},
            "learner": {"kind": "lm", "layers": 1, "curve_sequences": 4},
            "outer": OUTER | {"recipe": recipe, "fragments": fragments, "cut": cut, "exchanges_per_step": int(pairs)},
            "codec": {"name": "fp32", "block_size": 1024, "gradients": "lowrank", "rank": RANK},
            "peers": [{"count": 3, "step_s": 1.0}],
            **changes,
        }
    )


def layout(each: Scenario) -> FlatLayout:
    assert isinstance(each.learner, LanguageModelLearner)
    return FlatLayout.of(build_module(description(each.learner), each.run.seed))


def of_rank(parts: FlatLayout, rank: int) -> Tensor:
    """Return a pseudo-gradient whose matrices have this rank, and whose vectors are zero, [P]."""
    random = torch.Generator().manual_seed(0)
    vector = torch.zeros(parts.total)
    for shape, offset in zip(parts.shapes, parts.offsets, strict=True):
        if len(shape) == 2:
            factors = torch.randn(shape[0], rank, generator=random), torch.randn(rank, shape[1], generator=random)
            vector[offset : offset + math.prod(shape)] = (factors[0] @ factors[1]).view(-1)
    return vector


@pytest.mark.parametrize(("fragments", "cut"), [(1, "even"), (3, "even"), (3, "layers")])
def test_swarm_and_lockstep_send_as_much_as_a_real_peer(fragments: int, cut: str) -> None:
    swarm, everybody = scenario("swarm_both", fragments, cut), scenario("streaming_diloco", fragments, cut)
    parts = layout(swarm)
    pieces = fragments_of(swarm.outer, parts)
    assert cut == "even" or [piece.start for piece in pieces[1:2]] == [parts.unit_lengths[0]]
    slow, gradients = codecs_of(swarm.codec)
    lengths = [piece.stop - piece.start for piece in pieces]
    matrices = matrices_of(parts, pieces)
    real = Payloads(lengths, slow, gradients, matrices)  # as the peer builds it from its manifest
    sizes = real.encoded_sizes(range(2 * fragments))
    assert sizes[fragments:] == [
        gradients.encoded_size(CodecTerms(length, matrices=each))
        for length, each in zip(lengths, matrices, strict=True)
    ]
    assert sizes[fragments:] != [gradients.encoded_size(CodecTerms(length)) for length in lengths]

    assert swarm_rules_of(swarm, LanguageLearnerPool(swarm, "cpu"), RunId("ab" * 32)).fragment_bytes == tuple(sizes)
    simulation = EnsembleSimulation(everybody)
    simulation.run()
    assert simulation._send.encoded["pseudo_gradient"] == 2 * sum(sizes[fragments:])


def test_a_message_is_as_long_as_it_was_said_to_be_and_both_sides_read_it() -> None:
    each = scenario("swarm_both", 3)
    parts = layout(each)
    pieces = slices(parts.total, 3)
    slow, gradients = codecs_of(each.codec)
    mine, theirs = (
        Payloads([piece.stop - piece.start for piece in pieces], slow, gradients, matrices_of(parts, pieces))
        for _ in range(2)
    )
    vector = of_rank(parts, RANK)
    cut = tuple(vector[piece] for piece in pieces)
    mine.publish(Snapshot(1, cut + cut, cut))
    theirs.publish(Snapshot(1, cut + tuple(-part for part in cut), cut))
    numbers = (3, 4, 5)
    ours, other = mine.encode(numbers), theirs.encode(numbers)
    assert [len(part) for part in ours.parts] == mine.encoded_sizes(numbers)
    one, back = (
        mine.difference(ours, other.parts),
        theirs.difference(other, ours.parts),
    )
    for here, there in zip(one.parts, back.parts, strict=True):
        assert torch.equal(here, -there)


def test_matrices_are_sent_far_better_than_the_flat_vector_in_as_many_bytes() -> None:
    each = scenario("dilocox_global", 1)
    pool = make_pool(each, "cpu")
    vector = of_rank(pool.layout, RANK)[None]
    by_matrix = Lossy(each, matrices_of(pool.layout, slices(pool.layout.total, 1)))
    error = (by_matrix("pseudo_gradient", 0, vector) - vector).norm() / vector.norm()
    spent = by_matrix.encoded["pseudo_gradient"]
    rank, terms = 1, CodecTerms(pool.layout.total)
    while LowRankCodec(rank).encoded_size(terms) < spent:
        rank += 1
    flat = Lossy(each)
    flat.use_rank(rank)
    flat_error = (flat("pseudo_gradient", 0, vector) - vector).norm() / vector.norm()
    assert flat.encoded["pseudo_gradient"] >= spent
    assert float(error) < 0.2
    assert float(error) < 0.3 * float(flat_error)


def test_the_effective_rank_is_that_of_the_matrices() -> None:
    each = scenario("dilocox_global", 1, pace={"policy": "rank"})
    simulation = EnsembleSimulation(each)
    pace = simulation._rank_pace
    assert isinstance(pace, RankStepTimes)
    parts = layout(each)
    vector = of_rank(parts, RANK)
    pace.follow(vector, 2)
    (matrices,) = matrices_of(parts, slices(parts.total, 1))
    assert pace._effective_ranks == [effective_rank(vector, CodecTerms(parts.total, matrices=matrices))]
    assert pace._effective_ranks[0] <= RANK


def test_fragments_of_one_length_keep_what_they_left_out_apart() -> None:
    each = scenario("streaming_diloco", 2)
    send = Lossy(each)
    one, none = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 4096)
    send("pseudo_gradient", 0, one)
    assert not bool(send("pseudo_gradient", 1, none).any())
    assert bool(send("pseudo_gradient", 0, none).any())
