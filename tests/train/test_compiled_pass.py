"""Compiled passes: what they depend on, how a library is called; with a compiler, that they compute the same."""

import math
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import DESCRIPTIONS, description

from p2ptrain.train import compiled_pass
from p2ptrain.train.compiled_pass import CompiledPass, CompiledPassError, NativeLibrary, PassShape
from p2ptrain.train.model import FlatModel, flat_model, summed_loss
from p2ptrain.train.pass_compiler import compile_pass, difference

CPU = torch.device("cpu")


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


def test_cards_of_one_kind_share_a_library(tiny_run, monkeypatch):
    shape = replace(tiny_run().task().pass_shape(tiny_run().manifest.model), device="cuda:0", threads=0)
    kinds = {0: ("T4", 7, 5), 1: ("T4", 7, 5), 2: ("H100", 9, 0)}
    driver = [13000]

    def properties(device):
        name, major, minor = kinds[device.index]
        return SimpleNamespace(name=name, major=major, minor=minor)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver[0], raising=False)
    assert shape.key() == replace(shape, device="cuda:1").key()
    assert len({shape.key(), replace(shape, device="cuda:2").key(), replace(shape, device="cpu").key()}) == 3
    before = shape.key()
    driver[0] = 13010
    assert shape.key() != before


def test_a_file_that_is_no_library_is_refused(tiny_run, tmp_path):
    task = tiny_run().task()
    broken = tmp_path / "pass.so"
    broken.write_bytes(b"nonsense")
    with pytest.raises(CompiledPassError, match=r"pass\.so"):
        task.offer(broken, task.pass_shape(tiny_run().manifest.model), lambda ratio: None, lambda why: None)
    assert task.passes is None


def test_tensors_of_a_card_become_handles_on_it():
    """A card's tensors cannot exist here, so the double stands for torch's function and for the tensor."""
    calls = []
    dtypes = {"aoti_torch_dtype_int64": lambda: 4, "aoti_torch_device_type_cuda": lambda: 1}
    compiled = NativeLibrary.__new__(NativeLibrary)
    compiled._torch = SimpleNamespace(aoti_torch_create_tensor_from_blob=lambda *all: calls.append(all) or 0, **dtypes)
    tensor = SimpleNamespace(
        data_ptr=lambda: 0x7F00_0000_1000,
        dim=lambda: 2,
        shape=(4, 17),
        stride=lambda: (17, 1),
        dtype=torch.int64,
        device=torch.device("cuda", 3),
    )
    compiled.handle(tensor)
    data, dimensions, shape, stride, offset, dtype, kind, index, _ = calls[0]
    assert (data.value, dimensions.value, list(shape), list(stride)) == (0x7F00_0000_1000, 2, [4, 17], [17, 1])
    assert (offset.value, dtype.value, kind.value, index.value) == (0, 4, 1, 3)


# --- with a compiler --------------------------------------------------------------------------------------------------


@pytest.mark.lab
@pytest.mark.parametrize("architecture", DESCRIPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_those_of_the_eager_pass(architecture, dtype, tmp_path):
    has_fp32_norms = architecture not in ("GPT2LMHeadModel", "GPTNeoXForCausalLM")
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
def test_a_failing_call_is_an_error_and_not_the_end(tiny_run, tmp_path, capfd):
    tiny = tiny_run()
    task = tiny.task()
    shape = task.pass_shape(tiny.manifest.model)
    compile_pass(tiny.model(), shape, tmp_path / "pass.so", tmp_path)
    compiled = CompiledPass(tmp_path / "pass.so", task.model, task._gradient, shape)
    good = torch.zeros(4, 17, dtype=torch.int64)
    assert math.isfinite(compiled.run(good).item())
    with pytest.raises(CompiledPassError):
        compiled.run(good + 10_000)  # no such token
    assert capfd.readouterr().err == ""


@pytest.fixture
def recording_library(tmp_path, monkeypatch):
    """A double of a library, and the file of its calls."""
    library, torch_folder = tmp_path / "recording.so", Path(torch.__file__).parent
    source = Path(__file__).parent / "recording_library.cpp"
    linked = (f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10")
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(library), *linked], check=True)
    monkeypatch.setenv("RECORDING_LIBRARY", str(tmp_path / "calls"))
    return library, tmp_path / "calls"


@pytest.mark.lab
def test_a_card_is_called_as_torchs_header_says_and_on_its_current_stream(tiny_run, monkeypatch, recording_library):
    library, calls = recording_library
    tiny = tiny_run()
    task, streams = tiny.task(), []
    shape = replace(task.pass_shape(tiny.manifest.model), device="cuda:1")
    stream = SimpleNamespace(cuda_stream=0xABCDEF123456)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.append(device) or stream)
    compiled = CompiledPass(library, task.model, task._gradient, shape)
    compiled.run(torch.zeros(4, 17, dtype=torch.int64))
    created, ran = calls.read_text().splitlines()
    assert created == "create 1 cuda:1 1"
    assert streams == [torch.device("cuda:1")]
    tensors = [*task.model.module.parameters(), *(each.grad for each in task.model.module.parameters())]
    inputs = [f"{each.data_ptr():#x}:{each.numel()}" for each in (*tensors, compiled._total, compiled._batch)]
    assert ran.split() == ["run", "0x123456789abc", "1", "0", "0xabcdef123456", "1", *inputs]


@pytest.mark.lab
def test_a_library_that_fails_prints_nothing(tiny_run, monkeypatch, recording_library, capfd):
    tiny = tiny_run()
    task = tiny.task()
    compiled = CompiledPass(recording_library[0], task.model, task._gradient, task.pass_shape(tiny.manifest.model))
    monkeypatch.setenv("RECORDING_LIBRARY_FAILS", "1")
    with pytest.raises(CompiledPassError, match=r"^out of memory$"):
        compiled.run(torch.zeros(4, 17, dtype=torch.int64))
    assert capfd.readouterr().err == ""
