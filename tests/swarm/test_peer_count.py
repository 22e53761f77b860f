"""How many peers a peer counts, by which it multiplies its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean

import pytest
from run_rules import run_rules
from table import Table, presence

from p2ptrain.base.ids import PeerId
from p2ptrain.swarm import PeerState
from p2ptrain.swarm.events import Counted, LeaveRequested, OuterStepDone, PeersSeen
from p2ptrain.swarm.messages import Presence
from p2ptrain.swarm.peer import Peer
from p2ptrain.swarm.peer_count import AT_ONCE
from p2ptrain.swarm.peer_info import FailureKind
from p2ptrain.swarm.rules import ENOUGH_PEERS

RULES = run_rules(run_tokens=1e6, exchanges_per_step=2)


def swarm(*names: str, seed: int = 0, **changes) -> Table:
    rules = run_rules(**{"run_tokens": 1e6, "exchanges_per_step": 2, **changes})
    table = Table(*names, rules=rules, seed=seed)
    table.start()
    table.run(3.0)
    return table


def train(table: Table, steps: int) -> None:
    for _ in range(steps):
        table.step(*(name for name, seat in table.seats.items() if not seat.dead and not seat.finished))
        table.run(5.0)


def counted(table: Table) -> set[float]:
    return {seat.peers for seat in table.seats.values() if not seat.dead and not seat.finished}


def test_founders_count_each_other_before_their_first_outer_step():
    assert counted(swarm("amber", "birch", "cedar", "dune")) == {4.0}


def test_the_killed_do_not_count_from_the_outer_step_after_an_unanswered_call_on():
    table = swarm("amber", "birch", "cedar", "dune", exchanges_per_step=1)
    train(table, 3)
    table.kill("dune")
    numbers: set[tuple[bool, float]] = set()
    for _ in range(5):
        members = {name: table[name].core._core.members for name in ("amber", "birch", "cedar")}
        dunes = {name: each.get(PeerId("dune")) for name, each in members.items()}
        assert all(dunes[name] in each.live(table.now) for name, each in members.items()), "its record lives on"
        unanswered = {name: dune is not None and dune.unanswered > 0 for name, dune in dunes.items()}
        table.step(*members)
        numbers |= {(unanswered[name], table[name].peers) for name in members}
        table.run(5.0)
    assert numbers == {(False, 4.0), (True, 3.0)}
    assert counted(table) == {3.0}


def test_those_who_left_do_not_count():
    table = swarm("amber", "birch", "cedar")
    train(table, 3)
    table.handle(PeerId("cedar"), LeaveRequested())
    table.run(5.0)
    train(table, 2)
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


def counts_of(
    peer: Peer, records: Sequence[Presence], in_directory: int, steps: int, strangers_answer: bool = True
) -> list[float]:
    """Return each new number of peers: at a lookup, and after each outer step in which one stranger was called."""
    events: list[PeersSeen | OuterStepDone] = [PeersSeen(tuple((each, 1e9) for each in records), True, in_directory)]
    events += [OuterStepDone(step, 0.0, 0) for step in range(1, 1 + steps)]
    counts: list[float] = []
    for now, event in enumerate(events):
        counts += [each.peers for each in peer.handle(event, now) if isinstance(each, Counted)]
        members = peer._core.members
        stranger = next((known for known in members.live(now) if not known.was_heard), None)
        if stranger and strangers_answer:
            members.called(stranger.peer, now)
            members.hear(stranger.peer, stranger.state, 0, 0.0, now)
    return counts


def test_a_swarm_of_which_few_are_kept_is_counted_by_the_directory_and_at_most_doubles_with_a_step():
    records = [presence(f"peer {number}") for number in range(6 * ENOUGH_PEERS)]
    counts = counts_of(Peer(PeerId("amber"), RULES, Random(1)), records, in_directory=1000, steps=8)
    assert counts == [AT_ONCE, 128.0, 256.0, 512.0, 1000.0], "then it changes no more"


def test_of_the_directory_those_count_who_train_by_their_share_of_the_kept():
    states = [PeerState.TRAINING] * 3 + [PeerState.JOINING]
    records = [presence(f"peer {number}", state=states[number % 4]) for number in range(4 * ENOUGH_PEERS)]
    counts = counts_of(Peer(PeerId("amber"), RULES, Random(1)), records, in_directory=1000, steps=8)
    assert counts[-1] == pytest.approx(750.0, rel=0.1)


def test_a_small_swarm_that_grows_at_most_doubles_with_a_step():
    peer = Peer(PeerId("amber"), RULES, Random(1))
    assert counts_of(peer, [presence("birch")], in_directory=2, steps=1) == [2.0]
    joined = [presence(f"peer {number}") for number in range(100)]
    assert counts_of(peer, joined, in_directory=102, steps=4) == [4.0, 8.0, 16.0, 32.0, 64.0]


def test_strangers_that_do_not_answer_raise_the_number_no_more():
    peer = Peer(PeerId("amber"), RULES, Random(1))
    assert counts_of(peer, [presence("birch")], in_directory=2, steps=2) == [2.0]
    crowd = [presence(f"nobody {number}") for number in range(100)]
    assert counts_of(peer, crowd, in_directory=102, steps=4, strangers_answer=False) == []


def test_a_crowd_whose_owner_answers_doubles_the_number_only_until_half_the_calls_failed():
    peer = Peer(PeerId("amber"), RULES, Random(1))
    assert counts_of(peer, [presence("birch")], in_directory=2, steps=2) == [2.0]
    crowd = [presence(f"nobody {number}") for number in range(30)]
    counts = counts_of(peer, crowd, in_directory=32, steps=0)  # the first one called answers
    members = peer._core.members
    for call, known in enumerate([known for known in members.live(3.0) if not known.was_heard]):
        now = 3.0 + 0.1 * call  # its own calls, unanswered, do not fail yet
        effects = peer.handle(OuterStepDone(3 + call, 0.0, 0), now)
        counts += [each.peers for each in effects if isinstance(each, Counted)]
        members.called(known.peer, now)
        if call == 10:
            members.hear(known.peer, known.state, 0, 0.0, now)
        else:
            members.record_failure(known.peer, now, FailureKind.UNANSWERED)
    assert counts == [4.0, 3.0, 4.0], "both that answered, birch and itself"


def test_a_peer_that_slept_counts_at_once_those_whom_it_had_forgotten():
    table = swarm("amber", "birch", "cedar")
    train(table, 3)
    table["cedar"].frozen = True
    for _ in range(20):
        table.step("amber", "birch")
        table.run(5.0)
    table["cedar"].frozen = False
    table.step("cedar")
    assert table["cedar"].peers == 3.0, "until a lookup tells more, the last count is the best"
    table.run(1.0)
    assert table["cedar"].peers == 3.0


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_of_false_records_counts_for_few_outer_steps(seed: int):
    """Check 1,000 records of nobody among seven honest peers, renewed with every outer step."""
    honest = tuple(f"honest {number}" for number in range(7))
    table = swarm(*honest, seed=seed)
    train(table, 5)
    numbers: list[float] = []
    for _ in range(25):
        for number in range(1000):
            name = f"nobody {number}"
            table.records[PeerId(name)] = presence(name, at=table.now)
        train(table, 1)
        numbers.append(fmean(table[name].peers for name in honest))
    assert max(numbers) < 1.1 * len(honest)
    assert sum(numbers) / len(honest) - len(numbers) < 0.5, "outer steps by which the run ends earlier"


def test_a_lone_peer_among_records_of_nobody_counts_them_until_its_first_calls_fail():
    table = swarm("amber")
    for number in range(100):
        table.seat(f"nobody {number}").frozen = True  # a call takes its whole timeout
    numbers: list[float] = []
    for _ in range(60):
        for number in range(100):
            name = f"nobody {number}"
            table.records[PeerId(name)] = presence(name, at=table.now)
        train(table, 1)
        numbers.append(table["amber"].peers)
    assert max(numbers) == AT_ONCE
    assert sum(numbers) - len(numbers) < 4 * AT_ONCE, "outer steps by which the run ends earlier"
    table.seat("birch", step=table["amber"].step, progress=table["amber"].progress)
    table.start("birch")
    for _ in range(40):
        table.step("amber", "birch")
        table.run(5.0)
    assert table["amber"].peers == 2.0, "once the records expired, a peer that answers counts"
