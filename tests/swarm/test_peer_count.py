"""How many peers a peer counts, by which it multiplies its own tokens."""

from __future__ import annotations

from random import Random

import pytest
from run_rules import run_rules
from table import Table, presence

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import PeerState
from p2ptrain.swarm.events import Counted, LeaveRequested, PeersSeen
from p2ptrain.swarm.peer import Peer
from p2ptrain.swarm.peer_count import AT_ONCE, RISE

RULES = run_rules(run_tokens=1e6, exchanges_per_step=2)


def swarm(*names: str, **changes) -> Table:
    table = Table(*names, rules=run_rules(**{"run_tokens": 1e6, "exchanges_per_step": 2, **changes}))
    table.start()
    table.run(3.0)
    return table


def train(table: Table, steps: int) -> None:
    for _ in range(steps):
        table.step(*(name for name, seat in table.seats.items() if not seat.dead and not seat.finished))
        table.run(5.0)


def counted(table: Table) -> set[float]:
    return {seat.peers for seat in table.seats.values() if not seat.dead and not seat.finished}


def test_founders_count_each_other_in_the_first_outer_step():
    table = swarm("amber", "birch", "cedar", "dune")
    train(table, 1)
    assert counted(table) == {4.0}


def test_the_killed_and_the_gone_do_not_count():
    table = swarm("amber", "birch", "cedar", "dune")
    train(table, 3)
    table.kill("dune")
    train(table, 3)
    assert counted(table) == {3.0}, "its record lives on"
    table.handle(PeerId("cedar"), LeaveRequested())
    table.run(5.0)
    train(table, 4)
    assert counted(table) == {2.0}


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.FINISHING, PeerState.LEAVING])
def test_only_those_who_train_count(state: PeerState):
    peer = Peer(PeerId("amber"), RULES, Random(1))
    records = (presence("birch", state=PeerState.TRAINING), presence("cedar", state=state))
    effects = peer.handle(PeersSeen(tuple((record, 75.0) for record in records)), 0.0)
    assert [each.peers for each in effects if isinstance(each, Counted)] == [2.0]


def test_alone_by_choice_is_one():
    table = swarm("amber", "birch", exchanges_per_step=0, free=())
    train(table, 2)
    assert counted(table) == {1.0}


def test_a_large_swarm_is_counted_by_the_directory_and_at_most_doubles_with_a_step():
    peer = Peer(PeerId("amber"), RULES, Random(1))
    records = tuple((presence(f"peer {number}"), 1e9) for number in range(200))
    counts: list[float] = []
    for step in range(6):
        peer._core.count.outer_step_done()
        for effect in peer.handle(PeersSeen(records, in_directory=1000), float(step)):
            counts += [effect.peers] if isinstance(effect, Counted) else []
    assert counts == [AT_ONCE, AT_ONCE * RISE, AT_ONCE * RISE**2, AT_ONCE * RISE**3, 1000.0]


def test_a_crowd_of_false_records_counts_for_few_outer_steps():
    """Check 1,000 records of nobody among five honest peers: calls to them fail, and they stop counting."""
    honest = ("amber", "birch", "cedar", "dune", "elm")
    table = swarm(*honest)
    train(table, 5)
    excess = 0.0
    for _ in range(40):
        for number in range(1000):
            name = f"nobody {number}"
            table.records[PeerId(name)] = presence(name, at=table.now)
        train(table, 1)
        excess += sum(table[name].peers / len(honest) - 1.0 for name in honest) / len(honest)
    assert 10.0 < excess < 250.0, "outer steps by which the run ends earlier"
    assert max(counted(table)) < 1.2 * len(honest)
