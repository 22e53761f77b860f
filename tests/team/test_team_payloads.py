"""A team's payloads over shards in one process: what the network gets and gives, as from one learner."""

from __future__ import annotations

import gc
import socket
import threading
from dataclasses import replace

import pytest
import torch

from p2ptrain import codec
from p2ptrain.base.errors import DeviceError, MisfitError, NetworkError, RemoteError
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm.download_plan import Span, cut
from p2ptrain.swarm.events import Commit
from p2ptrain.team import shard as shard_module
from p2ptrain.team.connection import RankConnection, SocketLine
from p2ptrain.team.inbox import TeamInbox, delivery_of
from p2ptrain.team.payloads import TeamPayloads
from p2ptrain.team.remote_shard import RemoteShard
from p2ptrain.team.shard import LocalShard
from p2ptrain.team.shard_server import ShardServer
from p2ptrain.team.sharding import sharding_of
from p2ptrain.team.turn import MOST_DELIVERIES
from p2ptrain.train.inbox import Adoption, RoundFinished
from p2ptrain.train.learner import Learner
from p2ptrain.train.payloads import Snapshot
from p2ptrain.train.rules import LearnerRules
from p2ptrain.train.sketch import sketch
from sim.learners import QuadraticTask

FRAGMENTS = [slice(0, 1000), slice(1000, 2500), slice(2500, 3000), slice(3000, 3600)]
LINK = LinkId(PeerId("amber"), 1, outbound=True)
SEED = 3


def learner(begin=0, end=3600, fragments=FRAGMENTS, name="modular4"):
    random = torch.Generator().manual_seed(1)
    curvature, optimum = 0.2 + torch.rand(3600, generator=random), torch.randn(3600, generator=random)
    task = QuadraticTask(curvature[begin:end], optimum[begin:end], noise=0.0, seed=1)
    rules = LearnerRules(4, 1e6, OuterRule(0.7, 0.9), RECIPES["swarm"])
    made = Learner(task, rules, fragments, codec.get(name), MemoryLog())
    for _ in range(6):
        made.advance()
    return made


class SplitTeam:
    """Two learners, the second one behind a shard server; each is at its turn 0."""

    def __init__(self, name="modular4"):
        self.sharding = sharding_of(FRAGMENTS, [0, 2500])
        self.learners = [
            learner(0, 2500, self.sharding.slices(0), name),
            learner(2500, 3600, self.sharding.slices(1), name),
        ]
        self.shards = [LocalShard(each.payloads, patience_s=0.2) for each in self.learners]
        ours, theirs = socket.socketpair()
        self.server = ShardServer(self.shards[1], RankConnection(SocketLine(theirs), 1 << 20))
        self.server.start()
        self.remote = RemoteShard(1, RankConnection(SocketLine(ours), 1 << 20), deadline_s=5.0)
        self.payloads = TeamPayloads(
            codec.get(name),
            None,
            (),
            "fast",
            self.sharding,
            [self.shards[0], self.remote],
            lambda: self.shards[0].turn,
            adds_pending=True,
        )

    def complete(self, turn):
        released = [self.payloads.released.popleft() for _ in range(len(self.payloads.released))]
        for each in self.shards:
            each.complete(turn, released)

    def close(self):
        self.payloads.close()
        self.remote.close()
        self.server.close()


@pytest.fixture
def team():
    made = SplitTeam()
    yield made
    made.close()


def begin(payloads, fragments):
    snapshot = payloads.current(fragments)
    return snapshot, payloads.proposals(fragments, snapshot)


def swapped(team, fragments, theirs=None, factor=2.0):
    """Exchange with a peer that says that its weights are twice ours; return what the team and one learner find."""
    whole, other = learner().payloads, learner().payloads
    other.publish(Snapshot(1, tuple(2 * part for part in other.published.parts), (), (0,) * 4))
    (one, mine), (two, same), (three, others) = (begin(each, fragments) for each in (team.payloads, whole, other))
    assert mine == same
    encoded, expected = (
        payloads.encode(fragments, mine, others, snapshot)
        for payloads, snapshot in ((team.payloads, one), (whole, two))
    )
    assert (encoded.parts, encoded.norms, encoded.size_bytes) == (expected.parts, expected.norms, expected.size_bytes)
    three = replace(three, parts=tuple(factor / 2 * part for part in three.parts))
    parts = theirs or other.encode(fragments, others, mine, three).parts
    return team.payloads.difference(encoded, parts), whole.difference(expected, parts)


@pytest.mark.parametrize("fragments", [(0, 1, 2, 3), (3, 0), (2,), (1,)])
def test_an_exchange_measures_what_one_learner_measures(team, fragments):
    found, expected = swapped(team, fragments)
    for name in ("norm", "distance", "fingerprint", "sketched"):
        assert getattr(found, name) == getattr(expected, name), name
    records = [team.shards[rank].take(found.snapshot.lease.number) for rank in found.snapshot.owners]
    by_rank = {rank: iter(each.parts) for rank, each in zip(found.snapshot.owners, records, strict=True)}
    for number, part in zip(fragments, expected.parts, strict=True):
        assert torch.equal(next(by_rank[team.sharding.place(number)[0]]), part)


def test_bytes_that_are_no_weights_are_refused_by_their_owner(team):
    with pytest.raises(RemoteError):
        swapped(team, (0, 2), [bytes(team.payloads.encoded_sizes((0,))[0]), b"short"])


def test_weights_other_than_the_sketch_told_of_are_refused_by_all_ranks_together(team):
    with pytest.raises(MisfitError):
        swapped(team, (0, 2), factor=0.0)


def test_sizes_are_those_of_one_learner(team):
    whole = learner().payloads
    for name in ("encoded_sizes", "proposal_sizes"):
        assert getattr(team.payloads, name)(range(4)) == getattr(whole, name)(range(4))
    assert team.payloads.weight_sizes() == whole.weight_sizes()
    assert team.payloads.streams == whole.streams
    assert not team.payloads.are_zero


def test_what_nobody_refers_to_is_closed_by_the_next_turn(team):
    snapshot = team.payloads.current((0, 3))
    number = snapshot.lease.number
    team.complete(1)
    assert team.shards[1].proposals(number)
    del snapshot
    gc.collect()
    team.complete(2)
    for each in team.shards:
        with pytest.raises(NetworkError, match="is not open"):
            each.proposals(number)


def test_a_snapshot_waits_for_the_trainer_of_its_owner(team):
    team.shards[0].complete(1)
    threading.Timer(0.05, team.shards[1].complete, (1,)).start()
    assert team.payloads.current((0, 3)).owners == (0, 1)
    team.shards[0].complete(2)
    with pytest.raises(NetworkError, match="rank 1 of this peer: the trainer is at turn 1 and did not reach 2 in time"):
        team.payloads.current((0, 3))


def test_a_dead_shard_server_is_a_failure_of_the_network(team):
    team.server.close()
    with pytest.raises(NetworkError, match="rank 1 of this peer"):
        team.payloads.current((3,))
    with pytest.raises(NetworkError, match="rank 1 of this peer"):
        team.payloads.sketch(Span(3, 0, 64), SEED)
    assert team.payloads.current((0,)).owners == (0,)


def test_too_many_open_exchanges_are_refused(team, monkeypatch):
    monkeypatch.setattr(shard_module, "MOST_OPEN", 2)
    kept = [team.payloads.current((3,)) for _ in range(2)]
    with pytest.raises(NetworkError, match="2 exchanges, donations and downloads are open"):
        team.payloads.current((3,))
    assert len(kept) == 2


def test_newcomers_get_one_version_of_all_weights(team):
    whole = learner().payloads
    slow, expected = team.payloads.slow(), whole.slow()
    for each in team.learners:
        for _ in range(6):
            each.advance()
    team.complete(1)
    for span in cut(whole.weight_sizes()):
        assert bytes(team.payloads.piece(slow, span)) == bytes(whole.piece(expected, span))
    assert team.payloads.sketch(Span(3, 400, 800), SEED) != whole.sketch(Span(3, 400, 800), SEED)


def stored(team, parts):
    download = team.payloads.new_download()
    for span in cut([len(part) for part in parts]):
        download.store(span, memoryview(parts[span.fragment])[span.start : span.stop])
    return download


def test_a_donors_weights_reach_their_owners(team):
    donor = learner()
    donor.advance()
    parts = [bytearray(part) for part in donor.payloads.weights()]
    download = stored(team, parts)
    for span in cut([1000, 1500, 2000, 2400]):
        expected = sketch(torch.frombuffer(parts[span.fragment], dtype=torch.float32)[: span.stop // 4], SEED)
        assert download.sketch(span, SEED) == expected
    team.payloads.check_weights(download.whole)
    inbox = TeamInbox(0.25, team.payloads)
    inbox.adopt(LINK, 5, 60.0, download.whole)
    inbox.proceed(2)
    inbox.wake()
    deliveries, has_come = inbox.drain()
    assert has_come
    first, second = (
        delivery_of(entry.record, team.shards[rank], rank, entry.link)
        for rank, entry in ((0, deliveries[0]), (1, deliveries[0]))
    )
    assert isinstance(first, Adoption)
    assert (first.link, first.step, first.progress) == (LINK, 5, 60.0)
    for found, expected in zip([*first.weights, *second.weights], parts, strict=True):
        assert bytes(found.numpy().data) == bytes(expected)
    assert delivery_of(deliveries[1].record, team.shards[0], 0) == RoundFinished(2)
    assert inbox.drain() == ([], False)


@pytest.mark.parametrize(("place", "value"), [(3, float("nan")), (0, float("inf"))])
def test_a_donors_broken_weights_are_refused(team, place, value):
    parts = [bytearray(part) for part in learner().payloads.weights()]
    torch.frombuffer(parts[place], dtype=torch.float32)[7] = value
    with pytest.raises(RemoteError, match="its weights are not finite"):
        team.payloads.check_weights(stored(team, parts))


def test_a_turn_takes_so_many_deliveries_and_leaves_the_rest(team):
    inbox = TeamInbox(0.25, team.payloads)
    for step in range(MOST_DELIVERIES + 3):
        inbox.proceed(step)
    assert [len(inbox.drain()[0]) for _ in range(3)] == [MOST_DELIVERIES, 3, 0]


def test_a_pending_exchange_is_in_the_next_snapshot(team):
    found, _ = swapped(team, (0, 3))
    inbox = TeamInbox(0.25, team.payloads)
    before = team.payloads.current((3,))
    inbox.deliver(Commit(LINK, 0.0, 0.5, float("inf"), False, 0, 0), found)
    assert team.payloads.proposals((3,), before) != team.payloads.proposals((3,), team.payloads.current((3,)))
    team.payloads.settle(1)
    assert team.payloads.proposals((3,), before) == team.payloads.proposals((3,), team.payloads.current((3,)))


def test_fragments_within_a_stage_are_needed():
    with pytest.raises(DeviceError, match=r'outer\.cut = "layers"'):
        sharding_of(FRAGMENTS, [0, 2000])
    with pytest.raises(ValueError, match="do not own fragments in order"):
        sharding_of(FRAGMENTS, [1000, 2500])


def test_ranks_of_a_run_cut_by_layers_are_told_where_they_may_begin():
    units = [piece.stop - piece.start for piece in FRAGMENTS]
    units[:1] = [1, units[0] - 1]
    with pytest.raises(DeviceError, match="middle of a fragment") as caught:
        sharding_of(FRAGMENTS, [0, 1], units)
    assert "layers 0, 2, 3" in caught.value.remedy
