"""Compiled passes: what they depend on, how torch compiles them; with a compiler, that they compute the same."""

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import DESCRIPTIONS, description

from p2ptrain.train import compiled_pass, pass_compiler
from p2ptrain.train.compiled_pass import CompiledPass, CompiledPassError, PassShape, use
from p2ptrain.train.model import FlatModel, flat_model, summed_loss
from p2ptrain.train.pass_compiler import compared

CPU = torch.device("cpu")


def test_the_key_names_everything_that_the_pass_depends_on(tiny_run, monkeypatch):
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
    real = compiled_pass.metadata.version
    for package in ("p2ptrain", "torch", "transformers"):
        monkeypatch.setattr(
            compiled_pass.metadata, "version", lambda name, new=package: "9" if name == new else real(name)
        )
        assert shape.key() != before


def test_a_pass_is_compiled_in_the_type_in_which_it_computes(tiny_run):
    task = tiny_run().task(autocast=torch.bfloat16)
    assert task.pass_shape(tiny_run().manifest.model).autocast == torch.bfloat16
    assert tiny_run().task().pass_shape(tiny_run().manifest.model).autocast is None


def test_passes_are_compiled_for_the_cpu_and_for_cuda_cards(tiny_run, monkeypatch):
    task, model = tiny_run().task(), tiny_run().manifest.model
    monkeypatch.setattr(type(task), "theta", SimpleNamespace(device=torch.device("cuda:1")))
    assert (task.pass_shape(model).device, task.pass_shape(model).threads) == ("cuda:1", 0)
    monkeypatch.setattr(type(task), "theta", SimpleNamespace(device=torch.device("xpu:0")))
    with pytest.raises(CompiledPassError, match="for the CPU and CUDA cards alone, and this one is on xpu:0"):
        task.pass_shape(model)


def test_nothing_is_compiled_in_fp16(tiny_run):
    with pytest.raises(CompiledPassError, match="dynamic in fp16"):
        tiny_run().task(autocast=torch.float16).pass_shape(tiny_run().manifest.model)


def test_each_kind_of_card_has_a_pass_of_its_own(tiny_run, monkeypatch):
    shape = replace(tiny_run().task().pass_shape(tiny_run().manifest.model), device="cuda:0", threads=0)
    monkeypatch.setattr(compiled_pass.accelerator, "product_name", lambda device: "T4")
    keys = {shape.key(), replace(shape, device="cpu").key()}
    monkeypatch.setattr(compiled_pass.accelerator, "product_name", lambda device: "H100")
    assert len(keys | {shape.key()}) == 3


class Compilation:
    """Fake of ``torch.compile``: notes what it is given, and calls it as it is."""

    def __init__(self, monkeypatch):
        self.given = []
        monkeypatch.setattr(torch, "compile", self)

    def __call__(self, module, **given):
        self.given.append(given)
        return module


@pytest.mark.parametrize(("device", "in_graphs", "in_cpp"), [("cpu", False, True), ("cuda:0", True, False)])
def test_torch_is_asked_for_one_graph_that_never_changes(tiny_run, monkeypatch, device, in_graphs, in_cpp):
    tiny, asked = tiny_run(), Compilation(monkeypatch)
    task = tiny.task()
    shape = replace(task.pass_shape(tiny.manifest.model), device=device)
    compiled = CompiledPass(task.model, task._gradient, shape, in_graphs)
    (given,) = asked.given
    assert (given["fullgraph"], given["dynamic"], given["isolate_recompiles"]) == (True, False, True)
    assert (given["options"]["cpp_wrapper"], given["options"]["triton.cudagraphs"]) == (in_cpp, in_graphs)
    assert compiled.takes(torch.zeros(4, 17, dtype=torch.int64))
    assert not compiled.takes(torch.zeros(3, 17, dtype=torch.int64))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_the_one_graph_adds_loss_and_gradients_of_the_eager_pass(architecture, monkeypatch):
    """Let torch compute the graph by its own operations, without a C++ compiler."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **given: real(module, backend="eager", fullgraph=True))
    described = description(architecture)
    _adds_to_what_is_there(_model(described, torch.float64), PassShape.of(described, 2, 16, 64))


def test_a_compiler_that_raises_is_one_line(tiny_run, monkeypatch):
    def broken(module, **given):
        def call(part):
            raise RuntimeError("\n  CppCompileError: no such option\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    tiny = tiny_run()
    task = tiny.task()
    compiled = CompiledPass(task.model, task._gradient, task.pass_shape(tiny.manifest.model))
    with pytest.raises(CompiledPassError, match=r"^RuntimeError: CppCompileError: no such option$"):
        compiled.run(torch.zeros(4, 17, dtype=torch.int64))


@pytest.mark.parametrize(("free", "fits"), [(2000, False), (2500, True), (None, False)])
def test_a_card_uses_a_graph_only_if_activations_fit_twice(tiny_run, monkeypatch, free, fits):
    """Use a peak of 1,400 bytes, of which 400 are weights, gradient and moments; a fifth of what is free is kept so."""
    asked = Compilation(monkeypatch)
    tiny = tiny_run()
    task = tiny.task()
    shape = task.pass_shape(tiny.manifest.model)
    monkeypatch.setattr(type(task), "theta", SimpleNamespace(device=torch.device("cuda:0"), nbytes=100))
    monkeypatch.setattr(compiled_pass.accelerator, "free_bytes", lambda device: free)
    monkeypatch.setattr(compiled_pass.accelerator, "peak_bytes", lambda device: 1400)
    assert task.has_room_for_graph() is fits
    with contextlib.nullcontext() if fits else pytest.raises(CompiledPassError, match="memory is too small"):
        task.offer(shape, True, pytest.fail)
    task.offer(shape, False, pytest.fail)
    assert [each["options"]["triton.cudagraphs"] for each in asked.given] == [True, False][not fits :]


def test_the_cpu_has_no_graphs(tiny_run):
    assert not tiny_run().task().has_room_for_graph()


class FakePass:
    """Computes a part by the eager pass; fails from its ``failing``-th call on, with half of it done."""

    def __init__(self, task, size: int, failing: float = math.inf) -> None:
        self.task, self.size, self.failing, self.calls = task, size, failing, 0

    def takes(self, part):
        return len(part) == self.size

    def run(self, part):
        self.calls += 1
        loss = self.task._eager_pass(part)
        if self.calls >= self.failing:
            raise CompiledPassError("no memory")
        return loss


@pytest.mark.parametrize(("size", "failing", "calls"), [(2, math.inf, 12), (2, 4, 4), (3, math.inf, 0)])
def test_every_micro_batch_trains_once_whether_or_not_its_pass_is_compiled(tiny_run, size, failing, calls):
    tiny, failures = tiny_run(), []
    eager, task = (tiny.task(micro_batch=2) for _ in range(2))
    task.compiled, task._on_compiled_failure = FakePass(task, size, failing), failures.append
    fake = task.compiled
    for step in range(6):
        assert task.inner_step(step * 64).loss == eager.inner_step(step * 64).loss
    assert torch.equal(task.theta, eager.theta)
    assert fake.calls == calls
    assert failures == ["no memory"] * math.isfinite(failing)
    assert (task.compiled is None) == math.isfinite(failing)


# --- with a compiler --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Let torch compile in a folder of this test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    use(tmp_path)


@pytest.mark.lab
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_those_of_the_eager_pass(architecture, dtype):
    has_fp32_norms = architecture not in ("GPT2LMHeadModel", "GPTNeoXForCausalLM")
    most = 2e-6 if dtype == torch.float32 or has_fp32_norms else 1e-9
    described = description(architecture)
    model, shape = _model(described, dtype), PassShape.of(described, 2, 16, 64)
    assert compared(model, shape, in_graphs=False)[0] < most
    _adds_to_what_is_there(model, shape)


def _model(described, dtype: torch.dtype) -> FlatModel:
    built = flat_model(described, seed=5, device=CPU)
    theta = built.theta.to(dtype)
    for (_, view), parameter in zip(built.layout.views(theta).items(), built.module.parameters(), strict=True):
        parameter.data = view
    for buffer in built.module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return FlatModel(built.module, theta, built.layout)


def _adds_to_what_is_there(model: FlatModel, shape: PassShape) -> None:
    """Check two calls with weights that moved in between."""
    batch = torch.arange(34).reshape(2, 17)
    gradient = torch.zeros_like(model.theta)
    compiled = CompiledPass(model, gradient, shape)
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
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
def test_in_bf16_it_rounds_no_worse_than_the_eager_pass(architecture, monkeypatch):
    """Compare both with fp32 weights and products: the eager pass rounds each operation, the compiled one some."""
    described = description(architecture)
    model = flat_model(described, seed=5, device=CPU)
    exact = PassShape.of(described, 2, 16, 64)
    real = pass_compiler.CompiledPass
    rounded = replace(exact, computes_in="bfloat16")
    monkeypatch.setattr(pass_compiler, "CompiledPass", lambda model, gradient, *_: real(model, gradient, rounded))
    compiled, _ = compared(model, exact, in_graphs=False)
    assert 1e-5 < compiled < 1.2 * _rounding(model, exact)


def _rounding(model: FlatModel, shape: PassShape) -> float:
    """Return the relative difference of the eager gradients in bf16 and in fp32, on the tokens of ``compared``."""
    vocabulary, size = model.module.config.vocab_size, (shape.micro_batch, shape.sequence_length + 1)
    batch = torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(1))
    gradients = []
    for autocast in (torch.bfloat16, None):
        model.module.zero_grad(set_to_none=True)
        torch.autograd.backward(summed_loss(model.module, batch, autocast))
        gradients.append(torch.cat([each.grad.flatten() for each in model.module.parameters()]))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


@pytest.mark.lab
@pytest.mark.usefixtures("cache")
def test_a_failing_call_is_an_error_and_not_the_end(tiny_run):
    tiny = tiny_run()
    task = tiny.task()
    compiled = CompiledPass(task.model, task._gradient, task.pass_shape(tiny.manifest.model))
    good = torch.zeros(4, 17, dtype=torch.int64)
    assert math.isfinite(compiled.run(good).item())
    with pytest.raises(CompiledPassError):
        compiled.run(good + 10_000)  # no such token
