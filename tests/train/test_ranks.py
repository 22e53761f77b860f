"""Learners of one peer's ranks, each over its own fragments: together bitwise what one learner computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from p2ptrain import codec
from p2ptrain.base.ids import LinkId, PeerId
from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.outer.fragments import layer_slices
from p2ptrain.outer.step import OuterRule
from p2ptrain.recipes import RECIPES
from p2ptrain.swarm.events import Commit, OuterStepDone
from p2ptrain.train.learner import Learner
from p2ptrain.train.rules import LearnerRules
from sim.learners import QuadraticTask

UNITS = (2048, 1040, 1040, 1040)
FRAGMENTS = layer_slices(UNITS, 4)
LINK = LinkId(PeerId("amber"), 1, outbound=True)
LENGTH = "the length of the pseudo-gradient"
NAMES = {
    "swarm": {
        LENGTH,
        "the length of the shown pseudo-gradient",
        "the length of a displacement",
        "the arrival of copied weights",
    },
    "swarm_slow": {LENGTH},
}


class Gathering:
    """All-gather of threads, one per rank."""

    def __init__(self, ranks: int) -> None:
        self._parts: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(ranks, timeout=10.0)
        self.names: list[str] = []

    def of(self, rank: int):
        def gather(name: str, values: Tensor) -> Tensor:
            self._parts[rank] = values
            self.names.append(name)
            self._barrier.wait()
            gathered = torch.cat([self._parts[place] for place in sorted(self._parts)])
            self._barrier.wait()
            return gathered

        return gather


class Team:
    """Peer with one learner for each rank, or a single learner."""

    def __init__(self, seed: int, owned: list[range], codec_name: str, recipe: str) -> None:
        random = torch.Generator().manual_seed(seed)
        curvature, optimum = 0.2 + torch.rand(sum(UNITS), generator=random), torch.randn(sum(UNITS), generator=random)
        rules = LearnerRules(4, 1e9, OuterRule(0.7, 0.9), RECIPES[recipe])
        self.owned, self.gathering, self.learners = owned, Gathering(len(owned)), []
        for rank, fragments in enumerate(owned):
            pieces = [FRAGMENTS[fragment] for fragment in fragments]
            begin, end = pieces[0].start, pieces[-1].stop
            local = [slice(piece.start - begin, piece.stop - begin) for piece in pieces]
            task = QuadraticTask(curvature[begin:end], optimum[begin:end])
            gather = {"all_gather": self.gathering.of(rank)} if len(owned) > 1 else {}
            self.learners.append(Learner(task, rules, local, codec.get(codec_name), MemoryLog(), **gather))

    def all(self, do):
        """Call it with each learner, all at once."""
        with ThreadPoolExecutor(len(self.learners)) as pool:
            return list(pool.map(do, self.learners))

    def payloads_of(self, fragment: int):
        rank = next(place for place, owned in enumerate(self.owned) if fragment in owned)
        return self.learners[rank], fragment - self.owned[rank].start

    @property
    def state(self) -> dict[str, Tensor]:
        states = [each.state_dict()[0] for each in self.learners]
        return {
            name: torch.cat([torch.cat(list(state[name])) if name != "theta" else state[name] for state in states])
            for name in ("slow", "momentum", "theta")
        }


def exchange(one: Team, other: Team, fragment: int, push: float = 0.0) -> None:
    """Exchange a fragment; every rank of both peers learns of the exchange, as their owner or with nothing to add."""
    (mine, number), (theirs, place) = one.payloads_of(fragment), other.payloads_of(fragment)
    proposals = mine.payloads.proposals((number,)), theirs.payloads.proposals((place,))
    ours = mine.payloads.encode((number,), *proposals)
    others = theirs.payloads.encode((place,), *reversed(proposals))
    found = mine.payloads.difference(ours, others.parts), theirs.payloads.difference(others, ours.parts)
    commit = Commit(LINK, 0.0, 0.5, float("inf"), False, 0, 0)
    for team, owner, difference in zip((one, other), (mine, theirs), found, strict=True):
        for each in team.learners:
            nothing = type(difference)((), (), (), type(difference.mine)((), (), (), 0, (), ()))
            each.inbox.deliver(commit, difference if each is owner else nothing)


@pytest.mark.parametrize("recipe", ["swarm", "swarm_slow"])
@pytest.mark.parametrize("codec_name", ["fp32", "modular4"])
@pytest.mark.parametrize("split", [[range(2), range(2, 4)], [range(3), range(3, 4)]])
def test_ranks_train_and_exchange_bitwise_as_one_learner(split, codec_name, recipe):
    runs = []
    for owned in ([range(4)], split):
        peers = [Team(seed, owned, codec_name, recipe) for seed in (1, 2)]
        guards = []
        for step in range(16):
            for each in peers:
                events = each.all(lambda learner: learner.advance())
                ends = [any(isinstance(event, OuterStepDone) for event in of_rank) for of_rank in events]
                assert len(set(ends)) == 1
            exchange(*peers, fragment=step % 4)
            guards += [[each._guard.state_dict() for each in peer.learners] for peer in peers]
        for each in peers:
            each.all(lambda learner: learner.settle())
        runs.append(([peer.state for peer in peers], guards))
        assert all(set(peer.gathering.names) == (set() if len(owned) == 1 else NAMES[recipe]) for peer in peers), peers[
            0
        ].gathering.names
    (whole, usual), (ranks, theirs) = runs
    for one, many in zip(whole, ranks, strict=True):
        assert one.keys() == many.keys()
        assert all(torch.equal(one[name], many[name]) for name in one)
    for one, many in zip(usual, theirs, strict=True):
        assert many == one * len(split), "the guards of the ranks know the same as that of one learner"


class LateCopy:
    """Copy of the fast weights that arrives at the second look."""

    def __init__(self, copy) -> None:
        self._looks = iter((False,))
        self._copy = copy
        self.distances_from = copy.distances_from

    @property
    def is_complete(self) -> bool:
        return next(self._looks, True)

    @property
    def parts(self):
        return self._copy.parts


def test_ranks_publish_at_one_step_though_one_device_is_late():
    peer = Team(1, [range(2), range(2, 4)], "fp32", "swarm")
    late = peer.learners[1]._weights
    copy = late.copy_fast
    late.copy_fast = lambda: LateCopy(copy())
    seen = []
    for _ in range(8):
        before = [each.payloads.published for each in peer.learners]
        events = peer.all(lambda learner: learner.advance())
        assert events[0] == events[1]
        seen.append([each.payloads.published is not old for each, old in zip(peer.learners, before, strict=True)])
    assert all(one == other for one, other in seen)
    assert any(one for one, _ in seen[:3])


def test_a_phase_that_fails_on_one_rank_is_dropped_by_all():
    peer = Team(1, [range(2), range(2, 4)], "fp32", "swarm")
    for _ in range(40):
        peer.all(lambda learner: learner.advance())
    before = peer.state["slow"]
    peer.learners[1].task.theta[3] = float("nan")
    for _ in range(4):
        peer.all(lambda learner: learner.advance())
    assert torch.equal(peer.state["slow"], before)
    assert [each._notebook.kinds() for each in peer.learners] == [["discarded"], ["discarded"]]
