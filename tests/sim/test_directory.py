"""The simulated directory: bounded answers, counted bytes, and no peers that are gone."""

from __future__ import annotations

from random import Random

from p2ptrain.base.ids import PeerId, RunId
from p2ptrain.swarm import PeerState, Presence
from sim.directory import MOST, REPLICAS, REQUEST_BYTES, SimulatedDirectory
from sim.sizes import presence_bytes

RUN = RunId("5" * 64)


def record(number: int, at: float) -> Presence:
    name = PeerId(f"peer-{number:05d}")
    return Presence(name, RUN, ("/ip4/1.2.3.4/tcp/1",), PeerState.TRAINING, 3, 0.0, True, "", at, 75.0, bytes(64))


def filled(peers: int, rounds: int = 4) -> SimulatedDirectory:
    """Return a directory in which all have announced and looked up a few times, every 20 s as real peers do."""
    directory = SimulatedDirectory(RUN, Random(1))
    for turn in range(rounds):
        for number in range(peers):
            directory.announce(record(number, 20.0 * turn), 20.0 * turn)
            directory.lookup(record(number, 0.0).peer, 20.0 * turn + 1)
    return directory


def test_a_small_swarm_is_seen_whole_and_paid_for():
    directory = filled(6)
    found, sent, received = directory.lookup(record(0, 0.0).peer, 61.0)
    assert {presence.peer for presence, _ in found} == {record(number, 0.0).peer for number in range(6)}
    assert all(until == 60.0 + 75.0 for _, until in found)
    assert sent == REQUEST_BYTES
    assert received == REQUEST_BYTES + 6 * presence_bytes(record(0, 60.0))
    sent, received = directory.announce(record(0, 80.0), 80.0)
    stores = received // REQUEST_BYTES
    assert stores % REPLICAS == 0
    assert sent == stores * (REQUEST_BYTES + presence_bytes(record(0, 80.0)))


def test_an_answer_costs_the_same_however_large_the_swarm_is():
    costs = {}
    for peers in (300, 1200):
        directory = filled(peers)
        answers = [directory.lookup(record(number, 0.0).peer, 62.0) for number in range(0, peers, 10)]
        assert max(len(found) for found, _, _ in answers) <= MOST
        costs[peers] = sum(received for _, _, received in answers) / len(answers)
    assert costs[1200] < 1.5 * costs[300]


def test_whose_time_is_over_is_not_found():
    directory = filled(6)
    directory.announce(record(0, 100.0), 100.0)
    found, _, _ = directory.lookup(record(1, 0.0).peer, 136.0)
    assert [presence.peer for presence, _ in found] == [record(0, 0.0).peer]
