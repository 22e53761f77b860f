"""How soon a peer exchanges again after an event, from made-up artifacts."""

from __future__ import annotations

import math

from sample_artifacts import GROUP

from lab.artifacts import Artifacts
from lab.returning import longest_return_s
from lab.script import ActKind, ScriptedPeer


def peer(*ends: float) -> Artifacts:
    notes = [{"kind": "exchanged", "time": end, "seconds": 1.0} for end in ends]
    return Artifacts(ScriptedPeer("anna", "anna", GROUP, "anna"), "id", notes, None)


def acts(*times: tuple[float, ActKind]) -> list[dict[str, object]]:
    mine = [{"who": "anna", "time": time, "do": kind} for time, kind in times]
    return [*mine, {"who": "bert", "time": 0.0, "do": ActKind.MOVE}]


def test_the_longest_time_until_an_exchange_that_began_afterwards() -> None:
    moved = [(10.0, ActKind.MOVE), (50.0, ActKind.READDRESS)]
    assert longest_return_s(peer(5.0, 10.5, 17.0, 53.0), acts(*moved)) == 7.0
    assert longest_return_s(peer(5.0, 10.5, 17.0), acts(*moved)) == math.inf
    assert longest_return_s(peer(5.0), acts()) is None


def test_only_ends_of_events_count_and_of_several_at_once_the_last() -> None:
    offline = [(10.0, ActKind.UNROUTE), (70.0, ActKind.REROUTE)]
    assert longest_return_s(peer(74.0), acts(*offline)) == 4.0
    asleep = [(10.0, ActKind.SUSPEND), (20.0, ActKind.FORGET), (30.0, ActKind.JUMP), (70.0, ActKind.RESUME)]
    assert longest_return_s(peer(80.0), acts(*asleep)) == 10.0
