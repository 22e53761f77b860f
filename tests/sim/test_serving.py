"""A simulation with a page ends like one without, and the page shows its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.page.listen_address import ListenAddress
from sim import scenario_file
from sim.errors import ScenarioError
from sim.serving import SimulationView, simulate_and_show
from sim.simulate import begin, simulate
from sim.simulation import Simulation

ROUGH = Path(__file__).parent.parent.parent / "bench" / "scenarios" / "rough_weather.toml"
CHANGES = ["run.outer_steps=12"]


def begun() -> Simulation:
    simulation = begin(scenario_file.load(ROUGH, CHANGES))
    assert isinstance(simulation, Simulation)
    return simulation


def note_of(peer: str) -> dict[str, Any]:
    return {"peer": peer, "why": "", "seconds": 0.0, "size_bytes": 0}


def test_what_is_watched_ends_as_what_is_not() -> None:
    simulation = begun()
    view = SimulationView(simulation, "rough")

    def look(share: float) -> None:
        view._next_look = 0.0
        view.look()

    simulation.run(look)
    view.look(again=False)
    plain = simulate(scenario_file.load(ROUGH, CHANGES))
    shown = simulation.report("")
    assert shown.overall == plain.overall
    assert shown.curve == plain.curve
    assert shown.notes == plain.notes
    document = view.document()
    json.dumps(document, allow_nan=False)
    assert document["state"] == "over"
    assert document["figures"]["exchanges"] == sum(row["exchanges"] or 0 for row in document["peers"]) / 2 > 0
    assert document["failures"]
    assert {each["a"] for each in document["exchanges"]} <= {row["id"] for row in document["peers"]}
    assert document["disagreement"]
    assert all(each["bytes"] > 0 and each["seconds"] > 0 for each in document["exchanges"])
    assert max(sent for _, sent, _ in document["traffic"]) > 0


def test_an_exchange_is_shown_once() -> None:
    """Check that of two notes about an exchange, the one of the smaller id counts."""
    simulation = begun()
    view = SimulationView(simulation, "rough")
    first, second = sorted(each.name for each in simulation.population.slots[:2])
    view.add_note(first, "exchanged", note_of(second))  # type: ignore[arg-type]  # any id
    view.add_note(second, "exchanged", note_of(first))  # type: ignore[arg-type]
    view.add_note(second, "failed", note_of(first))  # type: ignore[arg-type]
    document = view.document()
    assert [(each["a"], each["b"]) for each in document["exchanges"]] == [(first, second)]
    assert [each["peer"] for each in document["failures"]] == [second]


def test_an_average_over_everybody_has_no_gossip_to_watch() -> None:
    changes = ["outer.recipe=ddp", "outer.exchanges_per_step=0", "outer.inner_steps=1", "outer.fragments=1"]
    scenario = scenario_file.load(ROUGH, [*CHANGES, *changes, "peers=[{count = 4, step_s = 1.0}]"])
    with pytest.raises(ScenarioError, match="no exchanges to watch"):
        simulate_and_show(
            scenario,
            ListenAddress(),
            title="rough",
            device="cpu",
            say=lambda text: None,
            progress=lambda share: None,
        )
