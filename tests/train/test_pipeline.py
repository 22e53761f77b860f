"""Teams of real processes: bitwise what one process computes, and a named error where a rank dies or freezes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from team_processes import Team
from team_rank import DEVICE, FIELDS, HELD_OUT, SEQUENCES, Case, corpus, rest, results, stages, train, whole_task

from p2ptrain.base.errors import DeviceError, TeamError, TeamMemoryError
from p2ptrain.train.evaluate import validation_loss
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.stages import equal_cut, stage_model
from p2ptrain.train.team_group import Rendezvous, TeamGroup

pytestmark = pytest.mark.net


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    team = Team(tmp_path_factory.mktemp("team"))
    yield team
    team.end()


CASES = [
    *(Case(architecture, 3) for architecture in FIELDS),
    Case(),
    Case("GPT2LMHeadModel"),
    Case(optimizer="muon"),
    Case("GPT2LMHeadModel", 3, optimizer="muon"),
    Case(clip=0.05),
    Case(compute="bfloat16"),
    Case(compute="float16", steps=5),
    Case(ranks=3, packed=True),
    Case("GPT2LMHeadModel", packed=True),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.architecture}-{case.ranks}-{case.optimizer}-{case.packed}"
)
def test_a_team_trains_bitwise_as_one_process(team, case):
    answers, tensors = team.run(case)
    task = whole_task(case)
    losses = train(task, case)
    for name, expected in results(task).items():
        assert torch.equal(tensors[name], expected), name
    held_out = validation_loss(task.model.module, corpus(case.manifest, case.packed), HELD_OUT, case.autocast).value
    numbers = [10.0, 20.0, 21.0][: 1 if case.ranks == 2 else 3]
    said = [numbers, 8 - case.ranks, "", "turn", "turn: 13 bytes, at most 4 expected"]
    for answer in answers:
        assert answer == {
            "losses": losses,
            "held_out": held_out,
            "listens_on": ["127.0.0.1"],
            "said": said,
            "is_line_fast": True,
        }


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_tied_embeddings_are_trained_up_to_rounding(team, architecture):
    case = Case(architecture, 3, tied=True)
    answers, tensors = team.run(case)
    task = whole_task(case)
    losses = train(task, case)
    assert all(answer["losses"] == pytest.approx(losses, rel=1e-6) for answer in answers)
    for name, expected in results(task).items():
        assert (tensors[name] - expected).norm() < 1e-5 * expected.norm(), name


@pytest.mark.parametrize("boundary", ["bf16", "int8"])
def test_short_activations_cost_little(team, boundary):
    case = Case(ranks=3, boundary=boundary)
    answers, tensors = team.run(case)
    task = whole_task(case)
    assert answers[0]["losses"] == pytest.approx(train(task, case), rel=1e-3)
    assert (tensors["first_moment"] - task.state_dict()["first_moment"]).norm() < 0.02 * tensors["first_moment"].norm()


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(fails="dies"), "pipeline schedule, gradient of micro-batch 0 from rank 1"),
        (Case(fails="freezes", timeout_s=4.0), "pipeline schedule, gradient of micro-batch 0 from rank 1"),
        (Case(fails="dies", at="_all_reduce"), "gradient norms and loss"),
        (Case(fails="dies", at="_sum_tied_gradients", tied=True), "gradient of the tied embedding"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.fails,
)
def test_a_failed_rank_is_noticed_and_replaced(team, case, name):
    team.tell(case)
    answer = team.ranks[0].answer()
    assert answer["kind"] == "TeamError"
    assert answer["error"].startswith(f"inner step 1: {name}: rank 0 of 2 gave up after ")
    assert ("Timed out" in answer["error"]) is (case.fails == "freezes")
    for rank in range(len(team.ranks) - 1, 0, -1):
        team.lose(rank)
    answers, tensors = team.run(Case(steps=1))  # the same leader, a new rank 1
    task = whole_task(Case())
    assert answers[0]["losses"] == train(task, Case(steps=1))
    assert torch.equal(tensors["theta"], task.theta)


def test_memory_that_runs_out_is_named_on_the_rank_and_noticed_by_the_others(team):
    case = team.tell(Case(fails="memory"))
    first, last = (rank.answer() for rank in team.ranks[: case.ranks])
    assert first["kind"] == "TeamError"
    assert "Timed out" not in first["error"]
    assert last["kind"] == "TeamMemoryError"
    assert last["error"] == "inner step 1: pipeline schedule: cpu ran out of memory with micro-batches of 2 sequences"


# --- one rank, in this process ----------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    group = TeamGroup(Rendezvous(tmp_path, 0, 1), 10.0)
    yield group
    group.close()
    group.close()


def test_a_team_of_one_is_one_process(alone):
    case = Case(ranks=1)
    manifest = case.manifest
    (stage,) = stages(case)
    task = PipelineTask(stage_model(manifest.model, manifest.run.seed, DEVICE, stage), alone, *rest(case))
    whole = whole_task(case)
    assert train(task, case) == train(whole, case)
    assert torch.equal(task.theta, whole.theta)
    assert alone.least("newest checkpoint", 7) == 7


def test_memory_that_runs_out_in_a_forward_pass_is_named(alone):
    case = Case(ranks=1)
    manifest = case.manifest
    model = stage_model(manifest.model, manifest.run.seed, DEVICE, stages(case)[0])
    task = PipelineTask(model, alone, *rest(case))

    def short(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model.flat.module.base_model.layers[1].register_forward_pre_hook(short)
    with pytest.raises(TeamMemoryError, match="cpu ran out of memory with micro-batches of 2 sequences"):
        task.inner_step(0)


def test_a_team_with_more_ranks_than_sequences_is_refused(alone):
    case = Case()
    manifest = case.manifest
    stage = replace(equal_cut(4, 4)[0], count=SEQUENCES + 1)
    model = stage_model(manifest.model, manifest.run.seed, DEVICE, stage)
    with pytest.raises(DeviceError, match="8 sequences per inner step, too few for a pipeline of 9 devices"):
        PipelineTask(model, alone, *rest(case))


def test_a_rank_that_never_comes_is_an_error_in_time(tmp_path):
    with pytest.raises(TeamError, match=r"^connecting the team: ranks did not come in 1 s: rank 1$"):
        TeamGroup(Rendezvous(tmp_path, 0, 2), 1.0)
    TeamGroup(Rendezvous(tmp_path, 0, 1, generation=1), 10.0).close()  # the failure left nothing behind


def test_errors_of_the_computation_keep_their_kind(alone):
    with pytest.raises(RuntimeError, match=r"^a bug$"), alone.named("inner step"):
        raise RuntimeError("a bug")
