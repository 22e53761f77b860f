"""Recipes that need everybody: what they compute, what they cost, and what a scenario may ask of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from p2ptrain.sim.ensemble import Lossy
from p2ptrain.sim.scenario import MEGABIT, Scenario
from p2ptrain.sim.simulate import simulate

OUTER = {
    "recipe": "diloco",
    "inner_steps": 10,
    "learning_rate": 0.7,
    "momentum": 0.5,
    "nesterov": True,
    "topology": "random",
    "partners": 1,
    "weights": "equal",
    "exchanges_per_step": 0,
    "fragments": 1,
    "fragments_per_exchange": 1,
}
LINE = {"count": 4, "step_s": 0.5, "up_mbit_s": 8.0, "down_mbit_s": 80.0, "latency_s": 0.0}
PARAMETERS = 4096


def scenario(learner: str = "quadratic", peers: list[dict[str, Any]] | None = None, **changes: Any) -> Scenario:
    sizes: dict[str, Any] = (
        {"parameters": PARAMETERS} if learner == "quadratic" else {"layers": 1, "curve_sequences": 4}
    )
    codec = {"name": "fp32", "block_size": 1024, "gradients": "fp32", "rank": 4}
    return Scenario.model_validate(
        {
            "run": {"outer_steps": 12, "points": 3, "failed_exchanges": changes.pop("failed_exchanges", 0.0)},
            "learner": {"kind": learner, **sizes},
            "outer": OUTER | {name: changes.pop(name) for name in list(changes) if name in OUTER},
            "codec": codec | changes,
            "peers": peers or [LINE],
        }
    )


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        scenario(**changes)
    return str(caught.value)


def test_everybody_ends_at_one_point_and_has_learnt() -> None:
    report = simulate(scenario())
    first, last = report.curve[0], report.curve[-1]
    assert last.disagreement == 0
    assert last.outer_steps == 12
    assert last.validation == last.validation_of_mean
    assert last.validation < 0.5 * first.validation


def test_the_same_scenario_gives_the_same_report() -> None:
    assert simulate(scenario()).without_cost() == simulate(scenario()).without_cost()


def test_an_outer_step_takes_the_slowest_phase_and_a_ring_all_reduce_over_the_narrowest_line() -> None:
    peers = [LINE | {"count": 3}, LINE | {"count": 1, "name": "odd", "step_s": 1.0, "up_mbit_s": 0.8}]
    report = simulate(scenario(peers=peers))
    sent = 2 * 3 / 4 * 4 * PARAMETERS
    assert report.simulated_s == pytest.approx(12 * (10 * 1.0 + sent / (0.8 * MEGABIT)))
    assert report.overall.up.payload == pytest.approx(12 * sent)
    assert report.overall.bits_per_parameter == pytest.approx(1.5 * 32)
    assert report.groups["odd"].utilization == pytest.approx(10.0 / (10.0 + sent / (0.8 * MEGABIT)))
    assert report.groups["peers-1"].utilization == pytest.approx(5.0 / (10.0 + sent / (0.8 * MEGABIT)))


def test_what_is_used_late_hides_behind_the_next_phase() -> None:
    assert simulate(scenario(recipe="dilocox")).simulated_s == pytest.approx(12 * 10 * 0.5)
    narrow = [LINE | {"up_mbit_s": 0.01}]
    sent = 2 * 3 / 4 * 4 * PARAMETERS
    assert simulate(scenario(recipe="eager_diloco", peers=narrow)).simulated_s == pytest.approx(
        12 * sent / (0.01 * MEGABIT)
    )


def test_gathered_messages_go_to_everybody() -> None:
    report = simulate(scenario(recipe="sparseloco", gradients="topk", momentum=0.9, learning_rate=1.0))
    assert report.overall.bits_per_parameter == pytest.approx(3 * 0.227, rel=0.02)


def test_failed_averages_set_peers_apart() -> None:
    assert (simulate(scenario(failed_exchanges=0.3)).curve[-1].disagreement or 0) > 1e-4


@pytest.mark.parametrize("recipe", ["ddp", "diloco", "streaming_diloco", "factored_gossip_local_global"])
def test_language_models_learn(recipe: str) -> None:
    changes: dict[str, Any] = {"recipe": recipe}
    changes |= {"inner_steps": 1} if recipe == "ddp" else {}
    changes |= {"fragments": 3} if recipe == "streaming_diloco" else {}
    report = simulate(scenario("lm", [LINE | {"count": 2}], **changes))
    assert report.curve[-1].validation < report.curve[0].validation < 6
    assert report.overall.tokens == 2 * 12 * changes.get("inner_steps", 10) * 256


def test_data_parallel_training_sends_a_gradient_every_inner_step() -> None:
    report = simulate(scenario("lm", [LINE | {"count": 2}], recipe="ddp", inner_steps=1))
    assert report.overall.bits_per_parameter == pytest.approx(32.0)


def test_feedback_loses_nothing_in_the_long_run() -> None:
    send = Lossy(scenario(recipe="dilocox", gradients="topk"))
    values = torch.randn(3, PARAMETERS, generator=torch.Generator().manual_seed(0))
    total = sum(send("pseudo_gradient", values) for _ in range(200))
    assert float((total / 200 - values).norm() / values.norm()) < 0.2
    assert send.encoded["pseudo_gradient"] == pytest.approx(200 * PARAMETERS * 0.227 / 8, rel=0.02)


def test_what_lockstep_does_not_have_is_refused_in_one_line() -> None:
    assert "recipe diloco averages over everybody, who must come, stay and be honest" in refusal(
        peers=[LINE | {"leaves_at_s": 5.0}]
    )
    assert "modular4 has a meaning between two peers only" in refusal(
        recipe="factored_gossip_global_none", name="modular4"
    )
    assert "outer.fragments: 2, and recipe diloco averages everything; set 1" in refusal(fragments=2)
