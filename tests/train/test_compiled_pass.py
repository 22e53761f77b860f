"""Compiled passes: whether they are kept, what happens when they fail; with a compiler, that they compute the same."""

import math
from dataclasses import replace

import pytest
import torch
from families import DESCRIPTIONS, description

from p2ptrain.train import compiled_pass
from p2ptrain.train.compiled_pass import (
    GAIN,
    PAIRS,
    CompiledPass,
    CompiledPassError,
    PassChoice,
    PassShape,
    compile_choice,
)
from p2ptrain.train.model import FlatModel, flat_model, summed_loss
from p2ptrain.train.pass_compiler import compile_pass, difference

CPU = torch.device("cpu")


def run(task, steps, start=0):
    tokens = task._training.tokens_per_step
    return [task.inner_step((start + step) * tokens).loss for step in range(steps)]


class FakePass:
    """Computes a part by the eager pass and counts; fails from its ``failing``-th call on, with half of it done."""

    def __init__(self, task, size: int, failing: float = math.inf) -> None:
        self.task, self.size, self.failing = task, size, failing
        self.calls = 0

    def takes(self, part):
        return len(part) == self.size

    def run(self, part):
        self.calls += 1
        loss = self.task._eager_pass(part)
        if self.calls >= self.failing:
            raise CompiledPassError("no memory")
        return loss


class Chosen:
    """A choice on a task with what it reported, and a clock by which each way takes its own time."""

    def __init__(self, task, compiled: FakePass, eager_s: float = 2.0, compiled_s: float = 1.0) -> None:
        self.ratios: list[float | None] = []
        self.failures: list[str] = []
        self._costs, self._readings = (eager_s, compiled_s), []
        self._compiled = compiled
        task.passes = PassChoice(compiled, self.ratios.append, self.failures.append, self.clock)

    def clock(self) -> float:
        self._readings.append(self._compiled.calls)
        if len(self._readings) % 2:
            self._at = 0.0
        else:
            self._at = self._costs[self._readings[-1] > self._readings[-2]]
        return self._at


@pytest.mark.parametrize(
    ("eager_s", "compiled_s", "ratio"),
    [
        ([1.2, 1.2, 1.2], [1.0, 1.0, 1.0], 1.2),
        ([1.2, 9.0, 1.2], [1.0, 1.0, 5.0], 1.2),  # another program disturbed two of the three
        ([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], 2.0),  # the machine slows down: pairs still agree
        ([GAIN], [1.0], GAIN),
        ([1.02], [1.0], None),
        ([1.0], [1.5], None),
    ],
)
def test_the_median_pair_decides(eager_s, compiled_s, ratio):
    assert compile_choice(eager_s, compiled_s) == (None if ratio is None else pytest.approx(ratio))


def test_real_micro_batches_alternate_until_the_faster_way_is_kept(tiny_run):
    tiny = tiny_run()
    eager, task = tiny.task(), tiny.task()
    fake = FakePass(task, size=4)
    chosen = Chosen(task, fake)
    steps = 2 * (PAIRS + 1)
    assert run(task, steps) == run(eager, steps)
    assert chosen.ratios == [2.0]
    assert fake.calls == PAIRS + 1
    run(task, 5, start=steps)
    run(eager, 5, start=steps)
    assert fake.calls == PAIRS + 1 + 5
    assert torch.equal(task.theta, eager.theta)


def test_a_slower_library_is_not_used(tiny_run):
    task = tiny_run().task()
    fake = FakePass(task, size=4)
    chosen = Chosen(task, fake, eager_s=1.0, compiled_s=1.0)
    run(task, 2 * (PAIRS + 1) + 5)
    assert chosen.ratios == [None]
    assert fake.calls == PAIRS + 1
    assert task.passes._compiled is None  # nor does it hold memory


def test_a_micro_batch_of_another_size_is_computed_eagerly(tiny_run):
    tiny = tiny_run(training__sequences_per_step=5)
    task = tiny.task(micro_batch=3)  # 3 and 2
    fake = FakePass(task, size=3)
    Chosen(task, fake)
    run(task, 4 * (PAIRS + 1))
    assert fake.calls < 4 * (PAIRS + 1)


def test_a_library_offered_when_memory_ran_short_is_not_used(tiny_run):
    task = tiny_run().task()
    fake = FakePass(task, size=4)
    Chosen(task, fake)
    task._recomputes = True  # after the compiler's thread looked, and before it set the pass
    run(task, 3)
    assert fake.calls == 0


@pytest.mark.parametrize("failing", [1, PAIRS + 4])
def test_after_a_failure_the_same_step_is_made_eagerly(tiny_run, failing):
    tiny = tiny_run()
    eager, task = tiny.task(micro_batch=2), tiny.task(micro_batch=2)
    fake = FakePass(task, size=2, failing=failing)
    chosen = Chosen(task, fake)
    steps = 2 * PAIRS
    assert run(task, steps) == run(eager, steps)
    assert torch.equal(task.theta, eager.theta)
    assert chosen.failures == ["no memory"]
    assert fake.calls == failing


def test_the_key_names_everything_that_the_library_depends_on(tiny_run, monkeypatch):
    shape = tiny_run().task().pass_shape(tiny_run().manifest.model)
    others = [
        replace(shape, **{name: value})
        for name, value in {
            "model": "{}",
            "micro_batch": 1,
            "sequence_length": 8,
            "tokens_per_step": 1,
            "computes_in": "bfloat16",
            "threads": 9,
        }.items()
    ]
    assert len({shape.key(), *(each.key() for each in others)}) == 7
    assert shape.key() == replace(shape).key()
    before = shape.key()
    for module, name in ((torch, "__version__"), (compiled_pass.metadata, "version")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "9.9" if module is torch else lambda package: f"{package} 9.9")
            assert shape.key() != before


def test_a_pass_is_compiled_in_the_type_in_which_it_computes(tiny_run):
    task = tiny_run().task(autocast=torch.bfloat16)
    assert task.pass_shape(tiny_run().manifest.model).autocast == torch.bfloat16
    assert tiny_run().task().pass_shape(tiny_run().manifest.model).autocast is None


def test_only_passes_on_the_cpu_are_compiled(tiny_run, monkeypatch):
    task = tiny_run().task()
    monkeypatch.setattr(type(task), "theta", torch.empty(1, device="meta"))
    with pytest.raises(CompiledPassError, match="only passes on the CPU are compiled, and this one is on meta"):
        task.pass_shape(tiny_run().manifest.model)


def test_a_file_that_is_no_library_is_refused(tiny_run, tmp_path):
    task = tiny_run().task()
    broken = tmp_path / "pass.so"
    broken.write_bytes(b"nonsense")
    with pytest.raises(CompiledPassError, match=r"pass\.so"):
        task.offer(broken, task.pass_shape(tiny_run().manifest.model), lambda ratio: None, lambda why: None)
    assert task.passes is None


# --- with a compiler --------------------------------------------------------------------------------------------------


@pytest.mark.lab
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_those_of_the_eager_pass(architecture, dtype, tmp_path):
    has_fp32_norms = architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
    most = 2e-6 if dtype == torch.float32 or has_fp32_norms else 1e-9
    described = description(architecture)
    built = flat_model(described, seed=5, device=CPU)
    theta = built.theta.to(dtype)
    for (_, view), parameter in zip(built.layout.views(theta).items(), built.module.parameters(), strict=True):
        parameter.data = view
    model = FlatModel(built.module, theta, built.layout)
    for buffer in built.module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    shape = PassShape.of(described, 2, 16, 64)
    library = tmp_path / "pass.so"
    compile_pass(model, shape, library, tmp_path)
    assert difference(model, shape, library) < most
    _adds_to_what_is_there(model, shape, library)


def _adds_to_what_is_there(model: FlatModel, shape: PassShape, library) -> None:
    """Check two calls with weights that moved in between."""
    batch = torch.arange(34).reshape(2, 17)
    gradient = torch.zeros_like(model.theta)
    compiled = CompiledPass(library, model, gradient, shape)
    losses, expected = [], []
    for parameter in model.module.parameters():
        parameter.grad = None
    for _ in range(2):
        losses.append(compiled.run(batch).item())
        loss = summed_loss(model.module, batch, None) / shape.tokens_per_step
        torch.autograd.backward(loss)
        expected.append(loss.item())
        model.theta.mul_(0.9)
    assert losses == pytest.approx(expected, rel=1e-5)
    for parameter, part in zip(model.module.parameters(), model.layout.views(gradient).values(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(part, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.lab
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_in_bf16_the_library_rounds_no_worse_than_the_eager_pass(architecture, tmp_path):
    """Compare both with fp32 weights and products: the eager pass rounds each operation, a library some of them."""
    described = description(architecture)
    model = flat_model(described, seed=5, device=CPU)
    exact = PassShape.of(described, 2, 16, 64)
    compile_pass(model, replace(exact, computes_in="bfloat16"), tmp_path / "pass.so", tmp_path)
    compiled = difference(model, exact, tmp_path / "pass.so")
    assert 1e-5 < compiled < 1.2 * _rounding(model, exact)


def _rounding(model: FlatModel, shape: PassShape) -> float:
    """Return the relative difference of the eager gradients in bf16 and in fp32, on the tokens of ``difference``."""
    vocabulary, size = model.module.config.vocab_size, (shape.micro_batch, shape.sequence_length + 1)
    batch = torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(1))
    gradients = []
    for autocast in (torch.bfloat16, None):
        model.module.zero_grad(set_to_none=True)
        torch.autograd.backward(summed_loss(model.module, batch, autocast))
        gradients.append(torch.cat([each.grad.flatten() for each in model.module.parameters()]))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


@pytest.mark.lab
def test_a_failing_call_is_an_error_and_not_the_end(tiny_run, tmp_path):
    tiny = tiny_run()
    task = tiny.task()
    shape = task.pass_shape(tiny.manifest.model)
    compile_pass(tiny.model(), shape, tmp_path / "pass.so", tmp_path)
    compiled = CompiledPass(tmp_path / "pass.so", task.model, task._gradient, shape)
    good = torch.zeros(4, 17, dtype=torch.int64)
    assert math.isfinite(compiled.run(good).item())
    with pytest.raises(CompiledPassError):
        compiled.run(good + 10_000)  # no such token
