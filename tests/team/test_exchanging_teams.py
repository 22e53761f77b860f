"""Teams of real processes that exchange: they end bitwise as peers of one process do, also mixed with such peers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from team_peer import ByHand, SwarmCase, plain_learner, state_of, told
from team_rank import HELD_OUT

from p2ptrain import checkpoint
from p2ptrain.team.handshake import new_key

pytestmark = pytest.mark.net

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("team_peer.py")
PATHS = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests" / "train", SCRIPT.parent))


REPLICAS = SwarmCase(replicas=2, micro_batch=4)
"""Two replicas of one micro-batch each, whose sum has one order: bitwise what one process computes."""


class Plain(ByHand):
    """Peer in this process."""

    def __init__(self, case: SwarmCase) -> None:
        super().__init__(plain_learner(case))

    def state(self) -> dict[str, torch.Tensor]:
        return state_of(self.learner.state_dict()[0])

    def evaluate(self) -> float:
        return self.learner.task.held_out_loss(HELD_OUT, math.inf, lambda read, wanted: True).value

    def save(self, home: Path) -> None:
        checkpoint.save(home, *self.learner.state_dict())

    def resume(self, home: Path) -> None:
        found = checkpoint.load_latest(home).checkpoint
        self.learner.load_state_dict(found.tensors, found.state)


class TeamProcesses:
    """Processes that live for several cases, because they take seconds to start."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": PATHS}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        self._generations = count()

    def begin(self, case: SwarmCase) -> TeamByHand:
        generation = next(self._generations)
        home = case.home or str(self.folder / f"home-{generation}")
        case = replace(case, generation=generation, key=new_key().hex(), home=home)
        for rank in self.ranks:
            rank.stdin.write(told(case) + "\n")
            rank.stdin.flush()
        assert self.answer() == "listening"
        return TeamByHand(self, case)

    def ask(self, *command):
        self.ranks[0].stdin.write(json.dumps(command) + "\n")
        self.ranks[0].stdin.flush()
        return self.answer() if command[0] != "stop" else None

    def answer(self):
        return json.loads(self.ranks[0].stdout.readline())

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()


class TeamByHand:
    """``ByHand`` of a team's leader in another process."""

    def __init__(self, processes: TeamProcesses, case: SwarmCase) -> None:
        self._processes = processes
        self._case = case

    def advance(self, steps):
        return self._processes.ask("advance", steps)

    def settle(self):
        return self._processes.ask("settle")

    def propose(self, fragments):
        return [bytes.fromhex(each) for each in self._processes.ask("propose", list(fragments))]

    def encode(self, theirs):
        return [bytes.fromhex(each) for each in self._processes.ask("encode", [each.hex() for each in theirs])]

    def conclude(self, theirs, *numbers):
        return self._processes.ask("conclude", [each.hex() for each in theirs], *numbers)

    def proceed(self, step):
        return self._processes.ask("proceed", step)

    def adopt(self, parts, step, progress):
        return self._processes.ask("adopt", [part.hex() for part in parts], step, progress)

    def donate(self):
        return [bytes.fromhex(each) for each in self._processes.ask("donate")]

    def evaluate(self):
        return self._processes.ask("evaluate")

    def numbers(self):
        return self._processes.ask("numbers")

    def state(self):
        path = Path(self._processes.ask("save"))
        found = checkpoint.load_latest(path.parent).checkpoint
        assert found.path == path
        assert len(list(path.glob("*.safetensors"))) == self._case.mesh.stages
        return state_of(found.tensors)

    def end(self):
        self._processes.ask("stop")


@pytest.fixture(scope="module")
def teams(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("amber", "birch")]
    both = [TeamProcesses(folder, ranks) for folder, ranks in zip(folders, (2, 4), strict=True)]
    yield both
    for each in both:
        each.end()


def exchange(one, other, fragments, share=0.5, clip_radius=float("inf"), progress=0.0):
    """Make a whole exchange, delivered to both and not yet applied; return what both measured."""
    proposals = one.propose(fragments), other.propose(fragments)
    ours, theirs = one.encode(proposals[1]), other.encode(proposals[0])
    found = one.conclude(theirs, share, clip_radius, progress), other.conclude(ours, 1 - share, clip_radius, -progress)
    return [*found, sum(map(len, ours)), sum(map(len, theirs))]


def live(one, other) -> list:
    """Train both peers for three outer steps with exchanges in between; return all that both report."""
    said = [one.advance(1), other.advance(1)]
    for turn in range(3):
        said += [one.advance(1), other.advance(1)]
        said.append(exchange(one, other, range(6), 0.5 + 0.1 * turn, progress=16.0))
        said.append(exchange(one, other, [4, 1], clip_radius=0.01))  # while the first one is pending
        said += [one.settle(), one.advance(2), other.advance(2)]
        said.append(exchange(one, other, [5], clip_radius=0.1 * turn))  # of the second rank's alone
        said += [one.advance(1), other.advance(1), one.numbers(), other.numbers()]
    return said


def live_in_rounds(one, other) -> list:
    """Train both peers for two outer steps that wait for each other; return all that both report."""
    said = []
    for step in range(1, 3):
        said += [one.advance(4), other.advance(4)]
        said += [exchange(one, other, range(12)), one.proceed(step), other.proceed(step)]
        said += [one.numbers(), other.numbers()]
    return said


def live_with_both_streams(one, other) -> list:
    """Train both peers while slow weights and pseudo-gradients are mixed late; return all that both report."""
    said = []
    for _ in range(2):
        said += [one.advance(5), other.advance(5), exchange(one, other, range(12)), exchange(one, other, [7, 0])]
        said += [one.advance(1), other.advance(1), one.numbers(), other.numbers()]
    return said


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (SwarmCase(optimizer="muon", clip=0.05), live),
        (SwarmCase(recipe="noloco", ranks=3), live_in_rounds),
        (SwarmCase(ranks=3), live),
        (SwarmCase(recipe="swarm_both", gradients="lowrank"), live_with_both_streams),
        (SwarmCase(recipe="dilocox", gradients="lowrank", adaptive=True), live_with_both_streams),
        (replace(REPLICAS, optimizer="muon", clip=0.05), live),
        (replace(REPLICAS, recipe="noloco"), live_in_rounds),
        (replace(REPLICAS, recipe="dilocox", gradients="lowrank", adaptive=True), live_with_both_streams),
    ],
    ids=["muon", "noloco-3", "swarm-3", "swarm_both", "dilocox", "muon-2x1", "noloco-2x1", "dilocox-2x1"],
)
def test_a_team_and_a_plain_peer_end_bitwise_as_two_plain_ones(teams, case, way):
    cases = [case, replace(case, peer="birch")]
    plain, mixed = [Plain(each) for each in cases], [Plain(cases[0]), teams[1].begin(cases[1])]
    assert way(*mixed) == way(*plain)
    for ours, whole in zip(mixed, plain, strict=True):
        found, wanted = ours.state(), whole.state()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
    mixed[1].end()


@pytest.mark.parametrize("case", [SwarmCase(), REPLICAS], ids=["stages", "replicas"])
def test_a_team_gives_and_takes_weights_as_one_process(teams, case):
    cases = [case, replace(case, peer="birch")]
    plain, mixed = [Plain(each) for each in cases], [Plain(cases[0]), teams[1].begin(cases[1])]
    for one, other in (plain, mixed):
        one.advance(9)
        other.advance(5)
    assert mixed[1].donate() == plain[1].donate()
    assert mixed[1].evaluate() == plain[1].evaluate()
    for one, other in (plain, mixed):
        assert other.adopt([bytes(part) for part in one.donate()], 2, 256.0) == ["Adopted"]
        worthless = [1e3 * torch.ones(len(part) // 4) for part in one.donate()]
        assert other.adopt([bytes(part.numpy().data) for part in worthless], 3, 384.0) == ["Unfit"]
    assert live(*mixed) == live(*plain)
    for ours, whole in zip(mixed, plain, strict=True):
        for name, tensor in whole.state().items():
            assert torch.equal(ours.state()[name], tensor), name
    mixed[1].end()


@pytest.mark.parametrize("codec", ["fp32", "modular4"])
def test_two_teams_end_bitwise_as_two_processes(teams, codec):
    cases = [SwarmCase(peer, codec=codec) for peer in ("amber", "birch")]
    plain, split = [Plain(case) for case in cases], [team.begin(case) for team, case in zip(teams, cases, strict=True)]
    expected = live(*plain)
    assert live(*split) == expected
    assert "OuterStepDone" in str(expected)
    for ours, whole in zip(split, plain, strict=True):
        found, wanted = ours.state(), whole.state()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
        ours.end()


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (SwarmCase(optimizer="muon"), live),
        (SwarmCase(recipe="noloco"), live_in_rounds),
        (SwarmCase(recipe="swarm_both", gradients="lowrank"), live_with_both_streams),
        (replace(REPLICAS, optimizer="muon"), live),
    ],
    ids=["swarm", "noloco", "swarm_both", "replicas"],
)
def test_any_split_resumes_the_checkpoint_of_another_bitwise(teams, tmp_path, case, way):
    """Check one process, then three ranks, then two, then one process, beside a peer that resumes alone each time.

    With replicas: one process, then two replicas, twice.
    """
    other = replace(case, peer="birch")
    homes = tmp_path / "amber", tmp_path / "birch"
    before = Plain(case), Plain(other)
    way(*before)
    for each, home in zip(before, homes, strict=True):
        each.save(home)
    for ranks in (3, 2) if case.replicas == 1 else (2, 2):
        plain = resumed(case, homes[0]), resumed(other, homes[1])
        split = teams[ranks - 2].begin(replace(case, ranks=ranks, home=str(homes[0]))), resumed(other, homes[1])
        assert way(*split) == way(*plain)
        found = split[0].state()  # a checkpoint, which the next ones resume
        split[0].end()
        plain[1].save(homes[1])
        for name, tensor in plain[0].state().items():
            assert torch.equal(found[name], tensor), (ranks, name)
    alone = resumed(case, homes[0]).state()
    for name, tensor in plain[0].state().items():
        assert torch.equal(alone[name], tensor), name


@pytest.mark.parametrize("recipe", ["swarm", "dilocox"])
def test_two_replicas_of_two_stages_train_as_one_process_up_to_rounding(teams, recipe):
    more = {"gradients": "lowrank", "adaptive": True} if recipe == "dilocox" else {}
    case = SwarmCase(codec="fp32", recipe=recipe, ranks=4, replicas=2, **more)
    plain, team = Plain(case), teams[1].begin(case)
    for peer in (plain, team):
        peer.advance(10)
    found, wanted = team.state(), plain.state()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).double().norm() <= 1e-4 * tensor.double().norm(), name
    assert team.evaluate() == pytest.approx(plain.evaluate(), rel=1e-5)
    team.end()


def resumed(case: SwarmCase, home: Path) -> Plain:
    peer = Plain(case)
    peer.resume(home)
    return peer


def test_a_rank_that_dies_ends_its_team_with_a_name(teams):
    """Check the last thing in this module: the first team is gone afterwards."""
    leader = teams[0].begin(SwarmCase())
    leader.advance(1)
    teams[0].ranks[1].kill()
    assert leader.advance(8)["error"].startswith("turn 2: rank 0 of 2 gave up after ")


def test_a_leader_that_dies_leaves_no_rank_in_its_case(teams):
    """Check that a rank ends as its input does, and not at a collective without its leader."""
    leader = teams[1].begin(SwarmCase())
    leader.advance(1)
    teams[1].ranks[0].kill()
    teams[1].ranks[1].stdin.close()
    assert teams[1].ranks[1].wait(timeout=60.0) == 0
