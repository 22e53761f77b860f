"""Compiled stages: which pass computes, what a failure does; with a compiler, that they compute the same."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from team_processes import Team
from team_rank import DEVICE, MICRO_BATCH, SEQUENCES, TOKENS, Case, rest, results, stages, train, whole_task

from p2ptrain.base.errors import TeamMemoryError
from p2ptrain.train import libraries, stage_compiler
from p2ptrain.train.compiled_pass import CompiledPassError, PassShape
from p2ptrain.train.inner import COMPILED
from p2ptrain.train.micro_batches import CompiledMicroBatches, MicroBatches
from p2ptrain.train.pace import REST_S, SHORTEST_S, Pace
from p2ptrain.train.pass_choice import EAGER, PAIRS, StageChoice
from p2ptrain.train.pass_compiler import compile_graph
from p2ptrain.train.pipeline import PipelineTask
from p2ptrain.train.stages import StagePass, stage_model

CASE = Case()


class FakeLibraries:
    """Double of ``CompiledStage`` that computes by autograd, and counts its calls."""

    def __init__(self, model, size=(MICRO_BATCH, TOKENS), fails=""):
        self.stage_pass = StagePass(model, None)
        self.size = size
        self.fails = fails
        self.calls = []
        self.dropped = 0

    def takes(self, sequences, tokens):
        return (sequences, tokens) == self.size

    def forward(self, given, targets):
        self.calls.append("forward")
        if self.fails == "forward":
            raise CompiledPassError("out of memory")
        given = given if given.dtype == torch.int64 else given.requires_grad_()
        return SimpleNamespace(given=given, hidden=self.stage_pass(given))

    def backward(self, begun, slope):
        self.calls.append("backward")
        if self.fails == "backward":
            raise CompiledPassError("out of memory")
        torch.autograd.backward(begun.hidden, slope)
        return begun.given.grad

    def drop(self, begun):
        self.dropped += 1


def first_stage():
    return stage_model(CASE.manifest.model, 1, torch.device("cpu"), stages(CASE)[0])


def choice(chosen=None):
    said = []
    made = StageChoice(COMPILED, lambda way, ratio: said.append((way, ratio)), said.append)
    made._chosen = chosen
    return made, said


def gradients(library=None, chosen=COMPILED, order=("f0", "f1", "b0", "b1"), path=Path("x.so")):
    """Return the gradient of the first stage after some passes of two micro-batches, and the double."""
    model = first_stage()
    for each in model.flat.module.parameters():
        each.grad = torch.zeros_like(each)
    fake = None if library is None else library(model)
    made, said = choice(chosen)
    compiled = None if fake is None else CompiledMicroBatches(fake, made, path)
    numbers = torch.Generator().manual_seed(3)
    batch = torch.randint(256, (2 * MICRO_BATCH, TOKENS + 1), generator=numbers)
    slopes = torch.randn(2, MICRO_BATCH, TOKENS, 32, generator=numbers)
    passes = MicroBatches(batch.split(MICRO_BATCH), StagePass(model, None), lambda *_: None, compiled, DEVICE)
    try:
        for word in order:
            number = int(word[1])
            if word[0] == "f":
                assert passes.forward(number, None).shape == (MICRO_BATCH, TOKENS, 32)
            else:
                assert passes.backward(number, slopes[number]) is None
    finally:
        passes.close()
    return torch.cat([each.grad.flatten() for each in model.flat.module.parameters()]), fake, said


# --- which pass computes ----------------------------------------------------------------------------------------------


def test_passes_take_turns_until_the_faster_one_is_known():
    made, said = choice()
    names = [made.begin() for _ in range(4)]  # in flight: none has a time yet
    assert names == [EAGER, COMPILED, EAGER, COMPILED]
    for number in range(PAIRS + 1):
        assert made.is_timing
        made.add(EAGER, 2.0)
        made.add(COMPILED, 100.0 if number == 0 else 1.0)  # the first one fills caches
    assert said == [(COMPILED, 2.0)]
    assert {made.begin() for _ in range(3)} == {COMPILED}
    made.add(EAGER, 2.0)  # of a micro-batch that was in flight
    assert said == [(COMPILED, 2.0)]


def test_a_slow_library_is_not_used_and_a_failure_is_told_once():
    made, said = choice()
    for _ in range(PAIRS + 1):
        made.add(EAGER, 1.0)
        made.add(COMPILED, 1.0)
    assert said == [(COMPILED, None)]
    assert made.begin() == EAGER
    made.give_up("later")
    assert said == [(COMPILED, None)]
    made, said = choice(COMPILED)
    made.give_up("out of memory")
    made.give_up("out of memory")
    assert said == ["out of memory"]


def test_micro_batches_in_flight_stay_with_the_pass_that_began_them():
    expected, *_ = gradients()
    found, fake, _ = gradients(FakeLibraries, None)
    assert fake.calls == ["forward", "backward"]  # the first one is eager, the second one compiled
    assert torch.equal(found, expected)


def test_other_shapes_are_computed_eagerly():
    expected, *_ = gradients()
    found, fake, _ = gradients(lambda model: FakeLibraries(model, (MICRO_BATCH + 1, TOKENS)))
    assert fake.calls == []
    assert torch.equal(found, expected)


def test_a_forward_pass_that_fails_is_computed_again_eagerly():
    expected, *_ = gradients()
    found, fake, said = gradients(lambda model: FakeLibraries(model, fails="forward"))
    assert (fake.calls, said) == (["forward"], ["out of memory"])
    assert torch.equal(found, expected)


def test_after_a_backward_pass_that_fails_nobody_uses_the_library_again(tmp_path):
    library = tmp_path / "key.so"
    library.write_bytes(b"library")
    with pytest.raises(CompiledPassError, match="out of memory"):
        gradients(lambda model: FakeLibraries(model, fails="backward"), path=library)
    assert not library.exists()
    assert libraries.failure(library) == "out of memory"


def test_what_a_step_leaves_is_freed():
    _, fake, _ = gradients(FakeLibraries, order=("f0", "f1", "b0"))
    assert fake.dropped == 1


# --- libraries --------------------------------------------------------------------------------------------------------


def shape_of(case: Case, rank: int) -> PassShape:
    stage, manifest = stages(case)[rank], case.manifest
    computes_in = "fp32" if case.autocast is None else "bfloat16"
    whole = PassShape.of(manifest.model, case.micro_batch, TOKENS, SEQUENCES * TOKENS, computes_in)
    blocks = stage.blocks
    return replace(whole, stages=stage.count, stage=stage.index, first_block=blocks.start, end_block=blocks.stop)


def test_stages_have_libraries_of_their_own_and_one_lock():
    shapes = [shape_of(Case(ranks=3), rank) for rank in range(3)]
    assert len({each.key() for each in shapes}) == 3
    assert len({each.lock() for each in shapes}) == 1
    whole = replace(shapes[0], stages=1, first_block=0, end_block=0)
    assert whole.lock() == whole.key()
    assert [stage_compiler.stage_range(each) for each in shapes] == list(stages(Case(ranks=3)))


def test_a_library_of_two_files_is_whole_with_both(tmp_path):
    (tmp_path / "made.so").write_bytes(b"forward")
    libraries.backward_library(tmp_path / "made.so").write_bytes(b"backward")
    library = tmp_path / "key.so"
    libraries.publish(tmp_path / "made.so", library)
    second = libraries.backward_library(library)
    assert (library.read_bytes(), second.read_bytes()) == (b"forward", b"backward")
    assert libraries.is_whole(library)
    libraries.keep(library)
    second.write_bytes(b"damaged")
    assert not libraries.is_whole(library)
    second.unlink()
    assert not libraries.is_whole(library)


def test_a_task_describes_its_stage_and_wants_no_graph():
    task = pipeline_task(CASE, 1)
    assert task.pass_shape(CASE.manifest.model) == shape_of(CASE, 1)
    with pytest.raises(CompiledPassError, match="several micro-batches at once"):
        task.offer_graph(lambda way, ratio: None, lambda why: None)
    with pytest.raises(CompiledPassError, match="dynamic in fp16"):
        pipeline_task(Case(compute="float16"), 1).pass_shape(CASE.manifest.model)


def pipeline_task(case: Case, rank: int) -> PipelineTask:
    model = stage_model(case.manifest.model, 1, torch.device("cpu"), stages(case)[rank])
    return PipelineTask(model, SimpleNamespace(rank=rank, size=case.ranks), *rest(case))


def test_a_library_that_fails_makes_the_ranks_start_again(monkeypatch):
    task = pipeline_task(CASE, 0)

    def fail(*arguments):
        raise CompiledPassError("status 1")

    monkeypatch.setattr("p2ptrain.train.pipeline.run_schedule", fail)
    monkeypatch.setattr(task, "group", NamedGroup())
    with pytest.raises(TeamMemoryError, match="the compiled code failed on cpu: status 1"):
        task._run_schedule(torch.zeros(SEQUENCES, TOKENS + 1, dtype=torch.int64))


class NamedGroup:
    def named(self, name):
        return nullcontext()


# --- pace -------------------------------------------------------------------------------------------------------------


def test_a_task_trains_while_it_makes_steps_and_knows_how_long_it_will():
    now = [0.0]
    pace = Pace(10_000, lambda: now[0])
    assert not pace.is_training()
    assert pace.remaining_s() is None
    for step in range(5):
        with pace.step(100.0 * step):
            now[0] += SHORTEST_S / 4 + 2 * REST_S
            assert pace.is_training()
    speed = 100 / (SHORTEST_S / 4 + 2 * REST_S)
    assert pace.remaining_s() == pytest.approx((10_000 - 400) / speed)
    now[0] += REST_S + 0.1
    assert not pace.is_training()
    with pace.step(500.0):
        assert pace.remaining_s() is None  # a rest says nothing of the speed


# --- with a compiler --------------------------------------------------------------------------------------------------


def compiled(case: Case, folder: Path) -> list[float]:
    """Compile all stages of a case; return their differences from the eager pass."""
    found = []
    for rank in range(case.mesh.stages):
        shape, library = shape_of(case, rank), folder / f"{rank}.so"
        model = stage_model(case.manifest.model, 1, torch.device("cpu"), stages(case)[rank])

        def write(graph, inputs, path, shape=shape):
            compile_graph(graph, inputs, shape, path, folder)

        stage_compiler.compile_stage(model, shape, library, write)
        found.append(stage_compiler.difference(model, shape, library))
    return found


@pytest.mark.lab
@pytest.mark.parametrize(
    ("case", "most"),
    [
        (Case("Qwen2ForCausalLM", 3), 1e-5),
        (Case("GPT2LMHeadModel", 2, tied=True), 1e-5),
        (Case("GPTNeoXForCausalLM", 2, compute="bfloat16"), 0.05),
        (Case("Gemma3ForCausalLM", 2), 1e-5),
    ],
    ids=["three-stages", "tied", "bf16", "windows"],
)
def test_a_compiled_stage_computes_what_the_eager_one_does(case, most, tmp_path):
    torch.set_num_threads(1)
    assert max(compiled(case, tmp_path)) < most


@pytest.mark.lab
def test_a_compiled_team_trains_as_a_process_does(tmp_path):
    """Compare the losses and weights of two compiled ranks with those of an eager process, in fp32."""
    torch.set_num_threads(1)
    compiled(CASE, tmp_path)
    team = Team(tmp_path)
    try:
        answers, tensors = team.run(replace(CASE, libraries=str(tmp_path)))
    finally:
        team.end()
    task = whole_task(CASE)
    losses = train(task, CASE)
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
    assert (tensors["theta"] - results(task)["theta"]).norm() < 1e-4 * tensors["theta"].norm()
