"""Keepers in simulated swarms: what they cost the trainers, and what newcomers get from them."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.host.keeper import Keeper
from p2ptrain.swarm import PeerState
from sim.errors import ScenarioError
from sim.scenario import Scenario
from sim.scenario_file import changed, parse
from sim.simulate import begin
from sim.simulation import Simulation

QUADRATIC = {"kind": "quadratic", "parameters": 8192, "spread": 0.3, "noise": 0.05}
CHANGES = ("outer.fragments=8", "outer.fragments_per_exchange=2", "outer.exchanges_per_step=2", "run.outer_steps=40")


def scenario(basic: dict[str, Any], *groups: dict[str, Any], changes: tuple[str, ...] = ()) -> Scenario:
    data = changed(basic, (*CHANGES, *changes))
    return parse({**data, "learner": QUADRATIC, "peers": list(groups)})


def trainers(count: int = 3, **fields: Any) -> dict[str, Any]:
    return {"name": "trainers", "count": count, "step_s": 1.0, "step_jitter": 0.1, "up_mbit_s": 20.0, **fields}


def keeper(keeps: str, name: str = "keeper", **fields: Any) -> dict[str, Any]:
    return {"name": name, "count": 1, "step_s": 1.0, "up_mbit_s": 20.0, "keeps": keeps, **fields}


def ran(scenario: Scenario) -> Simulation:
    simulation = begin(scenario, "cpu")
    assert isinstance(simulation, Simulation)
    simulation.run(lambda share: None)
    return simulation


def members(simulation: Simulation, group: str) -> list[Any]:
    return [each for each in simulation.population.members if each.slot.group == group]


def test_three_trainers_and_a_keeper_of_half_train_as_three_alone(basic: dict[str, Any]) -> None:
    losses, tokens = [], []
    for groups in ((trainers(),), (trainers(), keeper("0-3", arrives_at_s=30.0))):
        simulation = ran(scenario(basic, *groups))
        report = simulation.report("test")
        losses.append(report.curve[-1].validation_of_mean)
        tokens.append(sum(each.peer.learner.tokens for each in members(simulation, "trainers")))
    assert tokens[1] == pytest.approx(tokens[0], rel=0.05)
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    (kept,) = members(simulation, "keeper")
    assert kept.peer.core.state is PeerState.KEEPING
    assert kept.peer.core.counters.exchanges_ok > 10
    first = members(simulation, "trainers")[0].peer
    assert kept.peer.learner.progress == pytest.approx(first.learner.progress, rel=0.1)
    trained, held = first.learner.payloads.slow(), kept.peer.learner.payloads.slow()
    for number in range(4):
        assert float((trained[number] - held[number]).norm()) < 0.1 * float(trained[number].norm())
    assert not any(held[number].numel() for number in range(4, 8))
    assert isinstance(kept.peer.learner, Keeper)
    assert kept.peer.learner.nbytes == 4 * 8192 // 2


def test_a_newcomer_resumes_from_two_keepers_after_all_trainers_left(basic: dict[str, Any]) -> None:
    simulation = ran(
        scenario(
            basic,
            trainers(leaves_at_s=200.0),
            keeper("0-3", "low", arrives_at_s=30.0),
            keeper("4-7", "high", arrives_at_s=30.0),
            trainers(1, name="late", arrives_at_s=400.0),
        )
    )
    (late,) = members(simulation, "late")
    (low,) = members(simulation, "low")
    assert late.peer.core.counters.pulls == 1
    assert late.peer.learner.ended
    assert late.peer.learner.tokens < simulation.scenario.run_tokens  # it did not begin again
    assert low.peer.learner.progress > 0.9 * late.peer.learner.progress  # it followed the newcomer


def test_half_of_a_model_is_not_adopted(basic: dict[str, Any]) -> None:
    simulation = ran(
        scenario(
            basic,
            trainers(leaves_at_s=200.0),
            keeper("0-3", "low", arrives_at_s=30.0),
            trainers(1, name="late", arrives_at_s=400.0),
        )
    )
    (late,) = members(simulation, "late")
    assert late.peer.core.counters.pulls == 0
    assert late.peer.learner.ended  # it trained all of the run by itself
    assert simulation.population.notes.kinds["not held"] == 1


@pytest.mark.parametrize(
    ("keeps", "changes", "words"),
    [
        ("0-8", (), "the last fragment is 7"),
        ("3-1", (), "ascending"),
        ("x", (), "neither a fragment nor a range"),
        ("0-3", ("outer.topology=ring",), "topology random"),
    ],
)
def test_impossible_keepers_are_refused(
    basic: dict[str, Any], keeps: str, changes: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ScenarioError, match=words):
        scenario(basic, trainers(), keeper(keeps), changes=changes)
