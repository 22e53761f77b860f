"""Partitions that heal: outer steps until peers of both sides are as near as before."""

from __future__ import annotations

from typing import Any

import pytest

from lab.artifacts import Artifacts
from lab.healing import exchanges_within, steps_to_contact, steps_to_heal
from lab.scenario import RealGroup
from lab.script import ActKind, ScriptedPeer

SIDES = [["anna"], ["bert"]]
DONE = [
    {"at_s": 1, "time": 10.0, "do": ActKind.PART.value, "who": "0"},
    {"at_s": 2, "time": 20.0, "do": ActKind.HEAL.value, "who": "0"},
]


def artifacts(name: str, *distances: tuple[float, float]) -> Artifacts:
    """Return artifacts of a peer with an outer step per second and exchanges at these times and distances."""
    group = RealGroup(count=1, step_s=1.0)
    partner = "id of bert" if name == "anna" else "id of anna"
    notes: list[dict[str, Any]] = [{"kind": "progress", "time": float(n), "step": n} for n in range(60)]
    notes += [
        {"kind": "exchanged", "time": time, "seconds": 0.0, "peer": partner, "distance": distance}
        for time, distance in distances
    ]
    return Artifacts(ScriptedPeer(name, name, group, name), f"id of {name}", notes, None)


BEFORE = (5.0, 0.1), (6.0, 0.1)


@pytest.mark.parametrize(
    ("afterwards", "steps"),
    [
        ([(30.0, 0.9), (32.0, 0.5), (37.5, 0.19)], 7),  # counted from the first exchange, not from the repair
        ([(30.0, 0.2)], 0),
        ([(30.0, 0.9), (32.0, 0.5)], None),
        ([], None),
    ],
)
def test_steps_to_heal(afterwards: list[tuple[float, float]], steps: int | None) -> None:
    both = [artifacts("anna", *BEFORE, *afterwards), artifacts("bert", *BEFORE, (30.0, 0.1))]
    assert steps_to_heal(both, DONE, "0", SIDES) == steps


def test_steps_to_heal_need_a_distance_before_and_an_end() -> None:
    after = (30.0, 0.1)
    assert steps_to_heal([artifacts("anna", after), artifacts("bert", *BEFORE, after)], DONE, "0", SIDES) is None
    assert (
        steps_to_heal([artifacts("anna", *BEFORE, after), artifacts("bert", *BEFORE, after)], DONE[:1], "0", SIDES)
        is None
    )


def test_steps_to_contact_are_those_of_the_slowest_peer() -> None:
    both = [artifacts("anna", *BEFORE, (26.5, 0.9)), artifacts("bert", *BEFORE, (24.5, 0.9))]
    assert steps_to_contact(both, DONE, "0", SIDES) == 4
    fast = Artifacts(
        both[0].peer, both[0].peer_id, [*both[0].notes, {"kind": "progress", "time": 24.2, "step": 29}], None
    )
    assert steps_to_contact([fast, both[1]], DONE, "0", SIDES) == 9
    nobody = [artifacts("anna", *BEFORE), artifacts("bert", *BEFORE, (15.0, 0.1))]
    assert steps_to_contact(nobody, DONE, "0", SIDES) is None
    assert steps_to_contact(both, DONE[:1], "0", SIDES) is None


def test_exchanges_within_are_those_of_the_side_with_the_fewest() -> None:
    def one(name: str, *exchanges: tuple[str, float]) -> Artifacts:
        group = RealGroup(count=1, step_s=1.0)
        notes = [
            {"kind": "exchanged", "time": time, "seconds": 0.5, "peer": f"id of {partner}"}
            for partner, time in exchanges
        ]
        return Artifacts(ScriptedPeer(name, name, group, name), f"id of {name}", notes, None)

    anna = one("anna", ("cleo", 9.0), ("cleo", 10.2), ("cleo", 12.0), ("bert", 13.0), ("cleo", 14.0), ("cleo", 20.1))
    cleo = one("cleo", ("anna", 12.0), ("anna", 14.0))
    bert = one("bert", ("dora", 15.0), ("anna", 13.0))
    everybody = [anna, bert, cleo, one("dora", ("bert", 15.0))]
    sides = [["anna", "cleo", "bootstrap"], ["bert", "dora"]]
    assert exchanges_within(everybody, DONE, "0", sides[:1]) == 4
    assert exchanges_within(everybody, DONE, "0", sides) == 2
    assert (
        exchanges_within(everybody, DONE, "0", [["anna", "bootstrap"], ["bert", "dora"]]) == 2
    )  # one alone has no partner
    assert exchanges_within(everybody, DONE, "0", [["anna"], ["bert"]]) is None
    assert exchanges_within(everybody, [], "0", sides) is None
