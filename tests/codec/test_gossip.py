"""Outer steps, codecs and mixing together: invariants of a swarm of simulated peers that loses exchanges."""

import math
import random

import pytest
import torch
from torch import Tensor

from p2ptrain import codec
from p2ptrain.base.codec_names import WEIGHT_CODECS
from p2ptrain.codec import Codec
from p2ptrain.outer.mixing import displaced, displacement
from p2ptrain.outer.step import OuterRule, OuterState, initial_state, outer_step

ELEMENTS = 1100
RULE = OuterRule(0.7, 0.9)
EACH_CODEC = [
    *map(codec.get, WEIGHT_CODECS),
    codec.get("int8", block_size=64),
    codec.get("modular4", block_size=64),
]


def share(weight_mine: float, weight_theirs: float) -> float:
    """Return the share of the difference by which the first side moves, as ``swarm.messages.Terms.share`` does."""
    return weight_theirs / (weight_mine + weight_theirs)


def exchange(
    each: Codec, a: OuterState, b: OuterState, weight_a: float = 1.0, weight_b: float = 1.0, radius: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Return both sides' displacements, each computed as that side would."""
    proposals = (codec.proposal_for(each, codec.first_shape(each, state.slow), state.slow) for state in (a, b))
    terms = codec.agree(each, len(a.slow), *proposals)
    from_a, from_b = each.encode(a.slow, terms), each.encode(b.slow, terms)
    return (
        displacement(each.difference(from_a, from_b, terms), share(weight_a, weight_b), radius),
        displacement(each.difference(from_b, from_a, terms), share(weight_b, weight_a), radius),
    )


def disagreement(states: list[OuterState]) -> float:
    stacked = torch.stack([state.slow for state in states])
    return float((stacked - stacked.mean(0)).norm(dim=1).mean())


def settled_peers(count: int, seed: int) -> list[OuterState]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(ELEMENTS, generator=generator)
    return [initial_state(common + 0.1 * torch.randn(ELEMENTS, generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("each", EACH_CODEC, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_t3_the_weighted_mean_moves_only_by_outer_steps(each: Codec, weighted: bool) -> None:
    """Check random pairs in random order, a clip radius that is often reached, and a third of the exchanges lost."""
    choice = random.Random(7)
    generator = torch.Generator().manual_seed(8)
    weights = [1.0, 2.5, 0.3, 4.0, 1.7] if weighted else [1.0] * 5
    states = settled_peers(5, seed=9)
    expected = sum(w * state.slow.double() for w, state in zip(weights, states, strict=True))
    mixed = 0
    for _ in range(60):
        if choice.random() < 0.4:
            i = choice.randrange(5)
            theta = states[i].slow - 0.01 * torch.randn(ELEMENTS, generator=generator)
            after = outer_step(states[i], theta, RULE)
            expected = expected + weights[i] * (after.slow.double() - states[i].slow.double())
            states[i] = after
        else:
            i, j = choice.sample(range(5), 2)
            radius = choice.choice([math.inf, 1.0])
            dx_i, dx_j = exchange(each, states[i], states[j], weights[i], weights[j], radius)
            if choice.random() < 1 / 3:
                continue
            states[i], states[j] = displaced(states[i], dx_i), displaced(states[j], dx_j)
            mixed += 1
    total = sum(w * state.slow.double() for w, state in zip(weights, states, strict=True))
    assert mixed > 10
    torch.testing.assert_close(total, expected, rtol=0, atol=2e-5)


def test_t5_lossless_and_equal_weights_reach_the_exact_mean() -> None:
    a, b = settled_peers(2, seed=1)
    mean = (a.slow.double() + b.slow.double()) / 2
    dx_a, dx_b = exchange(codec.get("fp32"), a, b)
    for state in (displaced(a, dx_a), displaced(b, dx_b)):
        torch.testing.assert_close(state.slow.double(), mean, rtol=2**-22, atol=1e-6)


def test_t5_unequal_weights_reach_the_weighted_mean() -> None:
    a, b = settled_peers(2, seed=1)
    dx_a, dx_b = exchange(codec.get("fp32"), a, b, 3.0, 1.0)
    mean = 0.75 * a.slow + 0.25 * b.slow
    for state in (displaced(a, dx_a), displaced(b, dx_b)):
        torch.testing.assert_close(state.slow, mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("each", EACH_CODEC, ids=str)
def test_gossip_alone_brings_peers_together(each: Codec) -> None:
    choice = random.Random(3)
    states = settled_peers(6, seed=2)
    before = disagreement(states)
    for _ in range(40):
        i, j = choice.sample(range(6), 2)
        dx_i, dx_j = exchange(each, states[i], states[j])
        states[i], states[j] = displaced(states[i], dx_i), displaced(states[j], dx_j)
    # int4's noise is as large as the weights, and two modular bits leave most of the distance at first.
    floor = {"bf16": 0.1, "int8": 0.15, "int4": 2.0, "modular2": 0.4}.get(each.name, 0.05)
    assert disagreement(states) < floor * before


def after_rounds(rounds: int, engaged: bool) -> list[OuterState]:
    """Return six peers' states after some rounds; each round, every even peer meets every odd one, in three matchings.

    A fragment is either engaged until its displacement is applied, so that each exchange sees the newest weights, or
    one snapshot a round is served to all three partners, with the full share each time.
    """
    states = settled_peers(6, seed=5)
    fp32 = codec.get("fp32")
    for _ in range(rounds):
        served = list(states)
        for shift in range(3):
            for pair in range(3):
                i, j = 2 * pair, 2 * ((pair + shift) % 3) + 1
                source = states if engaged else served
                dx_i, dx_j = exchange(fp32, source[i], source[j])
                states[i], states[j] = displaced(states[i], dx_i), displaced(states[j], dx_j)
    return states


def test_engaged_fragments_converge() -> None:
    assert disagreement(after_rounds(10, engaged=True)) < 1e-4 * disagreement(after_rounds(0, engaged=True))


def test_serving_one_snapshot_three_times_diverges() -> None:
    """Show why a fragment is engaged: three half shares of one difference overshoot.

    The gap between the even and the odd peers' means: each side moves by 3/2 of it, so it becomes 1 - 3 = -2 times
    itself.
    """

    def gap(states: list[OuterState]) -> Tensor:
        stacked = torch.stack([state.slow.double() for state in states])
        return stacked[::2].mean(0) - stacked[1::2].mean(0)

    start, end = gap(after_rounds(0, engaged=False)), gap(after_rounds(10, engaged=False))
    torch.testing.assert_close(end, (-2.0) ** 10 * start, rtol=1e-4, atol=1e-2)
    assert disagreement(after_rounds(10, engaged=False)) > 100 * disagreement(after_rounds(0, engaged=False))
