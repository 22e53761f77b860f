"""Partitions that heal: how many outer steps it takes until those of both sides are as near as before."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.sim.reality import RealGroup
from peer.lab.healing import steps_to_heal
from peer.lab.left import Left
from peer.lab.script import Do, Part

SIDES = [["anna"], ["bert"]]
DONE = [
    {"at_s": 1, "time": 10.0, "do": Do.PART.value, "who": "0"},
    {"at_s": 2, "time": 20.0, "do": Do.HEAL.value, "who": "0"},
]


def left(name: str, *distances: tuple[float, float]) -> Left:
    """One that makes an outer step a second, with exchanges that begin at such a time and distance."""
    group = RealGroup(count=1, step_s=1.0)
    partner = "id of bert" if name == "anna" else "id of anna"
    notes: list[dict[str, Any]] = [{"kind": "progress", "time": float(n), "step": n} for n in range(60)]
    notes += [
        {"kind": "exchanged", "time": time, "seconds": 0.0, "peer": partner, "distance": distance}
        for time, distance in distances
    ]
    return Left(Part(name, name, group, name), f"id of {name}", notes, None)


BEFORE = (5.0, 0.1), (6.0, 0.1)


@pytest.mark.parametrize(
    ("afterwards", "steps"),
    [
        ([(30.0, 0.9), (32.0, 0.5), (37.5, 0.19)], 7),  # from the first exchange, not from when the network was whole
        ([(30.0, 0.2)], 0),
        ([(30.0, 0.9), (32.0, 0.5)], None),
        ([], None),
    ],
)
def test_steps_until_it_is_as_before(afterwards: list[tuple[float, float]], steps: int | None) -> None:
    both = [left("anna", *BEFORE, *afterwards), left("bert", *BEFORE, (30.0, 0.1))]
    assert steps_to_heal(both, DONE, "0", SIDES) == steps


def test_without_a_before_or_a_healing_there_is_no_number() -> None:
    after = (30.0, 0.1)
    assert steps_to_heal([left("anna", after), left("bert", *BEFORE, after)], DONE, "0", SIDES) is None
    assert steps_to_heal([left("anna", *BEFORE, after), left("bert", *BEFORE, after)], DONE[:1], "0", SIDES) is None
