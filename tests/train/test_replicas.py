"""Replicas of a pipeline, as real processes: bitwise equal to each other, and up to rounding to one process."""

from __future__ import annotations

import math

import pytest
import torch
from team_processes import Team
from team_rank import CPU, SEQUENCES, Case, rest, results, stages, train, whole_task

from p2ptrain.base.errors import TeamError
from p2ptrain.train.replicas import Mesh, Replicas, ReplicatedTask, shares
from p2ptrain.train.stages import stage_model
from p2ptrain.train.team_group import Rendezvous, TeamGroup


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    team = Team(tmp_path_factory.mktemp("team"))
    yield team
    team.end()


def live(team, case):
    """Return the first rank's answer, the tensors of all replicas, and those and the losses of one process."""
    case = team.tell(case)
    answers = [rank.answer() for rank in team.ranks[: case.ranks]]
    assert all(answer["losses"] == answers[0]["losses"] for answer in answers[: case.mesh.stages])
    assert all(answer["listens_on"] == ["127.0.0.1"] for answer in answers)
    task = whole_task(case)
    losses = train(task, case)
    return answers[0], [team.tensors(case, replica) for replica in range(case.replicas)], results(task), losses


@pytest.mark.net
@pytest.mark.parametrize(
    "case",
    [
        Case(ranks=4, replicas=2),
        Case(ranks=2, replicas=2),
        Case(ranks=3, replicas=3),
        Case(ranks=4, replicas=2, optimizer="muon", clip=0.05),
        Case("GPT2LMHeadModel", 4, 2, tied=True),
        Case(ranks=4, replicas=2, compute="float16", steps=5),
        Case(ranks=4, replicas=2, packed=True),
    ],
    ids=lambda case: f"{case.architecture}-{case.mesh}-{case.optimizer}-{case.compute}-{case.packed}",
)
def test_replicas_are_bitwise_equal_and_train_as_one_process_up_to_rounding(team, case):
    answer, replicas, expected, losses = live(team, case)
    # Muon multiplies the smallest singular values most.
    tolerance = 1e-5 if case.autocast is None and case.optimizer == "adamw" else 1e-2
    assert answer["losses"] == pytest.approx(losses, rel=tolerance)
    for name, tensor in expected.items():
        assert all(torch.equal(each[name], replicas[0][name]) for each in replicas[1:]), name
        assert (replicas[0][name] - tensor).norm() < tolerance * tensor.norm(), name


@pytest.mark.net
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_of_one_micro_batch_each_are_bitwise_one_process(team, count):
    """Check that sums over replicas have the order of the micro-batches."""
    answer, replicas, expected, losses = live(team, Case(ranks=count, replicas=count, micro_batch=SEQUENCES // count))
    assert answer["losses"] == losses
    for name, tensor in expected.items():
        assert torch.equal(replicas[0][name], tensor), name


@pytest.mark.net
@pytest.mark.parametrize(
    "case",
    [
        Case(ranks=4, replicas=2, fails="dies"),
        Case(ranks=4, replicas=2, fails="freezes", timeout_s=4.0),
        Case(ranks=4, replicas=2, fails="memory"),
    ],
    ids=lambda case: case.fails,
)
def test_a_failed_rank_of_another_replica_is_noticed(team, case):
    team.tell(case)
    answers = [rank.answer() for rank in team.ranks[: case.ranks - 1]]
    assert all(answer["kind"] == "TeamError" and answer["after_s"] < 30.0 for answer in answers)
    assert answers[0]["error"].startswith("inner step 1: ")
    for rank in range(len(team.ranks) - 1, 2, -1):
        team.lose(rank)
    live(team, Case(ranks=4, replicas=2, steps=1))  # the same ranks, and a new one


@pytest.mark.net
@pytest.mark.parametrize("order", [[math.nan, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, math.inf]])
def test_invalid_orders_end_a_replica(tmp_path, monkeypatch, order):
    case, group = Case(ranks=1), TeamGroup(Rendezvous(tmp_path, 0, 1), 10.0)
    try:
        model = stage_model(case.manifest.model, case.manifest.run.seed, CPU, stages(case)[0])
        replicas = Replicas(group, [SEQUENCES // case.micro_batch])
        monkeypatch.setattr(replicas, "order", lambda name, numbers: order)
        with pytest.raises(TeamError, match="the first replica's order is invalid"):
            ReplicatedTask(model, group, *rest(case), replicas=replicas).follow_replica()
    finally:
        group.close()


def test_a_mesh_has_replicas_of_stages():
    mesh = Mesh.of(6, 2)
    assert str(mesh) == "3 replicas of 2 stages"
    assert [list(each) for each in mesh.pipelines] == [[0, 1], [2, 3], [4, 5]]
    assert [list(each) for each in mesh.columns] == [[0, 2, 4], [1, 3, 5]]
    assert (mesh.replica(3), mesh.stage(3)) == (1, 1)
    with pytest.raises(ValueError, match="4 stages do not divide 6 ranks"):
        Mesh.of(6, 4)


@pytest.mark.parametrize(
    ("micro_batches", "stages", "seconds", "expected"),
    [
        (8, 2, (1.0, 1.0), (4, 4)),
        (9, 2, (1.0, 1.0), (5, 4)),
        (8, 2, (1.0, 1.05), (4, 4)),
        (12, 1, (1.0, 2.0), (8, 4)),
        (6, 2, (1.0, 100.0), (4, 2)),
        (4, 1, (3.0,), (4,)),
    ],
)
def test_shares_end_at_about_the_same_time(micro_batches, stages, seconds, expected):
    assert shares(micro_batches, stages, seconds) == expected


def test_shares_of_too_few_micro_batches_are_an_error():
    with pytest.raises(ValueError, match="3 micro-batches are too few for 2 replicas of 2 stages"):
        shares(3, 2, (1.0, 1.0))
