"""Recipes that wait for their partners, over real p2pd: three peers, each its own process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm import Program, Swarm

from p2ptrain import checkpoint

pytestmark = pytest.mark.net

# With this budget, peers whose imports take different times still make most outer steps together.
PLANNED = {"outer__exchanges_per_step": 0, "outer__inner_steps": 20, "run__tokens": 300_000}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "gasloc": {"outer__momentum": 0.0},
    "noloco": {"outer__momentum": 0.5},
    "factored_gossip": {"outer__topology": "ring"},
    "diloco": {"outer__topology": "complete", "codec__name": "fp32"},
}


def weights(program: Program, directory: str) -> torch.Tensor:
    found = checkpoint.load_latest(Path(program.home) / directory).checkpoint
    assert found is not None
    return found.tensors["slow"]


@pytest.mark.parametrize(
    "recipe",
    [
        "diloco",
        # Each takes half a minute and uses the same code: make lab runs them.
        pytest.param("gasloc", marks=pytest.mark.lab),
        pytest.param("noloco", marks=pytest.mark.lab),
        pytest.param("factored_gossip", marks=pytest.mark.lab),
    ],
)
def test_peers_that_wait_for_each_other_train_to_the_end(recipe: str) -> None:
    with Swarm(outer__recipe=recipe, **(PLANNED | RECIPES[recipe])) as swarm:
        bootstrap = swarm.bootstrap()
        peers = [swarm.peer(name) for name in ("anna", "bert", "cleo")]
        statuses = [each.end() for each in peers]
        assert statuses == [0, 0, 0], "\n".join(each.output[-2000:] for each in peers)
        assert bootstrap.terminate() == 0
        summaries = [json.loads((each.home / "summary.json").read_text()) for each in peers]
        for each, summary in zip(peers, summaries, strict=True):
            assert summary["finished"]
            assert summary["val_loss_last"] < 0.95 * summary["val_loss_first"]
            assert summary["exchanges_ok"] >= 5
            assert "Traceback" not in each.output
        points = torch.stack([weights(each, "checkpoints") for each in peers])
        assert float((points - points.mean(0)).norm(dim=1).max() / points.mean(0).norm()) < 0.05
