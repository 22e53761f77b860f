"""Adversarial weights: honest peers learn nearly as well as without them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from p2ptrain.codec import get
from p2ptrain.host.payloads import Payloads, Snapshot
from sim.adversaries import Adversary, falsified
from sim.report import SimulationReport
from sim.scenario import Scenario
from sim.scenario_file import ScenarioError
from sim.simulate import simulate

Make = Callable[..., Scenario]

SMALL = (
    "learner={kind = 'lm', hidden_size = 16, intermediate_size = 16, layers = 1, heads = 1, sequence_length = 16,"
    " sequences_per_step = 1}"
)
CHANGES = (
    SMALL,
    "run.outer_steps=20",
    "outer.inner_steps=5",
    "run.points=1",
    "outer.fragments=1",
    "outer.exchanges_per_step=2",
    "outer.learning_rate=0.4",
    "outer.momentum=0.8",
    "swarm.final_gossip_s=0",
)


def trained(make: Make, lie: str | None) -> SimulationReport:
    liars = [] if lie is None else [{"name": "liars", "count": 2, "step_s": 1.0, "lie": lie}]
    return simulate(make(*CHANGES, groups=liars))


@pytest.fixture(scope="module")
def clean(make: Make) -> SimulationReport:
    """Return the report of six honest peers."""
    return trained(make, None)


@pytest.mark.parametrize(
    "lie",
    [
        "flipped",
        # As long as the other; ``make lab`` also runs them in real peers.
        pytest.param("nan", marks=pytest.mark.lab),
        pytest.param("stale", marks=pytest.mark.lab),
    ],
)
def test_two_of_eight_that_lie_cost_the_honest_next_to_nothing(make: Make, clean: SimulationReport, lie: str) -> None:
    assert clean.groups["home"].offences == 0
    assert "clipped" not in clean.notes
    report = trained(make, lie)
    assert report.curve[-1].groups["home"] <= 1.03 * clean.curve[-1].groups["home"]
    assert report.groups["home"].solo_share <= 0.1
    assert report.groups["home"].offences >= 2


def test_two_of_eight_that_stay_at_the_beginning_do_not_keep_the_others_there(
    make: Make, clean: SimulationReport
) -> None:
    """Check that progress, which is averaged like weights, still rises: else the run would not end."""
    steps = clean.groups["home"].outer_steps
    assert steps > 0
    # 1.75 in the long run; at first each costs one outer step of twenty
    assert trained(make, "behind").groups["home"].outer_steps <= 2.0 * steps


def test_falsified_weights_are_what_they_are_called() -> None:
    weights = torch.linspace(-1, 1, 1000)
    liar = Adversary("random", 0.0, Random(1), lambda payload, random: payload)
    assert torch.equal(falsified(weights, "flipped", liar.random), -weights)
    assert torch.equal(falsified(weights, "scaled", liar.random), 3 * weights)
    noise = falsified(weights, "random", liar.random)
    assert float(noise.norm()) == pytest.approx(float(weights.norm()), rel=1e-4)
    assert abs(float(torch.dot(noise, weights) / weights.norm() ** 2)) < 0.2


def test_a_liars_payload_is_well_formed_and_it_keeps_its_own_weights() -> None:
    weights = torch.linspace(-1, 1, 256)
    payloads = Payloads([256], get("fp32", 1024), None)
    payloads.publish(Snapshot(1, (weights,), (weights,)))
    liar = Adversary("flipped", 0.0, Random(1), lambda payload, random: payload)
    question = (0,), (), (), payloads.published
    true = payloads.encode(*question)
    lie = liar.sends(true, payloads, question)
    difference = payloads.difference(true, lie.parts)
    assert difference.distance == pytest.approx(2.0)
    assert payloads.published.parts[0] is weights


def test_who_has_no_weights_cannot_lie_with_them(make) -> None:
    with pytest.raises(ScenarioError, match=r"lie: flipped needs weights"):
        make(groups=[{"name": "liars", "count": 1, "step_s": 1.0, "lie": "flipped"}])
