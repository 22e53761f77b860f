"""Whole conversations, recorded once and compared exactly: all messages and notes.

A difference is a change of the protocol's behaviour: intended, or a bug.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from table import Table

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm.events import LeaveRequested
from p2ptrain.swarm.messages import Acknowledge

GOLDEN = Path(__file__).parent / "golden"


def three_peers_begin() -> Table:
    table = Table("amber", "birch", "cedar", seed=5)
    table.start()
    table.run(3.0)
    for _ in range(3):
        table.step()
        table.run(0.7)
    return table


def a_newcomer_catches_up() -> Table:
    table = Table("amber", "birch", seed=5)
    table.start()
    table.run(3.0)
    for _ in range(12):
        table.step()
        table.run(0.7)
    table.run(21.0)
    table.trace.clear()
    table.seat("cedar", seed=5)
    table.start("cedar")
    table.run(2.0)
    table.step()
    table.run(1.0)
    return table


def a_partner_dies_in_mid_exchange() -> Table:
    table = three_peers_begin()
    table.trace.clear()
    table.step("amber")
    table.run(0.03)
    table.kill(next(iter(table["amber"].ends)).peer)
    table.run(3.0)
    table.step("amber")
    table.run(3.0)
    return table


def an_acknowledgement_is_lost() -> Table:
    table = three_peers_begin()
    table.trace.clear()
    table.holds_back = lambda sender, receiver, what: sender == "amber" and isinstance(what, Acknowledge)
    table.step("amber")
    table.run(20.0)
    return table


def the_run_ends() -> Table:
    table = three_peers_begin()
    table.trace.clear()
    table.end_training()
    table.run(20.0)
    return table


def an_owner_stops() -> Table:
    table = three_peers_begin()
    table.trace.clear()
    table.step("amber")
    table.handle(PeerId("amber"), LeaveRequested())
    table.run(1.0)
    table.step("birch")
    table.run(30.0)
    return table


@pytest.mark.parametrize(
    "scene",
    [
        three_peers_begin,
        a_newcomer_catches_up,
        a_partner_dies_in_mid_exchange,
        an_acknowledgement_is_lost,
        the_run_ends,
        an_owner_stops,
    ],
    ids=lambda scene: scene.__name__,
)
def test_the_conversation_is_the_recorded_one(scene, request):
    trace = "\n".join(scene().trace) + "\n"
    path = GOLDEN / f"{scene.__name__}.txt"
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(trace)
    assert trace == path.read_text()
