"""The compiler's process: what it asks of torch, and with which status it ends."""

from dataclasses import replace

import pytest
import torch

from p2ptrain.base.errors import DeviceError
from p2ptrain.train import accelerator, pass_compiler
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.libraries import TRY_LATER


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {"cpp.threads": 3}), ("cuda:1", {"aot_inductor.embed_kernel_binary": True})]
)
def test_a_library_holds_all_its_kernels(tiny_run, tmp_path, monkeypatch, device, options):
    tiny, asked = tiny_run(), []
    shape = replace(tiny.task().pass_shape(tiny.manifest.model), device=device, threads=3)
    monkeypatch.setattr(pass_compiler, "traced", lambda model, shape: ("graph", "inputs"))

    def compile_ahead(graph, inputs, options):
        asked.append((graph, inputs, options))
        made = tmp_path / "pass.so"
        made.write_bytes(b"library")
        return str(made)

    monkeypatch.setattr(torch._inductor, "aot_compile", compile_ahead)
    pass_compiler.compile_pass(tiny.model(), shape, tmp_path / "unchecked.so", tmp_path)
    assert asked == [("graph", "inputs", {"aot_inductor.output_path": str(tmp_path / "pass.so"), **options})]
    assert (tmp_path / "unchecked.so").read_bytes() == b"library"


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RuntimeError("C++ compile error\nnext line"), 1, "RuntimeError: C++ compile error"),
        (RuntimeError("a\ng++: No space left on device"), TRY_LATER, "RuntimeError: g++: No space left on device"),
        (torch.OutOfMemoryError("CUDA out of memory."), TRY_LATER, "OutOfMemoryError: CUDA out of memory."),
        (MemoryError(), TRY_LATER, "MemoryError: "),
        (CompiledPassError("status 1"), TRY_LATER, "CompiledPassError: status 1"),
        (DeviceError("It is busy.", "Wait."), TRY_LATER, "DeviceError: It is busy."),
    ],
)
def test_only_what_would_fail_again_ends_for_good(error, status, line):
    found = pass_compiler._failure(error)
    assert (found.exit_code, found.message) == (status, line)


def test_a_card_that_rounds_products_may_differ_by_more(tiny_run, monkeypatch):
    tiny = tiny_run()
    exact = tiny.task().pass_shape(tiny.manifest.model)
    monkeypatch.setattr(accelerator, "has_tf32", lambda device: device.type == "cuda")
    at = {name: pass_compiler._tolerance(exact, torch.device(name)) for name in ("cpu", "cuda")}
    half = pass_compiler._tolerance(replace(exact, computes_in="bfloat16"), torch.device("cuda"))
    assert at["cpu"] < at["cuda"] < half
