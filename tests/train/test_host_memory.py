"""Host memory of a learner's outer state, counted in live tensor bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_memory import most_live_bytes

from p2ptrain import checkpoint, codec
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.host.learner import Learner
from p2ptrain.host.rules import LearnerRules
from p2ptrain.outer.fragments import slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES, Recipe
from p2ptrain.train.memory import host_bytes
from sim.learners import InnerStepResult

P = 64_000


class StillTask:
    """A task whose inner step allocates nothing."""

    def __init__(self) -> None:
        self.theta = torch.ones(P)

    def inner_step(self, progress: float) -> InnerStepResult:
        self.theta.mul_(0.999)
        return InnerStepResult(1.0, 1)

    def reset(self, warmup_steps: int) -> None:
        """Do nothing: there is no state."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: there is no state."""


def trained(recipe: Recipe, fragments: int) -> Learner:
    """Return a learner after three outer steps, without partners."""
    rules = LearnerRules(4, 1e9, OuterRule(0.7, 0.9), recipe)
    learner = Learner(StillTask(), rules, slices(P, fragments), codec.get("fp32"), MemoryLog())
    while learner.step < 3:
        learner.advance()
        if learner.is_waiting:
            learner.inbox.proceed(learner.step + 1)
            learner.settle()
    return learner


@pytest.mark.parametrize("fragments", [1, 8])
@pytest.mark.parametrize(
    "recipe",
    [each for each in RECIPES.values() if each.exchanges and each.name != "ddp"],
    ids=lambda recipe: recipe.name,
)
def test_the_outer_state_takes_what_the_check_of_capacity_says(recipe: Recipe, fragments: int) -> None:
    if fragments == 1 and any(mix.share < 1 for mix in recipe.mixes):
        fragments = 2
    fast = 4 * P
    assert most_live_bytes(lambda: trained(recipe, fragments)) - fast <= (host_bytes(recipe, fragments) + 0.1) * P
    assert host_bytes(recipe, fragments) <= 28


def test_a_checkpoint_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    learner = trained(RECIPES["swarm"], 8)
    assert most_live_bytes(lambda: checkpoint.save(tmp_path, *learner.state_dict())) < P // 2
