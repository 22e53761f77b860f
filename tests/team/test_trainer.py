"""The leader's turns, and a rank that follows them, in two threads."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import torch
from test_team_payloads import FRAGMENTS, LINK, begin

from p2ptrain import codec
from p2ptrain.base.errors import NetworkError, TeamError
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm.events import Applied, Commit, OuterStepDone, Unfit
from p2ptrain.team import trainer as trainers
from p2ptrain.team.inbox import TeamInbox
from p2ptrain.team.payloads import TeamPayloads
from p2ptrain.team.shard import LocalShard
from p2ptrain.team.sharding import sharding_of
from p2ptrain.team.trainer import LeadingTrainer, follow
from p2ptrain.team.turn import MOST_BYTES, DisplacementRecord, Turn, decode_turn, encode_turn
from p2ptrain.train.learner import Learner
from p2ptrain.train.rules import LearnerRules
from sim.learners import QuadraticTask


class ThreadGroup:
    """``TeamGroup`` of two threads."""

    size = 2

    def __init__(self, rank, queues):
        self.rank = rank
        self.queues = queues  # to each rank
        self.sent = []

    def broadcast(self, name, body, at_most):
        if self.rank == 0:
            self.sent.append(decode_turn(body))
            self.queues[1].put(body)
            return body
        return self._get(name)

    def gather(self, name, values):
        self.queues[1 - self.rank].put(values)
        parts = [values, self._get(name)]
        return torch.cat(parts if self.rank == 0 else parts[::-1])

    def least(self, name, number):
        return int(self.gather(name, torch.tensor([number], dtype=torch.int64)).min())

    def together(self, name, work):
        result = work()
        self.least(name, 1)
        return result

    def _get(self, name):
        found = self.queues[self.rank].get(timeout=LEFT_ALONE_S)
        if found is GONE:
            raise TeamError(name, "the other thread is gone")
        return found

    def leave(self):
        """Tell the other thread that this one has ended."""
        self.queues[1 - self.rank].put(GONE)


def quadratic(begin=0, end=3600, seed=1):
    random, own = (torch.Generator().manual_seed(each) for each in (0, seed))
    curvature, optimum = 0.2 + torch.rand(3600, generator=random), torch.randn(3600, generator=random)
    optimum += 0.2 * torch.randn(3600, generator=own)
    return QuadraticTask(curvature[begin:end], optimum[begin:end], noise=0.0, seed=1)


def learner(task, fragments, all_gather=None, name="fp32"):
    rules = LearnerRules(4, 1e6, OuterRule(0.7, 0.9), RECIPES["swarm"], 2)
    extra = {} if all_gather is None else {"all_gather": all_gather}
    return Learner(task, rules, fragments, codec.get(name), MemoryLog(), clock=lambda: 0.0, **extra)


GONE = object()
LEFT_ALONE_S = 120.0
"""Seconds after which a thread fails whose other one hangs: longer than a test trains plain peers meanwhile."""


class ThreadTeam:
    """Two ranks as threads of this process.

    Args:
        seed: of the task.
        name: of the codec.
    """

    def __init__(self, seed=1, name="fp32"):
        queues = [SimpleQueue(), SimpleQueue()]
        self.groups = [ThreadGroup(rank, queues) for rank in range(2)]
        sharding = sharding_of(FRAGMENTS, [0, 2500])
        tasks = quadratic(0, 2500, seed), quadratic(2500, 3600, seed)
        self.learners = [
            learner(task, sharding.slices(rank), self.groups[rank].gather, name) for rank, task in enumerate(tasks)
        ]
        self.shards = [LocalShard(each.payloads) for each in self.learners]
        self.payloads = TeamPayloads(
            codec.get(name), None, (), "fast", sharding, self.shards, lambda: self.shards[0].turn, True
        )
        inbox = TeamInbox(RECIPES["swarm"].follow, self.payloads)
        self.leader = LeadingTrainer(self.learners[0], self.groups[0], self.shards[0], self.payloads, inbox)
        self.done = []
        self.saves = lambda: self.done.append("save")
        self.failure = None
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self):
        own = self.learners[1], self.groups[1], self.shards[1]
        try:
            follow(
                *own,
                lambda tokens: self.done.append(tokens),
                lambda: self.saves(),
                lambda: self.done.append("save_trained"),
            )
        except TeamError as error:
            self.failure = error
            self.groups[1].leave()

    def close(self):
        if self.thread.is_alive():
            self.leader.stop()
        self.thread.join(timeout=20.0)
        self.payloads.close()
        assert not self.thread.is_alive()

    def slow(self):
        return torch.cat([each.slow for each in self.learners])


@pytest.fixture
def team():
    made = ThreadTeam()
    yield made
    made.close()


def test_ranks_train_as_one_learner_and_report_its_events(team):
    whole = learner(quadratic(), FRAGMENTS)
    team.leader.peers = whole.peers = 2.5
    for _ in range(9):
        assert team.leader.advance() == whole.advance()
    assert (team.leader.step, team.leader.progress) == (2, whole.progress)
    assert not team.leader.ended
    assert not team.leader.is_waiting
    assert team.leader.save(lambda: "saved") == "saved"
    leading = team.learners[0]
    fast = leading.task.theta.clone()
    assert torch.equal(team.leader.evaluate(512, leading.task.theta.clone), leading.slow)
    assert torch.equal(leading.task.theta, fast)
    assert not torch.equal(fast, leading.slow)
    assert team.leader.save_trained(lambda: "saved") == "saved"
    team.close()
    assert team.done == ["save", 512, "save_trained"]
    assert torch.equal(team.slow(), whole.slow)
    assert [each.progress for each in team.learners] == [whole.progress] * 2


def test_an_exchange_may_begin_while_ranks_save(team):
    has_begun, waited = threading.Event(), []
    team.saves = lambda: waited.append(has_begun.wait(5.0))

    def begins():
        begin(team.payloads, (0, 3))
        has_begun.set()

    team.leader.save(begins)
    team.close()
    assert waited == [True]


def test_an_exchange_reaches_all_ranks_and_is_released_after_it(team):
    for _ in range(6):
        team.leader.advance()
    snapshot, _ = begin(team.payloads, (0, 3))
    encoded = team.payloads.encode((0, 3), (), (), snapshot)
    theirs = [bytes(len(part)) for part in encoded.parts]
    difference = team.payloads.difference(encoded, theirs)
    number = snapshot.lease.number
    team.leader.inbox.deliver(Commit(LINK, 3.0, 0.5, float("inf"), False, 0, 0), difference)
    del snapshot, encoded, difference
    before = team.leader.progress
    assert team.leader.settle() == [Applied(LINK, before + 3.0)]
    (record,) = team.groups[0].sent[-1].deliveries
    assert isinstance(record, DisplacementRecord)
    assert (record.exchange, record.owners, record.clip_radius) == (number, [0, 1], None)
    team.leader.settle()
    assert team.groups[0].sent[-1].released == [number]
    team.close()
    assert [each._exchanges for each in team.shards] == [{}, {}]


def test_a_leader_that_waits_is_heard(team, monkeypatch):
    monkeypatch.setattr(trainers, "HEARTBEAT_S", 0.05)
    sent = len(team.groups[0].sent)
    assert team.leader.settle(wait_s=0.3) == []
    assert len(team.groups[0].sent) > sent + 2
    threading.Timer(0.1, team.leader.inbox.wake).start()
    assert team.leader.settle(wait_s=60.0) == []


def test_a_rank_that_lacks_its_part_says_so(team):
    record = DisplacementRecord(
        serial=1, exchange=99, owners=[1], share=0.5, clip_radius=1.0, progress=0.0, finished=False, follow=1.0
    )
    turn = Turn(number=1, action="settle", peers=1.0, deliveries=[record])
    team.groups[0].broadcast("turn 1", encode_turn(turn), MOST_BYTES)
    team.thread.join(timeout=10.0)
    assert str(team.failure) == "turn 1: rank 1 lacks its part: exchange 99 is not open"


def test_the_longest_turn_fits():
    most, long = 2**63 - 1, 1.2345678901234567e-300
    record = DisplacementRecord(
        serial=most,
        exchange=most,
        owners=[255] * 256,
        share=long,
        clip_radius=long,
        progress=-long,
        finished=False,
        follow=long,
    )
    turn = Turn(number=most, action="evaluate", peers=long, deliveries=[record] * 64, released=[most] * 1024)
    assert decode_turn(encode_turn(turn)) == turn


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (encode_turn(Turn(number=2, action="settle", peers=1.0)), "turn 1: the leader is at turn 2"),
        (b"pt\x02\n{}", "turn: the leader runs another version of p2ptrain"),
        (b"pt\x01\n{}", "turn: number: Field required"),
    ],
)
def test_a_wrong_turn_is_an_error(team, body, why):
    team.groups[1].queues[1].put(body)
    team.thread.join(timeout=10.0)
    assert str(team.failure) == why


def test_outer_steps_are_the_leaders_to_report(team):
    said = [type(event) for _ in range(4) for event in team.leader.advance()]
    assert said.count(OuterStepDone) == 1


def test_what_failed_ranks_had_to_apply_is_reported_and_a_new_generation_goes_on(team):
    for _ in range(6):
        team.leader.advance()
    snapshot, _ = begin(team.payloads, (0, 3))
    encoded = team.payloads.encode((0, 3), (), (), snapshot)
    difference = team.payloads.difference(encoded, [bytes(len(part)) for part in encoded.parts])
    team.shards[1]._exchanges.clear()  # as in a rank that was started again
    team.leader.inbox.deliver(Commit(LINK, 3.0, 0.5, float("inf"), False, 0, 0), difference)
    with pytest.raises(TeamError):
        team.leader.advance()
    team.thread.join(timeout=20.0)
    team.leader.inbox.adopt(LINK, 9, 1.0, team.payloads.new_download())
    changes = team.leader.changes
    applied, unfit = team.leader.abandon()
    assert applied == Applied(LINK, team.leader.progress)
    assert isinstance(unfit, Unfit)
    assert team.leader.abandon() == []
    later = ThreadTeam()
    team.payloads.reconnect(later.shards)
    team.leader.restart(later.learners[0], later.groups[0], later.shards[0])
    team.payloads._version = lambda: later.shards[0].turn
    try:
        assert team.leader.step == 0
        assert team.leader.changes > changes
        for _ in range(4):
            team.leader.advance()
        assert team.leader.step == 1
        begin(team.payloads, (0, 3))
        with pytest.raises(NetworkError, match="is not open"):
            team.payloads.difference(encoded, [bytes(len(part)) for part in encoded.parts])
        team.leader.stop()
    finally:
        later.thread.join(timeout=20.0)
        later.payloads.close()
