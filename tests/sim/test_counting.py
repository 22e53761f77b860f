"""A learner that only counts affects the protocol exactly as a real one does."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scenario import Scenario
from sim.simulate import begin
from sim.simulation import Simulation

QUADRATIC = {"kind": "quadratic", "parameters": 4096, "tokens_per_step": 3}
BYTES = {"kind": "bytes", "parameters": 4096, "tokens_per_step": 3}

LATE = {"name": "late", "count": 2, "step_s": 0.7, "step_jitter": 0.2, "arrives_at_s": 120.0, "up_mbit_s": 1.0}
"""Late group that downloads whole models: the run is too far ahead to exchange with."""
KILLED = {"name": "killed", "count": 2, "step_s": 1.3, "step_jitter": 0.2, "leaves_at_s": 77.7, "leaves": "killed"}
ASLEEP = {"name": "asleep", "count": 1, "step_s": 1.0, "step_jitter": 0.1, "freezes": [{"at_s": 33.3, "for_s": 40.0}]}


def trace(scenario: Scenario) -> dict[str, Any]:
    """Return everything that is visible from outside, by peer."""
    simulation = begin(scenario)
    assert isinstance(simulation, Simulation)
    simulation.run()
    report = simulation.report("")
    peers = {
        member.peer.peer: (
            member.peer.core.counters,
            member.peer.finished,
            member.peer.traffic,
            round(member.peer.trainer.compute_s, 9),
            (member.peer.learner.step, member.peer.learner.progress, member.peer.learner.tokens),
        )
        for member in simulation.population.members
    }
    return {"peers": peers, "notes": report.notes, "seconds": report.simulated_s}


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ((), []),
        (("outer.exchanges_per_step=3", "run.failed_exchanges=0.2"), []),
        (("codec.name=int8",), [LATE]),
        (("swarm.catch_up_outer_steps=2",), [LATE, KILLED]),
        (("outer.recipe=swarm_both",), [ASLEEP]),
        (("outer.recipe=gasloc", "outer.exchanges_per_step=0"), []),
        (("outer.recipe=factored_gossip", "outer.exchanges_per_step=0", "outer.topology=ring"), [KILLED]),
        (("outer.recipe=local", "outer.exchanges_per_step=0"), []),
        (("pace.policy=by_speed",), [KILLED]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else ",".join(group["name"] for group in value),
)
def test_the_counting_learner_leaves_the_trace_of_the_real_one(make, changes, groups):
    # Without final gossip, whose end depends on distances, which counted bytes do not have.
    changes = ("run.outer_steps=25", "swarm.final_gossip_s=0", "peers.home.up_mbit_s=0.05", *changes)
    real = make(*changes, groups=groups).model_dump()
    counted = trace(Scenario.model_validate({**real, "learner": BYTES}))
    assert counted == trace(Scenario.model_validate({**real, "learner": QUADRATIC}))
    exchanges = sum(counters.exchanges_ok for counters, *_ in counted["peers"].values())
    assert exchanges > 100 or real["outer"]["recipe"] == "local"
    if LATE in groups:
        assert sum(counters.pulls for counters, *_ in counted["peers"].values()) >= 2


def test_steps_that_only_count_are_no_events(make):
    """Check the number of events: far fewer than a real learner's, which makes ten thousand peers possible."""
    scenario = make("outer.inner_steps=50").model_dump()
    events = {}
    for learner in (BYTES, QUADRATIC):
        simulation = begin(Scenario.model_validate({**scenario, "learner": learner}))
        simulation.run()
        events[learner["kind"]] = simulation.world.events
    assert events["bytes"] < events["quadratic"] / 2
