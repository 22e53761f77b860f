"""A learner that resumes from a checkpoint keeps its step widths, which follow the distance to others."""

import pytest
import torch
from stored import stored

from p2ptrain import codec
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import LearnerRules
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from sim.learners import QuadraticTask

P, INNER_STEPS = 3000, 4


def learner(seed: int, codec_name: str, recipe: str = "swarm") -> Learner:
    random = torch.Generator().manual_seed(seed)
    task = QuadraticTask(0.2 + torch.rand(P, generator=random), torch.randn(P, generator=random), noise=0.1, seed=seed)
    rules = LearnerRules(INNER_STEPS, 1000.0, OuterRule(0.4, 0.8), RECIPES[recipe])
    return Learner(task, rules, slices(P, 2), codec.get(codec_name), MemoryLog())


def resumed(seed: int, codec_name: str, inner_steps: int) -> Learner:
    """Return a learner that was saved after so many inner steps and loaded again."""
    before, after = learner(seed, codec_name), learner(seed, codec_name)
    for _ in range(inner_steps):
        before.advance()
    after.load_state_dict(*stored(before))
    return after


def apart(one: Learner, other: Learner) -> tuple[float, float]:
    """Return the distance as the exchange estimates it, and the true one."""
    fragments = (0, 1)
    proposals = [each.payloads.proposals(fragments) for each in (one, other)]
    ours, theirs = one.payloads.encode(fragments, *proposals), other.payloads.encode(fragments, *reversed(proposals))
    found = torch.cat(one.payloads.difference(ours, theirs.parts).parts)
    other.payloads.difference(theirs, ours.parts)
    true = torch.cat(other.payloads.published.parts) - torch.cat(one.payloads.published.parts)
    return float(found.norm()), float(true.norm())


@pytest.mark.parametrize("codec_name", ["modular8", "modular4"])
@pytest.mark.parametrize("inner_steps", [2 * INNER_STEPS, 2 * INNER_STEPS + 2])
def test_two_that_both_came_back_find_what_lies_between_them(codec_name, inner_steps) -> None:
    one, other = (resumed(seed, codec_name, inner_steps) for seed in (1, 2))
    for _ in range(3):
        for each in (one, other):
            each.advance()
    for _ in range(8):  # widths that were too narrow grow with each exchange
        found, true = apart(one, other)
    assert found == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize("codec_name", ["modular8", "modular4"])
def test_whoever_came_back_finds_what_lies_between_it_and_one_that_never_left(codec_name) -> None:
    one, other = resumed(1, codec_name, 2 * INNER_STEPS), learner(2, codec_name)
    for _ in range(2 * INNER_STEPS + 2):
        other.advance()
    for _ in range(8):
        found, true = apart(one, other)
    assert found == pytest.approx(true, rel=0.2)


def dropped(seed: int, codec_name: str) -> Learner:
    """Return a learner whose first inner phase was dropped, so no weight has moved."""
    each = learner(seed, codec_name, "swarm_slow")
    for step in range(INNER_STEPS):
        if step == INNER_STEPS - 1:
            each.task.theta.fill_(float("nan"))
        each.advance()
    assert each.step == 1
    assert torch.isfinite(each.slow).all()
    return each


@pytest.mark.parametrize("codec_name", ["modular8", "modular4"])
def test_two_whose_first_phase_was_dropped_find_what_lies_between_them(codec_name) -> None:
    one, other = (dropped(seed, codec_name) for seed in (1, 2))
    for _ in range(INNER_STEPS):
        for each in (one, other):
            each.advance()
    for _ in range(8):
        found, true = apart(one, other)
    assert found == pytest.approx(true, rel=0.2)
